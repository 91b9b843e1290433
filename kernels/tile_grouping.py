"""Which keys are read together by which rows: shared edges apart, or pushed down to what is below.

    edges   root [=====) 256 rows             root alone for 256 rows
              a    [==========) 64 rows       a and b for theirs
              b    [=) 3 rows                 the tails of b's rows reach up over b, which is too
            tails      [==) ...               short to pay for tiles and partial results of its own

An edge that is read apart costs tiles, and a partial result for each of its rows; one that is
pushed down is read again by each of its children, which begin that much earlier. From the root down
each edge takes what is cheaper, with what was pushed to it as a part of its length. Others weigh
the same differently: in FastTree (Pan et al., MLSys 2025) each child may leave its parent's group,
by what padding of tiles and reductions cost; DeFT (Yao et al., ICLR 2025) groups every edge and
cuts all keys evenly; Hydragen (Juravsky et al. 2024) and FlashInfer's cascade (Ye et al. 2024) read
each level apart. Here a tile costs the same with one row as with all: decoding waits for memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from sapwood.kernels.ragged import Int64Array, offsets_of, ranges
from sapwood.kernels.segments import AttentionPlan, Int32Array
from sapwood.kernels.tile_shapes import TileShapes

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRanges:
    """Ranges of keys and the query rows that attend to them: what is cut into tiles.

    Range `i` is the positions `[starts[i], ends[i])` of the blocks from `block_offsets[i]` on, of
    which the first holds position `starts[i] // block_size * block_size`, and the rows
    `rows[row_offsets[i] : row_offsets[i + 1]]`. All int64 but the rows and blocks.
    """

    starts: Int64Array
    ends: Int64Array
    block_offsets: Int64Array
    block_ids: Int32Array
    row_offsets: Int64Array
    rows: Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTiling:
    """How many query rows go into a tile, and which of the two shapes takes a number of rows."""

    narrow_rows: int
    wide_rows: int
    narrow_per_key: float
    wide_per_key: float

    @classmethod
    def of(cls, shapes: TileShapes, group_size: int) -> RowTiling:
        return cls(
            narrow_rows=shapes.narrow.num_query_rows(group_size),
            wide_rows=shapes.wide.num_query_rows(group_size),
            narrow_per_key=shapes.narrow_cost.per_key,
            wide_per_key=shapes.wide_cost.per_key,
        )

    def is_wide(self, num_rows: Int64Array) -> BoolArray:
        """Whether wide tiles read a key in less time. By the rows alone, so that a range of a
        sequence's own has the same tiles whatever is shared above it."""
        narrow = -(-num_rows // self.narrow_rows) * self.narrow_per_key
        wide = -(-num_rows // self.wide_rows) * self.wide_per_key
        return wide < narrow

    def num_tiles(self, num_rows: Int64Array) -> Int64Array:
        """Tiles that read each key of a range with so many rows."""
        rows = np.where(self.is_wide(num_rows), self.wide_rows, self.narrow_rows)
        return -(-num_rows // rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tails:
    """The private segments, int64 [num_private] each, and the rows of the step, [num_rows] each."""

    starts: Int64Array
    ends: Int64Array
    first_rows: Int64Array
    num_rows: Int64Array
    positions: Int64Array
    tail_of_row: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edges:
    """The shared segments, [num_edges] each.

    `parents` is the edge above or -1, likewise `parents_of_tails` [num_private]. `rows` are those
    that see its last key (so that they see some of it), `num_rows` of each edge, behind each other.
    `reach`: how far above its end the first of them sees.
    """

    starts: Int64Array
    ends: Int64Array
    parents: Int64Array
    parents_of_tails: Int64Array
    num_rows: Int64Array
    rows: Int64Array
    reach: Int64Array


@dataclass(frozen=True, slots=True)
class _Grouping:
    """`apart`: the edges that are ranges of their own. `pushed_tokens` and `pushed_edges`: what an
    edge passes to those below it, nothing where it is apart or unseen."""

    apart: list[int]
    tokens_above: list[int]
    pushed_tokens: list[int]
    pushed_edges: list[tuple[int, ...]]


def row_positions(plan: AttentionPlan) -> Int64Array:
    """Where each of the plan's rows stands in its sequence, int64 [num_rows]."""
    return _tails(plan).positions


def group_keys(
    plan: AttentionPlan, window: int | None, tiling: RowTiling, shapes: TileShapes
) -> tuple[KeyRanges, Int64Array]:
    """The ranges of a step for layers of one window, and its rows' positions.

    The rows of a private segment lie in the same shared ones: they are one sequence's. Raises
    ValueError where they do not.
    """
    tails = _tails(plan)
    edges = _edges(plan, tails, window)
    grouping = _group(edges, tails, tiling, shapes)
    return _ranges(plan, edges, tails, grouping, window), tails.positions


def _tails(plan: AttentionPlan) -> _Tails:
    facts = np.array(
        [(p.start, p.length, p.first_row, p.num_rows) for p in plan.private], dtype=np.int64
    ).reshape(-1, 4)
    starts, lengths, first_rows, num_rows = facts.T
    ends = starts + lengths
    rows = ranges(first_rows, num_rows)
    positions = np.zeros(plan.num_rows, dtype=np.int64)
    positions[rows] = ranges(ends - num_rows, num_rows)
    tail_of_row = np.zeros(plan.num_rows, dtype=np.int64)
    tail_of_row[rows] = np.repeat(np.arange(len(facts)), num_rows)
    return _Tails(
        starts=starts,
        ends=ends,
        first_rows=first_rows,
        num_rows=num_rows,
        positions=positions,
        tail_of_row=tail_of_row,
    )


def _edges(plan: AttentionPlan, tails: _Tails, window: int | None) -> _Edges:
    facts = np.array(
        [(s.start, s.length, len(s.rows)) for s in plan.shared], dtype=np.int64
    ).reshape(-1, 3)
    starts, lengths, num_rows = facts.T
    ends = starts + lengths
    empty = np.zeros(0, dtype=np.int32)
    rows = np.concatenate([empty, *(s.rows for s in plan.shared)]).astype(np.int64)
    edge_of_row = np.repeat(np.arange(len(facts)), num_rows)
    parents, parents_of_tails = _parents(starts, edge_of_row, rows, tails)
    if window is None:
        reach = ends
    else:
        seen = tails.positions[rows] + 1 - window < ends[edge_of_row]
        rows, edge_of_row = rows[seen], edge_of_row[seen]
        num_rows = np.bincount(edge_of_row, minlength=len(facts))
        lowest = np.full(len(facts), np.iinfo(np.int64).max)
        np.minimum.at(lowest, edge_of_row, tails.positions[rows])
        reach = np.where(num_rows > 0, ends - np.minimum(lowest, ends + window) - 1 + window, 0)
    return _Edges(
        starts=starts,
        ends=ends,
        parents=parents,
        parents_of_tails=parents_of_tails,
        num_rows=num_rows,
        rows=rows,
        reach=reach,
    )


def _parents(
    starts: Int64Array, edge_of_row: Int64Array, rows: Int64Array, tails: _Tails
) -> tuple[Int64Array, Int64Array]:
    """The edges directly above edges and above tails, -1 at the root. O(n log n), n tails below
    edges, counted for each edge."""
    tail = tails.tail_of_row[rows]
    is_first = rows == tails.first_rows[tail]
    edge, tail = edge_of_row[is_first], tail[is_first]
    if tails.num_rows[tail].sum() != len(rows):
        raise ValueError("a shared segment has some rows of a private segment and not all of them")
    order = np.lexsort((starts[edge], tail))
    edge, tail = edge[order], tail[order]
    parents = np.full(len(starts), -1)
    follows = tail[1:] == tail[:-1]
    parents[edge[1:][follows]] = edge[:-1][follows]
    parents_of_tails = np.full(len(tails.starts), -1)
    parents_of_tails[tail] = edge  # the last assignment, of the lowest edge, stays
    return parents, parents_of_tails


def _group(edges: _Edges, tails: _Tails, tiling: RowTiling, shapes: TileShapes) -> _Grouping:
    """Decide edge by edge, those above before those below. A few operations of Python an edge."""
    num_edges = len(edges.starts)
    grouping = _Grouping([], [0] * num_edges, [0] * num_edges, [()] * num_edges)
    if not num_edges:
        return grouping
    loads, key_seconds, tile_seconds = _tile_costs(edges.num_rows, tiling, shapes)
    loads_below, key_seconds_below = _sums_below(edges, tails, loads, key_seconds, tiling, shapes)
    saves_loads = (loads_below > loads).tolist()
    saved_per_key = (key_seconds_below - key_seconds).tolist()
    overhead = tile_seconds + edges.num_rows * shapes.per_partial
    seconds_apart = overhead.tolist()
    # The first edge apart makes partial results also of what is below it, which was final.
    seconds_first = (overhead + edges.num_rows * shapes.per_partial).tolist()
    parents, num_rows = edges.parents.tolist(), edges.num_rows.tolist()
    lengths, reach = (edges.ends - edges.starts).tolist(), edges.reach.tolist()
    has_apart_above = [False] * num_edges
    for edge in np.argsort(edges.starts, kind="stable").tolist():
        parent = parents[edge]
        above = grouping.pushed_tokens[parent] if parent >= 0 else 0
        has_apart_above[edge] = parent >= 0 and has_apart_above[parent]
        if not num_rows[edge]:
            continue
        grouping.tokens_above[edge] = above
        num_keys = min(above + lengths[edge], reach[edge])
        cost = seconds_apart[edge] if has_apart_above[edge] else seconds_first[edge]
        if saves_loads[edge] and saved_per_key[edge] * num_keys > cost:
            grouping.apart.append(edge)
            has_apart_above[edge] = True
        else:
            grouping.pushed_tokens[edge] = above + lengths[edge]
            carried = grouping.pushed_edges[parent] if parent >= 0 else ()
            grouping.pushed_edges[edge] = (*carried, edge)
    return grouping


def _tile_costs(
    num_rows: Int64Array, tiling: RowTiling, shapes: TileShapes
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """For ranges of so many rows: how often a key is loaded, what that takes, what tiles take."""
    is_wide, loads = tiling.is_wide(num_rows), tiling.num_tiles(num_rows)
    per_key: FloatArray = np.where(is_wide, shapes.wide_cost.per_key, shapes.narrow_cost.per_key)
    per_tile: FloatArray = np.where(is_wide, shapes.wide_cost.per_tile, shapes.narrow_cost.per_tile)
    return loads.astype(np.float64), loads * per_key, loads * per_tile


def _sums_below(
    edges: _Edges,
    tails: _Tails,
    loads: FloatArray,
    key_seconds: FloatArray,
    tiling: RowTiling,
    shapes: TileShapes,
) -> tuple[FloatArray, FloatArray]:
    """Of all edges and tails directly below each edge: loads of a key, and the seconds of them."""
    tail_loads, tail_key_seconds, _ = _tile_costs(tails.num_rows, tiling, shapes)
    above = np.concatenate([edges.parents, edges.parents_of_tails]) + 1

    def sums(of_edges: FloatArray, of_tails: FloatArray) -> FloatArray:
        both = np.concatenate([of_edges, of_tails])
        totals = np.bincount(above, weights=both, minlength=len(of_edges) + 1)
        return totals[1:].astype(np.float64)

    return sums(loads, tail_loads), sums(key_seconds, tail_key_seconds)


def _ranges(
    plan: AttentionPlan, edges: _Edges, tails: _Tails, grouping: _Grouping, window: int | None
) -> KeyRanges:
    """The edges apart and then the tails, each with what was pushed down to it from above."""
    apart = np.array(grouping.apart, dtype=np.int64)
    parents, parents_of_tails = edges.parents.tolist(), edges.parents_of_tails.tolist()
    blocks: list[list[Int32Array]] = []
    for edge in grouping.apart:
        carried = grouping.pushed_edges[parents[edge]] if parents[edge] >= 0 else ()
        blocks.append([*(plan.shared[e].block_ids for e in carried), plan.shared[edge].block_ids])
    tokens_above_tails = []
    for private, parent in zip(plan.private, parents_of_tails, strict=True):
        carried = grouping.pushed_edges[parent] if parent >= 0 else ()
        tokens_above_tails.append(grouping.pushed_tokens[parent] if parent >= 0 else 0)
        blocks.append([*(plan.shared[e].block_ids for e in carried), private.block_ids])
    above = np.array(
        [*(grouping.tokens_above[edge] for edge in grouping.apart), *tokens_above_tails],
        dtype=np.int64,
    )
    starts = np.concatenate([edges.starts[apart], tails.starts]) - above
    ends = np.concatenate([edges.ends[apart], tails.ends])
    edge_offsets = offsets_of(edges.num_rows)
    rows = np.concatenate(
        [
            edges.rows[ranges(edge_offsets[apart], edges.num_rows[apart])],
            ranges(tails.first_rows, tails.num_rows),
        ]
    )
    row_offsets = offsets_of(np.concatenate([edges.num_rows[apart], tails.num_rows]))
    block_ids = np.concatenate([*chain.from_iterable(blocks)]).astype(np.int32, copy=False)
    num_blocks = -(-(ends - starts) // plan.block_size)
    whole = KeyRanges(
        starts=starts,
        ends=ends,
        block_offsets=offsets_of(num_blocks)[:-1],
        block_ids=block_ids,
        row_offsets=row_offsets,
        rows=rows.astype(np.int32),
    )
    return whole if window is None else _cut(whole, tails.positions, window, plan.block_size)


def _cut(whole: KeyRanges, positions: Int64Array, window: int, block_size: int) -> KeyRanges:
    """Without the keys, and the blocks of keys, that no row sees."""
    lowest = np.minimum.reduceat(positions[whole.rows], whole.row_offsets[:-1])
    starts = np.maximum(whole.starts, lowest + 1 - window)
    num_hidden = starts // block_size - whole.starts // block_size
    num_blocks = -(-(whole.ends - whole.starts) // block_size) - num_hidden
    return KeyRanges(
        starts=starts,
        ends=whole.ends,
        block_offsets=offsets_of(num_blocks)[:-1],
        block_ids=whole.block_ids[ranges(whole.block_offsets + num_hidden, num_blocks)],
        row_offsets=whole.row_offsets,
        rows=whole.rows,
    )
