"""A step's tiles in one int32 buffer, so that one copy brings them to the device.

    buffer   [positions | counts, tiles, rows, merge lists, block ids of one window | of another )

Kernels read `counts` on the device: with a `TileCapacity` each section has a fixed place and size,
so that a CUDA graph can be replayed over other tiles, and programs beyond the counts return.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sapwood.kernels.tiles import Int32Array, TilePlan, TileShape


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
    raise NotImplementedError
