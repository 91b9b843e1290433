"""Keys and values in one byte a number, with a float32 scale for each row of each head.

    int8             scale = max |x| / 127     code = round(x / scale)
    float8_e4m3fn    scale = max |x| / 448     code = x / scale with three bits of mantissa
                                               (Micikevicius et al. 2022)

A row's codes and scale are a function of its own numbers alone: they do not depend on the step that
wrote it, on the rows around it or on the block it lies in. So a prefix that was cut elsewhere gives
the same bytes, and a hit stays exact. A scale for a whole block could not promise that: the rows of
a block are written one by one, in many steps, and those that the tree counts are never written
again, so a larger number in a later row would have to be cut off or the settled rows be rounded
anew. One scale for all blocks and heads would have to be calibrated, and heads differ.

The error of a number x, beside the scale's own rounding (2^-24 of it), is at most

    int8             max |x| / 254 of the row
    float8_e4m3fn    |x| / 16, or max |x| / (448 * 1024) where that is more (a subnormal code)

The price is 4 bytes for each row of a head: 3 % of keys and values of a head of 128.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_CODE = MappingProxyType({torch.int8: 127.0, torch.float8_e4m3fn: 448.0})

# A scale is no smaller: the reciprocal of a subnormal one would be infinite, and zeros not zero.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class QuantizedRows(NamedTuple):
    """`codes` [..., D] and `scales` float32 [...]."""

    codes: Tensor
    scales: Tensor


def encode(rows: Tensor, dtype: torch.dtype) -> QuantizedRows:
    """Round the rows [..., D] of heads to `dtype`, one of QUANTIZED_KV_DTYPES.

    A row that is not finite throughout is NaN throughout when decoded.
    """
    exact, largest = rows.to(torch.float32), LARGEST_CODE[dtype]
    scales = (exact.abs().amax(dim=-1) / largest).clamp_min(SMALLEST_SCALE)
    scales = scales.where(scales.isfinite(), torch.nan)
    scaled = (exact / scales.unsqueeze(-1)).clamp(-largest, largest)
    codes = scaled.round() if dtype == torch.int8 else scaled
    return QuantizedRows(codes.to(dtype), scales)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The rows that the codes stand for, float32 [..., D]."""
    return codes.to(torch.float32) * scales.unsqueeze(-1)
