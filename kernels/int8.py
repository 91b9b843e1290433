"""Projections in int8: weights and rows rounded in groups of 32 inputs, each with its own scale.

Groups keep what is large from spoiling what is small (Dai et al. 2021, VS-Quant), so that nothing
needs calibration. A row is rounded by itself, hence its result hangs on no other row of the batch.
csrc/int8.c has the arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sapwood.kernels.native import Native

GROUP = 32  # inputs that share a scale, as in csrc/int8.c


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


def pack(
    native: Native, weight: Tensor, bias: Tensor | None, *, num_planes: int = 1
) -> Int8Projection:
    """Round weight float32 [out, in]. Memory: 1.125 bytes a weight, 0.625 where it has 4 bits.

    Cost: two passes over the weights.
    """
    if weight.dtype != torch.float32 or (bias is not None and bias.dtype != torch.float32):
        raise TypeError(f"int8 projections are made of float32 weights, this one is {weight.dtype}")
    weight = weight.contiguous()
    num_bits = native.int8_num_bits(weight)
    return Int8Projection(
        packed=native.int8_pack(weight, num_bits),
        num_bits=num_bits,
        num_outputs=weight.shape[0],
        num_inputs=weight.shape[1],
        bias=bias,
        num_planes=num_planes,
    )


def unpack(native: Native, projection: Int8Projection) -> Tensor:
    """The weight that is multiplied by, float32 [out, in]."""
    weight = torch.empty(projection.num_outputs, projection.num_inputs)
    native.int8_unpack(projection.packed, projection.num_bits, weight)
    return weight


def linear(
    native: Native,
    x: Tensor,
    projection: Int8Projection,
    residual: Tensor | None,
    *,
    norm: tuple[Tensor, float] | None = None,
    is_gated: bool = False,
) -> Tensor:
    """`residual + inputs @ weight.T + bias`; a new tensor float32 [rows, out].

    The inputs are x float32 [rows, in], normed with `norm`, a weight [in] and an epsilon; or if
    `is_gated` those of x [rows, 2 in], gate and up side by side.
    """
    packed, num_bits, num_outputs, num_inputs, bias, num_planes = projection
    if x.dtype != torch.float32:
        raise TypeError(f"int8 projections take float32 rows, these are {x.dtype}")
    num_given = x.shape[1] // 2 if is_gated else x.shape[1]
    if num_given != num_inputs:
        raise ValueError(f"the rows have {num_given} inputs, the projection {num_inputs}")
    out = x.new_empty(len(x), num_outputs)
    if residual is not None:
        if residual.shape != out.shape or residual.dtype != torch.float32:
            raise ValueError(
                f"the residual is {residual.dtype} {list(residual.shape)}, it must be "
                f"float32 {list(out.shape)}"
            )
        residual = residual.contiguous()
    x = x.contiguous()
    native.int8_linear(
        x, norm, is_gated, num_inputs, packed, num_bits, num_planes, bias, residual, out
    )
    return out
