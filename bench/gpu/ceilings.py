"""What the card can do at most, measured: copying memory, multiplying matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gpu.sections import Row
from gpu.timing import HostTimer
from sapwood.kernels.device_timing import DeviceTimer, Timer

if TYPE_CHECKING:
    from gpu.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """`copy_bytes` a second, read and written ones counted; `bf16_operations` a second of a large
    product of random matrices."""

    copy_bytes: float
    copied_bytes: int  # of the copy that was timed, written
    bf16_operations: float
    side: int  # of the matrices


def measure_ceilings(device: torch.device, *, is_quick: bool) -> Ceilings:
    """A second on a GPU; quick ones are of small sizes and say little."""
    num_bytes, side = (2**22, 256) if is_quick else (2**32, 8192)
    timer = DeviceTimer(device) if device.type == "cuda" else HostTimer()
    return Ceilings(
        copy_bytes=2 * num_bytes / _copy_seconds(timer, device, num_bytes),
        copied_bytes=num_bytes,
        bf16_operations=2 * side**3 / _product_seconds(timer, device, side),
        side=side,
    )


def _copy_seconds(timer: Timer, device: torch.device, num_bytes: int) -> float:
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return timer(lambda: target.copy_(source))


def _product_seconds(timer: Timer, device: torch.device, side: int) -> float:
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    return timer(lambda: a @ b)


def bandwidth(context: Context) -> Iterator[Row]:
    ceilings = context.ceilings
    yield Row(
        name=f"copy of {ceilings.copied_bytes / 2**20:,.0f} MiB, read and written bytes counted",
        figures={"TB/s": ceilings.copy_bytes / 1e12},
    )
    yield Row(
        name=f"bf16 product of random matrices of {ceilings.side:,} x {ceilings.side:,}",
        figures={"TFLOP/s": ceilings.bf16_operations / 1e12},
    )
