"""Reads tiles key by key, as a kernel does, and says what each query row got to see."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sapwood.kernels.segments import AttentionPlan, slots_of
from sapwood.kernels.tile_packing import PackedTiles, Section, WindowSections
from sapwood.kernels.tiles import TileColumn, TileGroup, TilePlan

Keys = list[tuple[int, int]]  # (position, slot)


@dataclass(frozen=True)
class Tile:
    """A tile taken apart. `partials` [num_rows], or none where its results are final."""

    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    rows: NDArray[np.int32]
    num_seen_by_all: int
    partials: NDArray[np.int64] | None


def tiles_of(plan: TilePlan, block_size: int) -> list[Tile]:
    return [
        _tile(plan, column.tolist(), block_size) for group in plan.groups for column in group.tiles
    ]


def _tile(plan: TilePlan, columns: list[int], block_size: int) -> Tile:
    block_offset, first, num_keys, row_offset, num_rows, num_seen, partial, reserved = columns
    assert reserved == 0
    positions = np.arange(first, first + num_keys)
    blocks = plan.block_ids[block_offset + positions // block_size - first // block_size]
    return Tile(
        positions=positions,
        slots=blocks.astype(np.int64) * block_size + positions % block_size,
        rows=plan.rows[row_offset : row_offset + num_rows],
        num_seen_by_all=num_seen,
        partials=None if partial < 0 else partial + np.arange(num_rows),
    )


def visible(tile: Tile, positions: NDArray[np.int32], window: int | None) -> NDArray[np.bool_]:
    """Which row of the tile sees which of its keys."""
    own = positions[tile.rows][:, None]
    sees = tile.positions <= own
    return sees if window is None else sees & (tile.positions > own - window)


def keys_of_rows(plan: TilePlan, block_size: int, window: int | None) -> dict[int, Keys]:
    """Every key of every row, as often as a tile shows it, in the order of positions."""
    keys: dict[int, Keys] = {row: [] for row in range(len(plan.positions))}
    for tile in tiles_of(plan, block_size):
        sees = visible(tile, plan.positions, window)
        for row, own in zip(tile.rows.tolist(), sees, strict=True):
            keys[row] += zip(tile.positions[own].tolist(), tile.slots[own].tolist(), strict=True)
    return {row: sorted(own) for row, own in keys.items()}


def expected_keys(plan: AttentionPlan, window: int | None) -> dict[int, Keys]:
    """The same from the segments, without tiles."""
    keys: dict[int, Keys] = {row: [] for row in range(plan.num_rows)}
    for shared in plan.shared:
        slots = slots_of(shared.block_ids, plan.block_size, shared.length).tolist()
        for row in shared.rows.tolist():
            keys[row] += zip(range(shared.start, shared.start + shared.length), slots, strict=True)
    for private in plan.private:
        slots = slots_of(private.block_ids, plan.block_size, private.length).tolist()
        before = private.length - private.num_rows
        for index in range(private.num_rows):
            keys[private.first_row + index] += zip(
                range(private.start, private.start + before + index + 1), slots, strict=False
            )
    for own in keys.values():
        own.sort()
    return keys if window is None else {row: own[-window:] for row, own in keys.items()}


def check_results(plan: TilePlan, block_size: int, window: int | None) -> None:
    """Every row has one final result, or merges each of its partial ones once, in order."""
    final: Counter[int] = Counter()
    partials: dict[int, list[tuple[int, int]]] = {}
    for tile in tiles_of(plan, block_size):
        if tile.partials is None:
            final.update(tile.rows.tolist())
            assert visible(tile, plan.positions, window).any(axis=1).all()
            continue
        for row, partial in zip(tile.rows.tolist(), tile.partials.tolist(), strict=True):
            partials.setdefault(row, []).append((int(tile.positions[0]), partial))
    assert set(final.values()) <= {1}
    assert not set(final) & set(partials)
    assert set(final) | set(partials) == set(range(len(plan.positions)))
    assert plan.merged_rows.tolist() == sorted(partials)
    for row, (begin, end) in zip(
        plan.merged_rows.tolist(), pairwise(plan.merge_offsets), strict=True
    ):
        expected = [partial for _, partial in sorted(partials[row])]
        assert plan.partial_ids[begin:end].tolist() == expected
    assert sorted(plan.partial_ids.tolist()) == list(range(plan.num_partials))


def check_columns(plan: TilePlan, block_size: int, window: int | None, group_size: int) -> None:
    """Tiles are neither empty nor too large, and what all rows see needs no mask indeed."""
    for group in plan.groups:
        rows = group.tiles[:, TileColumn.NUM_ROWS]
        assert ((rows >= 1) & (rows <= max(group.shape.rows // group_size, 1))).all()
        assert (np.diff(group.tiles[:, TileColumn.NUM_KEYS]) <= 0).all(), "the longest go first"
    for tile in tiles_of(plan, block_size):
        assert len(tile.positions) >= 1
        assert 0 <= tile.num_seen_by_all <= len(tile.positions)
        sees = visible(tile, plan.positions, window)
        assert sees[:, : tile.num_seen_by_all].all()
        assert sees.any(axis=0).all(), "a key that no row sees is loaded"


def unpack(packed: PackedTiles, window: int | None, num_rows: int) -> TilePlan:
    """The plan as a device reads it: sections by their offsets, their lengths from the counts.

    `num_rows` of the step: a kernel knows it from its queries."""
    sections = packed.sections[window]
    used = packed.buffer[: packed.num_used]
    *num_tiles, num_merged = _read(used, sections.counts, len(sections.groups) + 1).tolist()
    offsets = _read(used, sections.merge_offsets, num_merged + 1)
    num_partials = int(offsets[-1])
    return TilePlan(
        groups=tuple(
            TileGroup(
                shape=group.shape,
                tiles=_read(used, group.tiles, count * len(TileColumn)).reshape(-1, 8),
            )
            for group, count in zip(sections.groups, num_tiles, strict=True)
        ),
        block_ids=_read_all(used, sections.block_ids),
        rows=_read_all(used, sections.rows),
        positions=_read(used, sections.positions, num_rows),
        merged_rows=_read(used, sections.merged_rows, num_merged),
        merge_offsets=offsets,
        partial_ids=_read(used, sections.partial_ids, num_partials),
        num_partials=num_partials,
    )


def places(sections: WindowSections) -> list[Section]:
    """All sections of a window."""
    return [
        sections.counts,
        *(group.tiles for group in sections.groups),
        sections.rows,
        sections.merged_rows,
        sections.merge_offsets,
        sections.partial_ids,
        sections.block_ids,
    ]


def _read(buffer: NDArray[np.int32], section: Section, length: int) -> NDArray[np.int32]:
    assert length <= section.length
    return buffer[section.offset : section.offset + length]


def _read_all(buffer: NDArray[np.int32], section: Section) -> NDArray[np.int32]:
    return buffer[section.offset : section.offset + section.length]
