"""Attention by torch's operations alone: pieces, one call of flash attention each.

    whole      a run of contiguous shared blocks for all its rows. The query heads of a KV group are
               folded into rows, so it is one product of [num_rows * G, D] with [D, L] per KV head,
               and its keys and values are read once.
    ragged     the private tails of several sequences with equally many rows each, padded to the
               longest. Sequences of similar length go together, since padding costs time too.
    causal     one sequence whose private tokens are just its rows: the upper triangle is skipped.
    masked     any rows over any tokens: those of one sequence behind private tokens that were
               computed before, or behind a window.

Every piece returns its log-sum-exp, by which a row's partial results are weighted (reference.py
has the formula). Which rows and slots it reads, its mask and the merge's indices depend on the
step alone, so that they are prepared once and all layers use them.

Padding repeats a slot of the same sequence: no row ever touches what another request wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sapwood.kernels.reference import ReferenceAttention
from sapwood.kernels.segments import AttentionPlan
from sapwood.kernels.windows import SeenSegment, narrowed, seen_private, seen_shared

# Measured on two Zen 4 cores with 3 KV heads of 64: a call costs as much as 200 padded tokens;
# from 512 tokens on the calls of single rows are no slower than a padded one.
_MAX_PADDED_TOKENS = 256
_MAX_RAGGED_LENGTH = 512
_MAX_RAGGED_ROWS = 8
# A shorter run is cheaper to gather with its neighbours than to attend to on its own.
_MIN_RUN_TOKENS = 256


class _Partial(NamedTuple):
    """Partial attention of a piece's rows: out [n, Hkv, G, D] and lse float32 [n, Hkv, G]."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """One call of flash attention over `num_sequences` times `length` slots.

    `rows` and `slots` are slices where they are contiguous (no copy), else int64 indices
    [num_sequences * rows per sequence] and [num_sequences * length]. `mask` is float32
    [num_sequences, rows per sequence, length], 0 where seen and -inf where not; None: all is seen,
    or with `is_causal` the lower triangle.
    """

    rows: slice | Tensor
    slots: slice | Tensor
    num_sequences: int
    mask: Tensor | None = None
    is_causal: bool = False

    def run(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> _Partial:
        """query [T, Hkv, G, D]; key and value [num_slots, Hkv, D] of one layer."""
        query = _take(query, self.rows)
        key, value = _take(key, self.slots), _take(value, self.slots)
        if self.num_sequences == 1 and (self.is_causal or self.mask is not None):
            return _per_head(query, key, value, self.mask, scale)
        return _heads_folded(query, key, value, self.num_sequences, self.mask, scale)


@dataclass(frozen=True, slots=True)
class _Merge:
    """The rows that lie in equally many pieces, and where their partial results are.

    `rows` int64 [n]; `parts` int64 [n * num_parts] indexes the pieces' rows behind each other.
    """

    rows: Tensor
    parts: Tensor
    num_parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchCalls:
    """What rows see through one window as calls and merges.

    Where one piece holds all rows in order, nothing is merged.
    """

    pieces: tuple[_Piece, ...]
    merges: tuple[_Merge, ...]
    num_kv_tokens: int


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """A plan as calls, for each of the layers' windows; `reference` makes it ready for what flash
    attention lacks, when it is first asked."""

    calls_by_window: Mapping[int | None, TorchCalls]
    reference: Callable[[], ReferenceAttention]

    @property
    def num_kv_tokens_read(self) -> int:
        return max(calls.num_kv_tokens for calls in self.calls_by_window.values())


def plan_torch(
    plan: AttentionPlan,
    windows: Iterable[int | None],
    reference: Callable[[], ReferenceAttention],
) -> TorchAttention:
    """The calls for a plan. Windows that hide nothing share theirs; `reference` is called once."""
    calls = cache(partial(_plan_calls, plan))
    by_window = {window: calls(narrowed(plan, window)) for window in windows}
    return TorchAttention(by_window, cache(reference))


def attend_with_torch(
    calls: TorchCalls,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    sinks: Tensor | None,
) -> Tensor:
    """query [T, Hq, D]; key and value [num_slots, Hkv, D] of one layer; sinks [Hq]."""
    grouped = query.view(len(query), key.shape[1], -1, query.shape[-1])
    partials = [piece.run(grouped, key, value, scale) for piece in calls.pieces]
    out = _merge(partials, calls.merges, grouped) if calls.merges else partials[0].out
    if sinks is not None:
        # exp(lse) / (exp(lse) + exp(sink)): the share that the tokens have beside the sink.
        lse = _merge_lse(partials, calls.merges, grouped) if calls.merges else partials[0].lse
        share = torch.sigmoid(lse - sinks.float().view(grouped.shape[1:3]))
        out = (out * share.unsqueeze(-1)).to(query.dtype)
    return out.flatten(1, 2)


def _plan_calls(plan: AttentionPlan, window: int | None) -> TorchCalls:
    shared = list(seen_shared(plan, window))
    private = [seen_private(segment, plan.block_size, window) for segment in plan.private]
    planned = [*_shared_pieces(shared), *_private_pieces(private)]
    return TorchCalls(
        pieces=tuple(one.piece for one in planned),
        merges=tuple(_plan_merges(plan.num_rows, [one.rows for one in planned])),
        num_kv_tokens=sum(len(seen.slots) for seen in (*shared, *private)),
    )


def _take(tensor: Tensor, index: slice | Tensor) -> Tensor:
    return tensor[index] if isinstance(index, slice) else tensor.index_select(0, index)


def _heads_folded(
    query: Tensor, key: Tensor, value: Tensor, num_sequences: int, mask: Tensor | None, scale: float
) -> _Partial:
    """All query heads of a KV head as rows of one product, for each sequence.

    query [N * R, Hkv, G, D]; key and value [N * L, Hkv, D]; mask [N, R, L].
    """
    num_kv_heads, num_groups, head_dim = query.shape[1:]
    num_rows = len(query) // num_sequences
    split = query.view(num_sequences, num_rows, num_kv_heads, num_groups, head_dim)
    folded = split.transpose(1, 2).reshape(num_sequences, num_kv_heads, -1, head_dim)
    if mask is not None:
        by_group = mask.unsqueeze(2).expand(-1, -1, num_groups, -1).flatten(1, 2)
        mask = by_group.unsqueeze(1).expand(-1, num_kv_heads, -1, -1)
    out, lse = _flash(
        folded,
        key.view(num_sequences, -1, num_kv_heads, head_dim).transpose(1, 2),
        value.view(num_sequences, -1, num_kv_heads, head_dim).transpose(1, 2),
        mask=mask,
        is_causal=False,
        scale=scale,
    )
    rows_first = (num_sequences, num_kv_heads, num_rows, num_groups)
    return _Partial(
        out=out.view(*rows_first, head_dim).transpose(1, 2).flatten(0, 1),
        lse=lse.view(rows_first).transpose(1, 2).flatten(0, 1),
    )


def _per_head(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> _Partial:
    """Each query head on its own, one sequence; without a mask the lower triangle is seen.

    query [R, Hkv, G, D]; key and value [L, Hkv, D]; mask [1, R, L]. KV heads are flash attention's
    batch and the query heads of one its heads, over keys that are repeated without a copy.
    """
    num_groups = query.shape[2]
    out, lse = _flash(
        query.permute(1, 2, 0, 3),
        key.transpose(0, 1).unsqueeze(1).expand(-1, num_groups, -1, -1),
        value.transpose(0, 1).unsqueeze(1).expand(-1, num_groups, -1, -1),
        mask=None if mask is None else mask.expand(query.shape[1], num_groups, -1, -1),
        is_causal=mask is None,
        scale=scale,
    )
    return _Partial(out=out.permute(2, 0, 1, 3), lse=lse.permute(2, 0, 1))


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> _Partial:
    """[B, H, n, D] over [B, H, L, D]: out like query, lse float32 [B, H, n]. Reads any strides."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return _Partial(out, lse)


def _merge(partials: list[_Partial], merges: Iterable[_Merge], like: Tensor) -> Tensor:
    """Each row's partial results, weighted by their share of the softmax's denominator."""
    outs = torch.cat([partial.out for partial in partials])
    lses = torch.cat([partial.lse for partial in partials])
    merged = torch.empty_like(like, memory_format=torch.contiguous_format)
    for merge in merges:
        out = outs.index_select(0, merge.parts)
        if merge.num_parts > 1:
            by_row = (len(merge.rows), merge.num_parts)
            lse = lses.index_select(0, merge.parts).view(*by_row, *lses.shape[1:])
            weights = lse.softmax(dim=1).unsqueeze(-1)
            out = (out.view(*by_row, *out.shape[1:]) * weights).sum(dim=1)
        merged.index_copy_(0, merge.rows, out.to(merged.dtype))
    return merged


def _merge_lse(partials: list[_Partial], merges: Iterable[_Merge], like: Tensor) -> Tensor:
    """Each row's log-sum-exp over all of its pieces, float32 [T, Hkv, G]."""
    lses = torch.cat([partial.lse for partial in partials])
    merged = lses.new_empty(like.shape[:-1])
    for merge in merges:
        lse = lses.index_select(0, merge.parts)
        by_row = lse.view(len(merge.rows), merge.num_parts, *lse.shape[1:])
        merged.index_copy_(0, merge.rows, by_row.logsumexp(dim=1))
    return merged


class _PlannedPiece(NamedTuple):
    piece: _Piece
    rows: NDArray[np.int64]  # the batch's rows in the order of the piece's


def _shared_pieces(segments: Iterable[SeenSegment]) -> Iterator[_PlannedPiece]:
    for seen in segments:
        if seen.is_seen_whole:
            yield from _whole_pieces(seen)
        else:
            yield _single_piece(seen)


def _private_pieces(segments: Iterable[SeenSegment]) -> Iterator[_PlannedPiece]:
    batched: dict[int, list[SeenSegment]] = {}
    for seen in segments:
        if len(seen.rows) <= _MAX_RAGGED_ROWS and len(seen.slots) <= _MAX_RAGGED_LENGTH:
            batched.setdefault(len(seen.rows), []).append(seen)
        else:
            yield _single_piece(seen)
    for same_num_rows in batched.values():
        for group in _groups_of_similar_length(same_num_rows):
            yield _single_piece(group[0]) if len(group) == 1 else _ragged_piece(group)


def _whole_pieces(seen: SeenSegment) -> Iterator[_PlannedPiece]:
    """One piece per contiguous run, or a single gathered one where the runs are short."""
    breaks = np.flatnonzero(np.diff(seen.slots) != 1) + 1
    num_runs = len(breaks) + 1
    runs = [seen.slots]
    if len(seen.slots) >= num_runs * _MIN_RUN_TOKENS:
        runs = np.split(seen.slots, breaks)
    for run in runs:
        piece = _Piece(rows=_index(seen.rows), slots=_index(run), num_sequences=1)
        yield _PlannedPiece(piece, seen.rows)


def _single_piece(seen: SeenSegment) -> _PlannedPiece:
    is_triangle = len(seen.rows) == len(seen.slots) and not seen.begins.any()
    is_causal = is_triangle and len(seen.rows) > 1
    piece = _Piece(
        rows=_index(seen.rows),
        slots=_index(seen.slots),
        num_sequences=1,
        mask=None if is_causal or seen.is_seen_whole else _mask(seen.visible[None]),
        is_causal=is_causal,
    )
    return _PlannedPiece(piece, seen.rows)


def _ragged_piece(segments: list[SeenSegment]) -> _PlannedPiece:
    """Segments of equally many rows, padded to the longest with each one's first slot."""
    length = max(len(seen.slots) for seen in segments)
    slots = np.empty((len(segments), length), dtype=np.int64)
    visible = np.zeros((len(segments), len(segments[0].rows), length), dtype=np.bool_)
    for index, seen in enumerate(segments):
        slots[index] = seen.slots[0]
        slots[index, : len(seen.slots)] = seen.slots
        visible[index, :, : len(seen.slots)] = seen.visible
    rows = np.concatenate([seen.rows for seen in segments])
    piece = _Piece(
        rows=_index(rows),
        slots=_index(slots.reshape(-1)),
        num_sequences=len(segments),
        mask=_mask(visible),
    )
    return _PlannedPiece(piece, rows)


def _groups_of_similar_length(segments: list[SeenSegment]) -> Iterator[list[SeenSegment]]:
    """Cut the segments, longest first, wherever padding would cost more than one more call."""
    group: list[SeenSegment] = []
    num_padded = 0
    for seen in sorted(segments, key=lambda s: -len(s.slots)):
        num_padded += len(group[0].slots) - len(seen.slots) if group else 0
        if num_padded > _MAX_PADDED_TOKENS:
            yield group
            group, num_padded = [], 0
        group.append(seen)
    yield group


def _mask(visible: NDArray[np.bool_]) -> Tensor:
    """float32 [num_sequences, rows per sequence, length]: -inf for what a row does not see."""
    return torch.zeros(visible.shape).masked_fill_(torch.from_numpy(~visible), -torch.inf)


def _index(indices: NDArray[np.int64]) -> slice | Tensor:
    """A slice where the indices are contiguous and ascending, which torch takes without a copy."""
    first, num_indices = int(indices[0]), len(indices)
    if indices[-1] - first == num_indices - 1 and (np.diff(indices) == 1).all():
        return slice(first, first + num_indices)
    return torch.from_numpy(indices)


def _plan_merges(num_rows: int, rows_of_piece: list[NDArray[np.int64]]) -> Iterator[_Merge]:
    """Group the rows by their number of pieces. Nothing where one piece has all rows in order."""
    row_of_part = np.concatenate(rows_of_piece)
    if len(rows_of_piece) == 1 and (np.diff(row_of_part) == 1).all():
        return
    parts_by_row = np.argsort(row_of_part, kind="stable")
    num_parts_of_row = np.bincount(row_of_part, minlength=num_rows)
    first_part_of_row = np.cumsum(num_parts_of_row) - num_parts_of_row
    for num_parts in np.unique(num_parts_of_row):
        rows = np.flatnonzero(num_parts_of_row == num_parts)
        parts = parts_by_row[first_part_of_row[rows][:, None] + np.arange(num_parts)]
        yield _Merge(
            rows=torch.from_numpy(rows),
            parts=torch.from_numpy(parts.reshape(-1)),
            num_parts=int(num_parts),
        )
