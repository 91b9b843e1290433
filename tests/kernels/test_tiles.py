"""Tiles show every row its own keys once, whatever is shared, grouped, cut, windowed or packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.kernels.segments import AttentionPlan, PrivateSegment, SharedSegment
from sapwood.kernels.tile_packing import TileCapacity, pack
from sapwood.kernels.tiles import (
    TileColumn,
    TileCost,
    TilePlan,
    TileShape,
    TileShapes,
    plan_tiles,
)
from tests.kernels.tile_reader import (
    check_columns,
    check_results,
    expected_keys,
    keys_of_rows,
    places,
    tiles_of,
    unpack,
)

SHAPES = TileShapes(
    narrow=TileShape(rows=16, keys=64, num_warps=4, num_stages=3),
    wide=TileShape(rows=128, keys=64, num_warps=8, num_stages=3),
    narrow_cost=TileCost(per_tile=3e-6, per_key=16e-9),
    wide_cost=TileCost(per_tile=4e-6, per_key=20e-9),
    per_partial=0.1e-6,
    per_launch=3e-6,
)
FREE = replace(
    SHAPES,
    narrow_cost=TileCost(per_tile=0, per_key=16e-9),
    wide_cost=TileCost(per_tile=0, per_key=20e-9),
    per_partial=0,
    per_launch=0,
)
"""Nothing but keys costs anything: every edge that saves a read is apart."""


@dataclass
class Builder:
    """Makes a plan of trees: `edge` adds a shared edge, `tail` a sequence below the open ones."""

    block_size: int
    shared: list[tuple[int, int, list[int]]] = field(default_factory=list)
    private: list[PrivateSegment] = field(default_factory=list)
    num_rows: int = 0
    num_blocks: int = 0

    def blocks(self, count: int) -> np.ndarray:
        """Blocks that lie in the cache in no order."""
        ids = (np.arange(self.num_blocks, self.num_blocks + count) * 7919 + 5) % 100_003
        self.num_blocks += count
        return ids.astype(np.int32)

    def edge(self, start: int, num_blocks: int, below: Callable[[int], None]) -> None:
        """An edge at position `start` that holds all rows which `below` adds from its end on."""
        place, first_row = len(self.shared), self.num_rows
        self.shared.append((start, num_blocks, []))
        below(start + num_blocks * self.block_size)
        self.shared[place][2].extend(range(first_row, self.num_rows))

    def tail(self, start: int, length: int, num_rows: int = 1) -> None:
        self.private.append(
            PrivateSegment(
                block_ids=self.blocks(-(-length // self.block_size)),
                start=start,
                length=length,
                first_row=self.num_rows,
                num_rows=num_rows,
            )
        )
        self.num_rows += num_rows

    def plan(self) -> AttentionPlan:
        plan = AttentionPlan(
            num_rows=self.num_rows,
            block_size=self.block_size,
            shared=tuple(
                SharedSegment(
                    block_ids=self.blocks(num_blocks),
                    start=start,
                    length=num_blocks * self.block_size,
                    rows=np.array(rows, dtype=np.int32),
                )
                for start, num_blocks, rows in self.shared
            ),
            private=tuple(self.private),
        )
        plan.check()
        return plan


def shuffled(plan: AttentionPlan, seed: int) -> AttentionPlan:
    """The same sequences in another order of the batch, so that an edge's rows are scattered."""
    order = np.random.default_rng(seed).permutation(len(plan.private))
    new_row = np.empty(plan.num_rows, dtype=np.int32)
    private, first_row = [], 0
    for segment in (plan.private[i] for i in order):
        own = slice(segment.first_row, segment.first_row + segment.num_rows)
        new_row[own] = np.arange(first_row, first_row + segment.num_rows)
        private.append(replace(segment, first_row=first_row))
        first_row += segment.num_rows
    shared = tuple(replace(s, rows=np.sort(new_row[s.rows])) for s in plan.shared)
    return replace(plan, shared=shared[::-1], private=tuple(private))


def flattened(plan: AttentionPlan) -> AttentionPlan:
    """The same keys with nothing shared: every sequence reads its own whole context."""
    private = []
    for tail in plan.private:
        above = sorted(
            (s for s in plan.shared if tail.first_row in s.rows), key=lambda segment: segment.start
        )
        blocks = np.concatenate([*(s.block_ids for s in above), tail.block_ids])
        whole = replace(tail, block_ids=blocks, start=0, length=tail.start + tail.length)
        private.append(whole)
    return replace(plan, shared=(), private=tuple(private))


def sharing(num_rows: int, prefix_len: int, tail_len: int) -> AttentionPlan:
    """Decoding `num_rows` sequences below one prefix."""
    builder = Builder(16)

    def below(start: int) -> None:
        for _ in range(num_rows):
            builder.tail(start, tail_len)

    builder.edge(0, prefix_len // 16, below)
    return builder.plan()


def tiled(plan: AttentionPlan, shapes: TileShapes = SHAPES, window: int | None = None) -> TilePlan:
    """As a model with 32 query and 8 key-value heads on a device of 264 programs."""
    return plan_tiles(
        plan, window=window, group_size=4, num_kv_heads=8, shapes=shapes, num_programs=264
    )


def check(tiles: TilePlan, plan: AttentionPlan, window: int | None, group_size: int = 4) -> None:
    assert keys_of_rows(tiles, plan.block_size, window) == expected_keys(plan, window)
    check_results(tiles, plan.block_size, window)
    check_columns(tiles, plan.block_size, window, group_size)


# -- every row sees its own keys ------------------------------------------------------------------


@st.composite
def forests(draw: st.DrawFn) -> AttentionPlan:
    """Trees of several levels with tails of one row and of several, in any order of the batch."""
    builder = Builder(draw(st.integers(1, 5)))

    def below(start: int, depth: int) -> None:
        for _ in range(draw(st.integers(1, 3))):
            if depth and draw(st.booleans()):
                num_blocks = draw(st.integers(1, 12))
                builder.edge(start, num_blocks, lambda end: below(end, depth - 1))
            else:
                num_rows = draw(st.one_of(st.just(1), st.integers(1, 9)))
                builder.tail(start, num_rows + draw(st.integers(0, 30)), num_rows)

    below(0, 3)
    return shuffled(builder.plan(), draw(st.integers(0, 100)))


@st.composite
def shapes(draw: st.DrawFn) -> TileShapes:
    """Tiny shapes, and costs by which nearly all, some or hardly any edges are apart."""
    seconds = st.sampled_from([0.0, 0.5, 3.0, 50.0])
    narrow_rows, keys = draw(st.sampled_from([2, 4, 8])), draw(st.sampled_from([1, 3, 8]))
    return TileShapes(
        narrow=TileShape(rows=narrow_rows, keys=keys, num_warps=1, num_stages=1),
        wide=TileShape(rows=4 * narrow_rows, keys=keys, num_warps=1, num_stages=1),
        narrow_cost=TileCost(per_tile=draw(seconds), per_key=1.0),
        wide_cost=TileCost(per_tile=draw(seconds), per_key=draw(st.sampled_from([1.0, 2.5, 9.0]))),
        per_partial=draw(st.sampled_from([0.0, 0.1, 2.0])),
        per_launch=draw(seconds),
    )


windows = st.one_of(st.none(), st.integers(1, 70))


@given(forests(), windows, shapes(), st.integers(1, 8), st.sampled_from([1, 3]), st.integers(1, 60))
def test_every_row_sees_its_own_keys_once(
    plan: AttentionPlan,
    window: int | None,
    shapes: TileShapes,
    group_size: int,
    num_kv_heads: int,
    num_programs: int,
) -> None:
    def planned(plan: AttentionPlan) -> TilePlan:
        return plan_tiles(
            plan,
            window=window,
            group_size=group_size,
            num_kv_heads=num_kv_heads,
            shapes=shapes,
            num_programs=num_programs,
        )

    tiles = planned(plan)
    check(tiles, plan, window, group_size)
    flat = planned(flattened(plan))
    assert tiles.num_kv_tokens_read <= flat.num_kv_tokens_read
