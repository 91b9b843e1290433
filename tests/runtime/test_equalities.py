"""Answers do not depend on what is cached, who else runs, or how memory is cut.

Answers are token ids and, where native code computes, the very bits of their log-probabilities:
torch's matrix products round a row a little differently in other batches.

The default suite checks this on a tiny random model and, briefly, on the real one; the sweep over
50 real prompts is marked slow.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood import Engine, RequestOutput, SamplingParams
from sapwood.kernels.cpu import CpuKernels
from sapwood.kernels.interface import KVCache, RowCopy
from sapwood.kernels.native import load
from sapwood.runtime.models import MODELS
from sapwood.runtime.scheduler import Scheduler
from sapwood.runtime.step_plan import StepPlan
from tests.runtime.test_engine import assert_nothing_held
from tests.texts import PROMPTS, STEMS

BLOCK_SIZES = (1, 16, 64)


def answers(
    engine: Engine, prompts: list[np.ndarray], max_tokens: int, *, others: int = 0
) -> list[RequestOutput]:
    """Greedy answers to the prompts, with `others` different prompts in the same batch."""
    crowd = [np.arange(5 + i, 60 + i, dtype=np.int32) for i in range(others)]
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=True)
    return engine.generate([*prompts, *crowd], sampling)[: len(prompts)]


def ids_of(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def bits_of(outputs: list[RequestOutput]) -> list[tuple[tuple[int, float], ...]]:
    """Token ids and their log-probabilities."""
    bits = []
    for output in outputs:
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        ids = output.outputs[0].token_ids
        bits.append(tuple((i, token.logprob) for i, token in zip(ids, logprobs, strict=True)))
    return bits


@contextmanager
def preempting_every_step() -> Iterator[None]:
    """Sends every running sequence back to wait before each plan."""
    plan = Scheduler.plan

    def preempt_and_plan(scheduler: Scheduler, now: float) -> StepPlan | None:
        scheduler.preempt(scheduler.num_running)
        return plan(scheduler, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "plan", preempt_and_plan)
        yield


def check_all(
    model: str,
    texts: list[str],
    max_tokens: int,
    compared: Callable[[list[RequestOutput]], list[Any]],
    block_sizes: tuple[int, ...] = BLOCK_SIZES,
    **options: object,
) -> None:
    """Every way to run the same prompts gives what running each alone and cold gives."""
    with Engine(model, prefix_caching=False, max_num_seqs=1, **options) as engine:
        prompts = [engine.tokenizer.encode(text) for text in texts]
        expected = [compared(answers(engine, [prompt], max_tokens))[0] for prompt in prompts]
    longest = max(map(len, prompts)) + max_tokens
    for block_size in block_sizes:
        with Engine(model, block_size=block_size, **options) as engine:
            cold = answers(engine, prompts, max_tokens)
            assert compared(cold) == expected, f"cold, block size {block_size}"
            warm = answers(engine, prompts, max_tokens)
            assert compared(warm) == expected, f"warm, block size {block_size}"
            assert all(output.num_cached_tokens > 0 for output in warm)
            engine.flush_cache()
            again = answers(engine, prompts, max_tokens)
            assert compared(again) == expected, f"flushed, block size {block_size}"
            engine.flush_cache()
            crowded = answers(engine, prompts, max_tokens, others=31)
            assert compared(crowded) == expected, f"with 31 others, block size {block_size}"
            with preempting_every_step():
                preempted = answers(engine, prompts, max_tokens)
            assert compared(preempted) == expected, f"preempted, block size {block_size}"
            # One that ends with its first token is done before it can be preempted.
            longer = [output for output in preempted if len(output.outputs[0].token_ids) > 1]
            assert len(longer) > len(prompts) // 2
            assert all(output.metrics.num_preemptions > 0 for output in longer)
            assert_nothing_held(engine)
        chunked = {"max_num_batched_tokens": 64, "max_num_seqs": 8}
        with Engine(model, block_size=block_size, **chunked, **options) as engine:
            assert compared(answers(engine, prompts, max_tokens)) == expected, "chunked"
        tight = {"num_kv_blocks": -(-longest // block_size), "kv_cache_memory": None}
        with Engine(model, block_size=block_size, **{**options, **tight}) as engine:
            assert compared(answers(engine, prompts, max_tokens)) == expected, "tight pool"
            assert_nothing_held(engine)


# Each with what is its own; windows are shorter than the prompts' common beginning.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"head_dim": 32},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 30.0,
    },
    "phi3": {"sliding_window": 24, "partial_rotary_factor": 0.5},
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 0.5},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
}


def compared_in(quantize: str) -> Callable[[list[RequestOutput]], list[Any]]:
    if load() is not None:
        return bits_of
    if quantize == "int8":
        pytest.skip("there is no C compiler")
    return ids_of


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_on_a_tiny_model(tiny_model: Path, quantize: str) -> None:
    texts = [stem + end for stem in STEMS[:2] for end in (" and then", " or so", "")]
    check_all(
        str(tiny_model), texts, 8, compared_in(quantize), quantize=quantize, kv_cache_memory=2**22
    )


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_with_keys_and_values_in_a_byte(tiny_model: Path, kv_dtype: str) -> None:
    texts = [stem + end for stem in STEMS[:2] for end in (" and then", "")]
    options = {"kv_dtype": kv_dtype, "kv_cache_memory": 2**22}
    check_all(str(tiny_model), texts, 6, ids_of, block_sizes=(16,), **options)


@pytest.fixture(params=ARCHITECTURES)
def architecture(
    request: pytest.FixtureRequest,
    write_model: Callable[[Path, Mapping[str, Any]], Path],
    tmp_path: Path,
) -> Path:
    """A tiny model of each architecture beside Llama."""
    return write_model(tmp_path, {"model_type": request.param, **ARCHITECTURES[request.param]})


def test_every_architecture_is_checked() -> None:
    assert {"llama", *ARCHITECTURES} == set(MODELS)


def test_on_every_architecture(architecture: Path) -> None:
    texts = [STEMS[0] + end for end in (" and then", " or so", "")]
    compared = compared_in("none")
    check_all(str(architecture), texts, 6, compared, block_sizes=(16,), kv_cache_memory=2**22)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_on_every_architecture_at_length(architecture: Path, quantize: str) -> None:
    check_all(
        str(architecture),
        list(PROMPTS[:12]),
        16,
        compared_in(quantize),
        quantize=quantize,
        kv_cache_memory=2**22,
    )


def test_the_tiny_model_notices_one_spoilt_row(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_that_spoilt_rows_show(tiny_model, monkeypatch, noise=0.1)


def test_every_architecture_notices_one_spoilt_row(
    architecture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Windows see few keys, and norms of heads make all keys as long: more must be off to show.
    check_that_spoilt_rows_show(architecture, monkeypatch, noise=0.4)


def check_that_spoilt_rows_show(
    model: Path, monkeypatch: pytest.MonkeyPatch, *, noise: float
) -> None:
    """What the tests above rest on: keys that are off change the answers."""

    def off(kernels: CpuKernels, kv: KVCache, layer: int, key: Tensor, *rest: Tensor) -> None:
        write(kernels, kv, layer, key + noise * torch.randn_like(key), *rest)

    def blank(kernels: CpuKernels, kv: KVCache, copies: Sequence[RowCopy]) -> None:
        for _, target, num_rows in copies:
            first = target * kv.spec.block_size
            kv.keys[:, first : first + num_rows] = 0.0
            kv.values[:, first : first + num_rows] = 0.0

    write = CpuKernels.write_kv
    torch.manual_seed(0)
    with Engine(str(model), quantize="none", kv_cache_memory=2**22) as engine:
        prompts = [engine.tokenizer.encode(stem) for stem in STEMS[:4]]
        expected = ids_of(answers(engine, prompts, 8))
        monkeypatch.setattr(CpuKernels, "write_kv", off)
        engine.flush_cache()
        spoilt = ids_of(answers(engine, prompts, 8))
        assert sum(a != b for a, b in zip(expected, spoilt, strict=True)) >= 2
        monkeypatch.setattr(CpuKernels, "write_kv", write)
        monkeypatch.setattr(CpuKernels, "copy_rows", blank)
        engine.flush_cache()
        answers(engine, [prompt[:-5] for prompt in prompts], 1)
        uncopied = ids_of(answers(engine, prompts, 8))
        assert sum(a != b for a, b in zip(expected, uncopied, strict=True)) >= 2


@pytest.mark.real_model
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_on_the_real_model(real_model: str, quantize: str) -> None:
    prompts, compared = PROMPTS[:2], compared_in(quantize)
    options = {"num_kv_blocks": 128, "quantize": quantize}
    with Engine(real_model, prefix_caching=False, **options) as engine:
        texts = [engine.tokenizer.encode(text) for text in prompts]
        expected = [compared(answers(engine, [prompt], 8))[0] for prompt in texts]
    with Engine(real_model, **options) as engine:
        for state in ("cold", "warm"):
            outputs = answers(engine, texts, 8)
            assert compared(outputs) == expected, state
        assert all(output.num_cached_tokens > 0 for output in outputs)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_on_fifty_real_prompts(real_model: str, quantize: str) -> None:
    assert len(PROMPTS) == 50
    check_all(real_model, list(PROMPTS), 16, compared_in(quantize), quantize=quantize)
