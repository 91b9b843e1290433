"""A model is tried out, gets a cache of what is left, and its graphs; on a device made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from sapwood import ConfigError
from sapwood.kernels.interface import Kernels, KVCache, KVCacheSpec, RowCopy
from sapwood.runtime.config import CacheOptions
from sapwood.runtime.core import EngineCore
from sapwood.runtime.cuda_graphs import GraphPlan, graph_row_counts
from sapwood.runtime.memory_trial import DeviceBytes, MemoryTrial, StepLimits, largest_batch
from sapwood.runtime.model_runner import ModelRunner
from sapwood.runtime.models import Model
from sapwood.runtime.placement import PlacedModel, memory_for, place_on_cpu, place_on_gpu
from sapwood.runtime.token_masks import TokenMasks
from tests.runtime.automata import Automaton, AutomatonMatcher
from tests.runtime.harness import Harness
from tests.runtime.static_kernels import CheckedRecorder, CheckedRecording, RowwiseKernels
from tests.runtime.test_cuda_graphs import model_of
from tests.runtime.tiny_models import VOCAB_SIZE, random_tokens

KIB = 2**10
LIMITS = StepLimits(num_rows=24, num_draws=8, max_context_len=40, block_size=4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of("llama-tied_head", tmp_path_factory.mktemp("llama"))


@dataclass
class MadeUpMeter:
    """A device of 100 KiB, of which a model has taken 10; a graph takes 3, or 1 as the second."""

    recorder: CountingRecorder = field(default_factory=lambda: CountingRecorder())
    num_steps: int = 0

    def look(self) -> DeviceBytes:
        alive = self.recorder.num_alive
        return DeviceBytes(free=(90 - (2 + alive if alive else 0)) * KIB, total=100 * KIB)

    def peak_of(self, work: Callable[[], object]) -> int:
        work()
        self.num_steps += 1
        return 5 * KIB


class CountingRecorder(CheckedRecorder):
    """Knows how many of its graphs are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.num_alive = 0

    def record(self, run: Callable[[], None]) -> CountedRecording:
        self.num_alive += 1
        return CountedRecording(self, super().record(run))


class CountedRecording:
    """What was noted, and no more of what it was noted from, as a graph."""

    def __init__(self, recorder: CountingRecorder, recording: CheckedRecording) -> None:
        self.recorder, self.recorded = recorder, recording.recorded

    def replay(self) -> None:
        raise AssertionError("nothing is replayed before there is a step")

    def __del__(self) -> None:
        self.recorder.num_alive -= 1


def graph_plan(meter: MadeUpMeter, *, at_start: bool = True) -> GraphPlan:
    return GraphPlan(
        row_counts=graph_row_counts(8),
        vocab_size=VOCAB_SIZE,
        max_context_len=40,
        make_recorder=lambda: meter.recorder,
        at_start=at_start,
    )


def place(
    model: Model,
    meter: MadeUpMeter,
    graphs: GraphPlan | None,
    kernels: RowwiseKernels | None = None,
    **cache: object,
) -> PlacedModel:
    options = CacheOptions(block_size=4, **cache)
    return place_on_gpu(
        model,
        kernels or RowwiseKernels(),
        options,
        LIMITS,
        meter=meter,
        free_at_first=100 * KIB,
        graphs=graphs,
    )


def test_the_trial_counts_the_model_a_step_and_every_graph(llama: Model) -> None:
    meter = MadeUpMeter()
    trial = MemoryTrial(model=llama, kernels=RowwiseKernels(), limits=LIMITS, meter=meter)
    use = trial.measure(100 * KIB, graph_plan(meter))
    assert (use.engine, use.step, use.graphs) == (10 * KIB, 5 * KIB, (3 + 3 * 1) * KIB)
    assert (use.free, use.total) == (90 * KIB, 100 * KIB)
    assert meter.recorder.num_alive == 0  # nothing of the trial is left
    assert trial.measure(100 * KIB, None).graphs == 0


def test_the_cache_is_what_is_left_and_the_graphs_are_over_it(llama: Model) -> None:
    meter = MadeUpMeter()
    placed = place(llama, meter, graph_plan(meter), memory_fraction=0.5)
    spec = placed.kv.spec
    left = (50 - 10 - 5 - 6) * KIB
    assert (spec.num_blocks + 1) * spec.num_bytes_per_token * 4 <= left
    assert (spec.num_blocks + 2) * spec.num_bytes_per_token * 4 > left
    assert placed.max_graph_rows == 8
    assert meter.recorder.num_alive == 4


def test_lazy_graphs_are_not_there_at_the_start(llama: Model) -> None:
    meter = MadeUpMeter()
    placed = place(llama, meter, graph_plan(meter, at_start=False), kv_tokens=64)
    assert placed.kv.spec.num_slots == 64
    assert placed.max_graph_rows == 8
    assert meter.recorder.num_alive == 0


def test_without_graphs_the_model_runs_by_itself(llama: Model) -> None:
    placed = place(llama, MadeUpMeter(), None, kv_tokens=64)
    assert placed.model is llama and placed.max_graph_rows == 0


def test_an_exact_size_that_leaves_a_step_no_room_is_refused(llama: Model) -> None:
    with pytest.raises(ConfigError, match="can be had"):
        place(llama, MadeUpMeter(), None, kv_cache_memory=88 * KIB)


def test_the_largest_step_has_all_rows_at_the_end_of_the_longest_contexts(llama: Model) -> None:
    kernels = RowwiseKernels()
    kv = kernels.make_kv_cache(llama.kv_spec(8, 4))
    limits = StepLimits(num_rows=100, num_draws=8, max_context_len=40, block_size=4)
    batch = largest_batch(kernels, kv, limits)
    assert len(batch.input_ids) == len(batch.logits_rows) == 100
    assert batch.positions.tolist() == [*range(40), *range(40), *range(20, 40)]
    assert batch.attention.num_kv_tokens_read == 3 * 40
    assert batch.slots.max() < kv.spec.num_slots


def test_memory_that_lacks_for_a_step_is_told_with_the_way_out(llama: Model) -> None:
    class FullMeter(MadeUpMeter):
        def peak_of(self, work: Callable[[], object]) -> int:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    with pytest.raises(ConfigError, match=r"no room for a step.*2 GiB\.\); lower max_num_batched"):
        place(llama, FullMeter(), None)


def test_memory_that_lacks_for_the_cache_is_told_with_the_way_out(llama: Model) -> None:
    class FullKernels(RowwiseKernels):
        def make_kv_cache(self, spec: KVCacheSpec) -> KVCache:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ConfigError, match="cannot be had; lower kv_tokens"):
        place_on_cpu(llama, FullKernels(), CacheOptions(block_size=4, num_kv_blocks=8))


def test_other_errors_than_of_memory_go_through() -> None:
    with pytest.raises(RuntimeError, match="a kernel failed"), memory_for("it", "lower it"):
        raise RuntimeError("a kernel failed")


# -- what is launched before the first request -----------------------------------------------------


class NotingKernels(RowwiseKernels):
    """Knows which operations were asked for, of how many rows attention, and copies of what."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[str] = set()
        self.num_rows: set[int] = set()
        self.copied: list[KVCache] = []

    def __getattribute__(self, name: str) -> object:
        if name in vars(Kernels) and not name.startswith("_"):
            self.asked.add(name)
        return super().__getattribute__(name)

    def attention(self, query: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        self.num_rows.add(len(query))
        return super().attention(query, *arguments, **options)

    def copy_rows(self, kv: KVCache, copies: Sequence[RowCopy]) -> None:
        self.copied.append(kv)
        super().copy_rows(kv, copies)


def test_all_that_requests_ask_of_a_gpus_kernels_was_launched_before_them(
    tmp_path: Path,
) -> None:
    """So that no kernel is compiled while somebody waits for a token."""
    kernels = NotingKernels()
    model = model_of("llama-tied_head", tmp_path, kernels)
    kernels.asked.clear()
    placed = place(model, MadeUpMeter(), None, kernels, kv_tokens=160)
    launched = set(kernels.asked)
    assert kernels.num_rows == {1, LIMITS.num_rows}, "few rows are other kernels than many"
    assert kernels.copied == [placed.kv], "a quantised cache has scales, which are copied as well"

    kernels.asked.clear()
    harness = Harness(
        block_size=4, num_blocks=40, options={"max_num_batched_tokens": 24, "max_num_seqs": 8}
    )
    masks = TokenMasks(kernels, num_rows=4, vocab_size=VOCAB_SIZE)
    harness.core = EngineCore(
        harness.scheduler,
        ModelRunner(placed.model, kernels, placed.kv, masks, placed.batches),
        clock=lambda: harness.now,
        make_cache=harness.make_cache,
    )
    prompt = random_tokens(21)
    choice = Automaton({0: {7: 1, 30: 1}}, frozenset({1}))
    harness.add(prompt, max_tokens=3)
    harness.add(prompt[:7], max_tokens=3, temperature=1.0, top_k=5, n=2)
    harness.add(prompt, max_tokens=3, matcher=AutomatonMatcher(choice))
    harness.run()
    assert {"copy_rows", "mask_logits", "draw_tokens", "attention"} <= kernels.asked
    assert kernels.asked <= launched
