"""The kernels for CPUs: in C where there is a compiler, else torch's operations.

With native code (csrc/) attention is few calls a step and layer, each of which goes on where the
ones before left a row, from the root of the tree to the row's own tokens:

    rows       all shared segments of one depth, and at the end all private ones of several rows,
               over tokens wherever they lie, in tiles of rows and tokens. A segment's keys and
               values are read once for all its rows.
    tails      the private tokens of all sequences with a single row.

A row's bits depend on the tokens that it sees alone, not on how they are cut (csrc/attention.c).

With torch alone it is cut into pieces, one call of flash attention each:

    whole      a run of contiguous shared blocks for all its rows. The query heads of a KV group are
               folded into rows, so it is one product of [num_rows * G, D] with [D, L] per KV head,
               and its keys and values are read once.
    ragged     the private tails of several sequences with equally many rows each, padded to the
               longest. Sequences of similar length go together, since padding costs time too.
    causal     one sequence whose private tokens are just its rows: the upper triangle is skipped.
    masked     one sequence's rows behind private tokens that were computed before.

Every piece returns its log-sum-exp, by which a row's partial results are weighted (reference.py
has the formula). Which rows and slots it reads, its mask and the merge's indices depend on the
step alone, so that they are prepared once and all layers use them.

Padding repeats a slot of the same sequence: no row ever touches what another request wrote.

Where projections are in int8 and the processor multiplies bfloat16, keys and values are kept in it:
half the bytes and twice the rate, and of its rounding nothing shows beside int8's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from sapwood.kernels.huge_pages import HugePages, zeros
from sapwood.kernels.interface import Activation, KVCache, KVCacheSpec
from sapwood.kernels.native import (
    TOKENS_PER_BLOCK,
    AttentionState,
    Native,
    RowSegments,
    Tails,
    load,
)
from sapwood.kernels.projections import (
    Float32Projection,
    Int8Projection,
    linear,
    pack_float32,
    pack_int8,
)
from sapwood.kernels.reference import ReferenceAttention, ReferenceKernels
from sapwood.kernels.segments import AttentionPlan, PrivateSegment, SharedSegment

# Measured on two Zen 4 cores with 3 KV heads of 64: a call costs as much as 200 padded tokens;
# from 512 tokens on the calls of single rows are no slower than a padded one.
_MAX_PADDED_TOKENS = 256
_MAX_RAGGED_LENGTH = 512
_MAX_RAGGED_ROWS = 8
# oneDNN reads packed weights at 22 GB/s for 1 to 3 rows and at 26 for 4 (float32, 2 threads).
_MIN_PACKED_ROWS = 4
# A shorter run is cheaper to gather with its neighbours than to attend to on its own.
_MIN_RUN_TOKENS = 256


class _Partial(NamedTuple):
    """Partial attention of a piece's rows: out [n, Hkv, G, D] and lse float32 [n, Hkv, G]."""

    out: Tensor
    lse: Tensor


class _Projection(NamedTuple):
    """A linear layer, its weight [out, in] in oneDNN's layout or as it came."""

    weight: Tensor
    bias: Tensor | None


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


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """A plan as calls and merges. Where one piece holds all rows in order, nothing is merged."""

    plan: AttentionPlan
    pieces: tuple[_Piece, ...]
    merges: tuple[_Merge, ...]
    num_kv_tokens_read: int


@dataclass(frozen=True, slots=True)
class NativeAttention:
    """A plan as calls of native code: `segments` in this order, then `tails`."""

    plan: AttentionPlan
    segments: tuple[RowSegments, ...]
    tails: Tails | None
    num_kv_tokens_read: int


class CpuKernels:
    """`Kernels` on a CPU. Cache layout: `[num_layers, num_slots, num_kv_heads, head_dim]`.

    A run of contiguous blocks is a view in it, a row's keys are one contiguous write.
    """

    def __init__(self, *, quantize: bool = False) -> None:
        self._quantize = quantize
        self._native = self._load()
        self._reference = ReferenceKernels()
        self._weights_memory = HugePages()

    @staticmethod
    def _load() -> Native | None:
        return load()

    @property
    def name(self) -> str:
        return "cpu"

    def quantized(self) -> CpuKernels | None:
        return None if self._native is None else type(self)(quantize=True)

    @property
    def min_saved_tokens(self) -> int:
        return 256

    def kv_dtype(self, dtype: torch.dtype, head_dim: int) -> torch.dtype:
        is_rounded = self._quantize and dtype == torch.float32
        if is_rounded and self._attends_natively(torch.bfloat16, head_dim):
            return torch.bfloat16
        return dtype

    def _attends_natively(self, kv_dtype: torch.dtype, head_dim: int) -> bool:
        return self._native is not None and self._native.can_attend(kv_dtype, head_dim)

    def make_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        shape = (spec.num_layers, spec.num_slots, spec.num_kv_heads, spec.head_dim)
        return KVCache(spec, keys=zeros(shape, spec.dtype), values=zeros(shape, spec.dtype))

    def copy_rows(self, kv: KVCache, source: int, target: int, num_rows: int) -> None:
        block_size = kv.spec.block_size
        source_slots = slice(source * block_size, source * block_size + num_rows)
        target_slots = slice(target * block_size, target * block_size + num_rows)
        for tensor in (kv.keys, kv.values):
            tensor[:, target_slots] = tensor[:, source_slots]

    def plan_attention(
        self, plan: AttentionPlan, spec: KVCacheSpec
    ) -> TorchAttention | NativeAttention | ReferenceAttention:
        if spec.windows != {None}:
            return self._reference.plan_attention(plan, spec)
        if self._attends_natively(spec.dtype, spec.head_dim):
            return _plan_native(plan)
        pieces, rows_of_piece = [], []
        for planned in _plan_pieces(plan):
            pieces.append(planned.piece)
            rows_of_piece.append(planned.rows)
        return TorchAttention(
            plan=plan,
            pieces=tuple(pieces),
            merges=tuple(_plan_merges(plan.num_rows, rows_of_piece)),
            num_kv_tokens_read=plan.num_kv_tokens,
        )

    def write_kv(self, kv: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        keys, values = kv.keys[layer], kv.values[layer]
        if (
            self._native is not None
            and key.dtype == torch.float32
            and keys.dtype in (torch.float32, torch.bfloat16)
            and _has_whole_rows(key, value)
        ):
            self._native.write_kv(key, value, slots, keys, values)
            return
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)

    def attention(
        self,
        query: Tensor,
        kv: KVCache,
        layer: int,
        prepared: object,
        scale: float,
        *,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        has_extras = softcap is not None or sinks is not None
        if has_extras and isinstance(prepared, TorchAttention | NativeAttention):
            prepared = self._reference.plan_attention(prepared.plan, kv.spec)
        if isinstance(prepared, ReferenceAttention):
            return self._reference.attention(
                query, kv, layer, prepared, scale, softcap=softcap, sinks=sinks
            )
        key, value = kv.keys[layer], kv.values[layer]
        if isinstance(prepared, NativeAttention):
            fits = self._attends_natively(key.dtype, key.shape[2])
            if not fits or query.dtype not in (torch.float32, key.dtype):
                raise TypeError(_unlike(query, key))
            return _attend_natively(self._own_native(), prepared, query, key, value, scale)
        if not isinstance(prepared, TorchAttention):
            raise TypeError(f"expected a prepared attention, got {type(prepared).__name__}")
        if query.dtype != key.dtype:
            raise TypeError(_unlike(query, key))
        grouped = query.view(len(query), kv.spec.num_kv_heads, -1, query.shape[-1])
        partials = [piece.run(grouped, key, value, scale) for piece in prepared.pieces]
        if not prepared.merges:
            return partials[0].out.flatten(1, 2)
        return _merge(partials, prepared.merges, grouped).flatten(1, 2)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32:
            return functional.rms_norm(x, weight.shape, weight, eps)
        if self._native is not None and x.dim() in (2, 3) and _has_whole_rows(x):
            return self._native.rms_norm(x, weight, eps)
        # Half the operations of torch's own, which matters for few rows.
        scale = (x * x).mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        return (x * scale).mul_(weight)

    def rotary(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self._native is not None and heads.dtype == torch.float32 and _has_whole_rows(heads):
            return self._native.rotary(heads, cos.contiguous(), sin.contiguous())
        rotary_dim = cos.shape[-1]
        turning = heads[..., :rotary_dim]
        partner = turning.roll(rotary_dim // 2, dims=-1)
        turned = torch.addcmul(turning * cos, partner, sin).to(heads.dtype)
        if rotary_dim == heads.shape[-1]:
            return turned
        return torch.cat((turned, heads[..., rotary_dim:]), dim=-1)

    def activate_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        if (
            self._native is not None
            and gate_up.dtype == torch.float32
            and gate_up.dim() == 2
            and gate_up.is_contiguous()
        ):
            return self._native.activate_and_mul(gate_up, activation)
        gate, up = gate_up.chunk(2, dim=-1)
        match activation:
            case Activation.SILU:
                return functional.silu(gate).mul_(up)
            case Activation.GELU_TANH:
                return functional.gelu(gate, approximate="tanh").mul_(up)

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, is_last: bool = False
    ) -> object:
        if self._native is not None and self._quantize:
            return pack_int8(
                *(self._native, weight, bias),
                num_planes=2 if is_last else 1,
                take=self._weights_memory.take,
            )
        if weight.dtype == torch.float32:
            if self._native is not None:
                return pack_float32(self._native, weight, bias, take=self._weights_memory.take)
            # oneDNN's blocked layout: 1.1 to 1.3 times as fast as plain weights from 32 rows up, 2
            # times at 1 to 8 rows (2 threads, AVX-512).
            if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
                weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        return _Projection(weight, bias)

    def linear(self, x: Tensor, packed: object, residual: Tensor | None = None) -> Tensor:
        if isinstance(packed, (Float32Projection, Int8Projection)):
            return linear(self._own_native(), x, packed, residual)
        if not isinstance(packed, _Projection):
            raise TypeError(f"expected a packed Projection, got {type(packed).__name__}")
        if not packed.weight.is_mkldnn:
            out = functional.linear(x, *packed)
            return out if residual is None else out + residual
        num_rows = len(x)
        if num_rows < _MIN_PACKED_ROWS:
            x = functional.pad(x, (0, 0, 0, _MIN_PACKED_ROWS - num_rows))
        padded: Tensor = torch.ops.mkldnn._linear_pointwise(x, *packed, "none", [], "")
        out = padded[:num_rows]
        return out if residual is None else out.add_(residual)

    def norm_linear(self, x: Tensor, weight: Tensor, eps: float, packed: object) -> Tensor:
        if isinstance(packed, (Float32Projection, Int8Projection)):
            return linear(self._own_native(), x, packed, None, norm=(weight, eps))
        return self.linear(self.rms_norm(x, weight, eps), packed)

    def gated_linear(
        self,
        gate_up: Tensor,
        packed: object,
        residual: Tensor | None = None,
        *,
        activation: Activation = Activation.SILU,
    ) -> Tensor:
        if isinstance(packed, (Float32Projection, Int8Projection)):
            return linear(self._own_native(), gate_up, packed, residual, activation=activation)
        return self.linear(self.activate_and_mul(gate_up, activation), packed, residual)

    def _own_native(self) -> Native:
        assert self._native is not None, "packed or planned by other kernels"
        return self._native


class TorchCpuKernels(CpuKernels):
    """The same with torch's operations only, as on a machine without a C compiler."""

    @property
    def name(self) -> str:
        return "cpu-torch"

    @staticmethod
    def _load() -> None:
        return None


def _unlike(query: Tensor, key: Tensor) -> str:
    return (
        f"queries in {query.dtype} cannot attend to keys and values in {key.dtype} here; keep them "
        "in what kv_dtype says"
    )


def _has_whole_rows(*tensors: Tensor) -> bool:
    """Whether each row of these [rows, n] or [rows, heads, dim] is contiguous."""
    return all(t.stride(-1) == 1 and (t.dim() == 2 or t.stride(1) == t.shape[2]) for t in tensors)


def _attend_natively(
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
    if not _has_whole_rows(query):
        query = query.contiguous()
    state = AttentionState(
        sums=query.new_empty(query.shape), totals=query.new_empty(*query.shape[:2], 2)
    )
    for segments in prepared.segments:
        native.attend_rows(query, key, value, segments, scale, state)
    if prepared.tails is not None:
        native.attend_tails(query, key, value, prepared.tails, scale, state)
    return state.sums.to(dtype)


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


def _plan_native(plan: AttentionPlan) -> NativeAttention:
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
    slots = [_slots(segment.block_ids, block_size, segment.length) for segment in segments]
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
    slots = [_slots(segment.block_ids, block_size, segment.length) for segment in segments]
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


class _PlannedPiece(NamedTuple):
    piece: _Piece
    rows: NDArray[np.int64]  # the batch's rows in the order of the piece's


def _plan_pieces(plan: AttentionPlan) -> Iterator[_PlannedPiece]:
    for shared in plan.shared:
        yield from _whole_pieces(shared, plan.block_size)
    batched: dict[int, list[PrivateSegment]] = {}
    for private in plan.private:
        if private.num_rows <= _MAX_RAGGED_ROWS and private.length <= _MAX_RAGGED_LENGTH:
            batched.setdefault(private.num_rows, []).append(private)
        else:
            yield _single_piece(private, plan.block_size)
    for same_num_rows in batched.values():
        for group in _groups_of_similar_length(same_num_rows):
            if len(group) == 1:
                yield _single_piece(group[0], plan.block_size)
            else:
                yield _ragged_piece(group, plan.block_size)


def _whole_pieces(segment: SharedSegment, block_size: int) -> Iterator[_PlannedPiece]:
    """One piece per contiguous run, or a single gathered one where the runs are short."""
    breaks = np.flatnonzero(np.diff(segment.block_ids) != 1) + 1
    num_runs = len(breaks) + 1
    runs = [segment.block_ids]
    if segment.length >= num_runs * _MIN_RUN_TOKENS:
        runs = np.split(segment.block_ids, breaks)
    rows = segment.rows.astype(np.int64)
    for run in runs:
        slots = _slots(run, block_size, len(run) * block_size)
        piece = _Piece(rows=_index(rows), slots=_index(slots), num_sequences=1)
        yield _PlannedPiece(piece, rows)


def _single_piece(segment: PrivateSegment, block_size: int) -> _PlannedPiece:
    slots = _slots(segment.block_ids, block_size, segment.length)
    rows = np.arange(segment.first_row, segment.first_row + segment.num_rows)
    is_causal = segment.num_rows > 1 and segment.num_rows == segment.length
    needs_mask = segment.num_rows > 1 and not is_causal
    piece = _Piece(
        rows=_index(rows),
        slots=_index(slots),
        num_sequences=1,
        mask=_mask([segment], segment.length) if needs_mask else None,
        is_causal=is_causal,
    )
    return _PlannedPiece(piece, rows)


def _ragged_piece(segments: list[PrivateSegment], block_size: int) -> _PlannedPiece:
    """Segments of equally many rows, padded to the longest with each one's first slot."""
    length = max(segment.length for segment in segments)
    slots = np.empty((len(segments), length), dtype=np.int64)
    for padded, segment in zip(slots, segments, strict=True):
        padded[: segment.length] = _slots(segment.block_ids, block_size, segment.length)
        padded[segment.length :] = padded[0]
    first_rows = np.array([segment.first_row for segment in segments], dtype=np.int64)
    rows = (first_rows[:, None] + np.arange(segments[0].num_rows)).reshape(-1)
    piece = _Piece(
        rows=_index(rows),
        slots=_index(slots.reshape(-1)),
        num_sequences=len(segments),
        mask=_mask(segments, length),
    )
    return _PlannedPiece(piece, rows)


def _groups_of_similar_length(segments: list[PrivateSegment]) -> Iterator[list[PrivateSegment]]:
    """Cut the segments, longest first, wherever padding would cost more than one more call."""
    group: list[PrivateSegment] = []
    num_padded = 0
    for segment in sorted(segments, key=lambda s: -s.length):
        num_padded += group[0].length - segment.length if group else 0
        if num_padded > _MAX_PADDED_TOKENS:
            yield group
            group, num_padded = [], 0
        group.append(segment)
    yield group


def _mask(segments: list[PrivateSegment], length: int) -> Tensor:
    """float32 [num_sequences, rows per sequence, length]: -inf for what a row does not see."""
    num_rows = segments[0].num_rows
    ends = np.array([segment.length for segment in segments])[:, None] - num_rows
    last_seen = ends + np.arange(num_rows)
    hidden = np.arange(length) > last_seen[..., None]
    return torch.zeros(hidden.shape).masked_fill_(torch.from_numpy(hidden), -torch.inf)


def _slots(block_ids: NDArray[np.int32], block_size: int, length: int) -> NDArray[np.int64]:
    """The slots of the first `length` tokens of a block table, int64 `[length]`."""
    first_slots = block_ids.astype(np.int64)[:, None] * block_size
    return (first_slots + np.arange(block_size)).reshape(-1)[:length]


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
