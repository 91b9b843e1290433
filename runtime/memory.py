"""How much memory this process may still take."""

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # cgroups of version 1
)


def available_bytes() -> int:
    """Bytes of RAM that can be had without swapping, within the limit of the container.

    Where the system does not tell what is available (it is not Linux), half of all there is.
    """
    system = _available_in_system()
    for limit_name, used_name in _LIMITS:
        limit, used = _number(_CGROUP / limit_name), _number(_CGROUP / used_name)
        if limit is not None and used is not None:
            return min(system, max(0, limit - used))
    return system


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
