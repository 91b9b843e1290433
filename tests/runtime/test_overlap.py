"""Steps that are planned while the one before them is in flight, on a device that is late."""

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from sapwood import ConstraintSpec, Engine, RequestOutput, SamplingParams
from sapwood.runtime.build import build_engine
from sapwood.runtime.config import BatchingMode, EngineConfig
from sapwood.runtime.outputs import FinishReason
from sapwood.runtime.request import ChunkResult, SampledToken, SequenceOutput
from sapwood.runtime.step_plan import StepPlan
from tests.runtime.automata import Automaton, AutomatonMatcher, allowed_token_after
from tests.runtime.harness import EOS, Harness, PagedStep, token_after
from tests.runtime.test_scheduler import LENGTHS, SHORT_LENGTHS


def overlapped(**options: object) -> Harness:
    return Harness(overlap=True, **options)  # type: ignore[arg-type]


def both(**options: object) -> tuple[Harness, Harness]:
    return Harness(**options), overlapped(**options)  # type: ignore[arg-type]


def ends_after(num_tokens: int):  # type: ignore[no-untyped-def]
    """Draws the end token as the last of so many, which no plan can know."""
    return lambda chunk, h: (
        EOS if chunk.sequence.num_generated == num_tokens - 1 else token_after(chunk, h)
    )


def members(harness: Harness) -> list[list[str]]:
    """The requests of every step."""
    return [[c.sequence.request_id for c in plan.chunks] for plan in harness.executor.plans]


# -- what is planned -------------------------------------------------------------------------------


def test_the_next_step_is_launched_before_the_last_one_is_asked_for_its_result() -> None:
    harness = overlapped()
    harness.add([1, 2, 3], 4)
    assert harness.step() == []
    [first] = harness.executor.in_flight
    assert first.results is None
    [told] = harness.step()
    assert len(told.token_ids) == 1
    [second] = harness.executor.in_flight
    assert second.results is None and second.plan.number == first.plan.number + 1
    [chunk] = second.plan.chunks
    assert chunk.is_pending and (chunk.start, chunk.length) == (3, 1)


def test_without_overlap_nothing_is_in_flight_between_two_steps() -> None:
    harness = Harness()
    harness.add([1, 2, 3], 4)
    while harness.core.has_work:
        assert len(harness.step()) == 1
        assert not harness.executor.in_flight


@pytest.mark.parametrize(
    ("lengths", "mode", "num_steps"),
    [
        (LENGTHS, BatchingMode.CONTINUOUS, 1150),
        (SHORT_LENGTHS, BatchingMode.CONTINUOUS, 12),
        (SHORT_LENGTHS, BatchingMode.STATIC, 19),
    ],
)
def test_ends_that_are_known_beforehand_cost_no_step(
    lengths: Iterable[int], mode: BatchingMode, num_steps: int
) -> None:
    harness = overlapped(options={"max_num_seqs": 4, "mode": mode}, num_blocks=2048)
    harness.core._check_invariants = False  # which takes most of the time of so many steps
    for i, length in enumerate(lengths):
        harness.add([i + 1], length, ignore_eos=True)
    harness.run()
    assert harness.scheduler.counters.num_steps == num_steps
    assert harness.scheduler.counters.computed_tokens == sum(lengths), "a row was wasted"


@pytest.mark.parametrize("max_model_len", [17, 20, 64])
def test_no_row_is_computed_beyond_the_context(max_model_len: int) -> None:
    harness = overlapped(block_size=4, num_blocks=32, max_model_len=max_model_len)
    done = harness.answer(range(1, 17), max_tokens=1000, ignore_eos=True)
    assert (len(done.token_ids), done.finish_reason) == (max_model_len - 16, FinishReason.LENGTH)
    assert harness.scheduler.counters.computed_tokens == max_model_len - 1


def test_a_seat_that_nobody_knew_to_get_free_is_filled_two_steps_later() -> None:
    harness = overlapped(next_token=ends_after(3), options={"max_num_seqs": 1})
    first, second = harness.add([1, 2], 9), harness.add([3, 4], 9)
    harness.run()
    # The fourth row of the first was planned before its end was known.
    assert members(harness) == [[first]] * 4 + [[second]] * 4


def test_a_long_prompt_does_not_stall_an_answer_whose_prompt_is_in_flight() -> None:
    harness = overlapped(options={"max_num_batched_tokens": 8, "max_num_seqs": 4})
    harness.answer(range(1, 21), 1)
    num_steps = len(harness.executor.plans)
    long = harness.add(range(500, 540), 1)
    short = harness.add([*range(1, 21), 900], 3)  # goes first, as most of it is cached
    harness.run()
    assert members(harness)[num_steps:][:4] == [[short, long]] * 3 + [[long]]


# -- what is dropped -------------------------------------------------------------------------------


def test_the_row_behind_an_end_is_not_told_and_not_cached() -> None:
    expected, harness = both(block_size=4, next_token=ends_after(5))
    prompt = range(1, 10)
    done = harness.answer(prompt, max_tokens=50)
    assert done.token_ids == expected.answer(prompt, max_tokens=50).token_ids
    assert harness.scheduler.counters.computed_tokens == 9 + 5  # one of them for nothing
    longer = [*prompt, *done.token_ids, 77]
    match = harness.cache.match(np.array(longer, np.int32))
    assert match.num_tokens == 9 + 4  # the end token was computed, and does not count
    harness.assert_nothing_held()


def test_blocks_of_an_answer_that_ended_are_held_until_its_last_row_is_computed() -> None:
    harness = overlapped(block_size=4, num_blocks=8, next_token=ends_after(2))
    harness.add(range(1, 9), 9)
    while not harness.finished:
        harness.step()
    assert harness.executor.in_flight and not harness.scheduler.num_running
    held = harness.cache.num_blocks - harness.cache.num_free_blocks
    assert held - harness.cache.num_evictable_blocks == 3
    harness.run()
    harness.assert_nothing_held()


def test_an_abort_between_two_steps_drops_what_is_drawn_for_it() -> None:
    for num_steps in range(1, 6):
        harness = overlapped(block_size=4)
        doomed, other = harness.add(range(1, 20), 9), harness.add(range(50, 60), 9)
        for _ in range(num_steps):
            harness.step()
        harness.abort(doomed)
        num_told = len(harness.answers[doomed])
        harness.run()
        assert len(harness.answers[doomed]) == num_told
        assert harness.answers[other] == Harness().answer(range(50, 60), 9).token_ids
        harness.assert_nothing_held()


# -- what waits ------------------------------------------------------------------------------------


def num_ahead(harness: Harness) -> list[int]:
    """How many steps were in flight after each call, until nothing is left."""
    counts = []
    while harness.core.has_work:
        harness.step()
        counts.append(len(harness.executor.in_flight))
    return counts


def test_a_constrained_answer_waits_for_its_tokens_and_for_nothing_else() -> None:
    choices = Automaton({0: {5: 0, 6: 0}}, frozenset())
    harness = overlapped(
        next_token=allowed_token_after, options={"max_num_batched_tokens": 8, "max_num_seqs": 2}
    )
    harness.add(range(1, 33), 3, matcher=AutomatonMatcher(choices))
    # Its prompt is four chunks, of which only the last one draws.
    assert num_ahead(harness) == [1, 1, 1, 1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("options", [{"frequency_penalty": 1.0}, {"n": 2}])
def test_penalties_and_forks_wait_for_the_token_they_depend_on(options: dict[str, object]) -> None:
    harness = overlapped()
    harness.add([1, 2, 3], 2, **options)
    assert 0 in num_ahead(harness)[:2]
    harness = overlapped()
    harness.add([1, 2, 3], 2, logprobs=True)
    assert num_ahead(harness) == [1, 1, 0]


def test_nobody_is_preempted_for_room_that_a_step_in_flight_gives_back() -> None:
    expected, harness = both(block_size=2, num_blocks=10, next_token=ends_after(6))
    for each in (expected, harness):
        each.scheduler._estimator.observe(1)
        for i in range(2):
            each.add([10 * i + 1, 10 * i + 2], 30)
        each.run()
    assert harness.answers == expected.answers
    assert harness.scheduler.counters.num_preemptions == 0


def test_preemption_by_hand_is_refused_while_a_step_is_in_flight() -> None:
    harness = overlapped()
    harness.add([1, 2, 3], 4)
    harness.step()
    with pytest.raises(ValueError, match="commit it"):
        harness.scheduler.preempt()
    assert harness.preempt(1) == 1
    harness.run()
    assert harness.answers["r0"] == Harness().answer([1, 2, 3], 4).token_ids


def test_a_flush_drops_the_tokens_of_an_answer_whose_last_row_is_in_flight() -> None:
    harness = overlapped(block_size=4, next_token=ends_after(2))
    harness.add(range(1, 9), 9)
    while not harness.finished:
        harness.step()
    harness.flush_cache()
    assert harness.cache.num_free_blocks == harness.cache.num_blocks


# -- faults ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Changed:
    """A step with another result."""

    step: PagedStep
    change: Callable[[list[ChunkResult]], list[ChunkResult]]

    def result(self) -> list[ChunkResult]:
        return self.change(self.step.result())


def change_result(
    harness: Harness, number: int, change: Callable[[list[ChunkResult]], list[ChunkResult]]
) -> None:
    """Of the step of that number."""
    launch = harness.executor.launch

    def launch_changed(plan: StepPlan) -> PagedStep:
        step = launch(plan)
        return Changed(step, change) if plan.number == number else step  # type: ignore[return-value]

    harness.executor.launch = launch_changed  # type: ignore[method-assign]


def gone(results: list[ChunkResult]) -> list[ChunkResult]:
    raise MemoryError("the device has gone")


def test_a_step_that_fails_takes_the_one_behind_it_along_and_the_engine_goes_on() -> None:
    harness = overlapped(block_size=4, options={"max_num_seqs": 4})
    change_result(harness, 2, gone)
    first = harness.add(range(1, 9), 9)
    harness.step()
    harness.step()
    second = harness.add(range(20, 29), 9)  # joins the step behind the one that fails
    harness.step()
    assert set(harness.errors) == {first, second}
    assert not harness.executor.in_flight and not harness.core.has_work
    assert harness.core.stats().num_quarantines == 1
    harness.errors.clear()
    assert harness.answer(range(1, 9), 9).token_ids == Harness().answer(range(1, 9), 9).token_ids
    harness.assert_nothing_held()


def test_a_failing_step_does_not_tell_of_a_request_that_was_aborted_before() -> None:
    harness = overlapped()
    change_result(harness, 2, gone)
    doomed, other = harness.add([1, 2, 3], 9), harness.add([4, 5], 9)
    harness.step()
    harness.step()
    harness.abort(doomed)
    harness.step()  # the harness refuses an answer that ends twice
    assert set(harness.errors) == {other}
    assert harness.finished[doomed].finish_reason is FinishReason.ABORT


def test_an_answer_without_a_sound_token_fails_alone_with_its_next_row_in_flight() -> None:
    def spoilt(results: list[ChunkResult]) -> list[ChunkResult]:
        return [ChunkResult(sampled=(SampledToken(5, is_sound=False),)), *results[1:]]

    harness = overlapped(block_size=4)
    change_result(harness, 3, spoilt)
    sick, sound = harness.add(range(1, 9), 9), harness.add(range(50, 59), 9)
    while harness.core.has_work:
        harness.step()
    assert "no finite logits" in harness.errors.pop(sick)
    assert len(harness.answers[sick]) == 2
    assert harness.answers[sound] == Harness().answer(range(50, 59), 9).token_ids
    assert harness.core.stats().num_quarantines == 0
    harness.assert_nothing_held()


def test_a_step_that_cannot_be_launched_ends_those_in_flight_too() -> None:
    harness = overlapped()
    request_id = harness.add([1, 2, 3], 9)
    harness.step()

    def broken(plan: StepPlan) -> PagedStep:
        raise MemoryError("no memory for this step")

    launch, harness.executor.launch = harness.executor.launch, broken  # type: ignore[method-assign]
    harness.step()
    assert "no memory" in harness.errors.pop(request_id)
    assert not harness.executor.in_flight
    harness.executor.launch = launch  # type: ignore[method-assign]
    assert harness.answer([1, 2, 3]).token_ids == Harness().answer([1, 2, 3]).token_ids


def test_one_request_of_two_hundred_tokens_in_small_chunks_frees_every_block_once() -> None:
    harness = overlapped(block_size=1, options={"max_num_batched_tokens": 4, "max_num_seqs": 4})
    harness.answer(range(1, 101), 100, ignore_eos=True)
    harness.assert_nothing_held()
    harness.flush_cache()
    assert harness.cache.num_free_blocks == harness.cache.num_blocks


def test_a_prefix_whose_computing_was_aborted_is_not_poisoned() -> None:
    prompt = range(1, 40)
    cold = Harness(block_size=4).answer(prompt, 6).token_ids
    for num_steps in range(1, 9):
        options = {"max_num_batched_tokens": 8, "max_num_seqs": 4}
        harness = overlapped(block_size=4, num_blocks=12, options=options)
        doomed = harness.add(prompt, 6)
        for _ in range(num_steps):
            harness.step()
        harness.abort(doomed)
        harness.answer(range(500, 540), 6)  # fills the pool with something else
        assert harness.answer(prompt, 6).token_ids == cold
        harness.assert_nothing_held()


# -- a real model ----------------------------------------------------------------------------------


PROMPTS = [[*range(3, 3 + n), 7 * n % 100 + 3] for n in (1, 5, 16, 17, 40, 40, 90)]
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.2, "seed": 5, "top_p": 0.95},
    "several": {"temperature": 0.9, "seed": 7, "n": 3},
    "scored": {"temperature": 0.0, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "constrained": {
        "temperature": 0.7,
        "seed": 3,
        "constraint": ConstraintSpec.regex("[a-z ]{3,20}"),
    },
    "stopped": {"temperature": 1.0, "seed": 11, "stop": ("e", "the")},
}
TIGHT = {"num_kv_blocks": 40, "block_size": 4}
CHUNKED = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 8}


def sampling_of(options: dict[str, object]) -> SamplingParams:
    return SamplingParams(max_tokens=16, **options)  # type: ignore[arg-type]


def facts_of(outputs: list[RequestOutput]) -> list[object]:
    """What a caller sees, but times."""
    return [
        (
            output.num_cached_tokens,
            [(a.token_ids, a.finish_reason, a.stop_reason, a.logprobs) for a in output.outputs],
        )
        for output in outputs
    ]


@pytest.mark.parametrize("options", [{}, CHUNKED, TIGHT], ids=["plain", "chunked", "tight"])
def test_a_real_model_answers_the_same_with_overlap(
    tiny_model: Path, options: dict[str, int]
) -> None:
    samplings = [sampling_of(sampling) for sampling in SAMPLINGS.values()]
    answers = []
    for overlap in (False, True):
        options = {"num_kv_blocks": 512, "check_invariants": True, **options}  # type: ignore[dict-item]
        with Engine(str(tiny_model), overlap=overlap, **options) as engine:
            found = [facts_of(engine.generate(PROMPTS, sampling)) for sampling in samplings]
            found.append(facts_of(engine.generate(PROMPTS, samplings[0])))
            engine.flush_cache()
            stats = engine.stats()
            assert stats.num_free_blocks == stats.num_blocks
            assert (stats.num_preemptions > 0) == (options["num_kv_blocks"] == 40)
        answers.append(found)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("seed", range(2))
def test_whoever_outlives_a_storm_of_aborts_gets_the_answer_it_would_get_alone(
    tiny_model: Path, seed: int
) -> None:
    draw = random.Random(seed)
    options = {"num_kv_blocks": 40, "block_size": 4, "max_num_batched_tokens": 24}
    config = EngineConfig.from_options(
        str(tiny_model), overlap=True, max_num_seqs=6, check_invariants=True, **options
    )
    parts = build_engine(config, time.monotonic)
    core, told = parts.core, dict[str, list[int]]()

    def take(outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            assert output.error is None
            told[output.request_id] += output.token_ids

    asked: dict[str, list[int]] = {}
    aborted: set[str] = set()
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    while len(asked) < 40 or core.has_work:
        if len(asked) < 40 and draw.random() < 0.4:
            prompt = [*range(3, draw.randint(4, 60)), draw.randint(3, 9)]
            request = parts.inputs.process(prompt, sampling, caller_id=None, now=0.0)
            asked[request.request_id], told[request.request_id] = prompt, []
            core.add(request)
        if asked and draw.random() < 0.2:
            doomed = draw.choice(list(asked))
            outputs = core.abort(doomed)
            aborted |= {output.request_id for output in outputs}
            take(outputs)
        take(core.step())
    assert aborted and len(aborted) < 40
    core.flush_cache()
    assert core.stats().num_free_blocks == core.stats().num_blocks
    with Engine(str(tiny_model), prefix_caching=False, max_num_seqs=1) as engine:
        for request_id, prompt in asked.items():
            expected = engine.generate(prompt, sampling)[0].outputs[0].token_ids
            answer = tuple(told[request_id])
            assert answer == (expected[: len(answer)] if request_id in aborted else expected)
