"""Measures the tuning table of the GPU at hand: which tile shapes are fastest, and what they cost.

Minutes, nearly all of them the compiler's. `sapwood tune` runs it; nothing here is part of serving.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
import triton
from triton.runtime.errors import OutOfResources

from sapwood.kernels.device_timing import DeviceTimer, Timer
from sapwood.kernels.interface import KVCacheSpec
from sapwood.kernels.segments import AttentionPlan, PrivateSegment
from sapwood.kernels.tile_shapes import TileCost, TileShape, TileShapes
from sapwood.kernels.triton_kernels import TritonKernels
from sapwood.kernels.tuning import AttentionTuning, TuningTable, shipped_table

logger = logging.getLogger(__name__)

BLOCK_SIZE = 16
GROUP_SIZE = 4
NUM_KV_HEADS = 8
SMALL_OPERATIONS = 64
COPY_BYTES = 2**30
NARROW_SHAPES = tuple(
    TileShape(rows=16, keys=keys, num_warps=num_warps, num_stages=num_stages)
    for keys, num_warps, num_stages in product((32, 64, 128), (2, 4, 8), (2, 3, 4))
)
WIDE_SHAPES = tuple(
    TileShape(rows=rows, keys=keys, num_warps=num_warps, num_stages=num_stages)
    for rows, keys, num_warps, num_stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sequences of `length` tokens of which the last `num_rows` are rows, all alike."""

    num_sequences: int
    length: int
    num_rows: int = 1

    def plan(self) -> AttentionPlan:
        """The sequences' blocks lie anywhere in the cache."""
        num_blocks = -(-self.length // BLOCK_SIZE)
        ids = np.random.default_rng(0).permutation(self.num_sequences * num_blocks)
        tables = ids.astype(np.int32).reshape(self.num_sequences, num_blocks)
        return AttentionPlan(
            num_rows=self.num_sequences * self.num_rows,
            block_size=BLOCK_SIZE,
            shared=(),
            private=tuple(
                PrivateSegment(
                    block_ids=table,
                    start=0,
                    length=self.length,
                    first_row=index * self.num_rows,
                    num_rows=self.num_rows,
                )
                for index, table in enumerate(tables)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured: what the shapes are compared on, and the keys that costs are fitted
    over, in `waves` times as many tiles as run at once."""

    decoding: tuple[Workload, ...] = (
        Workload(num_sequences=256, length=1024),
        Workload(num_sequences=16, length=8192),
    )
    prompts: tuple[Workload, ...] = (
        Workload(num_sequences=1, length=8192, num_rows=8192),
        Workload(num_sequences=8, length=1024, num_rows=1024),
    )
    key_counts: tuple[int, ...] = (256, 1024, 4096)
    waves: int = 4


class Tuner:
    """Measures on one device, with `timer`: seconds of a function's work on it."""

    def __init__(self, device: torch.device, timer: Timer, sizes: Sizes | None = None) -> None:
        self._device = device
        self._timer = timer
        self._sizes = sizes or Sizes()

    def tuned(
        self,
        entry: AttentionTuning,
        narrow_shapes: Iterable[TileShape] = NARROW_SHAPES,
        wide_shapes: Iterable[TileShape] = WIDE_SHAPES,
    ) -> AttentionTuning:
        """`entry` with the fastest of the shapes, and what they cost."""
        shapes = entry.shapes
        narrow = self._fastest(
            entry, narrow_shapes, self._sizes.decoding, lambda s: replace(shapes, narrow=s)
        )
        wide = self._fastest(
            entry, wide_shapes, self._sizes.prompts, lambda s: replace(shapes, wide=s)
        )
        shapes = replace(shapes, narrow=narrow, wide=wide)
        entry = replace(entry, shapes=shapes)
        rows_of_wide = wide.num_query_rows(GROUP_SIZE)
        shapes = replace(
            shapes,
            narrow_cost=self._cost(entry, 1),
            wide_cost=self._cost(entry, rows_of_wide),
            per_partial=self._seconds_per_partial(entry),
            per_launch=self._seconds_per_launch(),
        )
        return replace(entry, shapes=shapes)

    def _fastest(
        self,
        entry: AttentionTuning,
        candidates: Iterable[TileShape],
        workloads: Sequence[Workload],
        shapes_with: Callable[[TileShape], TileShapes],
    ) -> TileShape:
        """The candidate with the least sum of times, each relative to the first that runs."""
        seconds: dict[TileShape, np.ndarray] = {}
        for candidate in candidates:
            tried = replace(entry, shapes=shapes_with(candidate))
            try:
                found = np.array([self._seconds(tried, workload) for workload in workloads])
            except OutOfResources as error:
                logger.info("%s does not fit: %s", candidate, error)
                continue
            seconds[candidate] = found
            logger.info("%s takes %s us", candidate, (found * 1e6).round(1).tolist())
        if not seconds:
            raise RuntimeError("none of the shapes runs on this GPU")
        first = next(iter(seconds.values()))
        return min(seconds, key=lambda shape: float((seconds[shape] / first).sum()))

    def _cost(self, entry: AttentionTuning, num_rows: int) -> TileCost:
        """Of a tile with `num_rows` query rows, by its keys, while the device is full."""
        kernels, spec = self._kernels(entry), self._spec(entry, 1)
        num_programs = kernels.num_programs(spec)
        num_sequences = -(-self._sizes.waves * num_programs // NUM_KV_HEADS)
        samples = []
        for num_keys in self._sizes.key_counts:
            workload = Workload(
                num_sequences=num_sequences, length=num_keys + num_rows, num_rows=num_rows
            )
            per_tile = self._seconds(entry, workload) * num_programs
            samples.append((num_keys, per_tile / (num_sequences * NUM_KV_HEADS)))
        return fitted_cost(samples)

    def _seconds_per_partial(self, entry: AttentionTuning) -> float:
        """A partial result is written and read once: what its bytes take of a program's share of
        the copy's rate."""
        source = torch.empty(COPY_BYTES // 4, dtype=torch.int32, device=self._device)
        target = torch.empty_like(source)
        per_byte = self._timer(lambda: target.copy_(source)) / (2 * COPY_BYTES)
        num_programs = self._kernels(entry).num_programs(self._spec(entry, 1))
        num_bytes = 2 * 4 * GROUP_SIZE * (entry.max_head_dim + 1)
        return _rounded(per_byte * num_bytes * num_programs)

    def _seconds_per_launch(self) -> float:
        """Of one that does next to nothing, in a row of such."""
        small = torch.zeros(1, device=self._device)

        def run() -> None:
            for _ in range(SMALL_OPERATIONS):
                small.add_(1)

        return _rounded(self._timer(run) / SMALL_OPERATIONS)

    def _seconds(self, entry: AttentionTuning, workload: Workload) -> float:
        """Of one layer's attention."""
        plan = workload.plan()
        num_blocks = sum(len(private.block_ids) for private in plan.private)
        spec = self._spec(entry, num_blocks)
        kernels = self._kernels(entry)
        kv = kernels.make_kv_cache(spec)
        for tensor in kv.tensors:  # any numbers, but not those that never move: zeros are faster
            if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
                tensor.normal_()
            else:
                tensor.view(torch.int8).random_(-100, 100)
        dtype = torch.float32 if entry.kv_bytes == 4 else torch.bfloat16
        query = torch.randn(
            plan.num_rows, NUM_KV_HEADS * GROUP_SIZE, spec.head_dim, device=self._device
        ).to(dtype)
        prepared = kernels.plan_attention(plan, spec)
        scale = spec.head_dim**-0.5
        return self._timer(lambda: kernels.attention(query, kv, 0, prepared, scale))

    def _kernels(self, entry: AttentionTuning) -> TritonKernels:
        table = TuningTable(gpu="being measured", measured_with="", attention=(entry,))
        kv_dtype = torch.int8 if entry.kv_bytes == 1 else None
        return TritonKernels(kv_dtype=kv_dtype, table=table)

    def _spec(self, entry: AttentionTuning, num_blocks: int) -> KVCacheSpec:
        dtypes = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}
        return KVCacheSpec(
            num_layers=1,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_kv_heads=NUM_KV_HEADS,
            group_size=GROUP_SIZE,
            head_dim=entry.max_head_dim,
            dtype=dtypes[entry.kv_bytes],
            device=self._device,
        )


def fitted_cost(samples: Sequence[tuple[int, float]]) -> TileCost:
    """The line through (keys, seconds) by least squares, neither of its parts below zero."""
    keys, seconds = np.array(samples, np.float64).T
    per_key, per_tile = np.polyfit(keys, seconds, 1)
    if per_tile < 0:
        per_tile, per_key = 0.0, float((keys @ seconds) / (keys @ keys))
    return TileCost(per_tile=_rounded(float(per_tile)), per_key=_rounded(max(per_key, 0.0)))


def _rounded(seconds: float) -> float:
    """To as many digits as are known."""
    return float(f"{seconds:.3g}")


def gpu_name() -> str | None:
    """The GPU that is used here, as its driver calls it; None where torch sees none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def tune_here(report: Callable[[str], None]) -> TuningTable:
    """The table of the GPU at hand, measured. `report` is told what is going on.

    It has the entries of the table that comes with Sapwood: one that was measured here before may
    be of another version, or broken.
    float32 keeps the shapes it has: it is for checking, not for speed. Raises RuntimeError where
    there is no GPU.
    """
    gpu = gpu_name()
    if gpu is None:
        raise RuntimeError("torch sees no GPU here, and tile shapes are measured on one")
    device = torch.device("cuda")
    tuner = Tuner(device, DeviceTimer(device))
    entries = []
    for entry in shipped_table(gpu).attention:
        if entry.kv_bytes < 4:
            report(f"heads of {entry.max_head_dim}, {entry.kv_bytes} bytes a number of the cache")
            entry = tuner.tuned(entry)
        entries.append(entry)
    return TuningTable(
        gpu=gpu,
        measured_with=f"torch {torch.__version__}, triton {triton.__version__}",
        attention=tuple(entries),
    )
