"""A step's tiles in one int32 buffer, so that one copy brings them to the device.

    buffer   [positions | counts, tiles, rows, merge lists, block ids of one window | of another )

Kernels read `counts` on the device: with a `TileCapacity` each section has a fixed place and size,
so that a CUDA graph can be replayed over other tiles, and programs beyond the counts return.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sapwood.kernels.segments import Int32Array
from sapwood.kernels.tiles import TileColumn, TilePlan, TileShape

_ALIGNMENT = 8  # elements: 32 bytes, a tile's and a sector of memory's


class Section(NamedTuple):
    """`buffer[offset : offset + length]`; offsets are multiples of 8 elements (32 bytes)."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileCapacity:
    """What fits into a buffer of fixed places, for each window. `num_tiles` by group, as in
    `TilePlan.groups`; `num_tile_rows` is the length of `TilePlan.rows`."""

    num_rows: int
    num_tiles: tuple[int, ...]
    num_block_ids: int
    num_tile_rows: int
    num_merged_rows: int
    num_partials: int

    @classmethod
    def of(cls, plan: TilePlan) -> TileCapacity:
        """What holds this plan and no more."""
        return cls(
            num_rows=len(plan.positions),
            num_tiles=tuple(group.num_tiles for group in plan.groups),
            num_block_ids=len(plan.block_ids),
            num_tile_rows=len(plan.rows),
            num_merged_rows=len(plan.merged_rows),
            num_partials=plan.num_partials,
        )

    @classmethod
    def for_decoding(
        cls, num_rows: int, *, num_block_ids: int, rows_per_tile: int, programs_per_head: int
    ) -> TileCapacity:
        """Room for steps of `num_rows` rows of as many sequences, reasoned and not a bound: a tail
        for each row and as many edges, four ranges a row, and two waves of pieces with as many
        rows as tiles take (four of tiles). Deep trees of many edges may not fit; such a step runs
        without a graph.

        `num_block_ids`: entries of all block tables, if nothing is shared. `rows_per_tile`: query
        rows of a wide tile.
        """
        num_tiles = 2 * num_rows + 4 * programs_per_head
        return cls(
            num_rows=num_rows,
            num_tiles=(num_tiles, num_tiles),
            num_block_ids=num_block_ids,
            num_tile_rows=4 * num_rows,
            num_merged_rows=num_rows,
            num_partials=4 * num_rows + 2 * programs_per_head * min(rows_per_tile, num_rows),
        )

    def holds(self, plan: TilePlan) -> bool:
        needed = TileCapacity.of(plan)
        return (
            needed.num_rows <= self.num_rows
            and all(a <= b for a, b in zip(needed.num_tiles, self.num_tiles, strict=True))
            and needed.num_block_ids <= self.num_block_ids
            and needed.num_tile_rows <= self.num_tile_rows
            and needed.num_merged_rows <= self.num_merged_rows
            and needed.num_partials <= self.num_partials
        )


class GroupSection(NamedTuple):
    """The tiles of one launch. `num_tiles` is the grid's size: with a capacity, the capacity's."""

    shape: TileShape
    num_tiles: int
    tiles: Section


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSections:
    """Where the arrays of one `TilePlan` lie.

    `counts` [len(groups) + 1]: the tiles of each group, and the merged rows. `num_partials`
    and `num_merged_rows` are what the workspace and the grid of the merge have to hold: with a
    capacity, the capacity's. `positions` is the same section for all windows.
    """

    counts: Section
    groups: tuple[GroupSection, ...]
    block_ids: Section
    rows: Section
    positions: Section
    merged_rows: Section
    merge_offsets: Section
    partial_ids: Section
    num_merged_rows: int
    num_partials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTiles:
    """`buffer` int32 [*] and where in it each window's arrays lie.

    `num_used` leading elements are what has to be copied. Without a capacity windows that share a
    plan share its sections.
    """

    buffer: Int32Array
    num_used: int
    sections: Mapping[int | None, WindowSections]

    @property
    def num_partials(self) -> int:
        """What a workspace holds that all windows use in turn."""
        return max(sections.num_partials for sections in self.sections.values())


def pack(
    plans: Mapping[int | None, TilePlan], capacity: TileCapacity | None = None
) -> PackedTiles | None:
    """The plans of a step by window in one buffer; None where one does not fit the capacity.

    With the same windows and capacity the sections are the same, whatever the plans.
    """
    if capacity is not None and not all(capacity.holds(plan) for plan in plans.values()):
        return None
    cursor = _Cursor()
    some = next(iter(plans.values()))
    positions = cursor.take(capacity.num_rows if capacity else len(some.positions))
    sections: dict[int | None, WindowSections] = {}
    laid_out: list[tuple[TilePlan, WindowSections]] = []
    for window in sorted(plans, key=lambda window: (window is None, window)):
        plan = plans[window]
        known = [own for other, own in laid_out if other is plan and capacity is None]
        if not known:
            known = [_lay_out(plan, capacity or TileCapacity.of(plan), positions, cursor)]
            laid_out.append((plan, known[0]))
        sections[window] = known[0]
    buffer = np.zeros(cursor.end, dtype=np.int32)
    for plan, own in laid_out:
        _fill(buffer, plan, own)
    last_plan, last = laid_out[-1]
    return PackedTiles(
        buffer=buffer,
        num_used=last.block_ids.offset + len(last_plan.block_ids),
        sections=sections,
    )


class _Cursor:
    """Takes sections one behind the other."""

    def __init__(self) -> None:
        self.end = 0

    def take(self, length: int) -> Section:
        section = Section(self.end, length)
        self.end += -(-length // _ALIGNMENT) * _ALIGNMENT
        return section


def _lay_out(
    plan: TilePlan, capacity: TileCapacity, positions: Section, cursor: _Cursor
) -> WindowSections:
    """Of the plan only the shapes of its groups are looked at. Block ids come last: of all arrays
    they fill their capacity least, and what lies behind them need not be copied."""
    return WindowSections(
        counts=cursor.take(len(plan.groups) + 1),
        groups=tuple(
            GroupSection(group.shape, num_tiles, cursor.take(num_tiles * len(TileColumn)))
            for group, num_tiles in zip(plan.groups, capacity.num_tiles, strict=True)
        ),
        positions=positions,
        rows=cursor.take(capacity.num_tile_rows),
        merged_rows=cursor.take(capacity.num_merged_rows),
        merge_offsets=cursor.take(capacity.num_merged_rows + 1),
        partial_ids=cursor.take(capacity.num_partials),
        block_ids=cursor.take(capacity.num_block_ids),
        num_merged_rows=capacity.num_merged_rows,
        num_partials=capacity.num_partials,
    )


def _fill(buffer: Int32Array, plan: TilePlan, sections: WindowSections) -> None:
    counts = [*(group.num_tiles for group in plan.groups), len(plan.merged_rows)]
    filled = [
        (sections.counts, np.array(counts, dtype=np.int32)),
        *(
            (section.tiles, group.tiles.reshape(-1))
            for section, group in zip(sections.groups, plan.groups, strict=True)
        ),
        (sections.positions, plan.positions),
        (sections.rows, plan.rows),
        (sections.merged_rows, plan.merged_rows),
        (sections.merge_offsets, plan.merge_offsets),
        (sections.partial_ids, plan.partial_ids),
        (sections.block_ids, plan.block_ids),
    ]
    for section, values in filled:
        buffer[section.offset : section.offset + len(values)] = values
