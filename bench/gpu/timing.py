"""How long something takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


class HostTimer:
    """Seconds of one call on a CPU: says that a section runs, not how fast anything is."""

    def __call__(self, function: Callable[[], object]) -> float:
        started = time.perf_counter()
        function()
        return time.perf_counter() - started


def host_seconds(function: Callable[[], object], repeats: int = 7) -> float:
    """Median seconds that the calling thread spends in a function that waits for no device."""
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)
