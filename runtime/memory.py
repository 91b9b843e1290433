"""How much memory this process may still take."""

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes of RAM that can be had without swapping, within the limit of the container.

    Where the system does not tell what is available (it is not Linux), half of all there is.
    """
    system = _available_in_system()
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is None or used is None:
        return system
    return min(system, max(0, limit - used))


def _available_in_system() -> int:
    if _MEMINFO.is_file():
        for line in _MEMINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _number(path: Path) -> int | None:
    """The number that a file holds; None where there is no file, or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
