"""Attention over the prefix tree and the small operations around it: functions of tensors.

A backend implements the `Kernels` protocol (interface.py) and is named in `KERNELS`. Nothing here
knows sequences, block ownership or models, and importing this package does not import torch: the
scheduler builds an `AttentionPlan` without it.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from sapwood.kernels.segments import AttentionPlan, PrivateSegment, SharedSegment

if TYPE_CHECKING:
    from sapwood.kernels.interface import Kernels

KERNELS: MappingProxyType[str, str] = MappingProxyType(
    {
        "reference": "sapwood.kernels.reference:ReferenceKernels",
        "cpu": "sapwood.kernels.cpu:CpuKernels",
        "cpu-torch": "sapwood.kernels.cpu:TorchCpuKernels",
        "triton": "sapwood.kernels.triton_kernels:TritonKernels",
    }
)


def load_kernels(name: str) -> Kernels:
    """The backend called `name`, imported on use. Raises ValueError for an unknown name."""
    target = KERNELS.get(name)
    if target is None:
        raise ValueError(f"no kernels are called {name!r}; there are {', '.join(KERNELS)}")
    module_name, class_name = target.split(":")
    return cast("Kernels", getattr(importlib.import_module(module_name), class_name)())


__all__ = ["KERNELS", "AttentionPlan", "PrivateSegment", "SharedSegment", "load_kernels"]
