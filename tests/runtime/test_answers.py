"""Several answers and prompt log-probabilities through the engine, on a tiny random model."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from sapwood import Engine, RequestError, RequestOutput, SamplingParams
from tests.runtime.test_engine import assert_nothing_held, tiny_engine

PROMPT = "The quick brown fox jumps over the lazy dog, and then it does so"
SCORED = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with tiny_engine(tiny_model, quantize="none") as engine:
        yield engine


def logprobs_of(output: RequestOutput) -> np.ndarray:
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    return np.array([entry.logprob for entry in output.prompt_logprobs[1:] if entry is not None])


def num_computed(engine: Engine) -> int:
    engine._core.tree().result()
    return engine.stats().computed_tokens


def test_prompt_logprobs_are_those_of_transformers(engine: Engine, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    [output] = engine.generate(PROMPT, SCORED)
    ids = torch.from_numpy(output.prompt_token_ids.astype(np.int64))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.inference_mode():
        expected = model(ids[None]).logits[0].log_softmax(-1)
    own = expected[:-1].gather(1, ids[1:, None])[:, 0]
    np.testing.assert_allclose(logprobs_of(output), own, atol=1e-4)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=3)
    [output] = engine.generate(PROMPT, sampling)
    assert output.prompt_logprobs is not None
    best = expected.topk(3)
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry is not None
        assert entry.token_id == ids[position + 1]
        assert [other.token_id for other in entry.top] == best.indices[position].tolist()


@pytest.mark.parametrize("block_size", [1, 16])
def test_warm_prompt_logprobs_are_the_cold_ones_and_cost_one_token(
    tiny_model: Path, block_size: int
) -> None:
    with tiny_engine(tiny_model, block_size=block_size, max_num_batched_tokens=16,
                     max_num_seqs=8) as engine:  # fmt: skip
        [cold] = engine.generate(PROMPT, SCORED)
        before = num_computed(engine)
        only_scores = SamplingParams(max_tokens=0, prompt_logprobs=0)
        [warm] = engine.generate(PROMPT, only_scores)
        assert num_computed(engine) == before + 1
        np.testing.assert_array_equal(logprobs_of(warm), logprobs_of(cold))
        assert warm.outputs[0].token_ids == ()
        # One that shares a part of it, beside others.
        longer, _, _ = engine.generate([PROMPT + " again, and", "A tree", "Numbers"], SCORED)
        with tiny_engine(tiny_model) as other:
            [expected] = other.generate(PROMPT + " again, and", SCORED)
        np.testing.assert_allclose(logprobs_of(longer), logprobs_of(expected), atol=1e-4)
        assert_nothing_held(engine)


def test_generated_logprobs_are_the_prompt_logprobs_of_the_longer_prompt(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=10, logprobs=True)
    [output] = engine.generate(PROMPT, sampling)
    [answer] = output.outputs
    prompt = [*output.prompt_token_ids.tolist(), *answer.token_ids]
    [scored] = engine.generate(prompt, SCORED)
    told = [entry.logprob for entry in answer.logprobs or ()]
    np.testing.assert_allclose(logprobs_of(scored)[-len(told) :], told, atol=1e-4)


def test_answers_with_one_seed_differ_and_repeat_wherever_they_run(
    engine: Engine, tiny_model: Path
) -> None:
    sampling = SamplingParams(seed=11, n=4, max_tokens=12)

    def texts(output: RequestOutput) -> list[str]:
        return [answer.text for answer in output.outputs]

    [alone] = engine.generate(PROMPT, sampling)
    assert len(set(texts(alone))) == 4
    crowd = [SamplingParams(seed=i, max_tokens=12) for i in range(28)]
    crowded = engine.generate([PROMPT] * 29, [sampling, *crowd])
    assert texts(crowded[0]) == texts(alone)
    options = {"num_kv_blocks": 12, "block_size": 4, "max_model_len": 48, "quantize": "none"}
    with tiny_engine(tiny_model, **options) as tight:
        [elsewhere] = tight.generate(PROMPT, sampling)
        assert tight.stats().num_preemptions
        assert texts(elsewhere) == texts(alone)
        assert_nothing_held(tight)
    [single] = engine.generate(PROMPT, SamplingParams(seed=11, max_tokens=12))
    assert texts(single) == texts(alone)[:1]


def test_a_stream_of_several_answers_ends_when_all_have(engine: Engine) -> None:
    sampling = SamplingParams(seed=1, n=3, max_tokens=7)
    [whole] = engine.generate(PROMPT, sampling)
    told: dict[int, str] = {}
    for piece in engine.stream(PROMPT, sampling):
        [answer] = piece.outputs
        told[answer.index] = told.get(answer.index, "") + answer.text
    assert told == {answer.index: answer.text for answer in whole.outputs}


def test_best_of_cannot_be_streamed(engine: Engine) -> None:
    with pytest.raises(RequestError, match="best_of"):
        next(engine.stream(PROMPT, SamplingParams(n=1, best_of=2)))


def test_leaving_a_stream_ends_every_answer(engine: Engine) -> None:
    for _ in engine.stream(PROMPT, SamplingParams(n=5, max_tokens=500, ignore_eos=True)):
        break
    assert_nothing_held(engine)
