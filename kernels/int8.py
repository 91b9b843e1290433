"""Projections in int8: weights per output channel, activations per row.

A row is scaled by its own largest magnitude, so that its result hangs on no other row of the batch
(Yao et al. 2022, ZeroQuant). Sums of int8 products are exact in int32, whatever their order.

Some input channels would spoil that: their weights are so much larger than the others' that all
others would round to nothing. These outlier columns stay in the weight's own precision and are
multiplied apart (Dettmers et al. 2022, LLM.int8(), where the activations' outliers are); there are
few of them, or none. Smoothing (runtime/smoothing.py) makes outliers in the activations into such
columns before the weights come here.

This is the only file that touches torch's quantised tensors, whose constructors are deprecated.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sapwood.kernels.native import Native

# A column is an outlier if its largest weight is that many times the median column's.
OUTLIER_RATIO = 64.0
_LEVELS = 127


class Int8Weight(NamedTuple):
    """`weight[i, j] = values[i, j] * scales[i]` but for the outlier columns, which are zero there.

    values int8 [out, in], scales float32 [out], outliers int64 [n] in ascending order,
    outlier_weight [n, out] of the weight's dtype.
    """

    values: Tensor
    scales: Tensor
    outliers: Tensor
    outlier_weight: Tensor

    def dequantized(self) -> Tensor:
        """The weight as it is computed with, [out, in]."""
        weight = self.values.to(self.outlier_weight.dtype) * self.scales.unsqueeze(1)
        weight[:, self.outliers] = self.outlier_weight.t()
        return weight


class Int8Projection(NamedTuple):
    """A linear layer in fbgemm's layout, its outlier columns apart; `outliers` None: there are
    none."""

    packed: Any
    outliers: Tensor | None
    outlier_weight: Tensor
    bias: Tensor | None


def is_available() -> bool:
    """Whether this build of torch has fbgemm, which x86 builds do."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def quantize_weight(weight: Tensor, num_levels: int | None = None) -> Int8Weight:
    """Round weight float32 [out, in] to `num_levels` steps on each side of zero.

    None: as many as this machine multiplies exactly. Without AVX-512 VNNI products of two unsigned
    and signed bytes are added in 16 bits and saturate unless the weights have 7.
    """
    if num_levels is None:
        num_levels = _LEVELS if torch.cpu._is_vnni_supported() else _LEVELS // 2
    columns = weight.abs().amax(dim=0)
    is_outlier = columns > OUTLIER_RATIO * columns.median()
    outliers = is_outlier.nonzero().flatten()
    inliers = weight.masked_fill(is_outlier, 0.0) if len(outliers) else weight
    scales = inliers.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny) / num_levels
    values = (inliers / scales.unsqueeze(1)).round_().clamp_(-num_levels, num_levels)
    outlier_weight = weight[:, outliers].t().contiguous()
    return Int8Weight(values.to(torch.int8), scales, outliers, outlier_weight)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of x [rows, in] over its largest magnitude, and these magnitudes [rows, 1].

    A row of zeros becomes NaN, which `linear` multiplies by its magnitude of zero once it has been
    through integers.
    """
    magnitudes = x.abs().amax(dim=-1, keepdim=True)
    return x / magnitudes, magnitudes


def pack(weight: Tensor, bias: Tensor | None) -> Int8Projection:
    """Quantise weight float32 [out, in] and lay it out for fbgemm."""
    quantized = quantize_weight(weight)
    zero_points = torch.zeros(len(weight), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch._make_per_channel_quantized_tensor(
            quantized.values, quantized.scales.double(), zero_points, 0
        )
        packed = torch.ops.quantized.linear_prepack(tensor, None)
    return Int8Projection(
        packed=packed,
        outliers=quantized.outliers if len(quantized.outliers) else None,
        outlier_weight=quantized.outlier_weight,
        bias=bias,
    )


def linear(
    x: Tensor, projection: Int8Projection, residual: Tensor | None, native: Native | None
) -> Tensor:
    """`residual + x @ weight.T + bias` for x float32 [rows, in]; a new tensor."""
    _, outliers, outlier_weight, bias = projection
    if native is not None:
        scaled, magnitudes, kept = native.scale_rows(x.contiguous(), outliers)
        out = _product(scaled, projection)
        if residual is not None:
            residual = residual.contiguous()
        native.finish_rows(out, magnitudes, kept, outlier_weight, bias, residual)
        return out
    scaled, magnitudes = quantize_rows(x)
    out = _product(scaled, projection)
    out = out.mul_(magnitudes) if residual is None else torch.addcmul(residual, out, magnitudes)
    if outliers is not None:
        out.addmm_(x.index_select(1, outliers), outlier_weight)
    return out if bias is None else out.add_(bias)


def _product(scaled: Tensor, projection: Int8Projection) -> Tensor:
    """Rows of magnitude 1 at most, rounded to 127 steps, times the rounded weight."""
    product: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        scaled, 1 / _LEVELS, _LEVELS + 1, projection.packed
    )
    return product
