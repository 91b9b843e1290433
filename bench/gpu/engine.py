"""Whole engines of random weights: three workloads, and how busy they keep the device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from gpu.context import Context
from gpu.engines import BenchEngine, EngineShape, Prompt, give_back_memory, random_prompt
from gpu.models import LLAMA3_8B, QWEN3_0_6B, QWEN3_8B, TINY_QWEN3
from gpu.sections import Row, Scale
from gpu.steps import BLOCK_SIZE
from sapwood.runtime.config import CacheOptions
from sapwood.runtime.cuda_graphs import CudaGraphRecorder, GraphPlan, graph_row_counts
from sapwood.runtime.memory_trial import CudaMeter, StepLimits
from sapwood.runtime.model_config import ModelConfig
from sapwood.runtime.placement import place_on_gpu
from sapwood.runtime.weights import LoadedModel, load_model

MAX_SECONDS = 36.9  # SGLang with its Triton backend on an H200; 30.9 with FlashInfer's
MIN_TOKENS_PER_SECOND = 23_000.0
MIN_BUSY_SHARE = 0.95
MAX_NUM_SEQS = 256
MEMORY_FRACTION = 0.9
SECONDS_FOR_ALL_GROUPS = 150.0  # left, so that all groups are also run without the tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one run of a workload gave."""

    seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_steps: int

    @property
    def tokens_per_second(self) -> float:
        return self.num_generated_tokens / self.seconds

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "s": self.seconds,
            "prompt tokens": self.num_prompt_tokens,
            "output tokens": self.num_generated_tokens,
            "output tok/s": self.tokens_per_second,
            "% hits": self.num_cached_tokens / self.num_prompt_tokens * 100,
            "steps": self.num_steps,
        }


def engine(context: Context) -> Iterator[Row]:
    yield from _equal_requests(context)
    yield from _random_requests(context)
    yield from _groups(context)
    if context.is_full:
        yield _sizing(context)


def _equal_requests(context: Context) -> Iterator[Row]:
    """Qwen3-8B, 256 requests of 1,024 in and 1,024 out, and how busy the device is in decoding."""
    count, length, num_generated = _sizes(context, (256, 1024, 1024), (8, 64, 8), (2, 12, 2))
    rng = np.random.default_rng(4)
    loaded = _load(context, QWEN3_8B)
    vocab_size = loaded.config.vocab_size
    prompts = [random_prompt(rng, vocab_size, length, num_generated) for _ in range(count)]
    shape = _shape(context, prompts)
    running = _engine(context, loaded, shape)
    measured = _measure(running, prompts)
    is_judged = context.is_full
    yield Row(
        name=f"Qwen3-8B: {count} x {length:,} in, {num_generated:,} out",
        figures=measured.figures,
        bar=f"<= {MAX_SECONDS} s" if is_judged else None,
        is_met=measured.seconds <= MAX_SECONDS if is_judged else None,
    )
    yield _busy_row(context, "Qwen3-8B", running, vocab_size, is_judged=True)
    del running
    give_back_memory(context.device)
    if context.is_dry or (context.is_full and context.seconds_left < 120):
        return
    for name, changed in (
        ("without CUDA graphs", replace(shape, has_graphs=False)),
        ("without graphs and overlap", replace(shape, has_graphs=False, has_overlap=False)),
    ):
        yield _decode_row(context, name, _engine(context, loaded, changed), vocab_size)
        give_back_memory(context.device)


def _random_requests(context: Context) -> Iterator[Row]:
    """Qwen3-0.6B, 256 requests of 100 to 1,024 tokens in and out, drawn at random."""
    count, low, high = _sizes(context, (256, 100, 1024), (8, 50, 60), (2, 2, 3))
    rng = np.random.default_rng(5)
    loaded = _load(context, QWEN3_0_6B)
    lengths = rng.integers(low, high, (count, 2), endpoint=True).tolist()
    prompts = [
        random_prompt(rng, loaded.config.vocab_size, length, num_generated, temperature=0.6)
        for length, num_generated in lengths
    ]
    running = _engine(context, loaded, _shape(context, prompts))
    measured = _measure(running, prompts)
    is_judged = context.is_full
    yield Row(
        name=f"Qwen3-0.6B: {count} x {low:,} to {high:,} in and out",
        figures=measured.figures,
        bar=f">= {MIN_TOKENS_PER_SECOND:,.0f} output tok/s" if is_judged else None,
        is_met=measured.tokens_per_second >= MIN_TOKENS_PER_SECOND if is_judged else None,
    )
    if not context.is_dry:
        yield _busy_row(context, "Qwen3-0.6B", running, loaded.config.vocab_size, is_judged=False)
    del running, loaded
    give_back_memory(context.device)


def _groups(context: Context) -> Iterator[Row]:
    """Llama-3-8B, groups of 16 requests over 2,048 shared tokens, with the tree and without."""
    num_groups, shared, own, num_generated = _sizes(
        context, (64, 2048, 128, 256), (2, 64, 16, 8), (1, 16, 3, 2)
    )
    group_size = context.pick(16, 2)
    rng = np.random.default_rng(6)
    loaded = _load(context, LLAMA3_8B)
    vocab_size = loaded.config.vocab_size
    groups = []
    for _ in range(num_groups):
        prefix = random_prompt(rng, vocab_size, shared, num_generated).token_ids
        tails = [rng.integers(0, vocab_size, own).astype(np.int32) for _ in range(group_size)]
        groups.append(
            [
                Prompt(token_ids=np.concatenate([prefix, tail]), num_generated=num_generated)
                for tail in tails
            ]
        )
    rates = {}
    for has_tree in (True, False):
        count = num_groups
        if context.is_full and not has_tree and context.seconds_left < SECONDS_FOR_ALL_GROUPS:
            count = MAX_NUM_SEQS // group_size  # one full batch
        prompts = [prompt for group in groups[:count] for prompt in group]
        order = rng.permutation(len(prompts))
        prompts = [prompts[i] for i in order]
        running = _engine(context, loaded, replace(_shape(context, prompts), has_tree=has_tree))
        measured = _measure(running, prompts)
        rates[has_tree] = measured.tokens_per_second
        of_ratio = {} if has_tree else {"x of without": rates[True] / rates[False]}
        yield Row(
            name=f"Llama-3-8B: {count} groups x {group_size} requests, {shared:,} shared + {own} "
            f"in, {num_generated} out, {'with' if has_tree else 'without'} the tree",
            figures={**measured.figures, **of_ratio},
        )
        del running
        give_back_memory(context.device)


def _sizing(context: Context) -> Row:
    """A cache that takes what steps and graphs leave of the card, as engines size theirs."""
    meter = CudaMeter(context.device)
    free_at_first = meter.look().free
    loaded = _load(context, QWEN3_0_6B)
    vocab_size, max_model_len = loaded.config.vocab_size, 4096
    placed = place_on_gpu(
        loaded.model,
        context.kernels,
        CacheOptions(memory_fraction=MEMORY_FRACTION),
        StepLimits(
            num_rows=8192,
            num_draws=MAX_NUM_SEQS,
            max_context_len=max_model_len,
            block_size=BLOCK_SIZE,
        ),
        meter=meter,
        free_at_first=free_at_first,
        graphs=graphs_at_start(context.device, vocab_size, max_model_len),
    )
    left = meter.look()
    kv_bytes = placed.kv.spec.num_bytes
    return Row(
        name="Qwen3-0.6B: a cache sized by memory_fraction",
        figures={
            "memory GiB": left.total / 2**30,
            "cache GiB": kv_bytes / 2**30,
            "cache tokens": placed.kv.spec.num_slots,
            "left GiB": left.free / 2**30,
        },
        bar="some is left",
        is_met=left.free > 0,
    )


def graphs_at_start(device: torch.device, vocab_size: int, max_context_len: int) -> GraphPlan:
    """Those of an engine of the check's size, as engines record them by themselves."""
    return GraphPlan(
        row_counts=graph_row_counts(MAX_NUM_SEQS),
        vocab_size=vocab_size,
        max_context_len=max_context_len,
        make_recorder=lambda: CudaGraphRecorder(device),
        at_start=True,
    )


def _sizes(
    context: Context, full: tuple[int, ...], rehearsal: tuple[int, ...], dry: tuple[int, ...]
) -> tuple[int, ...]:
    return {Scale.FULL: full, Scale.REHEARSAL: rehearsal, Scale.DRY: dry}[context.scale]


def _load(context: Context, config: ModelConfig) -> LoadedModel:
    """Random weights; a rehearsal takes two layers, whose kernels are those of all."""
    if context.is_dry:
        config = TINY_QWEN3
    elif not context.is_full:
        config = replace(config, num_hidden_layers=2)
    return load_model(
        config,
        kernels=context.kernels,
        dtype=config.dtype,
        load_format="dummy",
        device=context.device,
    )


def _shape(context: Context, prompts: Sequence[Prompt]) -> EngineShape:
    """An engine whose cache holds as many of the longest requests as may run at once."""
    longest = max(len(prompt.token_ids) + prompt.num_generated for prompt in prompts)
    max_num_seqs = context.pick(MAX_NUM_SEQS, 4)
    # Some blocks more: the tree keeps what has ended, and a block is never shared when half full.
    num_tokens = (longest + 64) * min(max_num_seqs, len(prompts))
    return EngineShape(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=context.pick(8192, 32),
        max_model_len=longest,
        num_tokens=num_tokens,
    )


def _engine(context: Context, loaded: LoadedModel, shape: EngineShape) -> BenchEngine:
    """Warmed up: graphs recorded, kernels compiled and loaded, nothing of it left in the cache."""
    vocab_size = loaded.config.vocab_size
    running = BenchEngine(context, loaded.model, context.kernels, vocab_size, shape)
    if running.graphed is not None and context.is_full:
        running.graphed.record_all()
    rng = np.random.default_rng(7)
    length = min(shape.max_model_len - 4, context.pick(256, 2))
    count, num_generated = context.pick((40, 4), (1, 1))
    running.run([random_prompt(rng, vocab_size, length, num_generated) for _ in range(count)])
    running.clear()
    return running


def _measure(running: BenchEngine, prompts: Sequence[Prompt]) -> Measured:
    """All prompts at once, until the last has ended. A step ends with its tokens on the host."""
    before = running.core.stats()
    started = time.perf_counter()
    generated = running.run(prompts)
    seconds = time.perf_counter() - started
    after = running.core.stats()
    assert all(
        len(token_ids) == prompt.num_generated
        for token_ids, prompt in zip(generated, prompts, strict=True)
    ), "a request did not generate what it was asked for"
    return Measured(
        seconds=seconds,
        num_prompt_tokens=after.prompt_tokens - before.prompt_tokens,
        num_cached_tokens=after.cached_tokens - before.cached_tokens,
        num_generated_tokens=after.generated_tokens - before.generated_tokens,
        num_steps=after.num_steps - before.num_steps,
    )


def _decoding(context: Context, running: BenchEngine, vocab_size: int) -> int:
    """Bring an engine to where all its rows decode; how many there are."""
    rng = np.random.default_rng(8)
    count, length, num_generated = _sizes(context, (256, 512, 96), (8, 32, 12), (2, 4, 6))
    prompts = [random_prompt(rng, vocab_size, length, num_generated) for _ in range(count)]
    for prompt in prompts:
        running.submit(prompt)
    begun: set[str] = set()
    while len(begun) < count:
        begun |= running.step().keys()
    running.step()
    return count


def _finish(running: BenchEngine) -> None:
    while running.core.has_work:
        running.step()
    running.clear()


def _decode_row(context: Context, name: str, running: BenchEngine, vocab_size: int) -> Row:
    """Steps of decoding alone, by the clock of the host."""
    num_rows = _decoding(context, running, vocab_size)
    seconds = _seconds_per_step(context, running)
    _finish(running)
    return Row(
        name=f"Qwen3-8B: decoding {num_rows} rows, {name}",
        figures={"ms a step": seconds * 1e3},
    )


def _busy_row(
    context: Context, model: str, running: BenchEngine, vocab_size: int, *, is_judged: bool
) -> Row:
    """The share of time in which a kernel or a copy runs while all rows decode.

    How long they run is what the profiler saw, a step's time is without it: a profiler slows
    launches down, and kernels hardly.
    """
    num_rows = _decoding(context, running, vocab_size)
    seconds = _seconds_per_step(context, running)
    activity, device_type = ProfilerActivity.CUDA, DeviceType.CUDA
    if context.is_dry:
        activity, device_type = ProfilerActivity.CPU, DeviceType.CPU
    else:
        torch.cuda.synchronize()  # the step in flight is not one of those that are counted
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(_num_profiled_steps(context)):
            running.step()
        if not context.is_dry:
            torch.cuda.synchronize()
    intervals = [
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == device_type
    ]
    _finish(running)
    busy_ms = busy_time(intervals) / 1e3 / _num_profiled_steps(context)
    share = busy_ms / (seconds * 1e3)
    is_judged = is_judged and context.is_full
    return Row(
        name=f"{model}: decoding {num_rows} rows",
        figures={
            "ms a step": seconds * 1e3,
            "of it GPU busy": busy_ms,
            "% GPU busy": share * 100,
            "% busy while profiled": busy_share(intervals) * 100,
        },
        bar=f">= {MIN_BUSY_SHARE:.0%} busy" if is_judged else None,
        is_met=share >= MIN_BUSY_SHARE if is_judged else None,
    )


def _seconds_per_step(context: Context, running: BenchEngine) -> float:
    """By the host's clock, whose steps follow the device's."""
    num_steps = _num_profiled_steps(context)
    started = time.perf_counter()
    for _ in range(num_steps):
        running.step()
    return (time.perf_counter() - started) / num_steps


def _num_profiled_steps(context: Context) -> int:
    return _sizes(context, (24,), (3,), (1,))[0]


def busy_time(intervals: Sequence[tuple[float, float]]) -> float:
    """How long at least one of the intervals lasts."""
    busy, reached = 0.0, -np.inf
    for start, end in sorted(intervals):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy


def busy_share(intervals: Sequence[tuple[float, float]]) -> float:
    """The share of the time from the first beginning to the last end that intervals cover; 0
    without any."""
    if not intervals:
        return 0.0
    starts, ends = zip(*intervals, strict=True)
    return busy_time(intervals) / (max(ends) - min(starts))
