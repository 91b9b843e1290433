"""Backends as the suite checks them, each with the device it computes on."""

from __future__ import annotations

import torch

from sapwood.kernels import KERNELS, load_kernels
from sapwood.kernels.interface import Kernels
from sapwood.kernels.tile_shapes import TileCost, TileShape, TileShapes
from sapwood.kernels.tuning import AttentionTuning, TuningTable

WITHOUT_DEVICE = tuple(name for name in sorted(KERNELS) if name != "triton")
"""Backends that compute on any machine."""

# The interpreter takes as long for a small tile as for a large one.
INTERPRETED_SHAPES = TileShapes(
    narrow=TileShape(rows=16, keys=64, num_warps=4, num_stages=2),
    wide=TileShape(rows=64, keys=64, num_warps=4, num_stages=2),
    narrow_cost=TileCost(per_tile=3e-6, per_key=2e-8),
    wide_cost=TileCost(per_tile=4e-6, per_key=2e-8),
    per_partial=2e-7,
    per_launch=3e-6,
)


def is_interpreted(name: str) -> bool:
    return name == "triton" and not torch.cuda.is_available()


def load(name: str) -> Kernels:
    """The backend called `name`, with tiles for the interpreter where that is what runs it."""
    if not is_interpreted(name):
        return load_kernels(name)
    from sapwood.kernels.triton_kernels import TritonKernels

    return TritonKernels(table=table_of(INTERPRETED_SHAPES))


def device_of(name: str) -> torch.device:
    return torch.device("cuda" if name == "triton" and torch.cuda.is_available() else "cpu")


def table_of(shapes: TileShapes) -> TuningTable:
    """A table with one entry for each size of a number."""
    return TuningTable(
        gpu="none",
        measured_with="",
        attention=tuple(
            AttentionTuning(max_head_dim=256, max_group_size=16, kv_bytes=kv_bytes, shapes=shapes)
            for kv_bytes in (1, 2, 4)
        ),
    )
