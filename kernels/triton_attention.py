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

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_E4M3_UNIT = tl.constexpr(256.0)  # of what `_decoded` makes of an e4m3 number


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
    key_of_step = tl.arange(0, KEYS)
    first_offset = first_position % BLOCK_SIZE  # of the first key in its block
    masked_from = 0
    if HAS_UNMASKED:
        masked_from = num_keys_all_see // KEYS * KEYS

    for is_masked in tl.static_range(0 if HAS_UNMASKED else 1, 2):
        begin = masked_from if is_masked else 0
        end = num_keys if is_masked else masked_from
        next_ids = tl.load(
            block_ids + (first_offset + begin + key_of_step) // BLOCK_SIZE,
            mask=begin + key_of_step < end,
            other=0,
        )
        for start in tl.range(begin, end, KEYS):
            key = start + key_of_step
            offset = first_offset + key
            is_key = key < end
            block = first_block + next_ids
            next_ids = tl.load(
                block_ids + (offset + KEYS) // BLOCK_SIZE, mask=key + KEYS < end, other=0
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
                scores *= _scales(key_scales + slot, is_key, IS_E4M3)[None, :]
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
            # 2^(-inf - 0) is 0, as it has to be for a row that has seen no key, 2^(-inf + inf) not.
            base = tl.where(new_max == float("-inf"), 0.0, new_max) if is_masked else new_max
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
                weights *= _scales(value_scales + slot, is_key, IS_E4M3)[None, :]
            v = _decoded(v, IS_INT8, IS_E4M3, PRODUCT)
            weights = weights.to(weights_dtype).to(PRODUCT)
            total = tl.dot(weights, v, total, input_precision=PRECISION)

    num_heads = NUM_KV_HEADS * GROUP_SIZE
    if partial < 0:
        if HAS_SINKS:
            sink = tl.load(sinks + query_head).to(tl.float32) * _LOG2_E
            total, row_sum = _with_sink(total, row_max, row_sum, sink)
        out_at = (row.to(tl.int64) * num_heads + query_head) * HEAD_DIM
        final = (total / row_sum[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_at[:, None] + dims[None, :], final, mask=is_stored)
    else:
        # A row without any key: no division by 0, and a log-sum-exp of minus infinity.
        lse_at = (partial + row_of_tile) * num_heads + query_head
        part_at = lse_at.to(tl.int64) * HEAD_DIM
        part = total / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        tl.store(partial_lse + lse_at, row_max + tl.log2(row_sum), mask=is_row)
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
    PARTIALS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """One row of one head: the sum of its partial results, PARTIALS at a time, by their weights.

    Arguments as of `attend_tiles`; `tables` has the merge lists of `WindowSections`.
    """
    program = tl.program_id(0)
    index = program // NUM_HEADS
    head = program % NUM_HEADS
    if index >= tl.load(tables + count_at):
        return
    row = tl.load(tables + rows_at + index)
    begin = tl.load(tables + offsets_at + index)
    end = tl.load(tables + offsets_at + index + 1)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM

    total = tl.zeros([BLOCK_D], tl.float32)
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    for start in range(begin, end, PARTIALS):
        part = start + tl.arange(0, PARTIALS)
        is_part = part < end
        lse_at = tl.load(tables + ids_at + part, mask=is_part, other=0) * NUM_HEADS + head
        lse = tl.load(partial_lse + lse_at, mask=is_part, other=float("-inf"))
        part_at = lse_at.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
        is_number = is_part[:, None] & is_dim[None, :]
        parts = tl.load(partial_out + part_at, mask=is_number, other=0.0)
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(lse - base)
        shrink = tl.exp2(row_max - base)
        row_max = new_max
        row_sum = row_sum * shrink + tl.sum(weights, 0)
        total = total * shrink + tl.sum(weights[:, None] * parts, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2_E
        total_max = tl.maximum(row_max, sink)
        shrink = tl.exp2(row_max - total_max)
        row_sum = row_sum * shrink + tl.exp2(sink - total_max)
        total = total * shrink
    result_at = (row.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    result = (total / row_sum).to(out.dtype.element_ty)
    tl.store(out + result_at + dims, result, mask=is_dim)


@triton.jit
def _decoded(
    kept: tl.tensor, IS_INT8: tl.constexpr, IS_E4M3: tl.constexpr, PRODUCT: tl.constexpr
) -> tl.tensor:
    """Keys or values in the dtype of the product, without their scale.

    The sign, exponent and mantissa of an e4m3 byte, put where float16 has its own, are the number
    divided by 256. That needs no conversion that only some devices have.
    """
    if IS_E4M3:
        code = kept.to(tl.uint16)
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(PRODUCT)
    if IS_INT8:
        return kept.to(tl.float32).to(PRODUCT)
    return kept.to(PRODUCT)


@triton.jit
def _scales(pointers: tl.tensor, is_key: tl.tensor, IS_E4M3: tl.constexpr) -> tl.tensor:
    """What decoded keys or values have to be multiplied with."""
    scales = tl.load(pointers, mask=is_key, other=0.0)
    return scales * _E4M3_UNIT if IS_E4M3 else scales


@triton.jit
def _with_sink(
    total: tl.tensor, row_max: tl.tensor, row_sum: tl.tensor, sink: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Sums [ROWS, D] and [ROWS] that a score without a value was added to."""
    new_max = tl.maximum(row_max, sink)
    shrink = tl.exp2(row_max - new_max)
    return total * shrink[:, None], row_sum * shrink + tl.exp2(sink - new_max)


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
