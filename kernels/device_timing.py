"""How long a GPU takes for something. For tuning and benchmarks, not for the request path."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

L2_FLUSH_BYTES = 2**28  # several times any card's L2
HEAD_START_CYCLES = 1_000_000  # about half a millisecond
WARM_UPS = 2
MIN_REPEATS = 5
MAX_REPEATS = 60

Timer = Callable[[Callable[[], object]], float]


class DeviceTimer:
    """Median seconds of a function's work on the device, its inputs not in the L2 cache.

    Before each repeat the cache is filled by reading other memory (written lines would be written
    back during what is measured), and the device is kept busy for half a millisecond, so that the
    host has queued the function's launches before the first one begins: launching is not measured.
    """

    def __init__(self, device: torch.device, seconds: float = 0.2) -> None:
        self._seconds = seconds
        self._scratch = torch.ones(L2_FLUSH_BYTES // 4, dtype=torch.float32, device=device)
        self._sum = torch.empty((), dtype=torch.float32, device=device)

    def __call__(self, function: Callable[[], object]) -> float:
        for _ in range(WARM_UPS):
            function()
        torch.cuda.synchronize()
        first = self._repeat(function, 3)
        wanted = int(self._seconds / max(statistics.median(first), 1e-9))
        return statistics.median(self._repeat(function, max(MIN_REPEATS, min(wanted, MAX_REPEATS))))

    def _repeat(self, function: Callable[[], object], count: int) -> list[float]:
        events = [(_event(), _event()) for _ in range(count)]
        for start, end in events:
            torch.sum(self._scratch, dim=0, out=self._sum)
            torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
            start.record()
            function()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
