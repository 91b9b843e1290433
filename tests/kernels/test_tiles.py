"""Tiles show every row its own keys once, whatever is shared, grouped, cut, windowed or packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

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


@dataclass(frozen=True)
class Device:
    """What tiles are planned for."""

    shapes: TileShapes
    group_size: int
    num_kv_heads: int
    num_programs: int


devices = st.builds(
    Device, shapes(), st.integers(1, 8), st.sampled_from([1, 3]), st.integers(1, 60)
)


def check_on(device: Device, plan: AttentionPlan, window: int | None) -> None:
    def planned(plan: AttentionPlan) -> TilePlan:
        return plan_tiles(
            plan,
            window=window,
            group_size=device.group_size,
            num_kv_heads=device.num_kv_heads,
            shapes=device.shapes,
            num_programs=device.num_programs,
        )

    tiles = planned(plan)
    check(tiles, plan, window, device.group_size)
    flat = planned(flattened(plan))
    assert tiles.num_kv_tokens_read <= flat.num_kv_tokens_read


@given(devices, forests(), windows)
def test_every_row_sees_its_own_keys_once_and_loads_are_no_more_than_flat_ones(
    device: Device, plan: AttentionPlan, window: int | None
) -> None:
    check_on(device, plan, window)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(devices, forests(), windows)
def test_every_row_sees_its_own_keys_once_in_many_forests(
    device: Device, plan: AttentionPlan, window: int | None
) -> None:
    check_on(device, plan, window)


def test_a_plan_without_rows_has_no_tiles() -> None:
    tiles = tiled(AttentionPlan(num_rows=0, block_size=16, shared=(), private=()))
    assert [group.num_tiles for group in tiles.groups] == [0, 0]
    assert tiles.num_partials == 0
    assert tiles.merge_offsets.tolist() == [0]


def test_a_shared_segment_with_a_part_of_a_sequences_rows_is_refused() -> None:
    plan = AttentionPlan(
        num_rows=2,
        block_size=4,
        shared=(
            SharedSegment(
                block_ids=np.array([3], np.int32), start=0, length=4, rows=np.array([0], np.int32)
            ),
        ),
        private=(
            PrivateSegment(
                block_ids=np.array([7], np.int32), start=4, length=3, first_row=0, num_rows=2
            ),
        ),
    )
    with pytest.raises(ValueError, match="some rows of a private segment"):
        tiled(plan)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 4096])
def test_contexts_around_a_block_are_read_to_their_ends(length: int) -> None:
    builder = Builder(16)
    for num_rows in {1, min(length, 7), min(length, 70)}:
        builder.tail(0, length, num_rows)
    check(tiled(builder.plan()), builder.plan(), None)


def test_a_prompts_last_keys_alone_need_a_mask() -> None:
    builder = Builder(16)
    builder.tail(0, 2048, 2048)
    tiles = tiled(builder.plan()).groups[1].tiles
    masked = tiles[:, TileColumn.NUM_KEYS] - tiles[:, TileColumn.NUM_KEYS_ALL_SEE]
    assert (masked == tiles[:, TileColumn.NUM_ROWS] - 1).all()


# -- what is read together ------------------------------------------------------------------------


def test_a_long_prefix_is_read_once_for_all_rows_of_a_tile() -> None:
    plan = sharing(num_rows=32, prefix_len=8192, tail_len=100)  # 32 rows fill a wide tile
    assert tiled(plan).num_kv_tokens_read == 8192 + 32 * 100


def test_a_prefix_too_short_for_tiles_of_its_own_is_read_with_each_tail() -> None:
    plan = sharing(num_rows=4, prefix_len=32, tail_len=100)
    tiles = tiled(plan)
    assert tiles.num_kv_tokens_read == 4 * (32 + 100)
    assert tiles.num_partials == 0
    check(tiles, plan, None)


def test_tiles_that_cost_nothing_leave_every_edge_apart() -> None:
    plan = sharing(num_rows=4, prefix_len=32, tail_len=100)
    assert tiled(plan, FREE).num_kv_tokens_read == 32 + 4 * 100


def test_a_short_edge_above_long_ones_is_read_with_them() -> None:
    """Four system prompts of 2,048 tokens, each of 8 sequences, whose first block is the same."""
    builder = Builder(16)

    def tails(start: int) -> None:
        for _ in range(8):
            builder.tail(start, 50)

    def prompts(start: int) -> None:
        for _ in range(4):
            builder.edge(start, 127, tails)

    builder.edge(0, 1, prompts)
    plan = builder.plan()
    tiles = tiled(plan)
    check(tiles, plan, None)
    assert tiles.num_kv_tokens_read == 4 * (16 + 127 * 16) + 32 * 50


def test_edges_that_are_short_one_by_one_are_read_together_where_they_are_long() -> None:
    """Each sequence leaves the common prefix 32 tokens after the one before it."""
    builder = Builder(16)

    def below(start: int) -> None:
        builder.tail(start, 20)
        if builder.num_rows < 32:
            builder.edge(start, 2, below)
        else:
            builder.tail(start, 20)

    builder.edge(0, 2, below)
    plan = builder.plan()
    tiles = tiled(plan)
    check(tiles, plan, None)
    flat = tiled(flattened(plan))
    assert plan.num_kv_tokens < tiles.num_kv_tokens_read < flat.num_kv_tokens_read / 2


def test_wide_tiles_take_what_several_narrow_ones_would_read_again() -> None:
    assert [group.num_tiles for group in tiled(sharing(4, 512, 16)).groups][1] == 0
    wide = tiled(sharing(33, 512, 16)).groups[1].tiles
    assert set(wide[:, TileColumn.NUM_ROWS]) == {32, 1}


def test_tiles_that_read_the_same_keys_stand_next_to_each_other() -> None:
    tiles = tiled(sharing(num_rows=256, prefix_len=32768, tail_len=100))
    wide = tiles.groups[1].tiles
    keys = list(zip(wide[:, TileColumn.FIRST_POSITION], wide[:, TileColumn.NUM_KEYS], strict=True))
    changes = sum(a != b for a, b in zip(keys, keys[1:], strict=False))
    assert changes == len(set(keys)) - 1
    assert len(wide) == 8 * len(set(keys))


def test_the_same_plan_has_the_same_tiles() -> None:
    plan = shuffled(sharing(num_rows=40, prefix_len=4096, tail_len=100), 3)
    one, other = pack({None: tiled(plan)}), pack({None: tiled(plan)})
    assert one is not None
    assert other is not None
    assert np.array_equal(one.buffer, other.buffer)


# -- how long pieces are --------------------------------------------------------------------------


def test_one_long_sequence_is_cut_into_as_many_pieces_as_run_at_once() -> None:
    builder = Builder(16)
    builder.tail(0, 65536)
    narrow = tiled(builder.plan()).groups[0].tiles  # 264 programs, 8 KV heads: 33 at once
    assert 31 <= len(narrow) <= 33
    assert narrow[0, TileColumn.NUM_KEYS] <= 1.1 * 65536 / 33


def test_sequences_that_fill_the_device_are_not_cut() -> None:
    builder = Builder(16)
    for _ in range(33 * 4):
        builder.tail(0, 4096)
    tiles = tiled(builder.plan())
    assert tiles.groups[0].num_tiles == 33 * 4
    assert tiles.num_partials == 0


def test_a_last_wave_of_few_is_made_shorter_by_cutting() -> None:
    builder = Builder(16)
    for _ in range(40):  # 33 at once: two waves, the second with 7
        builder.tail(0, 16384)
    lengths = tiled(builder.plan()).groups[0].tiles[:, TileColumn.NUM_KEYS]
    waves = sum(int(lengths[index]) for index in range(0, len(lengths), 33))
    assert waves < 1.1 * 40 * 16384 / 33


def test_pieces_are_not_cut_so_short_that_tiles_cost_more_than_their_keys() -> None:
    builder = Builder(16)
    builder.tail(0, 200)
    assert tiled(builder.plan()).groups[0].num_tiles == 1


def test_the_rows_of_a_chunk_are_cut_at_the_same_keys() -> None:
    builder = Builder(16)
    builder.tail(0, 3000, 40)
    plan = builder.plan()
    tiles = tiled(plan)
    check(tiles, plan, None)
    wide = tiles.groups[1].tiles
    firsts = wide[:, TileColumn.FIRST_POSITION]
    assert len(wide) >= 20
    for row in set(wide[:, TileColumn.ROW_OFFSET]):
        assert set(firsts[wide[:, TileColumn.ROW_OFFSET] == row]) == set(firsts)


# -- windows --------------------------------------------------------------------------------------


def test_a_window_leaves_out_the_keys_and_blocks_before_it() -> None:
    plan = sharing(num_rows=8, prefix_len=8192, tail_len=64)
    tiles = tiled(plan, window=64)
    check(tiles, plan, 64)
    assert tiles.num_kv_tokens_read == 8 * 64
    assert tiles.num_partials == 0, "no row sees any of the prefix"
    assert len(tiles.block_ids) <= 8 * (64 // 16 + 1)


def test_a_window_that_reaches_into_an_edge_shares_what_it_sees_of_it() -> None:
    plan = sharing(num_rows=32, prefix_len=8192, tail_len=100)
    tiles = tiled(plan, window=2100)
    check(tiles, plan, 2100)
    assert tiles.num_kv_tokens_read == 2000 + 32 * 100


def test_rows_that_see_about_as_far_back_share_a_tile() -> None:
    """Of an edge, 32 sequences see 990 keys and 32 see 100, in turns: one wide tile for each."""
    builder = Builder(16)

    def below(start: int) -> None:
        for _ in range(32):
            builder.tail(start, 10)
            builder.tail(start, 900)

    builder.edge(0, 128, below)
    plan = builder.plan()
    tiles = tiled(plan, window=1000)
    check(tiles, plan, 1000)
    assert tiles.num_kv_tokens_read == 990 + 100 + 32 * (10 + 900)


def test_rows_that_see_none_of_an_edge_are_not_among_its_rows() -> None:
    builder = Builder(16)

    def below(start: int) -> None:
        for tail_len in (10, 1000) * 32:
            builder.tail(start, tail_len)

    builder.edge(0, 128, below)
    plan = builder.plan()
    tiles = tiled(plan, window=1000)  # the last of 1,000 tokens sees up to the first
    check(tiles, plan, 1000)
    assert len(tiles.rows) == 32 + 64


def test_a_group_of_few_rows_in_the_window_loads_no_key_more_often_than_its_rows_alone() -> None:
    """Found by hypothesis: three of five rows saw the edge, too few for a wide tile."""
    builder = Builder(1)
    builder.edge(0, 1, lambda start: builder.tail(start, 5, 5))
    plan = builder.plan()
    tiny = TileShapes(
        narrow=TileShape(rows=2, keys=1, num_warps=1, num_stages=1),
        wide=TileShape(rows=8, keys=1, num_warps=1, num_stages=1),
        narrow_cost=TileCost(per_tile=0, per_key=1),
        wide_cost=TileCost(per_tile=0, per_key=2.5),
        per_partial=0,
        per_launch=0,
    )
    tiles, flat = (
        plan_tiles(one, window=4, group_size=1, num_kv_heads=1, shapes=tiny, num_programs=1)
        for one in (plan, flattened(plan))
    )
    assert tiles.num_kv_tokens_read <= flat.num_kv_tokens_read


# -- one buffer -----------------------------------------------------------------------------------


def assert_same(actual: TilePlan, expected: TilePlan) -> None:
    for one, other in zip(actual.groups, expected.groups, strict=True):
        assert one.shape == other.shape
        assert np.array_equal(one.tiles, other.tiles)
    for name in ("positions", "merged_rows", "merge_offsets", "partial_ids"):
        assert np.array_equal(getattr(actual, name), getattr(expected, name)), name


ROOMY = TileCapacity(
    num_rows=120,
    num_tiles=(400, 300),
    num_block_ids=4000,
    num_tile_rows=1000,
    num_merged_rows=120,
    num_partials=4000,
)


@given(forests(), windows, st.booleans())
def test_a_kernel_finds_the_plan_in_the_buffer(
    plan: AttentionPlan, window: int | None, is_fixed: bool
) -> None:
    plans = {one: tiled(plan, FREE, one) for one in (None, window)}
    packed = pack(plans, ROOMY if is_fixed else None)
    assert packed is not None
    for one, tiles in plans.items():
        found = unpack(packed, one, plan.num_rows)
        assert_same(found, tiles)
        check(found, plan, one)


def test_sections_do_not_overlap_and_are_aligned() -> None:
    plan = sharing(num_rows=30, prefix_len=4096, tail_len=100)
    packed = pack({window: tiled(plan, window=window) for window in (None, 512)}, ROOMY)
    assert packed is not None
    sections = [place for own in packed.sections.values() for place in places(own)]
    sections.append(packed.sections[None].positions)
    end = 0
    for section in sorted(sections):
        assert section.offset % 8 == 0
        assert section.offset >= end
        end = section.offset + section.length
    assert end <= len(packed.buffer)


def test_a_capacitys_places_are_the_same_for_every_plan() -> None:
    plans = [sharing(num_rows=n, prefix_len=2048, tail_len=64) for n in (1, 2, 33)]
    packed = [pack({512: tiled(plan, window=512), None: tiled(plan)}, ROOMY) for plan in plans]
    places_of = [None if one is None else (one.sections, len(one.buffer)) for one in packed]
    assert places_of[0] is not None
    assert places_of[1:] == places_of[:-1]


@pytest.mark.parametrize(
    "too_small",
    [
        {"num_rows": 32},
        {"num_tiles": (32, 300)},
        {"num_tiles": (400, 0)},
        {"num_block_ids": 200},
        {"num_tile_rows": 65},
        {"num_merged_rows": 32},
        {"num_partials": 65},
    ],
    ids=str,
)
def test_a_plan_that_does_not_fit_is_not_packed(too_small: dict[str, Any]) -> None:
    tiles = tiled(sharing(num_rows=33, prefix_len=4096, tail_len=100))
    assert pack({None: tiles}, ROOMY) is not None
    assert pack({None: tiles}, replace(ROOMY, **too_small)) is None


def test_windows_that_share_a_plan_share_its_place() -> None:
    tiles = tiled(sharing(num_rows=4, prefix_len=64, tail_len=64))
    packed, alone = pack({None: tiles, 4096: tiles}), pack({None: tiles})
    assert packed is not None
    assert alone is not None
    assert packed.sections[None] is packed.sections[4096]
    assert np.array_equal(packed.buffer, alone.buffer)


@pytest.mark.parametrize("num_rows", [1, 2, 8, 64, 256])
@pytest.mark.parametrize("context", [100, 1000, 8192])
def test_the_capacity_for_decoding_holds_steps_with_one_prefix_and_with_none(
    num_rows: int, context: int
) -> None:
    capacity = TileCapacity.for_decoding(
        num_rows,
        num_block_ids=num_rows * -(-(context + 32) // 16),
        rows_per_tile=SHAPES.wide.num_query_rows(4),
        programs_per_head=33,
    )
    plan = sharing(num_rows, context // 16 * 16, 32)
    for step in (plan, flattened(plan)):
        for window in (None, 512):
            assert capacity.holds(tiled(step, window=window))


@pytest.mark.parametrize("change", [{"rows": 0}, {"keys": -1}, {"num_warps": 0}])
def test_a_shape_of_nothing_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        replace(SHAPES.narrow, **change)


def test_a_wide_shape_with_fewer_rows_than_the_narrow_one_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer than the narrow"):
        replace(SHAPES, wide=replace(SHAPES.wide, rows=8))


def test_costs_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="costs"):
        TileCost(per_tile=-1, per_key=1)
    with pytest.raises(ValueError, match="costs"):
        TileCost(per_tile=0, per_key=0)
    with pytest.raises(ValueError, match="costs"):
        replace(SHAPES, per_partial=-1)
