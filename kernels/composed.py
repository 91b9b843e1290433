"""What a backend without a kernel of its own for it composes of others."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood.kernels.interface import HeadNorms, Kernels, KVCache


def rotary_and_write(
    kernels: Kernels,
    heads: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    kv: KVCache,
    layer: int,
    slots: Tensor,
    norms: HeadNorms | None,
) -> Tensor:
    """`Kernels.rotary_and_write` by norms, `rotary` and `write_kv`."""
    num_turned = num_heads + kv.spec.num_kv_heads
    turned = heads[:, :num_turned]
    if norms is not None:
        query = kernels.rms_norm(turned[:, :num_heads], norms.query, norms.eps)
        key = kernels.rms_norm(turned[:, num_heads:], norms.key, norms.eps)
        turned = torch.cat((query, key), dim=1)
    turned = kernels.rotary(turned, cos, sin)
    kernels.write_kv(kv, layer, turned[:, num_heads:], heads[:, num_turned:], slots)
    return turned[:, :num_heads]
