"""Memory in pages of 2 MiB, where the system has them: a page of 4 KiB is read in less time than
it takes to find it."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

_CHUNK_BYTES = 2**25
_ALIGNMENT = 64  # bytes: a cache line, and the longest vector


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """All memory is taken now: a first touch later would cost a prefill 5 % of its time.

    Raises MemoryError.
    """
    return _map(math.prod(shape) * dtype.itemsize).view(dtype).view(shape).zero_()


class HugePages:
    """Hands out memory for many tensors, side by side in chunks.

    A chunk is given back when the last tensor in it is gone, and the next has been begun.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], undefined, from the start of a cache line. Raises MemoryError."""
        if num_bytes > len(self._free):
            self._free = _map(max(num_bytes, _CHUNK_BYTES))
        taken = self._free[:num_bytes]
        self._free = self._free[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        return taken


def _map(num_bytes: int) -> Tensor:
    try:
        buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes cannot be had: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(buffer, dtype=torch.uint8)
