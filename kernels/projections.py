"""Projections by native code, in float32 and in int8. A row's result hangs on no other row.

In int8 weights and rows are rounded in groups of 32 inputs, each with its own scale. Groups keep
what is large from spoiling what is small (Dai et al. 2021, VS-Quant), so that nothing needs
calibration. csrc/float32.c and csrc/int8.c have the arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sapwood.kernels.interface import Activation
from sapwood.kernels.native import Native, Take

GROUP = 32  # inputs that share a scale, as in csrc/int8.c


def take_any(num_bytes: int) -> Tensor:
    """Memory wherever torch has it, uint8 [num_bytes]."""
    return torch.empty(num_bytes, dtype=torch.uint8)


class Float32Projection(NamedTuple):
    """A linear layer as csrc/float32.c packs it: `packed` float32, `bias` float32 [num_outputs]."""

    packed: Tensor
    num_outputs: int
    num_inputs: int
    bias: Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.packed.nbytes


class Int8Projection(NamedTuple):
    """A linear layer as csrc/int8.c packs it.

    `packed` uint8 holds the rounded weight [num_outputs, num_inputs], `bias` is float32
    [num_outputs]. Weights have 8 bits, or 4 where they have no more. Inputs are rounded to 8 bits
    with one plane and to 16 with two, which takes twice the products.
    """

    packed: Tensor
    num_bits: int
    num_outputs: int
    num_inputs: int
    bias: Tensor | None
    num_planes: int

    @property
    def num_bytes(self) -> int:
        return self.packed.nbytes


Projection = Float32Projection | Int8Projection


def pack_float32(
    native: Native, weight: Tensor, bias: Tensor | None, *, take: Take = take_any
) -> Float32Projection:
    """Lay out weight float32 [out, in], in memory of `take`.

    As many bytes as the weight, outputs rounded up to 48.
    """
    _check_float32(weight, bias)
    return Float32Projection(
        packed=native.float32_pack(weight.contiguous(), take),
        num_outputs=weight.shape[0],
        num_inputs=weight.shape[1],
        bias=None if bias is None else bias.contiguous(),
    )


def pack_int8(
    native: Native,
    weight: Tensor,
    bias: Tensor | None,
    *,
    num_planes: int = 1,
    take: Take = take_any,
) -> Int8Projection:
    """Round weight float32 [out, in], in memory of `take`.

    1.125 bytes a weight, 0.625 where it has 4 bits. Cost: two passes over the weights.
    """
    _check_float32(weight, bias)
    weight = weight.contiguous()
    num_bits = native.int8_num_bits(weight)
    return Int8Projection(
        packed=native.int8_pack(weight, num_bits, take),
        num_bits=num_bits,
        num_outputs=weight.shape[0],
        num_inputs=weight.shape[1],
        bias=None if bias is None else bias.contiguous(),
        num_planes=num_planes,
    )


def unpack_int8(native: Native, projection: Int8Projection) -> Tensor:
    """The weight that is multiplied by, float32 [out, in]."""
    weight = torch.empty(projection.num_outputs, projection.num_inputs)
    native.int8_unpack(projection.packed, projection.num_bits, weight)
    return weight


def linear(
    native: Native,
    x: Tensor,
    projection: Projection,
    residual: Tensor | None,
    *,
    norm: tuple[Tensor, float] | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """`residual + inputs @ weight.T + bias`; a new tensor float32 [rows, out].

    The inputs are x float32 [rows, in], normed with `norm`, a weight [in] and an epsilon; or
    with an `activation` those of x [rows, 2 in], gate and up side by side.
    """
    if x.dtype != torch.float32 or x.dim() != 2:
        raise TypeError(f"native projections take float32 rows, this is {x.dtype} {list(x.shape)}")
    num_given = x.shape[1] if activation is None else x.shape[1] // 2
    if num_given != projection.num_inputs:
        raise ValueError(
            f"the rows have {num_given} inputs, the projection {projection.num_inputs}"
        )
    out = x.new_empty(len(x), projection.num_outputs)
    if residual is not None:
        if residual.shape != out.shape or residual.dtype != torch.float32:
            raise ValueError(
                f"the residual is {residual.dtype} {list(residual.shape)}, it must be "
                f"float32 {list(out.shape)}"
            )
        residual = residual.contiguous()
    x = x.contiguous()
    if norm is not None:
        norm = norm[0].contiguous(), norm[1]
    if isinstance(projection, Float32Projection):
        packed, _, num_inputs, bias = projection
        native.float32_linear(x, norm, activation, num_inputs, packed, bias, residual, out)
    else:
        packed, num_bits, _, num_inputs, bias, num_planes = projection
        native.int8_linear(
            x, norm, activation, num_inputs, packed, num_bits, num_planes, bias, residual, out
        )
    return out


def _check_float32(weight: Tensor, bias: Tensor | None) -> None:
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"the bias is {list(bias.shape)}, the weight {list(weight.shape)}")
    if weight.dtype != torch.float32 or (bias is not None and bias.dtype != torch.float32):
        raise TypeError(
            f"native projections are made of float32 weights, this one is {weight.dtype}"
        )
