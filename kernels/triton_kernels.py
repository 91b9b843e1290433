"""The kernels for NVIDIA GPUs: attention over tiles of the prefix tree, in Triton.

A step's plan becomes tiles once for all layers (tiles.py), and one copy brings them to the device.
A layer's attention is then a launch for each tile shape and one that merges (triton_attention.py).
What is around it is in triton_elementwise.py and triton_kv_cache.py; projections are torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sapwood.kernels import triton_elementwise, triton_kv_cache, triton_sampling
from sapwood.kernels.interface import (
    QUANTIZED_KV_DTYPES,
    Activation,
    DrawnTokens,
    DrawParams,
    HeadNorms,
    KVCache,
    KVCacheSpec,
    RowCopy,
)
from sapwood.kernels.reference import Projection
from sapwood.kernels.segments import AttentionPlan
from sapwood.kernels.staging import Staging, send
from sapwood.kernels.tile_packing import TileCapacity, WindowSections, pack
from sapwood.kernels.tile_shapes import TileShapes
from sapwood.kernels.tiles import TilePlan, plan_tiles
from sapwood.kernels.triton_attention import NUM_SCRATCH_BLOCKS, Workspace, attend
from sapwood.kernels.tuning import TuningTable, load_table
from sapwood.kernels.windows import narrowed

_MAX_HEAD_ROWS = 2**31  # the kernels count the rows of all heads in int32
_INTERPRETED_PROGRAMS = 16  # that "run at once" where nothing does: some, so that ranges are split


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonAttention:
    """A plan as tiles in `tables`, int32 on the device, and where in it those of each window are.

    `workspace` is for the partial results of one layer at a time; None: each layer makes its own.
    """

    tables: Tensor
    sections: Mapping[int | None, WindowSections]
    workspace: Workspace | None
    num_kv_tokens_read: int


class StaticTritonAttention:
    """What a CUDA graph attends to: prepared attention whose tables stay where they are.

    `load` puts the tiles of another plan into them. Before the first, no row attends to anything.
    """

    def __init__(
        self,
        kernels: TritonKernels,
        spec: KVCacheSpec,
        num_rows: int,
        capacity: TileCapacity,
        staging: Staging,
    ) -> None:
        self._kernels, self._spec, self._staging = kernels, spec, staging
        self._num_rows, self._capacity = num_rows, capacity
        self._num_kv_tokens_read = 0
        nothing = AttentionPlan(num_rows=0, block_size=spec.block_size, shared=(), private=())
        packed = pack(kernels.plan_tiles(nothing, spec), capacity)
        assert packed is not None, "a plan without rows fits any capacity"
        # A graph's layers allocate nothing when it is replayed, and one memory serves all graphs.
        self._prepared = TritonAttention(
            tables=torch.from_numpy(packed.buffer).to(spec.device, copy=True),
            sections=packed.sections,
            workspace=None,
            num_kv_tokens_read=0,
        )

    @property
    def prepared(self) -> TritonAttention:
        """Attention to whatever is loaded when it is run."""
        return self._prepared

    @property
    def num_kv_tokens_read(self) -> int:
        """Of the plan that was loaded last."""
        return self._num_kv_tokens_read

    def load(self, plan: AttentionPlan) -> StaticTritonAttention | TritonAttention:
        """Make the tables hold `plan`, behind what the stream does now; where it does not fit, it
        gets tables of its own."""
        plans = self._kernels.plan_tiles(plan, self._spec)
        packed = pack(plans, self._capacity) if plan.num_rows <= self._num_rows else None
        if packed is None:
            return _in_own_tables(plans, self._spec)
        self._staging.send_into(self._prepared.tables, packed.buffer[: packed.num_used])
        self._num_kv_tokens_read = _num_kv_tokens_read(plans)
        return self


class TritonKernels:
    """`Kernels` on an NVIDIA GPU, or in Triton's interpreter.

    Cache layout: `[num_layers, num_blocks + 1, num_kv_heads, block_size, head_dim]`, so that the
    keys of a block and head are one run. The last block belongs to nobody.
    """

    def __init__(
        self, *, kv_dtype: torch.dtype | None = None, table: TuningTable | None = None
    ) -> None:
        """`table`: the shapes of tiles, if not those that are kept for the GPU of this machine."""
        self._kv_dtype = kv_dtype
        has_gpu = torch.cuda.is_available()
        self._table = table or load_table(torch.cuda.get_device_name() if has_gpu else None)

    @property
    def name(self) -> str:
        return "triton"

    def quantized(self) -> None:
        return None

    def with_kv_dtype(self, dtype: torch.dtype) -> TritonKernels | None:
        if dtype not in QUANTIZED_KV_DTYPES:
            return None
        return type(self)(kv_dtype=dtype, table=self._table)

    @property
    def min_saved_tokens(self) -> int:
        # Reasoned: below it even the tables cost the host more than the device can save. Which of
        # the edges above are read apart is decided by cost when tiles are planned.
        return 256

    def kv_dtype(self, dtype: torch.dtype, head_dim: int) -> torch.dtype:
        return self._kv_dtype or dtype

    def make_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        by_head = (
            spec.num_layers,
            spec.num_blocks + NUM_SCRATCH_BLOCKS,
            spec.num_kv_heads,
            spec.block_size,
        )
        num_head_rows = by_head[0] * by_head[1] * by_head[2] * by_head[3]
        if num_head_rows >= _MAX_HEAD_ROWS:
            raise ValueError(
                f"a cache of {spec.num_blocks} blocks has {num_head_rows} rows of heads, the "
                f"kernels count up to {_MAX_HEAD_ROWS}; use fewer blocks"
            )

        def rows() -> Tensor:
            return torch.empty((*by_head, spec.head_dim), dtype=spec.dtype, device=spec.device)

        def scales() -> Tensor | None:
            if not spec.is_quantized:
                return None
            return torch.empty(by_head, dtype=torch.float32, device=spec.device)

        return KVCache(spec, rows(), rows(), scales(), scales())

    def copy_rows(self, kv: KVCache, copies: Sequence[RowCopy]) -> None:
        triton_kv_cache.copy_rows(kv, copies)

    def plan_attention(self, plan: AttentionPlan, spec: KVCacheSpec) -> TritonAttention:
        return _in_own_tables(self.plan_tiles(plan, spec), spec)

    def plan_tiles(self, plan: AttentionPlan, spec: KVCacheSpec) -> dict[int | None, TilePlan]:
        """The tiles of a step for each of the spec's windows; windows that hide nothing share
        theirs."""
        shapes = self._tile_shapes(spec)
        num_programs = _num_programs(shapes, spec)
        plans = {
            window: plan_tiles(
                plan,
                window=window,
                group_size=spec.group_size,
                num_kv_heads=spec.num_kv_heads,
                shapes=shapes,
                num_programs=num_programs,
            )
            for window in {narrowed(plan, window) for window in spec.windows}
        }
        return {window: plans[narrowed(plan, window)] for window in spec.windows}

    def num_programs(self, spec: KVCacheSpec) -> int:
        """Programs of narrow tiles that the device runs at once, over all KV heads."""
        return _num_programs(self._tile_shapes(spec), spec)

    def static_attention(
        self, spec: KVCacheSpec, num_rows: int, max_context_len: int, staging: Staging
    ) -> StaticTritonAttention:
        shapes = self._tile_shapes(spec)
        # No more than twice the cache: rows that share more than that are read by groups.
        num_block_ids = num_rows * -(-max_context_len // spec.block_size)
        capacity = TileCapacity.for_decoding(
            num_rows,
            num_block_ids=min(num_block_ids, 2 * spec.num_blocks + num_rows),
            rows_per_tile=shapes.wide.num_query_rows(spec.group_size),
            programs_per_head=-(-_num_programs(shapes, spec) // spec.num_kv_heads),
        )
        return StaticTritonAttention(self, spec, num_rows, capacity, staging)

    def _tile_shapes(self, spec: KVCacheSpec) -> TileShapes:
        return self._table.tile_shapes(
            head_dim=spec.head_dim, group_size=spec.group_size, kv_bytes=spec.dtype.itemsize
        )

    def write_kv(self, kv: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        triton_kv_cache.write_kv(kv, layer, key, value, slots)

    def rotary_and_write(
        self,
        heads: Tensor,
        num_heads: int,
        cos: Tensor,
        sin: Tensor,
        kv: KVCache,
        layer: int,
        slots: Tensor,
        *,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        return triton_kv_cache.rotary_and_write(
            heads, num_heads, cos, sin, kv, layer, slots, norms=norms
        )

    def attention(
        self,
        query: Tensor,
        kv: KVCache,
        layer: int,
        prepared: object,
        scale: float,
        *,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if isinstance(prepared, StaticTritonAttention):
            prepared = prepared.prepared
        if not isinstance(prepared, TritonAttention):
            raise TypeError(f"expected a TritonAttention, got {type(prepared).__name__}")
        spec = kv.spec
        if query.shape[1] > spec.num_kv_heads * spec.group_size:
            raise ValueError(
                f"{query.shape[1]} query heads for {spec.num_kv_heads} key-value heads, the plan "
                f"is for groups of {spec.group_size}; set group_size in the cache's spec"
            )
        if scale <= 0.0:
            raise ValueError(f"the scale of scores is {scale}, it must be positive")
        if query.stride(2) != 1 or query.stride(1) != spec.head_dim:
            query = query.contiguous()
        sections = prepared.sections[spec.window(layer)]
        return attend(
            query,
            kv,
            layer,
            prepared.tables,
            sections,
            prepared.workspace or _workspace(sections.num_partials, spec),
            scale,
            softcap,
            sinks,
        )

    def mask_logits(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        triton_elementwise.mask_logits(logits, rows, allowed)

    def draw_tokens(self, logits: Tensor, params: DrawParams) -> DrawnTokens:
        return triton_sampling.draw_tokens(logits, params)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        return triton_elementwise.rms_norm(x, weight, eps, residual)

    def rotary(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return triton_kv_cache.rotary(heads, cos, sin)

    def activate_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return triton_elementwise.activate_and_mul(gate_up, activation)

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, is_last: bool = False
    ) -> Projection:
        return Projection(weight, bias)

    def linear(self, x: Tensor, packed: object, residual: Tensor | None = None) -> Tensor:
        if not isinstance(packed, Projection):
            raise TypeError(f"expected a Projection, got {type(packed).__name__}")
        if residual is None:
            return functional.linear(x, packed.weight, packed.bias)
        # The product's epilogue adds to what is in its output, which spares a pass over memory.
        residual.addmm_(x, packed.weight.t())
        return residual if packed.bias is None else residual.add_(packed.bias)

    def norm_linear(self, x: Tensor, weight: Tensor, eps: float, packed: object) -> Tensor:
        return self.linear(self.rms_norm(x, weight, eps), packed)

    def gated_linear(
        self,
        gate_up: Tensor,
        packed: object,
        residual: Tensor | None = None,
        *,
        activation: Activation = Activation.SILU,
    ) -> Tensor:
        return self.linear(self.activate_and_mul(gate_up, activation), packed, residual)


def _in_own_tables(plans: Mapping[int | None, TilePlan], spec: KVCacheSpec) -> TritonAttention:
    packed = pack(plans)
    assert packed is not None, "without a capacity every plan fits"
    return TritonAttention(
        tables=send({"tables": packed.buffer}, spec.device)["tables"],
        sections=packed.sections,
        workspace=_workspace(packed.num_partials, spec),
        num_kv_tokens_read=_num_kv_tokens_read(plans),
    )


def _workspace(num_partials: int, spec: KVCacheSpec) -> Workspace:
    num_heads = spec.num_kv_heads * spec.group_size
    return Workspace.allocate(num_partials, num_heads, spec.head_dim, spec.device)


def _num_kv_tokens_read(plans: Mapping[int | None, TilePlan]) -> int:
    return max(plan.num_kv_tokens_read for plan in plans.values())


def _num_programs(shapes: TileShapes, spec: KVCacheSpec) -> int:
    """Programs of narrow tiles that the device runs at once, by its shared memory."""
    if spec.device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    device = torch.cuda.get_device_properties(spec.device)
    shape = shapes.narrow
    key_bytes = 2 * shape.keys * spec.head_dim * spec.dtype.itemsize
    shared_bytes = key_bytes * max(shape.num_stages - 1, 1)
    resident = max(device.shared_memory_per_multiprocessor // shared_bytes, 1)
    threads = device.max_threads_per_multi_processor // (32 * shape.num_warps)
    return int(device.multi_processor_count * min(resident, threads))
