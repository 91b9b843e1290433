"""What a section is given: the device, how much to run, and the rates to compare with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch

from gpu.ceilings import Ceilings, measure_ceilings
from gpu.sections import Scale
from gpu.timing import HostTimer
from sapwood.kernels import load_kernels
from sapwood.kernels.device_timing import DeviceTimer, Timer
from sapwood.kernels.interface import Kernels

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Context:
    """`deadline` is of `time.monotonic`; `shard` (i, n) says that this process takes every n-th
    case from the i-th on."""

    device: torch.device
    scale: Scale
    deadline: float
    shard: tuple[int, int] = (0, 1)

    @property
    def is_dry(self) -> bool:
        return self.scale is Scale.DRY

    @property
    def is_full(self) -> bool:
        return self.scale is Scale.FULL

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @cached_property
    def kernels(self) -> Kernels:
        return load_kernels("triton")

    @cached_property
    def ceilings(self) -> Ceilings:
        return measure_ceilings(self.device, is_quick=not self.is_full)

    @cached_property
    def seconds(self) -> Timer:
        """Median seconds of a function on the device, after warming up."""
        if self.device.type == "cuda":
            return DeviceTimer(self.device, seconds=0.2 if self.is_full else 0.0)
        return HostTimer()

    def pick(self, full: T, dry: T) -> T:
        """`dry` in the interpreter, else `full`."""
        return dry if self.is_dry else full

    def first(self, cases: Sequence[T], count: int) -> Sequence[T]:
        """All cases in a full run, the first `count` of them in others."""
        return cases if self.is_full else cases[:count]

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Fresh normal numbers on the device."""
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype)
