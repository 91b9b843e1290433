"""The real scheduler over the real tree, without a model."""

import random
from collections.abc import Iterable

import numpy as np
import pytest

from sapwood.radix import Lease, NamespaceKind, NamespacePart
from sapwood.runtime.config import BatchingMode
from sapwood.runtime.hints import Hints
from sapwood.runtime.outputs import FinishReason
from sapwood.runtime.request import Sequence
from sapwood.runtime.scheduler import Scheduler
from tests.runtime.harness import EOS, Harness, PagedStep, token_after

LENGTHS = (100, 300, 1000, 100, 400, 320, 700, 230, 100, 100, 500, 400)
SHORT_LENGTHS = (4, 12, 6, 3, 5, 7, 6)


def finish_steps(lengths: Iterable[int], mode: str) -> list[int]:
    """Finish step of one-token prompts with four seats and no pressure on the cache."""
    harness = Harness(options={"max_num_seqs": 4, "mode": mode}, num_blocks=2048)
    ids = [harness.add([i + 1], length, ignore_eos=True) for i, length in enumerate(lengths)]
    harness.run()
    assert all(len(harness.answers[i]) == n for i, n in zip(ids, lengths, strict=True))
    return [harness.finished[request_id].step for request_id in ids]


# -- exact schedules -------------------------------------------------------------------------------


def test_continuous_batching_takes_1150_steps_with_mean_finish_635() -> None:
    steps = finish_steps(LENGTHS, "continuous")
    assert steps == [100, 300, 1000, 100, 500, 420, 1000, 650, 600, 700, 1150, 1100]
    assert max(steps) == 1150
    assert np.mean(steps) == 635.0


def test_static_batching_takes_2200_steps_with_mean_group_finish_1633() -> None:
    steps = finish_steps(LENGTHS, "static")
    assert max(steps) == 2200
    # A group's members are all given back when its longest ends.
    groups = [max(steps[i : i + 4]) for i in (0, 4, 8)]
    assert groups == [1000, 1700, 2200]
    assert np.mean(np.repeat(groups, 4)) == pytest.approx(1633.333, abs=1e-3)


def test_seven_short_answers_take_12_steps_and_static_19() -> None:
    steps = finish_steps(SHORT_LENGTHS, "continuous")
    assert steps == [4, 12, 6, 3, 8, 11, 12]
    assert max(finish_steps(SHORT_LENGTHS, "static")) == 19


def test_three_decodes_and_a_prompt_of_five_are_eight_rows_of_one_pass() -> None:
    harness = Harness()
    for i in range(3):
        harness.add([10 + i], max_tokens=8)
    harness.step()
    harness.add([20, 21, 22, 23, 24], max_tokens=2)
    harness.step()
    plan = harness.executor.plans[-1]
    assert plan.num_rows == 8
    assert sorted(chunk.length for chunk in plan.chunks) == [1, 1, 1, 5]


# -- what is cached --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shared", [1, 15, 16, 17, 31, 32, 33])
def test_a_prefix_reports_exactly_its_tokens_as_cached(num_shared: int) -> None:
    harness = Harness(block_size=16)
    common = [500 + i for i in range(num_shared)]
    harness.answer([*common, *range(1, 41)])
    second = harness.answer([*common, *range(101, 141)])
    assert second.num_cached_tokens == num_shared


def scripted(script: list[int]):
    """Draws these tokens, by the number generated so far."""
    return lambda chunk, _: (*script, *[EOS] * 9)[chunk.sequence.num_generated]


@pytest.mark.parametrize("kept", range(1, 8))
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_an_answer_that_ended_by_itself_is_cached_to_its_last_token(
    kept: int, block_size: int
) -> None:
    answer = [901, 902, 903, 904, 905, 906, 907]
    harness = Harness(block_size=block_size, num_blocks=512, next_token=scripted([*answer, EOS]))
    prompt = list(range(1, 31))
    first = harness.answer(prompt, max_tokens=50)
    assert first.finish_reason is FinishReason.STOP
    assert first.token_ids == [*answer, EOS]
    harness.executor._next_token = token_after
    second = harness.answer([*prompt, *answer[:kept], 77, 78, 79])
    assert second.num_cached_tokens == len(prompt) + kept


@pytest.mark.parametrize("kept", range(1, 8))
def test_the_last_token_of_an_answer_that_max_tokens_ended_was_never_computed(kept: int) -> None:
    answer = [901, 902, 903, 904, 905, 906, 907]
    harness = Harness(next_token=scripted([*answer, EOS]))
    prompt = list(range(1, 31))
    assert harness.answer(prompt, max_tokens=7).finish_reason is FinishReason.LENGTH
    harness.executor._next_token = token_after
    second = harness.answer([*prompt, *answer[:kept], 77, 78, 79])
    assert second.num_cached_tokens == len(prompt) + min(kept, 6)


@pytest.mark.parametrize("num_copies", [2, 5, 17])
@pytest.mark.parametrize("prompt_len", [1, 16, 33, 100])
@pytest.mark.parametrize("budget", [128, 10_000])
def test_identical_cold_prompts_compute_the_prompt_once(
    num_copies: int, prompt_len: int, budget: int
) -> None:
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 32}
    harness = Harness(options=options)
    for _ in range(num_copies):
        harness.add(range(1, prompt_len + 1), max_tokens=1)
    harness.run()
    computed = harness.scheduler.counters.computed_tokens
    assert computed == prompt_len + num_copies - 1
    assert len({tuple(f.token_ids) for f in harness.finished.values()}) == 1


def test_a_request_is_not_held_where_waiting_saves_nothing() -> None:
    harness = Harness()
    harness.add(range(1, 41), max_tokens=2)
    harness.add(range(101, 141), max_tokens=2)
    harness.step()
    assert len(harness.executor.plans[0].chunks) == 2


def test_requests_of_different_namespaces_do_not_wait_for_each_other() -> None:
    harness = Harness()
    for value in ("a", "b"):
        namespace = (NamespacePart(NamespaceKind.TENANT, value),)
        harness.add(range(1, 41), max_tokens=2, namespace=namespace)
    harness.step()
    assert len(harness.executor.plans[0].chunks) == 2


def test_one_that_decodes_holds_nobody_back() -> None:
    harness = Harness()
    harness.add(range(1, 41), max_tokens=30)
    for _ in range(3):
        harness.step()
    [sequence] = harness.scheduler.running
    # What it is about to compute is published only at its end.
    harness.add([*sequence.token_ids.tolist(), 5, 6], max_tokens=2)
    harness.step()
    assert len(harness.executor.plans[-1].chunks) == 2


def test_a_hold_ends_when_the_one_it_waits_for_is_aborted() -> None:
    harness = Harness(options={"max_num_batched_tokens": 128})
    first = harness.add(range(1, 500), max_tokens=2)
    second = harness.add(range(1, 500), max_tokens=2)
    harness.step()
    assert harness.scheduler.num_running == 1
    harness.abort(first)
    harness.run()
    assert harness.finished[second].num_cached_tokens == 128


def test_without_a_tree_nobody_is_held_and_nothing_is_cached() -> None:
    harness = Harness(prefix_caching=False)
    for _ in range(3):
        harness.add(range(1, 41), max_tokens=2)
    harness.step()
    assert len(harness.executor.plans[0].chunks) == 3
    harness.run()
    assert all(f.num_cached_tokens == 0 for f in harness.finished.values())
    harness.assert_nothing_held()


def test_namespaces_do_not_share() -> None:
    harness = Harness()
    spaces = [(NamespacePart(kind, "x"),) for kind in (NamespaceKind.TENANT, NamespaceKind.SALT)]
    for space in (spaces[0], spaces[1]):
        assert harness.answer(range(1, 41), namespace=space).num_cached_tokens == 0
    assert harness.answer(range(1, 41), namespace=spaces[0]).num_cached_tokens == 39


# -- the budget ------------------------------------------------------------------------------------


def test_a_long_prompt_is_cut_into_chunks_beside_running_decodes() -> None:
    options = {"max_num_batched_tokens": 512, "max_num_seqs": 8}
    harness = Harness(options=options)
    for i in range(3):
        harness.add([10 + i], max_tokens=40)
    harness.step()
    long = harness.add(range(1, 4001), max_tokens=1)
    harness.run()
    plans = [
        p for p in harness.executor.plans if any(c.sequence.request_id == long for c in p.chunks)
    ]
    assert len(plans) == 8  # ceil(4000 / 509)
    assert all(sum(chunk.length == 1 for chunk in plan.chunks) == 3 for plan in plans)
    assert max(plan.num_rows for plan in harness.executor.plans) <= 512


@pytest.mark.parametrize("seed", range(5))
def test_no_step_exceeds_the_budget_or_the_seats(seed: int) -> None:
    rng = random.Random(seed)
    options = {"max_num_batched_tokens": 24, "max_num_seqs": 5}
    harness = Harness(block_size=4, num_blocks=64, options=options)
    for _ in range(40):
        prompt = [rng.randint(1, 3) for _ in range(rng.randint(1, 60))]
        harness.add(prompt, rng.randint(1, 20))
    harness.run()
    assert all(plan.num_rows <= 24 for plan in harness.executor.plans)
    assert all(len(plan.chunks) <= 5 for plan in harness.executor.plans)
    harness.assert_nothing_held()


def test_an_answer_goes_on_beside_a_longer_prompt_that_arrived_before_it() -> None:
    options = {"max_num_batched_tokens": 32, "max_num_seqs": 4}
    harness = Harness(options=options)
    harness.answer(range(1, 41), 1)
    cold = harness.add(range(301, 601), max_tokens=2)
    warm = harness.add([*range(1, 41), 900], max_tokens=8)
    for _ in range(8):
        harness.step()
        assert any(c.sequence.request_id == warm for c in harness.executor.plans[-1].chunks)
    assert harness.finished[warm].step == harness.num_steps
    assert cold not in harness.finished


# -- order and fairness ----------------------------------------------------------------------------


def first_planned(harness: Harness) -> list[str]:
    """Request ids in the order of their first chunk."""
    ids = [c.sequence.request_id for plan in harness.executor.plans for c in plan.chunks]
    return list(dict.fromkeys(ids))


def test_the_longest_cached_prefix_goes_first_and_ties_keep_arrival_order() -> None:
    harness = Harness(options={"max_num_seqs": 1})
    harness.answer(range(1, 101))
    harness.add(range(301, 311), request_id="cold-1")
    harness.add([*range(1, 41), 900], request_id="warm-40")
    harness.add(range(401, 411), request_id="cold-2")
    harness.add([*range(1, 81), 900], request_id="warm-80")
    harness.run()
    assert first_planned(harness)[1:] == ["warm-80", "warm-40", "cold-1", "cold-2"]


def test_fcfs_keeps_arrival_order() -> None:
    harness = Harness(options={"max_num_seqs": 1, "schedule_policy": "fcfs"})
    harness.answer(range(1, 101))
    harness.add(range(301, 311), request_id="cold")
    harness.add([*range(1, 81), 900], request_id="warm")
    harness.run()
    assert first_planned(harness)[1:] == ["cold", "warm"]


@pytest.mark.parametrize("max_overtakes", [1, 5])
def test_a_cold_request_is_overtaken_so_often_and_no_more(max_overtakes: int) -> None:
    options = {"max_num_seqs": 1, "max_overtakes": max_overtakes}
    harness = Harness(options=options)
    harness.answer(range(1, 41), 1)
    cold = harness.add(range(301, 341), max_tokens=1)
    for i in range(3 * max_overtakes):
        harness.add([*range(1, 41), 500 + i], max_tokens=1)
    harness.run()
    assert first_planned(harness).index(cold) == 1 + max_overtakes


def test_being_held_is_not_being_overtaken() -> None:
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 8}
    harness = Harness(options=options)
    harness.add(range(1, 2000), max_tokens=1)
    harness.step()
    held = harness.add(range(1, 2000), max_tokens=1)
    for i in range(5):
        harness.add([600 + i], max_tokens=1)
    for _ in range(5):
        harness.step()
    [sequence] = harness.scheduler.waiting[:1]
    assert sequence.request_id == held
    assert sequence.num_overtaken == 0


# -- memory ----------------------------------------------------------------------------------------


def crowded() -> tuple[Harness, list[str]]:
    """Three answers of 12 tokens in a pool that holds two, after the engine has come to expect
    short ones."""
    harness = Harness(block_size=4, num_blocks=12, next_token=scripted([EOS]))
    harness.answer([1], 12)
    harness.flush_cache()
    harness.executor._next_token = token_after
    return harness, [harness.add([100 * i + j for j in range(8)], 12) for i in (1, 2, 3)]


def test_nobody_is_admitted_whose_predicted_peak_does_not_fit() -> None:
    harness = Harness(block_size=4, num_blocks=12)
    first, second = (
        harness.add(range(i, i + 8), 32, ignore_eos=True)  # 10 blocks at its end
        for i in (1, 101)
    )
    harness.run()
    assert harness.scheduler.counters.num_preemptions == 0
    assert (harness.finished[first].step, harness.finished[second].step) == (32, 64)


def test_a_short_answer_is_admitted_beside_a_long_one_that_will_need_its_blocks_later() -> None:
    harness = Harness(block_size=4, num_blocks=12)
    long = harness.add(range(1, 9), 32, ignore_eos=True)  # 10 blocks at its end
    short = harness.add(range(101, 109), 12, ignore_eos=True)  # 5 blocks, gone by step 12
    harness.run()
    assert harness.scheduler.counters.num_preemptions == 0
    assert (harness.finished[long].step, harness.finished[short].step) == (32, 12)


@pytest.mark.parametrize(("guess", "num_running"), [(None, 2), (4, 3)])
def test_answers_that_are_said_to_be_short_are_admitted_beside_each_other(
    guess: int | None, num_running: int
) -> None:
    harness = Harness(block_size=4, num_blocks=100)
    for i in range(3):
        prompt = [100 * i + j for j in range(8)]
        harness.add(prompt, 150, hints=Hints(output_tokens=guess))
    harness.step()
    assert harness.scheduler.num_running == num_running  # of 40 blocks each, or of 3
    harness.run()
    assert [len(answer) for answer in harness.answers.values()] == [150] * 3


def test_answers_that_max_tokens_cut_off_teach_nothing_about_lengths() -> None:
    harness = Harness(block_size=4, num_blocks=100)
    harness.answer(range(1, 9), 1)  # cut off: says nothing about how long answers get
    for i in range(3):
        harness.add([100 * i + j for j in range(8)], 150)
    harness.step()
    assert harness.scheduler.num_running == 2  # 2 x 40 blocks fit, 3 x 40 do not


def test_a_full_pool_preempts_the_newest_and_resumes_it_first() -> None:
    harness, ids = crowded()
    while not harness.scheduler.counters.num_preemptions:
        harness.step()
    [preempted] = harness.scheduler.waiting
    assert preempted.request_id == ids[-1]
    num_plans = len(harness.executor.plans)
    late = harness.add([7], 2)
    harness.run()
    since = harness.executor.plans[num_plans:]
    order = [chunk.sequence.request_id for plan in since for chunk in plan.chunks]
    assert order.index(ids[-1]) < order.index(late)
    harness.assert_nothing_held()


def test_a_step_that_preempts_admits_nobody() -> None:
    harness, ids = crowded()
    small = None
    while not harness.scheduler.counters.num_preemptions:
        # One that would fit waits at every step, as all seats but its own are given out anew.
        if small is None or small in harness.finished:
            small = harness.add([900], 1)
        waiting = {sequence.request_id for sequence in harness.scheduler.waiting}
        harness.step()
    planned = {chunk.sequence.request_id for chunk in harness.executor.plans[-1].chunks}
    assert small in waiting
    assert not planned & waiting
    assert planned <= set(ids)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_answers_are_the_same_cold_warm_chunked_preempted_and_crowded(block_size: int) -> None:
    rng = random.Random(block_size)
    stems = [[rng.randint(1, 999) for _ in range(rng.randint(1, 50))] for _ in range(4)]
    prompts = [
        [*rng.choice(stems), *(rng.randint(1, 5) for _ in range(rng.randint(1, 9)))]
        for _ in range(24)
    ]

    def answers(harness: Harness, preempt: bool = False) -> list[list[int]]:
        harness.finished.clear()
        ids = [harness.add(prompt, 9) for prompt in prompts]
        while harness.core.has_work:
            harness.step()
            assert not harness.errors, harness.errors
            if preempt:
                harness.preempt(harness.scheduler.num_running)
        harness.assert_nothing_held()
        return [harness.finished[i].token_ids for i in ids]

    big = 8192 // block_size
    cold = [Harness(block_size=block_size, num_blocks=big).answer(p, 9).token_ids for p in prompts]
    shared = Harness(block_size=block_size, num_blocks=big)
    assert answers(shared) == cold
    assert answers(shared) == cold  # warm
    assert all(shared.finished[i].num_cached_tokens > 0 for i in shared.finished)
    shared.flush_cache()
    assert shared.cache.num_tree_blocks == 0
    assert answers(shared) == cold
    chunked = {"max_num_batched_tokens": 8, "max_num_seqs": 8}
    assert answers(Harness(block_size=block_size, num_blocks=big, options=chunked)) == cold
    assert answers(Harness(block_size=block_size, num_blocks=big), preempt=True) == cold
    longest = max(map(len, prompts)) + 9
    tight = -(-longest // block_size)
    assert answers(Harness(block_size=block_size, num_blocks=tight)) == cold
    assert answers(Harness(block_size=block_size, num_blocks=big, prefix_caching=False)) == cold
    static = {"mode": BatchingMode.STATIC, "max_num_seqs": 4}
    assert answers(Harness(block_size=block_size, num_blocks=big, options=static)) == cold


def test_cached_tokens_stay_below_the_prompt_under_preemption() -> None:
    harness = Harness(block_size=4, num_blocks=40)
    ids = [harness.add(range(1, 21), 15, ignore_eos=True) for _ in range(6)]
    while harness.core.has_work:
        harness.step()
        harness.preempt(2)
    assert all(harness.finished[i].num_cached_tokens <= 19 for i in ids)
    counters = harness.scheduler.counters
    assert counters.prompt_tokens == 6 * 20
    assert counters.cached_tokens == sum(harness.finished[i].num_cached_tokens for i in ids)


def test_two_requests_slightly_too_large_for_the_pool_both_finish() -> None:
    harness = Harness(block_size=4, num_blocks=19)
    ids = [harness.add([i, *range(50, 59)], 30, ignore_eos=True) for i in (1, 2)]
    harness.run(limit=500)
    assert all(len(harness.answers[i]) == 30 for i in ids)


def test_an_answer_that_fills_the_context_ends_with_length() -> None:
    harness = Harness(block_size=4, num_blocks=8, max_model_len=20)
    done = harness.answer(range(1, 11), max_tokens=1000, ignore_eos=True)
    assert done.finish_reason is FinishReason.LENGTH
    assert len(done.token_ids) == 10


# -- how an answer ends ----------------------------------------------------------------------------


def test_stop_token_ids_end_the_answer_and_are_told() -> None:
    harness = Harness(next_token=scripted([5, 6, 7, 8]))
    done = harness.answer([1, 2], max_tokens=9, stop_token_ids=(7,))
    assert (done.token_ids, done.finish_reason) == ([5, 6, 7], FinishReason.STOP)
    assert done.stop_reason == 7


def test_ignore_eos_goes_on_behind_the_end_token() -> None:
    harness = Harness(next_token=scripted([5, EOS, 6, EOS]))
    done = harness.answer([1, 2], max_tokens=4, ignore_eos=True)
    assert done.token_ids == [5, EOS, 6, EOS]


def test_a_stop_string_split_over_tokens_ends_the_answer() -> None:
    token_bytes = tuple(bytes([i]) for i in range(256))
    harness = Harness(next_token=scripted(list(b"one\n\ntwo")), token_bytes=token_bytes)
    done = harness.answer([1, 2], max_tokens=8, stop=("\n\n",))
    assert bytes(done.token_ids) == b"one\n\n"
    assert done.stop_reason == "\n\n"


def test_a_stop_regex_ends_the_answer_and_is_told() -> None:
    token_bytes = tuple(bytes([i]) for i in range(256))
    harness = Harness(next_token=scripted(list(b"1 and 22, 33")), token_bytes=token_bytes)
    done = harness.answer([1, 2], max_tokens=12, stop=("33",), stop_regex=r"\d\d,?")
    assert bytes(done.token_ids) == b"1 and 22"
    assert (done.finish_reason, done.stop_reason) == (FinishReason.STOP, r"\d\d,?")


def test_min_tokens_holds_off_stop_strings() -> None:
    token_bytes = tuple(bytes([i]) for i in range(256))
    harness = Harness(next_token=scripted(list(b"aaaaaa")), token_bytes=token_bytes)
    done = harness.answer([1, 2], max_tokens=6, stop=("a",), min_tokens=3)
    assert len(done.token_ids) == 4


# -- aborts and failures ---------------------------------------------------------------------------


def test_an_abort_at_any_step_leaves_nothing_and_harms_nobody() -> None:
    prompt = range(1, 60)
    cold = Harness(block_size=4).answer(prompt, 6).token_ids
    for abort_at in range(12):
        options = {"max_num_batched_tokens": 16, "max_num_seqs": 8}
        harness = Harness(block_size=4, options=options)
        doomed = harness.add(prompt, 6)
        other = harness.add([*range(1, 30), 444], 6)
        for _ in range(abort_at):
            harness.step()
        harness.abort(doomed)
        harness.run()
        reason = harness.finished[doomed].finish_reason
        assert reason is (FinishReason.ABORT if abort_at < 9 else FinishReason.LENGTH)
        assert len(harness.answers[other]) == 6
        harness.assert_nothing_held()
        assert harness.answer(prompt, 6).token_ids == cold


def test_an_abort_names_exactly_one_request() -> None:
    harness = Harness()
    for request_id in ("1", "10", "11"):
        harness.add([5, 6, 7], 4, request_id=request_id)
    harness.step()
    harness.abort("1")
    harness.run()
    reasons = {i: f.finish_reason for i, f in harness.finished.items()}
    assert reasons == {
        "1": FinishReason.ABORT,
        "10": FinishReason.LENGTH,
        "11": FinishReason.LENGTH,
    }


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_with_random_aborts_leave_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    options = {"max_num_batched_tokens": 32, "max_num_seqs": 6}
    harness = Harness(block_size=4, num_blocks=48, options=options, min_saved_tokens=8)
    live: list[str] = []
    for _ in range(250):
        if rng.random() < 0.5:
            prompt = [rng.randint(1, 2) for _ in range(rng.randint(1, 70))]
            live.append(harness.add(prompt, rng.randint(1, 30), ignore_eos=True))
        if live and rng.random() < 0.3:
            harness.abort(live.pop(rng.randrange(len(live))))
        if rng.random() < 0.1:
            harness.preempt(rng.randint(1, 3))
        if rng.random() < 0.05:
            harness.flush_cache()
        if harness.core.has_work:
            harness.step()
        assert not harness.errors, harness.errors
        live = [i for i in live if i not in harness.finished]
    harness.run()
    assert len(harness.finished) == harness._num_added
    harness.assert_nothing_held()


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on() -> None:
    harness = Harness()
    good_answer = Harness().answer(range(1, 30)).token_ids
    running = harness.add(range(1, 30))
    harness.step()

    def broken(plan: object) -> PagedStep:
        raise MemoryError("no memory for this step")

    launch, harness.executor.launch = harness.executor.launch, broken  # type: ignore[method-assign]
    harness.step()
    assert "no memory" in harness.errors.pop(running)
    harness.executor.launch = launch  # type: ignore[method-assign]
    assert harness.answer(range(1, 30)).token_ids == good_answer
    assert harness.core.stats().num_quarantines == 1
    assert harness.core.stats().num_finished_by_reason == {"error": 1, "length": 1}


def test_a_preemption_that_breaks_ends_its_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, ids = crowded()
    preempt = Scheduler._preempt

    def broken(scheduler: Scheduler, sequence: Sequence) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Lease, "publish", raising)
            preempt(scheduler, sequence)

    def raising(lease: Lease, token_ids: np.ndarray) -> None:
        raise MemoryError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_preempt", broken)
        while not harness.errors:
            harness.step()
    assert set(harness.errors) == set(ids)
    assert not harness.core.has_work
    harness.assert_nothing_held()


def test_requests_that_break_the_plan_are_told_and_do_not_loop() -> None:
    harness = Harness()
    request_id = harness.add([1, 2, 3])
    harness.scheduler._policy = None  # type: ignore[assignment]
    harness.step()
    assert request_id in harness.errors
    assert not harness.core.has_work


# -- reads -----------------------------------------------------------------------------------------


def test_a_shared_prefix_is_read_once_for_everyone_below_it() -> None:
    harness = Harness(block_size=16)
    stem = list(range(1, 321))
    harness.answer(stem, 1)
    harness.executor.num_kv_tokens_read = 0
    for i in range(8):
        harness.add([*stem, 700 + i], 1)
    harness.step()
    # 320 tokens of the stem, and one own token for each.
    assert harness.executor.num_kv_tokens_read == 320 + 8


def test_every_level_of_a_tree_is_read_once() -> None:
    harness = Harness(block_size=16)
    stem = list(range(1, 65))
    for group in range(3):
        harness.answer([*stem, *([800 + group] * 32), 1], 1)
    harness.executor.num_kv_tokens_read = 0
    for group in range(3):
        for i in range(4):
            harness.add([*stem, *([800 + group] * 32), 900 + i], 1)
    harness.step()
    assert harness.executor.num_kv_tokens_read == 64 + 3 * 32 + 12


def test_short_edges_are_read_with_the_private_tails() -> None:
    harness = Harness(block_size=16, min_saved_tokens=100)
    harness.answer(range(1, 65), 1)
    for i in range(2):
        harness.add([*range(1, 65), 700 + i], 1)
    harness.step()
    assert not harness.executor.plans[-1].attention.shared
