"""The kernels for CPUs: in C where there is a compiler (csrc/), else torch's operations.

Attention is planned and done in native_attention.py and torch_attention.py.

Where projections are in int8 and the processor multiplies bfloat16, keys and values are kept in it:
half the bytes and twice the rate, and of its rounding nothing shows beside int8's.

Keys and values in int8 or e4m3 save memory here, not time: attention over them is reference.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sapwood.kernels import drawing
from sapwood.kernels.composed import rotary_and_write
from sapwood.kernels.huge_pages import HugePages, zeros
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
from sapwood.kernels.native import Native, has_whole_rows, load
from sapwood.kernels.native_attention import NativeAttention, attend_natively, plan_native
from sapwood.kernels.projections import (
    Float32Projection,
    Int8Projection,
    linear,
    pack_float32,
    pack_int8,
)
from sapwood.kernels.reference import ReferenceAttention, ReferenceKernels
from sapwood.kernels.segments import AttentionPlan
from sapwood.kernels.staging import Staging
from sapwood.kernels.torch_attention import TorchAttention, attend_with_torch, plan_torch

# oneDNN reads packed weights at 22 GB/s for 1 to 3 rows and at 26 for 4 (float32, 2 threads).
_MIN_PACKED_ROWS = 4


class _Projection(NamedTuple):
    """A linear layer, its weight [out, in] in oneDNN's layout or as it came."""

    weight: Tensor
    bias: Tensor | None


class CpuKernels:
    """`Kernels` on a CPU. Cache layout: `[num_layers, num_slots, num_kv_heads, head_dim]`.

    A run of contiguous blocks is a view in it, a row's keys are one contiguous write.
    """

    def __init__(self, *, quantize: bool = False, kv_dtype: torch.dtype | None = None) -> None:
        self._quantize = quantize
        self._kv_dtype = kv_dtype
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
        has_int8 = self._native is not None
        return type(self)(quantize=True, kv_dtype=self._kv_dtype) if has_int8 else None

    def with_kv_dtype(self, dtype: torch.dtype) -> CpuKernels | None:
        if dtype not in QUANTIZED_KV_DTYPES:
            return None
        return type(self)(quantize=self._quantize, kv_dtype=dtype)

    @property
    def min_saved_tokens(self) -> int:
        return 256

    def kv_dtype(self, dtype: torch.dtype, head_dim: int) -> torch.dtype:
        if self._kv_dtype is not None:
            return self._kv_dtype
        is_rounded = self._quantize and dtype == torch.float32
        if is_rounded and self._attends_natively(torch.bfloat16, head_dim):
            return torch.bfloat16
        return dtype

    def _attends_natively(self, kv_dtype: torch.dtype, head_dim: int) -> bool:
        return self._native is not None and self._native.can_attend(kv_dtype, head_dim)

    def make_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        by_head = (spec.num_layers, spec.num_slots, spec.num_kv_heads)
        rows = partial(zeros, (*by_head, spec.head_dim), spec.dtype)
        if not spec.is_quantized:
            return KVCache(spec, rows(), rows())
        scales = partial(zeros, by_head, torch.float32)
        return KVCache(spec, rows(), rows(), scales(), scales())

    def copy_rows(self, kv: KVCache, copies: Sequence[RowCopy]) -> None:
        self._reference.copy_rows(kv, copies)

    def plan_attention(
        self, plan: AttentionPlan, spec: KVCacheSpec
    ) -> TorchAttention | NativeAttention | ReferenceAttention:
        if spec.is_quantized:
            return self._reference.plan_attention(plan, spec)
        if self._attends_natively(spec.dtype, spec.head_dim):
            return plan_native(plan, spec.windows)
        reference = partial(self._reference.plan_attention, plan, spec)
        return plan_torch(plan, spec.windows, reference)

    def static_attention(
        self, spec: KVCacheSpec, num_rows: int, max_context_len: int, staging: Staging
    ) -> None:
        return None

    def write_kv(self, kv: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        if kv.spec.is_quantized:
            self._reference.write_kv(kv, layer, key, value, slots)
            return
        keys, values = kv.keys[layer], kv.values[layer]
        if (
            self._native is not None
            and key.dtype == torch.float32
            and keys.dtype in (torch.float32, torch.bfloat16)
            and has_whole_rows(key, value)
        ):
            self._native.write_kv(key, value, slots, keys, values)
            return
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)

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
        if isinstance(prepared, ReferenceAttention):
            return self._reference.attention(
                query, kv, layer, prepared, scale, softcap=softcap, sinks=sinks
            )
        key, value, window = kv.keys[layer], kv.values[layer], kv.spec.window(layer)
        if isinstance(prepared, NativeAttention):
            fits = self._attends_natively(key.dtype, key.shape[2])
            if not fits or query.dtype not in (torch.float32, key.dtype):
                raise TypeError(_unlike(query, key))
            return attend_natively(
                self._own_native(),
                prepared.calls_by_window[window],
                query,
                key,
                value,
                scale,
                softcap=softcap,
                sinks=sinks,
            )
        if not isinstance(prepared, TorchAttention):
            raise TypeError(f"expected a prepared attention, got {type(prepared).__name__}")
        if query.dtype != key.dtype:
            raise TypeError(_unlike(query, key))
        if softcap is not None:
            return self._reference.attention(
                query, kv, layer, prepared.reference(), scale, softcap=softcap, sinks=sinks
            )
        calls = prepared.calls_by_window[window]
        return attend_with_torch(calls, query, key, value, scale, sinks=sinks)

    def mask_logits(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        can_be_native = logits.dtype == torch.float32 and logits.is_contiguous()
        if self._native is not None and can_be_native and allowed.is_contiguous():
            self._native.mask_logits(logits, rows, allowed)
        else:
            self._reference.mask_logits(logits, rows, allowed)

    def draw_tokens(self, logits: Tensor, params: DrawParams) -> DrawnTokens:
        return drawing.draw_tokens(logits, params)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        normed = self._normed(x, weight, eps)
        return normed if residual is None else residual + normed

    def _normed(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32:
            return functional.rms_norm(x, weight.shape, weight, eps)
        can_stride = x.dim() in (2, 3) and (x.is_contiguous() or has_whole_rows(x))
        if self._native is not None and can_stride:
            return self._native.rms_norm(x, weight, eps)
        # Half the operations of torch's own, which matters for few rows.
        scale = (x * x).mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        return (x * scale).mul_(weight)

    def rotary(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self._native is not None and heads.dtype == torch.float32 and has_whole_rows(heads):
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
