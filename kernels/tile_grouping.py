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

from dataclasses import dataclass, replace

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
    `rows[row_offsets[i] : row_offsets[i + 1]]`, in tiles of the wide shape or not.
    """

    starts: Int64Array
    ends: Int64Array
    block_offsets: Int64Array
    block_ids: Int32Array
    row_offsets: Int64Array
    rows: Int32Array
    is_wide: BoolArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTiling:
    """How many query rows go into a tile. Ranges of `wide_from` rows and more have wide tiles.

    By the number of rows alone, those that a window hides the range from included, so that a group
    never has smaller tiles than its rows would by themselves: it loads no key more often.
    """

    narrow_rows: int
    wide_rows: int
    wide_from: int

    @classmethod
    def of(cls, shapes: TileShapes, group_size: int) -> RowTiling:
        narrow_rows = shapes.narrow.num_query_rows(group_size)
        wide_rows = shapes.wide.num_query_rows(group_size)
        # More narrow tiles than this take longer to read a key than one wide tile.
        num_narrow = max(int(shapes.wide_cost.per_key / shapes.narrow_cost.per_key), 1)
        wide_from = narrow_rows * num_narrow + 1
        return cls(
            narrow_rows=narrow_rows,
            wide_rows=wide_rows,
            wide_from=wide_from if wide_from <= wide_rows else np.iinfo(np.int64).max,
        )

    def is_wide(self, num_rows: Int64Array) -> BoolArray:
        return num_rows >= self.wide_from

    def rows_per_tile(self, is_wide: BoolArray) -> Int64Array:
        return np.where(is_wide, self.wide_rows, self.narrow_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tails:
    """The private segments, int64 [num_private] each, and the rows of the step, [num_rows] each."""

    starts: Int64Array
    ends: Int64Array
    first_rows: Int64Array
    num_rows: Int64Array
    positions: Int64Array
    tail_of_row: Int64Array
    is_wide: BoolArray


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
    is_wide: BoolArray


@dataclass(frozen=True, slots=True)
class _Grouping:
    """`apart`: the edges that are ranges of their own. `pushed_tokens` and `pushed_edges`: what an
    edge passes to those below it, nothing where it is apart."""

    apart: list[int]
    pushed_tokens: list[int]
    pushed_edges: list[tuple[int, ...]]


def group_keys(
    plan: AttentionPlan, window: int | None, tiling: RowTiling, shapes: TileShapes
) -> tuple[KeyRanges, Int64Array]:
    """The ranges of a step for layers of one window, and its rows' positions.

    The rows of a private segment lie in the same shared ones: they are one sequence's. Raises
    ValueError where they do not.
    """
    tails = _tails(plan, tiling)
    edges = _edges(plan, tails, window, tiling)
    grouping = _group(edges, tails, tiling, shapes)
    return _ranges(plan, edges, tails, grouping, window), tails.positions


def _tails(plan: AttentionPlan, tiling: RowTiling) -> _Tails:
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
        is_wide=tiling.is_wide(num_rows),
    )


def _edges(plan: AttentionPlan, tails: _Tails, window: int | None, tiling: RowTiling) -> _Edges:
    facts = np.array(
        [(s.start, s.length, len(s.rows)) for s in plan.shared], dtype=np.int64
    ).reshape(-1, 3)
    starts, lengths, num_rows = facts.T
    is_wide = tiling.is_wide(num_rows)
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
        # Rows that see about as far stand together, so that few tiles read what few rows see.
        order = np.lexsort((tails.positions[rows], edge_of_row))
        rows, edge_of_row = rows[order], edge_of_row[order]
        num_rows = np.bincount(edge_of_row, minlength=len(facts))
        reach = np.zeros(len(facts), dtype=np.int64)
        firsts = offsets_of(num_rows)[:-1][num_rows > 0]
        reach[num_rows > 0] = ends[num_rows > 0] + window - 1 - tails.positions[rows[firsts]]
    return _Edges(
        starts=starts,
        ends=ends,
        parents=parents,
        parents_of_tails=parents_of_tails,
        num_rows=num_rows,
        rows=rows,
        reach=reach,
        is_wide=is_wide,
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
    grouping = _Grouping([], [0] * num_edges, [()] * num_edges)
    if not num_edges:
        return grouping
    key_seconds, tile_seconds = _tile_costs(edges, tiling, shapes)
    below = _key_seconds_below(edges, tails, key_seconds, tiling, shapes)
    saved_per_key = (below - key_seconds).tolist()
    overhead = tile_seconds + edges.num_rows * shapes.per_partial
    seconds_apart = overhead.tolist()
    # The first edge apart makes partial results also of what is below it, which was final.
    seconds_first = (overhead + edges.num_rows * shapes.per_partial).tolist()
    parents = edges.parents.tolist()
    lengths, reach = (edges.ends - edges.starts).tolist(), edges.reach.tolist()
    has_apart_above = [False] * num_edges
    for edge in np.argsort(edges.starts, kind="stable").tolist():
        parent = parents[edge]
        above = grouping.pushed_tokens[parent] if parent >= 0 else 0
        has_apart_above[edge] = parent >= 0 and has_apart_above[parent]
        num_keys = min(above + lengths[edge], reach[edge])
        cost = seconds_apart[edge] if has_apart_above[edge] else seconds_first[edge]
        if saved_per_key[edge] * num_keys > cost:
            grouping.apart.append(edge)
            has_apart_above[edge] = True
        else:
            grouping.pushed_tokens[edge] = above + lengths[edge]
            carried = grouping.pushed_edges[parent] if parent >= 0 else ()
            grouping.pushed_edges[edge] = (*carried, edge)
    return grouping


def _tile_costs(
    of: _Edges | _Tails, tiling: RowTiling, shapes: TileShapes
) -> tuple[FloatArray, FloatArray]:
    """Of each range: seconds to read a key in all of its tiles, and to run them without keys."""
    wide, narrow = shapes.wide_cost, shapes.narrow_cost
    num_tiles = -(-of.num_rows // tiling.rows_per_tile(of.is_wide))
    per_key: FloatArray = np.where(of.is_wide, wide.per_key, narrow.per_key)
    per_tile: FloatArray = np.where(of.is_wide, wide.per_tile, narrow.per_tile)
    return num_tiles * per_key, num_tiles * per_tile


def _key_seconds_below(
    edges: _Edges, tails: _Tails, key_seconds: FloatArray, tiling: RowTiling, shapes: TileShapes
) -> FloatArray:
    """Seconds to read a key in the tiles of all edges and tails directly below each edge."""
    of_tails, _ = _tile_costs(tails, tiling, shapes)
    above = np.concatenate([edges.parents, edges.parents_of_tails]) + 1
    both = np.concatenate([key_seconds, of_tails])
    sums = np.bincount(above, weights=both, minlength=len(key_seconds) + 1)
    return sums[1:].astype(np.float64)


def _ranges(
    plan: AttentionPlan, edges: _Edges, tails: _Tails, grouping: _Grouping, window: int | None
) -> KeyRanges:
    """The edges apart and then the tails, each with what was pushed down to it from above."""
    apart = np.array(grouping.apart, dtype=np.int64)
    # One more entry, which -1 leads to: nothing is pushed down to what has no edge above.
    pushed_tokens = np.array([*grouping.pushed_tokens, 0])
    pushed_edges = [*grouping.pushed_edges, ()]
    parents = np.concatenate([edges.parents[apart], edges.parents_of_tails])
    above = pushed_tokens[parents]
    own_blocks = [plan.shared[edge].block_ids for edge in grouping.apart]
    own_blocks += [private.block_ids for private in plan.private]
    blocks = [np.zeros(0, dtype=np.int32)]
    for parent, own in zip(parents.tolist(), own_blocks, strict=True):
        if pushed_edges[parent]:
            blocks.extend(plan.shared[edge].block_ids for edge in pushed_edges[parent])
        blocks.append(own)
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
    block_ids = np.concatenate(blocks)
    num_blocks = -(-(ends - starts) // plan.block_size)
    whole = KeyRanges(
        starts=starts,
        ends=ends,
        block_offsets=offsets_of(num_blocks)[:-1],
        block_ids=block_ids,
        row_offsets=row_offsets,
        rows=rows.astype(np.int32),
        is_wide=np.concatenate([edges.is_wide[apart], tails.is_wide]),
    )
    return whole if window is None else _cut(whole, tails.positions, window, plan.block_size)


def _cut(whole: KeyRanges, positions: Int64Array, window: int, block_size: int) -> KeyRanges:
    """Without the keys, and the blocks of keys, that no row sees."""
    if not len(whole.rows):
        return whole
    lowest = np.minimum.reduceat(positions[whole.rows], whole.row_offsets[:-1])
    starts = np.maximum(whole.starts, lowest + 1 - window)
    num_hidden = starts // block_size - whole.starts // block_size
    num_blocks = -(-(whole.ends - whole.starts) // block_size) - num_hidden
    return replace(
        whole,
        starts=starts,
        block_offsets=offsets_of(num_blocks)[:-1],
        block_ids=whole.block_ids[ranges(whole.block_offsets + num_hidden, num_blocks)],
    )
