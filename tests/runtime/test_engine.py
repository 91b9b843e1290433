"""The synchronous engine, from text to text, on a tiny random model."""

import gc
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from sapwood import (
    ConfigError,
    ContextLengthError,
    Engine,
    EngineClosedError,
    EngineError,
    FinishReason,
    Hints,
    RequestError,
    SamplingParams,
)
from sapwood.kernels.interface import Kernels
from sapwood.radix import Lease, PrefixCache
from sapwood.runtime.core import StepInFlight
from sapwood.runtime.engine_base import EngineBase
from sapwood.runtime.model_runner import ModelRunner
from sapwood.runtime.sampler import Drawn, draw
from sapwood.runtime.sampling_row import SamplingRow
from sapwood.runtime.step_plan import StepPlan
from sapwood.runtime.token_masks import TokenMasks

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with tiny_engine(tiny_model) as engine:
        yield engine


def tiny_engine(folder: Path, **options: object) -> Engine:
    given = {"num_kv_blocks": 256, "check_invariants": True, **options}
    return Engine(str(folder), **given)


def assert_nothing_held(engine: EngineBase) -> None:
    """Wait for what is in flight to end, then count blocks."""
    engine._core.tree().result()  # answered between two steps
    for _ in range(1000):
        stats = engine.stats()
        if not stats.num_running and not stats.num_waiting:
            break
        engine._core.tree().result()
    assert stats.num_free_blocks + stats.num_tree_blocks == stats.num_blocks
    assert stats.num_evictable_blocks == stats.num_tree_blocks


def test_one_input_gives_a_list_of_one(engine: Engine) -> None:
    for prompt in ("The quick", [5, 6, 7], [{"role": "user", "content": "hi"}], np.array([5, 6])):
        [output] = engine.generate(prompt, GREEDY)
        assert len(output.outputs[0].token_ids) == 12
        assert output.finished


def test_outputs_come_in_the_order_of_the_inputs(engine: Engine) -> None:
    prompts = ["The quick", "A tree", "Numbers such"]
    outputs = engine.generate(prompts, GREEDY)
    decoded = [engine.tokenizer.decode(output.prompt_token_ids) for output in outputs]
    assert decoded == prompts
    assert engine.generate([], GREEDY) == []


def test_hints_reach_the_requests_for_all_inputs_or_one_each(engine: Engine) -> None:
    alike = Hints(program_id="p", more_follows=True)
    assert [r.hints for r in engine._requests(["a", "b"], GREEDY, hints=alike)] == [alike, alike]
    each = [alike, Hints(output_tokens=3)]
    assert [r.hints for r in engine._requests(["a", "b"], GREEDY, hints=each)] == each
    assert engine._requests("a", GREEDY)[0].hints == Hints()


def test_hints_change_no_answer_and_wrong_ones_are_refused(engine: Engine) -> None:
    [plain] = engine.generate("The quick", GREEDY)
    [hinted] = engine.generate("The quick", GREEDY, hints=Hints(output_tokens=1))
    [*pieces] = engine.stream("The quick", GREEDY, hints=Hints(fork_size=2))
    streamed = [token for piece in pieces for token in piece.outputs[0].token_ids]
    assert list(hinted.outputs[0].token_ids) == list(plain.outputs[0].token_ids) == streamed
    with pytest.raises(RequestError, match="2 inputs and 1 hints"):
        engine.generate(["a", "b"], GREEDY, hints=[Hints()])
    with pytest.raises(RequestError, match="must be a Hints, not dict"):
        engine.generate("a", GREEDY, hints={"more_follows": True})  # type: ignore[arg-type]


def test_each_input_may_have_sampling_of_its_own(engine: Engine) -> None:
    samplings = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5)]
    outputs = engine.generate(["a", "b"], samplings)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5]
    with pytest.raises(RequestError, match="2 inputs and 1 sampling"):
        engine.generate(["a", "b"], samplings[:1])


def test_the_text_is_what_the_tokenizer_decodes(engine: Engine) -> None:
    [output] = engine.generate("The quick brown", SamplingParams(seed=3, ignore_eos=True))
    answer = output.outputs[0]
    assert answer.text == engine.tokenizer.decode(answer.token_ids)


def test_a_stream_adds_up_to_the_whole_answer(engine: Engine) -> None:
    sampling = SamplingParams(seed=7, max_tokens=40, logprobs=True, top_logprobs=2)
    [whole] = engine.generate("A tree maps", sampling)
    pieces = list(engine.stream("A tree maps", sampling))
    assert len(pieces) == len(whole.outputs[0].token_ids)
    assert "".join(p.outputs[0].text for p in pieces) == whole.outputs[0].text
    assert sum((p.outputs[0].token_ids for p in pieces), ()) == whole.outputs[0].token_ids
    told = sum((p.outputs[0].logprobs or () for p in pieces), ())
    assert [t.token_id for t in told] == list(whole.outputs[0].token_ids)
    assert pieces[-1].outputs[0].finish_reason is whole.outputs[0].finish_reason
    assert all(p.outputs[0].finish_reason is None for p in pieces[:-1])


def test_a_second_request_is_cached_and_equal(engine: Engine) -> None:
    engine.flush_cache()
    [cold] = engine.generate("The quick brown fox jumps over", GREEDY)
    [warm] = engine.generate("The quick brown fox jumps over", GREEDY)
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == len(warm.prompt_token_ids) - 1
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_logprobs_are_of_the_model_and_sorted(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=5, logprobs=True, top_logprobs=4)
    [output] = engine.generate("The quick", sampling)
    for entry in output.outputs[0].logprobs or ():
        values = [top.logprob for top in entry.top]
        assert values == sorted(values, reverse=True)
        assert entry.token_id == entry.top[0].token_id
        assert entry.logprob == entry.top[0].logprob < 0
    [silent] = engine.generate("The quick", GREEDY)
    assert silent.outputs[0].logprobs is None


def test_a_seed_fixes_the_answer_alone_and_in_a_batch(engine: Engine) -> None:
    sampling = SamplingParams(seed=11, max_tokens=20, ignore_eos=True)
    [alone] = engine.generate("Numbers such as", sampling)
    others = [f"word {i}" for i in range(12)]
    batch = engine.generate([*others, "Numbers such as"], sampling)
    assert batch[-1].outputs[0].token_ids == alone.outputs[0].token_ids
    [other_seed] = engine.generate("Numbers such as", SamplingParams(seed=12, max_tokens=20))
    assert other_seed.outputs[0].token_ids != alone.outputs[0].token_ids


def test_without_a_seed_answers_differ(engine: Engine) -> None:
    outputs = engine.generate(["The quick"] * 4, SamplingParams(max_tokens=20, ignore_eos=True))
    assert len({output.outputs[0].token_ids for output in outputs}) == 4


def test_a_stop_string_is_not_part_of_the_text(engine: Engine) -> None:
    [free] = engine.generate("The quick", SamplingParams(seed=1, max_tokens=40, ignore_eos=True))
    text = free.outputs[0].text
    stop = next(text[i : i + 3] for i in range(5, 37) if text[i : i + 3].isascii())
    cut = text[: text.index(stop)]
    sampling = SamplingParams(seed=1, max_tokens=40, ignore_eos=True, stop=stop)
    [stopped] = engine.generate("The quick", sampling)
    assert stopped.outputs[0].text == cut
    assert stopped.outputs[0].finish_reason is FinishReason.STOP
    assert stopped.outputs[0].stop_reason == stop
    pieces = engine.stream("The quick", sampling)
    assert "".join(piece.outputs[0].text for piece in pieces) == cut


def test_an_end_token_is_in_the_tokens_and_not_in_the_text(engine: Engine) -> None:
    [free] = engine.generate("The quick", SamplingParams(seed=1, max_tokens=10, ignore_eos=True))
    end = free.outputs[0].token_ids[4]
    length = free.outputs[0].token_ids.index(end) + 1
    sampling = SamplingParams(seed=1, max_tokens=10, ignore_eos=True, stop_token_ids=(end,))
    [stopped] = engine.generate("The quick", sampling)
    answer = stopped.outputs[0]
    assert answer.token_ids == free.outputs[0].token_ids[:length]
    assert answer.text == engine.tokenizer.decode(answer.token_ids[:-1])
    assert answer.stop_reason == end


def test_metrics_are_in_order(engine: Engine) -> None:
    [output] = engine.generate("The quick", GREEDY)
    m = output.metrics
    assert m.first_scheduled_time is not None
    assert m.first_token_time is not None
    assert m.finished_time is not None
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([[]], "empty"),
        ([-1, 5], "outside the vocabulary"),
        ([5, 10**6], "outside the vocabulary"),
        ([5, 2**70], "token ids"),
        ([[1, 2], [3, "x"]], "token ids"),
        ([1.5, 2.5], "token ids"),
        ([[[1, 2]]], "token ids"),
        ("\ud800", "Unicode"),
        ([{"role": 5, "content": "hi"}], "role"),
        ([{"content": "hi"}], "role"),
        (3, "inputs are strings"),
    ],
)
def test_a_wrong_prompt_is_refused_before_it_reaches_the_core(
    engine: Engine, prompt: object, message: str
) -> None:
    steps = engine.stats().num_steps
    with pytest.raises(RequestError, match=message):
        engine.generate(prompt, GREEDY)  # type: ignore[arg-type]
    assert engine.stats().num_steps == steps


def test_a_prompt_longer_than_the_context_says_what_fits(tiny_model: Path) -> None:
    with tiny_engine(tiny_model, max_model_len=64) as engine:
        with pytest.raises(ContextLengthError, match="maximum context length is 64 tokens") as info:
            engine.generate(list(range(3, 67)), GREEDY)
        assert info.value.code == "context_length_exceeded"
        [output] = engine.generate(list(range(3, 66)), GREEDY)
        assert output.outputs[0].finish_reason is FinishReason.LENGTH
        assert len(output.outputs[0].token_ids) == 1


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_engine(tiny_model, max_model_len=64) as engine:
        monkeypatch.setattr(engine.tokenizer, "encode", None)
        for prompt in ("tree " * 10_000, [{"role": "user", "content": "tree " * 10_000}]):
            with pytest.raises(ContextLengthError, match="at least [0-9]+"):
                engine.generate(prompt, GREEDY)


def test_a_prompt_longer_than_the_pool_is_refused(tiny_model: Path) -> None:
    with tiny_engine(tiny_model, num_kv_blocks=4) as engine:
        assert engine.info.max_model_len == 64
        with pytest.raises(ContextLengthError):
            engine.generate(list(range(3, 70)), GREEDY)


def test_one_wrong_input_of_many_submits_none(engine: Engine) -> None:
    steps = engine.stats().num_steps
    with pytest.raises(RequestError):
        engine.generate(["fine", ""], GREEDY)
    assert engine.stats().num_steps == steps


@pytest.mark.parametrize(
    "options",
    [
        {"no_such_option": 1},
        {"block_size": 0},
        {"max_num_seqs": 0},
        {"max_num_seqs": 513, "max_num_batched_tokens": 512},
        {"dtype": "float8"},
        {"schedule_policy": "lifo"},
        {"kernels": "abacus"},
        {"device": "abacus"},
        {"max_model_len": 10**6},
        {"mode": "sometimes"},
        {"max_num_batched_tokens": 1.5},
        {"prefix_caching": "no"},
        {"check_invariants": 1},
        {"kernels": ["cpu"]},
        {"schedule_policy": ["lpm"]},
        {"kv_cache_memory": 10, "num_kv_blocks": None},
        {"memory_fraction": 0.5, "num_kv_blocks": None, "device": "cpu"},
        {"cuda_graphs": "start", "device": "cpu"},
        {"kv_dtype": "int4"},
    ],
)
def test_a_wrong_option_is_refused(tiny_model: Path, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        tiny_engine(tiny_model, **options)


# -- ends ------------------------------------------------------------------------------------------


def test_leaving_a_stream_early_ends_the_request(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=1500, ignore_eos=True)
    stream = engine.stream("The quick", sampling)
    next(stream)
    assert engine.stats().num_running == 1
    stream.close()
    engine._core.tree().result()
    assert engine.stats().num_running == 0
    assert engine.stats().num_finished_by_reason["abort"] >= 1
    assert_nothing_held(engine)


def test_a_stream_that_is_never_read_submits_nothing(engine: Engine) -> None:
    steps = engine.stats().num_steps
    engine.stream("The quick", GREEDY)
    gc.collect()
    assert engine.stats().num_steps == steps


def test_closing_ends_what_is_in_flight_with_an_error(tiny_model: Path) -> None:
    engine = tiny_engine(tiny_model)
    stream = engine.stream("The quick", SamplingParams(max_tokens=1500, ignore_eos=True))
    next(stream)
    engine.close()
    with pytest.raises(EngineClosedError):
        list(stream)
    with pytest.raises(EngineClosedError):
        engine.generate("more", GREEDY)
    with pytest.raises(EngineClosedError):
        engine.tree()
    engine.close()
    assert not engine.is_alive


def test_closing_frees_the_model_without_waiting_for_the_collector(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[ModelRunner]] = []
    launch = ModelRunner.launch

    def noted(runner: ModelRunner, plan: StepPlan) -> StepInFlight:
        made.append(weakref.ref(runner))
        return launch(runner, plan)

    monkeypatch.setattr(ModelRunner, "launch", noted)
    gc.collect()
    gc.disable()
    try:
        engine = tiny_engine(tiny_model)
        engine.generate("The quick", GREEDY)
        assert made[0]() is not None
        engine.close()
        assert made[0]() is None
    finally:
        gc.enable()


def test_a_failing_step_is_an_error_for_its_callers_only(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_engine(tiny_model) as engine:
        [before] = engine.generate("The quick", GREEDY)

        def broken(runner: ModelRunner, plan: object) -> None:
            raise MemoryError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "launch", broken)
            with pytest.raises(EngineError, match="no memory"):
                engine.generate("The quick", GREEDY)
        [after] = engine.generate("The quick", GREEDY)
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        assert engine.stats().num_quarantines == 1
        assert_nothing_held(engine)


def test_several_threads_may_call_one_engine(engine: Engine) -> None:
    answers: dict[int, list[tuple[int, ...]]] = {}

    def call(index: int) -> None:
        prompts = [f"number {index} {i}" for i in range(4)]
        outputs = engine.generate(prompts, GREEDY)
        answers[index] = [output.outputs[0].token_ids for output in outputs]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, answer in answers.items():
        prompts = [f"number {index} {i}" for i in range(4)]
        again = engine.generate(prompts, GREEDY)
        assert [output.outputs[0].token_ids for output in again] == answer
    assert len(answers) == 6
    assert_nothing_held(engine)


def test_two_engines_live_side_by_side(tiny_model: Path) -> None:
    with tiny_engine(tiny_model) as first, tiny_engine(tiny_model, block_size=1) as second:
        [a] = first.generate("The quick", GREEDY)
        [b] = second.generate("The quick", GREEDY)
        assert a.outputs[0].token_ids == b.outputs[0].token_ids


def test_the_tree_can_be_looked_at(engine: Engine) -> None:
    engine.flush_cache()
    assert engine.tree() == []
    [output] = engine.generate("The quick brown fox", GREEDY)
    [node] = engine.tree()
    num_tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
    assert len(node.token_ids) == num_tokens
    assert engine.tokenizer.decode(node.token_ids).startswith("The quick brown fox")


def test_a_huge_number_is_refused_and_not_repeated(engine: Engine) -> None:
    for name in ("top_k", "max_tokens", "min_tokens", "seed"):
        with pytest.raises(RequestError, match=f"{name} is out of range"):
            SamplingParams(**{name: 10**400})
    with pytest.raises(RequestError, match="sampling must be"):
        engine.generate("a", 5)  # type: ignore[arg-type]


def test_a_request_without_finite_logits_fails_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.flush_cache()
    [expected] = engine.generate("The quick", GREEDY)
    engine.flush_cache()
    num_quarantines = engine.stats().num_quarantines

    def poisoned(
        logits: torch.Tensor, rows: list[SamplingRow], masks: TokenMasks, kernels: Kernels
    ) -> Drawn:
        for index, row in enumerate(rows):
            if row.params.top_k == 7 and row.position > 8:
                logits[index, 3] = torch.nan
        return draw(logits, rows, masks, kernels)

    monkeypatch.setattr("sapwood.runtime.model_runner.draw", poisoned)
    results: dict[str, object] = {}

    def call(name: str, prompt: str, sampling: SamplingParams) -> None:
        try:
            [results[name]] = engine.generate(prompt, sampling)
        except EngineError as error:
            results[name] = error

    sick = SamplingParams(top_k=7, max_tokens=30, ignore_eos=True)
    threads = [
        threading.Thread(target=call, args=("sick", "A tree maps prefixes", sick)),
        threading.Thread(target=call, args=("sound", "The quick", GREEDY)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "finite logits" in str(results["sick"])
    assert results["sound"].outputs[0].token_ids == expected.outputs[0].token_ids  # type: ignore[attr-defined]
    assert engine.stats().num_quarantines == num_quarantines
    assert_nothing_held(engine)


def test_an_error_in_an_abort_or_a_flush_does_not_end_the_engine(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise MemoryError("broken")

    with tiny_engine(tiny_model) as engine:
        stream = engine.stream("The quick", SamplingParams(max_tokens=1500, ignore_eos=True))
        next(stream)
        with monkeypatch.context() as patch:
            patch.setattr(Lease, "publish", broken)
            stream.close()
            engine.tree()
        with monkeypatch.context() as patch:
            patch.setattr(PrefixCache, "flush", broken)
            engine.flush_cache()
        with monkeypatch.context() as patch:
            patch.setattr(PrefixCache, "walk", broken)
            with pytest.raises(MemoryError):
                engine.tree()
        assert engine.is_alive
        assert engine.stats().num_quarantines == 2
        assert len(engine.generate("The quick", GREEDY)[0].outputs[0].token_ids) == 12
        assert_nothing_held(engine)


def test_a_pool_that_cannot_be_had_is_told(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="are free"):
        tiny_engine(tiny_model, num_kv_blocks=10**12)


def test_a_cache_has_room_for_the_tokens_asked_for(tiny_model: Path) -> None:
    with tiny_engine(tiny_model, num_kv_blocks=None, kv_tokens=100) as engine:
        assert (engine.info.num_kv_blocks, engine.info.kv_capacity_tokens) == (7, 112)


def test_keys_and_values_in_a_byte_are_told_and_answer(tiny_model: Path) -> None:
    for name, told in (("int8", "int8"), ("fp8", "float8_e4m3fn")):
        with tiny_engine(tiny_model, kv_dtype=name, quantize="none") as engine:
            assert engine.info.kv_dtype == told
            assert engine.info.precision == f"float32, keys and values in {told}"
            assert len(engine.generate("The quick", GREEDY)[0].outputs[0].token_ids) == 12


def test_a_pool_smaller_than_the_context_is_told(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_engine(tiny_model, num_kv_blocks=4).close()
    assert "holds 64 tokens" in caplog.text


def test_backends_give_the_same_answers(tiny_model: Path) -> None:
    prompts = ["The quick brown fox", "The quick brown dog", "A tree"]
    answers = []
    for kernels in ("reference", "cpu", "cpu-torch"):
        with tiny_engine(tiny_model, kernels=kernels, quantize="none") as engine:
            outputs = engine.generate(prompts, GREEDY)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.slow
def test_a_thousand_requests_with_random_aborts_leave_nothing_behind(tiny_model: Path) -> None:
    rng = random.Random(0)
    with tiny_engine(tiny_model, num_kv_blocks=64, check_invariants=False) as engine:
        for _ in range(100):
            streams = []
            for _ in range(10):
                prompt = [rng.randint(3, 5) for _ in range(rng.randint(1, 200))]
                sampling = SamplingParams(max_tokens=rng.randint(1, 60), ignore_eos=True)
                streams.append(engine.stream(prompt, sampling))
            for stream in streams:
                for _ in range(rng.randint(0, 5)):
                    next(stream, None)
            for stream in streams:
                stream.close()
        assert_nothing_held(engine)
