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

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from sapwood.kernels.segments import AttentionPlan

Int32Array = NDArray[np.int32]


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
class TileShape:
    """What one program works on: BLOCK_M packed rows, which are query rows times the heads of a
    KV group, by BLOCK_N keys an iteration; and how it is compiled. From the tuning table."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name in ("rows", "keys", "num_warps", "num_stages"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be positive")

    def num_query_rows(self, group_size: int) -> int:
        """Query rows that one tile takes: at least one, whatever the heads of a KV group."""
        return max(self.rows // group_size, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileCost:
    """Seconds that one program takes on a device that is full, measured.

    `per_tile`: to begin and to end, without any key. `per_key`: for each key and its value.
    """

    per_tile: float
    per_key: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShapes:
    """The shapes to choose from and what they cost. From the tuning table.

    `narrow` is for few rows (decoding, drafts, small groups), `wide` for many (chunks, prompts,
    edges that many sequences share). `per_partial`: seconds that one program takes to write and
    merge the partial result of one query row and KV head. `per_launch`: seconds from the end of one
    launch to the beginning of the next.
    """

    narrow: TileShape
    wide: TileShape
    narrow_cost: TileCost
    wide_cost: TileCost
    per_partial: float
    per_launch: float


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
    heads of a KV head. Cost: some tens of numpy calls, and O(1) Python for each shared segment.
    """
    raise NotImplementedError
