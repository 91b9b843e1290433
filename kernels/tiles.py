"""Tiles: what one program of a tree attention kernel works on, a run of keys and query rows on it.

All segments of an `AttentionPlan`, shared and private, of decoding, drafts, chunks and prompts,
become tiles of one format, so that one kernel serves them all. A step is one launch for each tile
shape, and one that merges the partial results of rows that have several tiles.

    positions   0               64                128       150
    edge        [======= tile 0 =======)[=== tile 1 ====)             rows a, b, c and d
    tails                                               [= tile 2 =)  row a
                                                        [ tile 3 )    row b

Pure values of numpy arrays; nothing here imports torch or knows what a device is. `pack`
(tile_packing.py) puts a step's tiles into one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sapwood.kernels.ragged import Int64Array, ranges
from sapwood.kernels.segments import AttentionPlan, Int32Array
from sapwood.kernels.tile_grouping import KeyRanges, RowTiling, group_keys
from sapwood.kernels.tile_shapes import TileCost, TileShape, TileShapes
from sapwood.kernels.tile_splitting import Spans, count_pieces, piece_lengths
from sapwood.kernels.windows import narrowed

__all__ = [
    "TileColumn",
    "TileCost",
    "TileGroup",
    "TilePlan",
    "TileShape",
    "TileShapes",
    "plan_tiles",
]


class TileColumn(IntEnum):
    """The columns of a tile. A row at position `q` sees the key at `p` iff `q - window < p <= q`.

    A row may see none of the keys of a tile with partial results (a piece of a causal range, or of
    a windowed one): its partial result then has the log-sum-exp minus infinity and weighs nothing.
    Each row of a tile with final results sees at least itself.
    """

    BLOCK_OFFSET = 0
    """Into `block_ids`: the block that holds the tile's first key, the others follow."""
    FIRST_POSITION = 1
    """Position of the first key; its place in its block is this modulo the block size."""
    NUM_KEYS = 2
    """At least 1."""
    ROW_OFFSET = 3
    """Into `rows`: the first query row of the tile, the others follow."""
    NUM_ROWS = 4
    """From 1 to `TileShape.num_query_rows(group_size)`."""
    NUM_KEYS_ALL_SEE = 5
    """Leading keys that every row of the tile sees, so that they need no mask."""
    PARTIAL = 6
    """Partial result of the tile's first row, the others follow; -1: the results are final."""
    RESERVED = 7
    """0; makes a tile 32 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileGroup:
    """The tiles of one launch. `tiles` int32 [num_tiles, 8] of `TileColumn`, the longest first;
    those that read the same keys stand next to each other, so that they meet in the L2 cache."""

    shape: TileShape
    tiles: Int32Array

    @property
    def num_tiles(self) -> int:
        return len(self.tiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """All tiles of a step for layers of one window.

    `groups` are those of the narrow and of the wide shape, in this order and possibly empty.
    `block_ids` and `rows` hold what the tiles refer to, `positions` [num_rows] where each query row
    of the step stands in its sequence. Row `merged_rows[i]` is the sum by log-sum-exp of the
    partial results `partial_ids[merge_offsets[i] : merge_offsets[i + 1]]`, at least one, in the
    order of positions; the rows of all other tiles are final. Partial results are numbered from 0
    to `num_partials` and each is merged once.
    """

    groups: tuple[TileGroup, ...]
    block_ids: Int32Array
    rows: Int32Array
    positions: Int32Array
    merged_rows: Int32Array
    merge_offsets: Int32Array
    partial_ids: Int32Array
    num_partials: int

    @property
    def num_kv_tokens_read(self) -> int:
        """Keys that programs load for one KV head, repetitions counted."""
        return sum(int(group.tiles[:, TileColumn.NUM_KEYS].sum()) for group in self.groups)


def plan_tiles(
    plan: AttentionPlan,
    *,
    window: int | None,
    group_size: int,
    num_kv_heads: int,
    shapes: TileShapes,
    num_programs: int,
) -> TilePlan:
    """The tiles of a step for layers of one window.

    `num_programs` are those that the device runs at once, over all KV heads; `group_size` the query
    heads of a KV head. Cost: about a hundred numpy calls, and a few Python operations for each
    segment. Raises ValueError where a shared segment has some rows of a private one and not all.
    """
    window = narrowed(plan, window)
    tiling = RowTiling.of(shapes, group_size)
    keys, positions = group_keys(plan, window, tiling, shapes)
    cuts = []
    for row_tiles, shape, cost in zip(
        _row_tiles(keys, positions, window, tiling),
        (shapes.narrow, shapes.wide),
        (shapes.narrow_cost, shapes.wide_cost),
        strict=True,
    ):
        lengths = piece_lengths(
            row_tiles.spans,
            cost=cost,
            per_partial=shapes.per_partial,
            per_launch=shapes.per_launch,
            num_programs=num_programs / num_kv_heads,
            key_step=shape.keys,
        )
        cuts.append(_tiles(row_tiles, lengths, keys, window, plan.block_size))
    num_partials = _number_partials(cuts)
    merges = _merges(cuts, keys.rows)
    return TilePlan(
        groups=(
            TileGroup(shape=shapes.narrow, tiles=cuts[0]),
            TileGroup(shape=shapes.wide, tiles=cuts[1]),
        ),
        block_ids=keys.block_ids,
        rows=keys.rows,
        positions=positions.astype(np.int32),
        merged_rows=merges.rows,
        merge_offsets=merges.offsets,
        partial_ids=merges.partial_ids,
        num_partials=num_partials,
    )


_PARTIAL, _FINAL = 0, -1  # what stands in the column before partial results have their numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowTiles:
    """Rows of ranges, as many as go into a tile, int64 [num_row_tiles] each.

    `lows` and `highs` are the positions of the first and the last row.
    """

    range_ids: Int64Array
    row_offsets: Int64Array
    lows: Int64Array
    highs: Int64Array
    spans: Spans

    def where(self, mask: NDArray[np.bool_]) -> _RowTiles:
        return _RowTiles(
            range_ids=self.range_ids[mask],
            row_offsets=self.row_offsets[mask],
            lows=self.lows[mask],
            highs=self.highs[mask],
            spans=self.spans.where(mask),
        )


class _Merges(NamedTuple):
    rows: Int32Array
    offsets: Int32Array
    partial_ids: Int32Array


def _row_tiles(
    keys: KeyRanges, positions: Int64Array, window: int | None, tiling: RowTiling
) -> tuple[_RowTiles, _RowTiles]:
    """Those of the narrow and of the wide shape."""
    rows_of_range = np.diff(keys.row_offsets)
    most = tiling.rows_per_tile(keys.is_wide)
    counts = -(-rows_of_range // most)
    range_ids = np.repeat(np.arange(len(counts)), counts)
    row_offsets = keys.row_offsets[range_ids] + ranges(0 * counts, counts) * most[range_ids]
    num_rows = np.minimum(keys.row_offsets[range_ids + 1] - row_offsets, most[range_ids])
    lows, highs, has_partials = _row_facts(keys.rows, row_offsets, positions)
    begins = firsts = keys.starts[range_ids]
    if window is not None:
        begins = np.maximum(firsts, lows + 1 - window)
    lasts = keys.ends[range_ids]
    spans = Spans(
        firsts=firsts,
        lasts=lasts,
        begins=begins,
        ends=np.minimum(lasts, highs + 1),
        num_rows=num_rows,
        has_partials=has_partials,
    )
    both = _RowTiles(
        range_ids=range_ids, row_offsets=row_offsets, lows=lows, highs=highs, spans=spans
    )
    is_wide = keys.is_wide[range_ids]
    return both.where(~is_wide), both.where(is_wide)


def _row_facts(
    rows: Int32Array, row_offsets: Int64Array, positions: Int64Array
) -> tuple[Int64Array, Int64Array, NDArray[np.bool_]]:
    """Of each run of rows: its lowest and highest position, and whether one has several ranges."""
    if not len(rows):
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing, np.zeros(0, dtype=np.bool_)
    own = positions[rows]
    num_ranges = np.bincount(rows, minlength=len(positions))[rows]
    return (
        np.minimum.reduceat(own, row_offsets),
        np.maximum.reduceat(own, row_offsets),
        np.maximum.reduceat(num_ranges, row_offsets) > 1,
    )


def _tiles(
    row_tiles: _RowTiles,
    piece_lengths: Int64Array,
    keys: KeyRanges,
    window: int | None,
    block_size: int,
) -> Int32Array:
    """The pieces of row tiles as tiles [num_tiles, 8], the longest first; same keys together."""
    spans = row_tiles.spans
    num_pieces = count_pieces(spans, piece_lengths)
    of = np.repeat(np.arange(len(num_pieces)), num_pieces)
    lengths, firsts = piece_lengths[of], spans.firsts[of]
    pieces = ranges((spans.begins - spans.firsts) // piece_lengths, num_pieces)
    begins = np.maximum(firsts + pieces * lengths, spans.begins[of])
    num_keys = np.minimum(firsts + (pieces + 1) * lengths, spans.ends[of]) - begins
    num_seen = np.clip(row_tiles.lows[of] + 1 - begins, 0, num_keys)
    if window is not None:
        num_seen[row_tiles.highs[of] + 1 - window > begins] = 0
    range_ids = row_tiles.range_ids[of]
    first_blocks = keys.starts[range_ids] // block_size
    is_partial = (spans.has_partials | (num_pieces > 1))[of]
    tiles = np.zeros((len(of), len(TileColumn)), dtype=np.int32)
    tiles[:, TileColumn.BLOCK_OFFSET] = (
        keys.block_offsets[range_ids] + begins // block_size - first_blocks
    )
    tiles[:, TileColumn.FIRST_POSITION] = begins
    tiles[:, TileColumn.NUM_KEYS] = num_keys
    tiles[:, TileColumn.ROW_OFFSET] = row_tiles.row_offsets[of]
    tiles[:, TileColumn.NUM_ROWS] = spans.num_rows[of]
    tiles[:, TileColumn.NUM_KEYS_ALL_SEE] = num_seen
    tiles[:, TileColumn.PARTIAL] = np.where(is_partial, _PARTIAL, _FINAL)
    order: Int64Array = np.lexsort((begins, range_ids, -num_keys))
    return tiles[order]


def _number_partials(cuts: Sequence[Int32Array]) -> int:
    """Give the rows of tiles with partial results their numbers, in place; how many there are."""
    num_partials = 0
    for tiles in cuts:
        is_partial = tiles[:, TileColumn.PARTIAL] == _PARTIAL
        num_rows = tiles[is_partial, TileColumn.NUM_ROWS]
        ends = num_partials + np.cumsum(num_rows)
        tiles[is_partial, TileColumn.PARTIAL] = ends - num_rows
        num_partials += int(num_rows.sum())
    return num_partials


def _merges(cuts: Sequence[Int32Array], rows: Int32Array) -> _Merges:
    """Which partial results are those of which row."""
    tiles = np.concatenate(cuts)
    tiles = tiles[tiles[:, TileColumn.PARTIAL] != _FINAL]
    tiles = tiles[np.argsort(tiles[:, TileColumn.FIRST_POSITION], kind="stable")].astype(np.int64)
    num_rows = tiles[:, TileColumn.NUM_ROWS]
    of_partial = rows[ranges(tiles[:, TileColumn.ROW_OFFSET], num_rows)]
    order = np.argsort(of_partial, kind="stable")
    of_partial = of_partial[order]
    is_first = np.diff(of_partial, prepend=-1) > 0
    offsets = np.append(np.flatnonzero(is_first), len(of_partial))
    return _Merges(
        rows=of_partial[is_first],
        offsets=offsets.astype(np.int32),
        partial_ids=ranges(tiles[:, TileColumn.PARTIAL], num_rows)[order].astype(np.int32),
    )
