"""Attention by native code: few calls a step and layer, each of which goes on where the ones before
left a row, from the root of the tree to the row's own tokens.

    rows       all shared segments of one depth, and at the end all private ones of several rows,
               over tokens wherever they lie, in tiles of rows and tokens. A segment's keys and
               values are read once for all its rows.
    tails      the private tokens of all sequences with a single row.

A row's bits depend on the tokens that it sees alone, not on how they are cut (csrc/attention.c).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sapwood.kernels.native import (
    TOKENS_PER_BLOCK,
    AttentionState,
    Native,
    RowSegments,
    Tails,
    has_whole_rows,
)
from sapwood.kernels.segments import AttentionPlan, PrivateSegment, SharedSegment, slots_of


@dataclass(frozen=True, slots=True)
class NativeAttention:
    """A plan as calls of native code: `segments` in this order, then `tails`."""

    plan: AttentionPlan
    segments: tuple[RowSegments, ...]
    tails: Tails | None
    num_kv_tokens_read: int


def plan_native(plan: AttentionPlan) -> NativeAttention:
    """The calls for a plan."""
    # Shared segments below each other in the tree are one call after the other, others one call.
    levels: list[list[SharedSegment]] = []
    level_of_row = np.zeros(plan.num_rows, dtype=np.int64)
    for shared in sorted(plan.shared, key=lambda segment: segment.start):
        level = int(level_of_row[shared.rows].max())
        level_of_row[shared.rows] = level + 1
        if level == len(levels):
            levels.append([])
        levels[level].append(shared)
    calls = [
        _row_segments(
            level,
            [s.rows.astype(np.int64) for s in level],
            [np.full(len(s.rows), s.length) for s in level],
            plan.block_size,
            is_last=False,
        )
        for level in levels
    ]
    several = [private for private in plan.private if private.num_rows > 1]
    if several:
        rows = [np.arange(s.first_row, s.first_row + s.num_rows) for s in several]
        seen = [np.arange(s.length - s.num_rows + 1, s.length + 1) for s in several]
        calls.append(_row_segments(several, rows, seen, plan.block_size, is_last=True))
    single = [private for private in plan.private if private.num_rows == 1]
    return NativeAttention(
        plan=plan,
        segments=tuple(calls),
        tails=_tails(single, plan.block_size) if single else None,
        num_kv_tokens_read=plan.num_kv_tokens,
    )


def _row_segments(
    segments: Sequence[SharedSegment | PrivateSegment],
    rows: Sequence[NDArray[np.int64]],
    seen: Sequence[NDArray[np.int64]],
    block_size: int,
    *,
    is_last: bool,
) -> RowSegments:
    """`rows` and `seen` of each of `segments`."""
    slots = [slots_of(segment.block_ids, block_size, segment.length) for segment in segments]
    return RowSegments(
        rows=torch.from_numpy(np.concatenate(rows)),
        seen=torch.from_numpy(np.concatenate(seen)),
        slots=torch.from_numpy(np.concatenate(slots)),
        first_rows=torch.from_numpy(_bounds(rows)),
        first_slots=torch.from_numpy(_bounds(slots)),
        is_first=torch.tensor([int(segment.start == 0) for segment in segments]),
        is_last=is_last,
    )


def _tails(segments: Sequence[PrivateSegment], block_size: int) -> Tails:
    """Of segments of one row each."""
    slots = [slots_of(segment.block_ids, block_size, segment.length) for segment in segments]
    num_blocks = [-(-segment.length // TOKENS_PER_BLOCK) for segment in segments]
    return Tails(
        rows=torch.tensor([segment.first_row for segment in segments]),
        is_first=torch.tensor([int(segment.start == 0) for segment in segments]),
        slots=torch.from_numpy(np.concatenate(slots)),
        first_slots=torch.from_numpy(_bounds(slots)),
        first_blocks=torch.from_numpy(np.cumsum([0, *num_blocks])),
        num_blocks=sum(num_blocks),
    )


def _bounds(arrays: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Where each begins when they lie behind each other, and where the last ends."""
    return np.cumsum([0, *(len(array) for array in arrays)])


def attend_natively(
    native: Native,
    prepared: NativeAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
) -> Tensor:
    """query [T, Hq, D]; key and value [num_slots, Hkv, D] of one layer."""
    dtype = query.dtype
    if dtype != torch.float32:
        query = query.float()
    if not has_whole_rows(query):
        query = query.contiguous()
    state = AttentionState(
        sums=query.new_empty(query.shape), totals=query.new_empty(*query.shape[:2], 2)
    )
    for segments in prepared.segments:
        native.attend_rows(query, key, value, segments, scale, state)
    if prepared.tails is not None:
        native.attend_tails(query, key, value, prepared.tails, scale, state)
    return state.sums.to(dtype)
