"""Attention by native code: few calls a step and layer, each of which goes on where the ones before
left a row, from the root of the tree to the row's own tokens.

    rows       all shared segments of one depth, and at the end all private ones of several rows,
               over tokens wherever they lie, in tiles of rows and tokens. A segment's keys and
               values are read once for all its rows.
    tails      the private tokens of all sequences with a single row.

A row's bits depend on the tokens that it sees alone, not on how they are cut (csrc/attention.c).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

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
from sapwood.kernels.segments import AttentionPlan, PrivateSegment, slots_of
from sapwood.kernels.windows import SeenSegment, narrowed, seen_private, seen_shared


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeCalls:
    """What rows see through one window as calls of native code: `segments` in order, then `tails`.

    `is_windowed`: a row may begin in any segment, so that its state has to be defined before.
    """

    segments: tuple[RowSegments, ...]
    tails: Tails | None
    is_windowed: bool
    num_kv_tokens: int


@dataclass(frozen=True, slots=True)
class NativeAttention:
    """A plan as calls, for each of the layers' windows."""

    calls_by_window: Mapping[int | None, NativeCalls]

    @property
    def num_kv_tokens_read(self) -> int:
        return max(calls.num_kv_tokens for calls in self.calls_by_window.values())


def plan_native(plan: AttentionPlan, windows: Iterable[int | None]) -> NativeAttention:
    """The calls for a plan. Windows that hide nothing share theirs."""
    calls = cache(partial(_plan_calls, plan))
    return NativeAttention({window: calls(narrowed(plan, window)) for window in windows})


def attend_natively(
    native: Native,
    calls: NativeCalls,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query [T, Hq, D]; key and value [num_slots, Hkv, D] of one layer; sinks [Hq]."""
    dtype = query.dtype
    if dtype != torch.float32:
        query = query.float()
    if not has_whole_rows(query):
        query = query.contiguous()
    make_state = AttentionState.of_nothing if calls.is_windowed else AttentionState.undefined
    state = make_state(query)
    for segments in calls.segments:
        native.attend_rows(query, key, value, segments, scale, softcap, state)
    if calls.tails is not None:
        totals = native.attend_tails(query, key, value, calls.tails, scale, softcap, state)
        if sinks is not None:
            state.totals.index_copy_(0, calls.tails.rows, totals)
    if sinks is not None:
        native.add_sinks(state, sinks.float().contiguous())
    return state.sums.to(dtype)


def _plan_calls(plan: AttentionPlan, window: int | None) -> NativeCalls:
    several = [
        seen_private(segment, plan.block_size, window)
        for segment in plan.private
        if segment.num_rows > 1
    ]
    segments = tuple(
        _row_segments(together, is_last=together is several, is_windowed=window is not None)
        for together in (*_levels(plan, window), several)
        if together
    )
    single = [segment for segment in plan.private if segment.num_rows == 1]
    tails = _tails(single, plan.block_size, window) if single else None
    return NativeCalls(
        segments=segments,
        tails=tails,
        is_windowed=window is not None,
        num_kv_tokens=sum(len(s.slots) for s in segments) + (len(tails.slots) if tails else 0),
    )


def _levels(plan: AttentionPlan, window: int | None) -> list[list[SeenSegment]]:
    """Shared segments in the order of their calls: those below each other in the tree are one call
    after the other, others one call."""
    levels: list[list[SeenSegment]] = []
    level_of_row = np.zeros(plan.num_rows, dtype=np.int64)
    for shared in seen_shared(plan, window):
        level = int(level_of_row[shared.rows].max())
        level_of_row[shared.rows] = level + 1
        if level == len(levels):
            levels.append([])
        levels[level].append(shared)
    return levels


def _row_segments(
    segments: Sequence[SeenSegment], *, is_last: bool, is_windowed: bool
) -> RowSegments:
    begins = torch.from_numpy(np.concatenate([s.begins for s in segments])) if is_windowed else None
    return RowSegments(
        rows=torch.from_numpy(np.concatenate([s.rows for s in segments])),
        begins=begins,
        ends=torch.from_numpy(np.concatenate([s.ends for s in segments])),
        slots=torch.from_numpy(np.concatenate([s.slots for s in segments])),
        first_rows=torch.from_numpy(_bounds([len(s.rows) for s in segments])),
        first_slots=torch.from_numpy(_bounds([len(s.slots) for s in segments])),
        is_first=torch.tensor([int(segment.start == 0) for segment in segments]),
        is_last=is_last,
    )


def _tails(segments: Sequence[PrivateSegment], block_size: int, window: int | None) -> Tails:
    """Of segments of one row each, which sees the last tokens of its own."""
    num_hidden = [0 if window is None else max(s.length - window, 0) for s in segments]
    slots = [
        slots_of(segment.block_ids, block_size, segment.length)[hidden:]
        for segment, hidden in zip(segments, num_hidden, strict=True)
    ]
    first_blocks = _bounds([-(-len(own) // TOKENS_PER_BLOCK) for own in slots])
    return Tails(
        rows=torch.tensor([segment.first_row for segment in segments]),
        is_first=torch.tensor([int(segment.start == 0) for segment in segments]),
        slots=torch.from_numpy(np.concatenate(slots)),
        first_slots=torch.from_numpy(_bounds([len(own) for own in slots])),
        first_blocks=torch.from_numpy(first_blocks),
        num_blocks=int(first_blocks[-1]),
    )


def _bounds(lengths: Sequence[int]) -> NDArray[np.int64]:
    """Where arrays of these lengths begin behind each other, and where the last ends."""
    return np.cumsum([0, *lengths])
