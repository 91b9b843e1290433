"""What an engine takes of a GPU beside its weights, found by trying before there is a KV cache.

The largest step is run once over made-up rows: as many as a step may have, at the end of the
longest context, all of their logits wanted, and as many tokens drawn as there are seats. Graphs are
recorded, the largest and the next one, and thrown away: what they take is not to be had from
torch's allocator alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sapwood.kernels.interface import Kernels, KVCache
from sapwood.kernels.segments import AttentionPlan, PrivateSegment
from sapwood.runtime.batch import ForwardBatch
from sapwood.runtime.cuda_graphs import GraphPlan
from sapwood.runtime.device_memory import DeviceUse, graph_bytes
from sapwood.runtime.models import Model
from sapwood.runtime.sampler import sample
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.sampling_row import SamplingRow


class DeviceBytes(NamedTuple):
    """Of a GPU's memory."""

    free: int
    total: int


class _Tried(NamedTuple):
    """Bytes that were taken at the most."""

    step: int
    graphs: int


class MemoryMeter(Protocol):
    """Measures a device's memory."""

    def look(self) -> DeviceBytes:
        """What the device has now, when nothing is under way and nothing is kept for reuse."""
        ...

    def peak_of(self, work: Callable[[], object]) -> int:
        """Bytes that `work` took at its most, beside what was taken before."""
        ...


class CudaMeter:
    """Measures one GPU, all programs on it included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def look(self) -> DeviceBytes:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return DeviceBytes(*torch.cuda.mem_get_info(self._device))

    def peak_of(self, work: Callable[[], object]) -> int:
        # What is reserved, not what is allocated: fragments take memory too.
        self.look()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The most that steps are made of: rows, tokens drawn, tokens of a context."""

    num_rows: int
    num_draws: int
    max_context_len: int
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrial:
    """Tries a model out, within its `limits`."""

    model: Model
    kernels: Kernels
    limits: StepLimits
    meter: MemoryMeter

    def measure(self, free_at_first: int, graphs: GraphPlan | None) -> DeviceUse:
        """What the engine takes of a device of which `free_at_first` bytes were free before it was
        loaded. Cost: a few steps.

        Raises torch.OutOfMemoryError where even the trial does not fit.
        """
        tried = self._try_out(graphs)
        now = self.meter.look()
        return DeviceUse(
            total=now.total,
            free=now.free,
            engine=max(0, free_at_first - now.free),
            step=tried.step,
            graphs=tried.graphs,
        )

    def _try_out(self, graphs: GraphPlan | None) -> _Tried:
        """Over a cache that holds the rows of a step and is gone afterwards."""
        num_blocks = -(-self.limits.num_rows // self.limits.block_size)
        kv = self.kernels.make_kv_cache(self.model.kv_spec(num_blocks, self.limits.block_size))
        for tensor in kv.tensors:
            tensor.view(torch.uint8).zero_()  # so that logits are numbers, from which is drawn
        return _Tried(
            step=self.meter.peak_of(lambda: self._run_largest_step(kv)),
            graphs=0 if graphs is None else self._graph_bytes(kv, graphs),
        )

    def _graph_bytes(self, kv: KVCache, graphs: GraphPlan) -> int:
        """What all graphs will take, by the largest and by that with the next one."""
        before = self.meter.look().free
        taken = []
        for row_counts in (graphs.row_counts[-1:], graphs.row_counts[-2:]):
            graphed = graphs.over(self.model, self.kernels, kv, row_counts)
            graphed.record_all()
            taken.append(before - self.meter.look().free)
            del graphed
        return graph_bytes(taken[0], taken[1], len(graphs.row_counts))

    @torch.inference_mode()
    def _run_largest_step(self, kv: KVCache) -> None:
        logits = self.model.forward(largest_batch(self.kernels, kv, self.limits), kv)
        rows = _rows_to_draw(min(self.limits.num_draws, len(logits)))
        sample(logits, rows, kernels=self.kernels)


def largest_batch(kernels: Kernels, kv: KVCache, limits: StepLimits) -> ForwardBatch:
    """`num_rows` rows at the end of sequences of the longest context, whose blocks are any."""
    spec = kv.spec
    length = limits.max_context_len
    table = np.arange(-(-length // spec.block_size), dtype=np.int32) % spec.num_blocks
    private, positions = [], []
    for first_row in range(0, limits.num_rows, length):
        num_rows = min(length, limits.num_rows - first_row)
        positions.append(np.arange(length - num_rows, length))
        private.append(
            PrivateSegment(
                block_ids=table, start=0, length=length, first_row=first_row, num_rows=num_rows
            )
        )
    plan = AttentionPlan(
        num_rows=limits.num_rows, block_size=spec.block_size, shared=(), private=tuple(private)
    )

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(spec.device)

    rows = np.arange(limits.num_rows)
    return ForwardBatch(
        input_ids=tensor(np.zeros_like(rows)),
        positions=tensor(np.concatenate(positions)),
        slots=tensor(rows % spec.num_slots),
        logits_rows=tensor(rows),
        attention=kernels.plan_attention(plan, spec),
    )


def _rows_to_draw(num_rows: int) -> list[SamplingRow]:
    """Rows that take the most memory to draw from: filtered, penalised, told with alternatives."""
    params = SamplingParams(
        top_k=50, top_p=0.9, repetition_penalty=1.1, logprobs=True, top_logprobs=5
    )
    return [
        SamplingRow(
            params=params,
            seed=row,
            logits_index=row,
            token_ids=np.zeros(1, np.int32),
            num_prompt_tokens=1,
        )
        for row in range(num_rows)
    ]
