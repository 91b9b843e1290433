"""Attention over tiles, in Triton: paged, ragged, grouped heads, shared edges read once.

One program works on one tile (tiles.py) for one KV head: the tile's query rows, times the query
heads that share the KV head, packed to ROWS rows, against the tile's keys, KEYS at a time. For row
`i` and key `j`, with scores in powers of two,

    s_ij = log2(e) scale <q_i, k_j>            m_i = max_j s_ij       l_i = sum_j 2^(s_ij - m_i)
    o_i  = sum_j 2^(s_ij - m_i) v_j / l_i      lse_i = m_i + log2 l_i

are found in one pass over the keys (Milakov and Gimelshein 2018; Dao et al. 2022, alg. 1). A row
that has several tiles leaves `o` and `lse` of each as a partial result, and a second kernel merges
them with the weights 2^lse_t / sum_u 2^lse_u (Dao et al. 2023, Flash-Decoding).

What is reasoned, and to be measured on a device:

- A key's row of one head is `head_dim` numbers in a run, and rows of a block follow each other, so
  that a warp's loads are whole cache lines. Keys and values go to shared memory by `cp.async`, 16
  bytes a thread, `num_stages - 1` iterations ahead. Block ids are loaded an iteration before their
  keys: a load whose address is loaded in the same iteration would halve that distance.
- The bulk copy engine (TMA) takes boxes of a regular tensor. A block is one, but a box of 16 keys
  is smaller than an iteration's tile, and Triton cannot put several into one tile on sm_90 (its
  gather of rows is for sm_100). With blocks of 16 tokens `cp.async` is what is left.
- Wide tiles, 64 rows for each 4 warps, multiply with `wgmma` on sm_90. Their leading keys, which
  all rows see, go through a loop without masks. Narrow ones wait for memory anyway: one loop, with
  masks, so that loads are not drained in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood.kernels.interface import QUANTIZED_KV_DTYPES, KVCache
from sapwood.kernels.kernel_form import NUM_STAGES
from sapwood.kernels.model_shapes import MODEL_SHAPES, ModelShape
from sapwood.kernels.specialization import Specialization
from sapwood.kernels.tile_packing import WindowSections
from sapwood.kernels.tile_shapes import TileShape
from sapwood.kernels.tuning import TABLES, TuningTable, parse_table

NUM_SCRATCH_BLOCKS = 1
"""Blocks behind those of a spec that belong to nobody: padded rows of a CUDA graph write there."""

_MIN_ROWS_UNMASKED = 64  # of a tile whose leading keys go through a loop without masks
# Keys an iteration of the short loop with masks behind it: masks take registers, and half of the
# last iteration is for nothing.
_MAX_KEYS_BEHIND = 64
# A program of the merge: numbers of a row, and how many partial results of them are on their way at
# once. With one warp these are 32 registers of a thread, in loads of 16 bytes.
_MERGED_NUMBERS = 128
_MERGED_PARTIALS = 8
_MERGE_WARPS = 1
_TRITON_DTYPES = MappingProxyType(
    {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
)
_TYPE_NAMES = MappingProxyType(  # Triton's; e4m3 is loaded as bytes
    {
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.int8: "i8",
        torch.float8_e4m3fn: "u8",
    }
)

_LOG2_E = tl.constexpr(math.log2(math.e))
_TWO_TO_120 = tl.constexpr(2.0**120)
_E4M3_BITS = tl.constexpr(0x87F00000 - 2**32)  # in float32: the sign and seven bits


@triton.jit(
    do_not_specialize=(
        "count_at",
        "tiles_at",
        "block_ids_at",
        "rows_at",
        "positions_at",
        "first_block",
        "window",
    )
)
def attend_tiles(
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    sinks: tl.tensor,
    tables: tl.tensor,
    count_at: tl.tensor,
    tiles_at: tl.tensor,
    block_ids_at: tl.tensor,
    rows_at: tl.tensor,
    positions_at: tl.tensor,
    first_block: tl.tensor,
    query_stride: tl.tensor,
    score_scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED_KEYS: tl.constexpr,
    IS_INT8: tl.constexpr,
    IS_E4M3: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_UNMASKED: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One tile for one KV head.

    `out` and `query` [T, Hq, D], `query` with rows `query_stride` apart; `partial_out` float32 [*,
    Hq, D] and `partial_lse` float32 [*, Hq]; `keys` and `values` [*, Hkv, BLOCK_SIZE, D] and their
    scales float32 [*, Hkv, BLOCK_SIZE], of which the layer begins at `first_block`; `tables` int32
    with the sections of `WindowSections` at the named offsets, `count_at` that of the number of
    tiles. `score_scale` multiplies products, to powers of two or, with a softcap, to what
    its tanh takes; `softcap` is in powers of two.
    """
    program = tl.program_id(0)
    index = program // NUM_KV_HEADS
    head = program % NUM_KV_HEADS
    if index >= tl.load(tables + count_at):
        return
    tile = tables + tiles_at + index * 8
    block_ids = tables + block_ids_at + tl.load(tile)
    first_position = tl.load(tile + 1)
    num_keys = tl.load(tile + 2)
    row_offset = tl.load(tile + 3)
    num_rows = tl.load(tile + 4)
    num_keys_all_see = tl.load(tile + 5)
    partial = tl.load(tile + 6)

    packed = tl.arange(0, ROWS)
    row_of_tile = packed // GROUP_SIZE
    query_head = head * GROUP_SIZE + packed % GROUP_SIZE
    is_row = row_of_tile < num_rows
    row = tl.load(tables + rows_at + row_offset + row_of_tile, mask=is_row, other=0)
    row_position = tl.load(tables + positions_at + row, mask=is_row, other=0)
    # Of the tile's keys a row sees those from behind its window to its own position.
    last_key = tl.minimum(row_position - first_position, num_keys - 1)
    last_key_behind = row_position - first_position - window
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    is_stored = is_row[:, None] & is_dim[None, :]
    query_at = row.to(tl.int64) * query_stride + query_head * HEAD_DIM
    q = tl.load(query + query_at[:, None] + dims[None, :], mask=is_stored, other=0.0)
    weights_dtype = q.dtype
    q = q.to(PRODUCT)

    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    first_offset = first_position % BLOCK_SIZE  # of the first key in its block
    masked_from = 0
    if HAS_UNMASKED:
        masked_from = num_keys_all_see // KEYS * KEYS

    for is_masked in tl.static_range(0 if HAS_UNMASKED else 1, 2):
        begin = masked_from if is_masked else 0
        end = num_keys if is_masked else masked_from
        step = MASKED_KEYS if is_masked else KEYS
        key_of_step = tl.arange(0, MASKED_KEYS if is_masked else KEYS)
        next_ids = tl.load(
            block_ids + (first_offset + begin + key_of_step) // BLOCK_SIZE,
            mask=begin + key_of_step < end,
            other=0,
        )
        for start in tl.range(begin, end, step):
            key = start + key_of_step
            offset = first_offset + key
            is_key = key < end
            block = first_block + next_ids
            next_ids = tl.load(
                block_ids + (offset + step) // BLOCK_SIZE, mask=key + step < end, other=0
            )
            slot = (block * NUM_KV_HEADS + head) * BLOCK_SIZE + offset % BLOCK_SIZE
            numbers_at = slot.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
            # Masked keys are not loaded: what they hold may not be a number, which times 0 is none.
            is_number = (is_key if is_masked else key >= 0)[:, None] & is_dim[None, :]

            if is_masked or HEAD_DIM < BLOCK_D:
                k = tl.load(keys + numbers_at, mask=is_number, other=0)
            else:
                k = tl.load(keys + numbers_at)
            k = _decoded(k, IS_INT8, IS_E4M3, PRODUCT)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if IS_INT8 or IS_E4M3:
                scores *= tl.load(key_scales + slot, mask=is_key, other=0.0)[None, :]
            if HAS_SOFTCAP:
                scores = softcap * _tanh(scores * score_scale)
                factor = 1.0
            else:
                factor = score_scale
            if is_masked:
                is_seen = key[None, :] <= last_key[:, None]
                if HAS_WINDOW:
                    is_seen &= key[None, :] > last_key_behind[:, None]
                scores = tl.where(is_seen, scores, float("-inf"))

            new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
            base = _base(new_max) if is_masked else new_max
            weights = tl.exp2(scores * factor - base[:, None])
            shrink = tl.exp2(row_max - base)
            row_max = new_max
            row_sum = row_sum * shrink + tl.sum(weights, 1)
            total = total * shrink[:, None]

            if is_masked or HEAD_DIM < BLOCK_D:
                v = tl.load(values + numbers_at, mask=is_number, other=0)
            else:
                v = tl.load(values + numbers_at)
            if IS_INT8 or IS_E4M3:
                weights *= tl.load(value_scales + slot, mask=is_key, other=0.0)[None, :]
            v = _decoded(v, IS_INT8, IS_E4M3, PRODUCT)
            weights = weights.to(weights_dtype).to(PRODUCT)
            total = tl.dot(weights, v, total, input_precision=PRECISION)

    num_heads = NUM_KV_HEADS * GROUP_SIZE
    if HAS_UNMASKED:
        # Wide tiles have no registers left to keep these in while they go through their keys.
        row_offset = tl.load(tile + 3, volatile=True)
        num_rows = tl.load(tile + 4, volatile=True)
        partial = tl.load(tile + 6, volatile=True)
        is_row = row_of_tile < num_rows
        is_stored = is_row[:, None] & is_dim[None, :]
        row = tl.load(tables + rows_at + row_offset + row_of_tile, mask=is_row, other=0)
    if partial < 0:
        if HAS_SINKS:
            sink = tl.load(sinks + query_head).to(tl.float32) * _LOG2_E
            total, row_sum = _with_sink(total, row_max, row_sum, sink)
        out_at = (row.to(tl.int64) * num_heads + query_head) * HEAD_DIM
        final = (total / _divisor(row_sum)[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_at[:, None] + dims[None, :], final, mask=is_stored)
    else:
        lse_at = (partial + row_of_tile) * num_heads + query_head
        part_at = lse_at.to(tl.int64) * HEAD_DIM
        part = total / _divisor(row_sum)[:, None]
        tl.store(partial_lse + lse_at, row_max + tl.log2(_divisor(row_sum)), mask=is_row)
        tl.store(partial_out + part_at[:, None] + dims[None, :], part, mask=is_stored)


@triton.jit(do_not_specialize=("count_at", "rows_at", "offsets_at", "ids_at"))
def merge_partials(
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    sinks: tl.tensor,
    tables: tl.tensor,
    count_at: tl.tensor,
    rows_at: tl.tensor,
    offsets_at: tl.tensor,
    ids_at: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    PARTIALS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """HEADS heads of one row: the sum of their partial results, PARTIALS at a time, by weight.

    Arguments as of `attend_tiles`; `tables` has the merge lists of `WindowSections`.
    """
    index = tl.program_id(0)
    if index >= tl.load(tables + count_at):
        return
    row = tl.load(tables + rows_at + index)
    begin = tl.load(tables + offsets_at + index)
    end = tl.load(tables + offsets_at + index + 1)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK_D)
    is_head = head < NUM_HEADS
    is_stored = is_head[:, None] & (dims < HEAD_DIM)[None, :]

    total = tl.zeros([HEADS, BLOCK_D], tl.float32)
    row_max = tl.full([HEADS], float("-inf"), tl.float32)
    row_sum = tl.zeros([HEADS], tl.float32)
    for start in range(begin, end, PARTIALS):
        part = start + tl.arange(0, PARTIALS)
        is_part = part < end
        ids = tl.load(tables + ids_at + part, mask=is_part, other=0)
        lse_at = ids[:, None] * NUM_HEADS + head[None, :]
        is_some = is_part[:, None] & is_head[None, :]
        lse = tl.load(partial_lse + lse_at, mask=is_some, other=float("-inf"))
        parts = tl.load(
            partial_out + lse_at.to(tl.int64)[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=is_part[:, None, None] & is_stored[None, :, :],
            other=0.0,
        )
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        base = _base(new_max)
        weights = tl.exp2(lse - base[None, :])
        shrink = tl.exp2(row_max - base)
        row_max = new_max
        row_sum = row_sum * shrink + tl.sum(weights, 0)
        total = total * shrink[:, None] + tl.sum(weights[:, :, None] * parts, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32) * _LOG2_E
        total, row_sum = _with_sink(total, row_max, row_sum, sink)
    out_at = (row.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    final = (total / _divisor(row_sum)[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_at[:, None] + dims[None, :], final, mask=is_stored)


@triton.jit
def _decoded(
    kept: tl.tensor, IS_INT8: tl.constexpr, IS_E4M3: tl.constexpr, PRODUCT: tl.constexpr
) -> tl.tensor:
    """Keys or values in the dtype of the product, without their scale.

    The sign, exponent and mantissa of an e4m3 byte, put where float32 has its own, are the number
    divided by 2^120. That needs no conversion that only some devices have.
    """
    if IS_E4M3:
        # The sign fills the bits above; those between sign and exponent are masked.
        bits = (kept.to(tl.int8, bitcast=True).to(tl.int32) << 20) & _E4M3_BITS
        return (bits.to(tl.float32, bitcast=True) * _TWO_TO_120).to(PRODUCT)
    if IS_INT8:
        return kept.to(tl.float32).to(PRODUCT)
    return kept.to(PRODUCT)


@triton.jit
def _with_sink(
    total: tl.tensor, row_max: tl.tensor, row_sum: tl.tensor, sink: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Sums [ROWS, D] and [ROWS] that a score without a value was added to."""
    base = _base(tl.maximum(row_max, sink))
    shrink = tl.exp2(row_max - base)
    return total * shrink[:, None], row_sum * shrink + tl.exp2(sink - base)


@triton.jit
def _base(row_max: tl.tensor) -> tl.tensor:
    """What scores are taken relative to: the largest, and 0 for a row that has seen no key.

    2^(-inf - 0) is 0, as its weights have to be; 2^(-inf + inf) is not.
    """
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def _divisor(row_sum: tl.tensor) -> tl.tensor:
    """The sums of weights, 1 for a row that has seen no key: its total is 0."""
    return tl.where(row_sum == 0.0, 1.0, row_sum)


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """tanh to about float32's accuracy: by its series where 1 - 2 / (e^2x + 1) would cancel."""
    square = x * x
    series = 62.0 / 2835.0 - square * (1382.0 / 155925.0)
    series = square * series - 17.0 / 315.0
    series = square * series + 2.0 / 15.0
    series = square * series - 1.0 / 3.0
    by_series = x + x * square * series
    by_exponential = 1.0 - 2.0 / (tl.exp2(x * (2.0 * _LOG2_E)) + 1.0)
    return tl.where(tl.abs(x) < 0.3, by_series, by_exponential)


class Workspace(NamedTuple):
    """Partial results: `out` float32 [*, Hq, D] and `lse` float32 [*, Hq]."""

    out: Tensor
    lse: Tensor

    @classmethod
    def allocate(
        cls, num_partials: int, num_heads: int, head_dim: int, device: torch.device
    ) -> Workspace:
        shape = (num_partials, num_heads, head_dim)
        return cls(
            out=torch.empty(shape, dtype=torch.float32, device=device),
            lse=torch.empty(shape[:2], dtype=torch.float32, device=device),
        )


def attend(
    query: Tensor,
    kv: KVCache,
    layer: int,
    tables: Tensor,
    sections: WindowSections,
    workspace: Workspace,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of query [T, Hq, D] over the tiles of `sections` in `tables`, int32 on the device.

    At most three launches, none of which waits for the host. The numbers of a head are contiguous
    in `query`, and so are the heads of a row.
    """
    spec, window = kv.spec, kv.spec.window(layer)
    num_heads = query.shape[1]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for number, group in enumerate(sections.groups):
        if group.num_tiles == 0:
            continue
        attend_tiles[(group.num_tiles * spec.num_kv_heads,)](
            out,
            workspace.out,
            workspace.lse,
            query,
            _loadable(kv.keys),
            _loadable(kv.values),
            kv.key_scales,
            kv.value_scales,
            sinks,
            tables,
            sections.counts.offset + number,
            group.tiles.offset,
            sections.block_ids.offset,
            sections.rows.offset,
            sections.positions.offset,
            layer * (spec.num_blocks + NUM_SCRATCH_BLOCKS),
            query.stride(0),
            scale / softcap if softcap else scale * math.log2(math.e),
            softcap * math.log2(math.e) if softcap else 0.0,
            window or 0,
            num_warps=group.shape.num_warps,
            num_stages=group.shape.num_stages,
            enable_fp_fusion=True,
            **_tile_constants(
                group.shape,
                head_dim=spec.head_dim,
                group_size=num_heads // spec.num_kv_heads,
                num_kv_heads=spec.num_kv_heads,
                block_size=spec.block_size,
                dtype=query.dtype,
                kv_dtype=spec.dtype,
                has_window=window is not None,
                has_softcap=softcap is not None,
                has_sinks=sinks is not None,
            ),
        )
    if sections.num_merged_rows:
        constants = _merge_constants(spec.head_dim, num_heads, has_sinks=sinks is not None)
        num_parts = triton.cdiv(num_heads, constants["HEADS"])
        merge_partials[(sections.num_merged_rows, num_parts)](
            out,
            workspace.out,
            workspace.lse,
            sinks,
            tables,
            sections.counts.offset + len(sections.groups),
            sections.merged_rows.offset,
            sections.merge_offsets.offset,
            sections.partial_ids.offset,
            num_warps=_MERGE_WARPS,
            **constants,
        )
    return out


def _loadable(kept: Tensor) -> Tensor:
    """Keys or values as what kernels load: e4m3 numbers as bytes, see `_decoded`."""
    return kept.view(torch.uint8) if kept.dtype == torch.float8_e4m3fn else kept


def _tile_constants(
    shape: TileShape,
    *,
    head_dim: int,
    group_size: int,
    num_kv_heads: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    has_window: bool,
    has_softcap: bool,
    has_sinks: bool,
) -> dict[str, object]:
    """The constants of `attend_tiles`."""
    # The interpreter has bfloat16 as bits, and products of those are none.
    has_unmasked = shape.rows >= _MIN_ROWS_UNMASKED
    is_emulated = triton.knobs.runtime.interpret and dtype == torch.bfloat16
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_D": _padded(head_dim),
        "GROUP_SIZE": group_size,
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "ROWS": shape.rows,
        "KEYS": shape.keys,
        "MASKED_KEYS": min(shape.keys, _MAX_KEYS_BEHIND) if has_unmasked else shape.keys,
        "IS_INT8": kv_dtype == torch.int8,
        "IS_E4M3": kv_dtype == torch.float8_e4m3fn,
        "HAS_WINDOW": has_window,
        "HAS_SOFTCAP": has_softcap,
        "HAS_SINKS": has_sinks,
        "HAS_UNMASKED": has_unmasked,
        "PRODUCT": tl.float32 if is_emulated else _TRITON_DTYPES[dtype],
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }


def _merge_constants(head_dim: int, num_heads: int, *, has_sinks: bool) -> dict[str, int]:
    """The constants of `merge_partials`."""
    padded = _padded(head_dim)
    # The interpreter takes as long for one head as for all.
    heads = num_heads if triton.knobs.runtime.interpret else _MERGED_NUMBERS // padded
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded,
        "NUM_HEADS": num_heads,
        "HEADS": triton.next_power_of_2(max(min(heads, num_heads), 1)),
        "PARTIALS": _MERGED_PARTIALS,
        "HAS_SINKS": has_sinks,
    }


def _padded(head_dim: int) -> int:
    """The next power of two that matrix instructions take."""
    return max(16, 1 << (head_dim - 1).bit_length())


def specializations() -> Iterator[Specialization]:
    """The forms that MODEL_SHAPES are launched in, with the tiles of every tuning table.

    Gemma's layers cap scores, half of them within a window.
    """
    for path in sorted(TABLES.glob("*.json")):
        table = parse_table(path.read_text(encoding="utf-8"), path.name)
        for shape, dtype in product(MODEL_SHAPES, (torch.bfloat16, torch.float16)):
            for kept in (dtype, *QUANTIZED_KV_DTYPES):
                yield from _tile_specializations(table, shape, dtype, kept)
    for shape, dtype in product(MODEL_SHAPES, (torch.bfloat16, torch.float16)):
        yield _merge_specialization(shape, dtype)


def _tile_specializations(
    table: TuningTable, shape: ModelShape, dtype: torch.dtype, kept: torch.dtype
) -> Iterator[Specialization]:
    group_size = shape.num_heads // shape.num_kv_heads
    shapes = table.tile_shapes(
        head_dim=shape.head_dim, group_size=group_size, kv_bytes=kept.itemsize
    )
    windows = (False, True) if shape.has_score_cap else (False,)
    tiles = (("narrow", shapes.narrow), ("wide", shapes.wide))
    for (width, tile), has_window in product(tiles, windows):
        constants = _tile_constants(
            tile,
            head_dim=shape.head_dim,
            group_size=group_size,
            num_kv_heads=shape.num_kv_heads,
            block_size=16,
            dtype=dtype,
            kv_dtype=kept,
            has_window=has_window,
            has_softcap=shape.has_score_cap,
            has_sinks=False,
        )
        numbers, codes = f"*{_TYPE_NAMES[dtype]}", f"*{_TYPE_NAMES[kept]}"
        scales = ("key_scales", "value_scales")
        is_quantized = kept in QUANTIZED_KV_DTYPES
        yield Specialization(
            name=f"attend-{width}-{shape.name}-{_TYPE_NAMES[dtype]}-kept-in-{_TYPE_NAMES[kept]}"
            f"{'-window' if has_window else ''} ({table.gpu})",
            function=attend_tiles,
            signature={
                **dict.fromkeys(("out", "query"), numbers),
                **dict.fromkeys(("partial_out", "partial_lse"), "*fp32"),
                **dict.fromkeys(("keys", "values"), codes),
                **dict.fromkeys(scales if is_quantized else (), "*fp32"),
                "tables": "*i32",
                **dict.fromkeys(("count_at", "tiles_at", "block_ids_at"), "i32"),
                **dict.fromkeys(("rows_at", "positions_at", "first_block", "window"), "i32"),
                "query_stride": "i32:16",
                **dict.fromkeys(("score_scale", "softcap"), "fp32"),
            },
            constants={
                **constants,
                **dict.fromkeys(("sinks", *(() if is_quantized else scales))),
            },
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def _merge_specialization(shape: ModelShape, dtype: torch.dtype) -> Specialization:
    constants: dict[str, object] = {
        **_merge_constants(shape.head_dim, shape.num_heads, has_sinks=False)
    }
    return Specialization(
        name=f"merge-{shape.name}-{_TYPE_NAMES[dtype]}",
        function=merge_partials,
        signature={
            "out": f"*{_TYPE_NAMES[dtype]}",
            **dict.fromkeys(("partial_out", "partial_lse"), "*fp32"),
            "tables": "*i32",
            **dict.fromkeys(("count_at", "rows_at", "offsets_at", "ids_at"), "i32"),
        },
        constants={**constants, "sinks": None},
        num_warps=_MERGE_WARPS,
        num_stages=NUM_STAGES,
    )
