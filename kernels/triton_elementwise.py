"""What is done to the rows of a step between products, in Triton: norms, activations, masks.

Each is bound by memory, so what counts is how often its rows cross it. A decode step's rows stay in
L2 (256 rows of 4096 in bfloat16 are 2 MiB), a prefill's do not.

The addition of a residual is no pass of its own. With n bytes of rows, a product, the addition and
the norm that follows move, beside the product's own inputs,

    product, addition, norm             write n;  read 2n, write n;  read n, write n     6n
    product, addition and norm in one   write n;  read 2n, write 2n                      5n
    product that adds, norm             read n, write n;  read n, write n                4n

so the product adds in its epilogue, in place (TritonKernels.linear), with no kernel here and no
change of a layer's code: the sum goes where the residual was, which nothing reads any more. Where a
norm stands between the product and the addition (Gemma 2), the norm adds: 4n in place of 6n, and
one launch in place of two. This is reasoned; it was not measured.

Reductions and everything between a load and a store are in float32; a result is rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood.kernels.interface import Activation
from sapwood.kernels.kernel_form import KernelForm, next_power_of_two, num_pieces
from sapwood.kernels.model_shapes import MODEL_SHAPES, ModelShape
from sapwood.kernels.specialization import Specialization

_WARP_ELEMENTS = 512  # of a program's tile: two loads of 16 bytes a thread, in half precision
_MAX_WARPS = 16
_NORM_TILE = 1024  # elements of short rows (heads) that one program norms together
_ACTIVATION_BLOCK = 1024
_MASK_WORDS = 64  # 2048 tokens a program: a mask is read once, a logit not at all
_MASK_FORM = KernelForm(MappingProxyType({"WORDS": _MASK_WORDS}), num_warps=4)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    """Rows ROWS at a time. Row `r` is head `r % NUM_HEADS` of token `r // NUM_HEADS`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (at < SIZE)[None, :]
    source = row // NUM_HEADS * token_stride + row % NUM_HEADS * head_stride
    values = tl.load(x + source[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / SIZE + eps)
    weights = tl.load(weight + at, mask=at < SIZE, other=0.0).to(tl.float32)
    result = values * scale[:, None] * weights[None, :]
    target = row[:, None] * SIZE + at[None, :]
    if HAS_RESIDUAL:
        result += tl.load(residual + target, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + target, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _activate_and_mul(
    gate_up: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
) -> None:
    """One row's `BLOCK` numbers of gate, with those of up, SIZE further on."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    source = gate_up + row * (2 * SIZE) + at
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=inside, other=0.0).to(tl.float32)
    # (1 + tanh(u)) / 2 is the logistic function of 2 u, without the cancellation near -1.
    logit = gate
    if IS_GELU:
        logit = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    result = gate / (1.0 + tl.exp(-logit)) * up
    tl.store(out + row * SIZE + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _mask_logits(
    logits: tl.tensor,
    rows: tl.tensor,
    allowed: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    allowed_stride: tl.tensor,
    WORDS: tl.constexpr,
) -> None:
    """Write minus infinity where a bit is 0. What stays is neither read nor written."""
    index = tl.program_id(0).to(tl.int64)
    word_at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    token = word_at[:, None] * 32 + bit[None, :]
    word = tl.load(allowed + index * allowed_stride + word_at, mask=word_at * 32 < vocab_size)
    is_allowed = (word[:, None] >> bit[None, :]) & 1
    target = logits + tl.load(rows + index) * logits_stride + token
    tl.store(target, float("-inf"), mask=(is_allowed == 0) & (token < vocab_size))


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """`Kernels.rms_norm`."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if residual is not None and not residual.is_contiguous():
        residual = residual.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    has_heads = x.dim() == 3
    num_heads = x.shape[1] if has_heads else 1
    num_rows = x.shape[0] * num_heads
    form = _norm_form(x.shape[-1], num_heads, has_residual=residual is not None)
    _rms_norm[(num_pieces(num_rows, form.constants["ROWS"]),)](
        x,
        weight,
        residual,
        out,
        num_rows,
        x.stride(0),
        x.stride(1) if has_heads else 0,
        eps,
        **form.constants,
        **form.options,
    )
    return out


def activate_and_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """`Kernels.activate_and_mul`."""
    gate_up = gate_up.contiguous()
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    form = _activation_form(size, is_gelu=activation is Activation.GELU_TANH)
    _activate_and_mul[(num_rows, num_pieces(size, _ACTIVATION_BLOCK))](
        gate_up, out, **form.constants, **form.options
    )
    return out


def mask_logits(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """`Kernels.mask_logits`."""
    vocab_size = logits.shape[1]
    _mask_logits[(len(rows), num_pieces(vocab_size, 32 * _MASK_WORDS))](
        logits,
        rows,
        allowed,
        vocab_size,
        logits.stride(0),
        allowed.stride(0),
        **_MASK_FORM.constants,
        **_MASK_FORM.options,
    )


def specializations() -> Iterator[Specialization]:
    """The forms that MODEL_SHAPES are launched in."""
    for dtype in ("bf16", "fp16"):
        for shape in MODEL_SHAPES:
            yield from _norm_specializations(shape, dtype)
            form = _activation_form(shape.intermediate_size, is_gelu=shape.is_gelu)
            yield form.specialization(
                f"activate-{shape.name}-{dtype}",
                _activate_and_mul,
                {"gate_up": f"*{dtype}", "out": f"*{dtype}"},
            )
    yield _MASK_FORM.specialization(
        "mask-logits",
        _mask_logits,
        {
            "logits": "*fp32",
            "rows": "*i64",
            "allowed": "*i32",
            "vocab_size": "i32:16",
            "logits_stride": "i32:16",
            "allowed_stride": "i32",
        },
    )


def _norm_specializations(shape: ModelShape, dtype: str) -> Iterator[Specialization]:
    """Norms of hidden rows, and those that add a residual. Norms of heads are fused elsewhere."""
    for has_residual in (False, True) if shape.has_post_norms else (False,):
        form = _norm_form(shape.hidden_size, 1, has_residual=has_residual)
        added = {"residual": f"*{dtype}"} if has_residual else {}
        yield form.specialization(
            f"rms-norm{'-add' if has_residual else ''}-{shape.name}-{dtype}",
            _rms_norm,
            {
                "x": f"*{dtype}",
                "weight": f"*{dtype}",
                "out": f"*{dtype}",
                "num_rows": "i32",
                "token_stride": "i32:16",
                "head_stride": "i32:16",
                "eps": "fp32",
                **added,
            },
        )


def _norm_form(size: int, num_heads: int, *, has_residual: bool) -> KernelForm:
    block = next_power_of_two(size)
    rows = max(1, _NORM_TILE // block)
    return KernelForm(
        {
            "NUM_HEADS": num_heads,
            "SIZE": size,
            "ROWS": rows,
            "BLOCK": block,
            "HAS_RESIDUAL": has_residual,
        },
        num_warps=_num_warps(rows * block),
    )


def _activation_form(size: int, *, is_gelu: bool) -> KernelForm:
    return KernelForm(
        {"SIZE": size, "BLOCK": _ACTIVATION_BLOCK, "IS_GELU": is_gelu},
        num_warps=_num_warps(_ACTIVATION_BLOCK),
    )


def _num_warps(num_elements: int) -> int:
    return min(_MAX_WARPS, max(1, num_elements // _WARP_ELEMENTS))
