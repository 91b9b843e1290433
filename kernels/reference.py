"""The kernels in plain torch, written to be read. Every other backend is checked against the same
oracle as this one.

Attention over several segments. For one row and one head let segment `s` hold the keys `k_i` and
values `v_i`, i in s, with scores `a_i = scale * <q, k_i>`. Its partial result is

    out_s = sum_i exp(a_i) v_i / sum_i exp(a_i)        lse_s = log sum_i exp(a_i)

and attention over the union of disjoint segments is (Dao et al. 2022; Juravsky et al. 2024, eq. 5)

    out = sum_s w_s out_s                               w_s = exp(lse_s) / sum_t exp(lse_t)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sapwood.kernels import drawing
from sapwood.kernels.composed import rotary_and_write
from sapwood.kernels.interface import (
    QUANTIZED_KV_DTYPES,
    Activation,
    DrawnTokens,
    DrawParams,
    HeadNorms,
    KVCache,
    KVCacheSpec,
    RowCopy,
)
from sapwood.kernels.kv_quantization import decode, encode
from sapwood.kernels.segments import AttentionPlan
from sapwood.kernels.staging import Staging
from sapwood.kernels.windows import seen_private, seen_shared


class PartialAttention(NamedTuple):
    """Attention of some rows over one segment: `out` [n, Hq, D] and `lse` [n, Hq], float32."""

    out: Tensor
    lse: Tensor


class Projection(NamedTuple):
    """A linear layer as the checkpoint has it: weight [out, in] and bias [out]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class SegmentIndices:
    """One segment: its query rows int64 [n], its slots int64 [L], and which row sees which slot.

    `visible` is bool [n, L]; each row sees at least one slot.
    """

    rows: Tensor
    slots: Tensor
    visible: Tensor


@dataclass(frozen=True, slots=True)
class ReferenceAttention:
    """A plan as the segments' indices, for each of the layers' windows."""

    segments_by_window: Mapping[int | None, tuple[SegmentIndices, ...]]

    @property
    def num_kv_tokens_read(self) -> int:
        return max(
            sum(len(segment.slots) for segment in segments)
            for segments in self.segments_by_window.values()
        )


class ReferenceKernels:
    """`Kernels` on any device. Cache layout: `[num_layers, num_slots, num_kv_heads, head_dim]`."""

    def __init__(self, *, kv_dtype: torch.dtype | None = None) -> None:
        self._kv_dtype = kv_dtype

    @property
    def name(self) -> str:
        return "reference"

    def quantized(self) -> None:
        return None

    def with_kv_dtype(self, dtype: torch.dtype) -> ReferenceKernels | None:
        return type(self)(kv_dtype=dtype) if dtype in QUANTIZED_KV_DTYPES else None

    @property
    def min_saved_tokens(self) -> int:
        return 1

    def kv_dtype(self, dtype: torch.dtype, head_dim: int) -> torch.dtype:
        return self._kv_dtype or dtype

    def make_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        by_head = (spec.num_layers, spec.num_slots, spec.num_kv_heads)
        empty = partial(torch.empty, device=spec.device)
        rows = partial(empty, (*by_head, spec.head_dim), dtype=spec.dtype)
        if not spec.is_quantized:
            return KVCache(spec, rows(), rows())
        scales = partial(empty, by_head, dtype=torch.float32)
        return KVCache(spec, rows(), rows(), scales(), scales())

    def copy_rows(self, kv: KVCache, copies: Sequence[RowCopy]) -> None:
        for source, target, num_rows in copies:
            first, to = source * kv.spec.block_size, target * kv.spec.block_size
            for tensor in kv.tensors:
                tensor[:, to : to + num_rows] = tensor[:, first : first + num_rows]

    def plan_attention(self, plan: AttentionPlan, spec: KVCacheSpec) -> ReferenceAttention:
        return ReferenceAttention(
            {window: tuple(_segment_indices(plan, window, spec.device)) for window in spec.windows}
        )

    def static_attention(
        self, spec: KVCacheSpec, num_rows: int, max_context_len: int, staging: Staging
    ) -> None:
        return None

    def write_kv(self, kv: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        if kv.key_scales is None or kv.value_scales is None:
            kv.keys[layer, slots] = key
            kv.values[layer, slots] = value
        else:
            kv.keys[layer, slots], kv.key_scales[layer, slots] = encode(key, kv.spec.dtype)
            kv.values[layer, slots], kv.value_scales[layer, slots] = encode(value, kv.spec.dtype)

    def rotary_and_write(
        self,
        heads: Tensor,
        num_heads: int,
        cos: Tensor,
        sin: Tensor,
        kv: KVCache,
        layer: int,
        slots: Tensor,
        *,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        return rotary_and_write(self, heads, num_heads, cos, sin, kv, layer, slots, norms)

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
        if not isinstance(prepared, ReferenceAttention):
            raise TypeError(f"expected a ReferenceAttention, got {type(prepared).__name__}")
        out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device)
        for segment in prepared.segments_by_window[kv.spec.window(layer)]:
            key = _rows(kv.keys, kv.key_scales, layer, segment.slots)
            value = _rows(kv.values, kv.value_scales, layer, segment.slots)
            part = _attend(query[segment.rows], key, value, segment.visible, scale, softcap)
            before = PartialAttention(out[segment.rows], lse[segment.rows])
            out[segment.rows], lse[segment.rows] = _merge(before, part)
        if sinks is not None:
            # exp(lse) / (exp(lse) + exp(sink)): the share that the tokens have beside the sink.
            out = out * torch.sigmoid(lse - sinks.to(torch.float32)).unsqueeze(-1)
        return out.to(query.dtype)

    def mask_logits(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        bits = torch.arange(32, device=allowed.device, dtype=torch.int32)
        is_allowed = (allowed[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()
        logits[rows] = logits[rows].masked_fill_(~is_allowed, -torch.inf)

    def draw_tokens(self, logits: Tensor, params: DrawParams) -> DrawnTokens:
        return drawing.draw_tokens(logits, params)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        exact = x.to(torch.float32)
        scaled = exact * torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + eps)
        normed = weight * scaled.to(x.dtype)
        return normed if residual is None else residual + normed

    def rotary(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotary_dim = cos.shape[-1]
        exact = heads[..., :rotary_dim].to(torch.float32)
        partner = exact.roll(rotary_dim // 2, dims=-1)
        turned = (exact * cos + partner * sin).to(heads.dtype)
        return torch.cat((turned, heads[..., rotary_dim:]), dim=-1)

    def activate_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        match activation:
            case Activation.SILU:
                return functional.silu(gate) * up
            case Activation.GELU_TANH:
                return functional.gelu(gate, approximate="tanh") * up

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, is_last: bool = False
    ) -> Projection:
        return Projection(weight, bias)

    def linear(self, x: Tensor, packed: object, residual: Tensor | None = None) -> Tensor:
        if not isinstance(packed, Projection):
            raise TypeError(f"expected a Projection, got {type(packed).__name__}")
        out = functional.linear(x, packed.weight, packed.bias)
        return out if residual is None else out + residual

    def norm_linear(self, x: Tensor, weight: Tensor, eps: float, packed: object) -> Tensor:
        return self.linear(self.rms_norm(x, weight, eps), packed)

    def gated_linear(
        self,
        gate_up: Tensor,
        packed: object,
        residual: Tensor | None = None,
        *,
        activation: Activation = Activation.SILU,
    ) -> Tensor:
        return self.linear(self.activate_and_mul(gate_up, activation), packed, residual)


def _segment_indices(
    plan: AttentionPlan, window: int | None, device: torch.device
) -> Iterator[SegmentIndices]:
    """The plan's segments as rows see them that look back `window` tokens, None for all."""
    private = (seen_private(segment, plan.block_size, window) for segment in plan.private)
    for seen in chain(seen_shared(plan, window), private):
        yield SegmentIndices(
            rows=torch.from_numpy(seen.rows).to(device),
            slots=torch.from_numpy(seen.slots).to(device),
            visible=torch.from_numpy(seen.visible).to(device),
        )


def _rows(kept: Tensor, scales: Tensor | None, layer: int, slots: Tensor) -> Tensor:
    """Keys or values [L, Hkv, D] at `slots` int64 [L] of one layer."""
    rows = kept[layer, slots]
    return rows if scales is None else decode(rows, scales[layer, slots])


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
) -> PartialAttention:
    """Partial attention of query [n, Hq, D] over key and value [L, Hkv, D]."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    grouped = query.to(torch.float32).view(num_rows, num_kv_heads, -1, head_dim)
    scores = torch.einsum("nkgd,lkd->nkgl", grouped, key.to(torch.float32)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, None, :], -torch.inf)
    out = torch.einsum("nkgl,lkd->nkgd", scores.softmax(dim=-1), value.to(torch.float32))
    return PartialAttention(
        out=out.reshape(num_rows, num_heads, head_dim),
        lse=scores.logsumexp(dim=-1).reshape(num_rows, num_heads),
    )


def _merge(first: PartialAttention, second: PartialAttention) -> PartialAttention:
    """Attention over the union of two disjoint segments; one of them may be empty (lse -inf)."""
    lse = torch.logaddexp(first.lse, second.lse)
    first_weight = torch.exp(first.lse - lse).unsqueeze(-1)
    second_weight = torch.exp(second.lse - lse).unsqueeze(-1)
    return PartialAttention(first_weight * first.out + second_weight * second.out, lse)
