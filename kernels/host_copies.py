"""Copies from a device to its host for which nobody waits before they are needed.

As on the way there (staging.py), what belongs together goes in one copy, and on the host's side in
page-locked memory. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.generic]


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """A copy of some tensors to the host, under way since `of`."""

    _tensors: Sequence[Tensor]
    _bytes: Tensor | None = None
    _ended: torch.cuda.Event | None = None

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> HostCopy:
        """Ask for it, behind what the current stream was asked for before."""
        if not tensors or tensors[0].device.type != "cuda":
            return cls(tensors)
        packed = pack(tensors)
        host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ended.record()
        return cls(tensors, host, ended)

    def arrays(self) -> list[Array]:
        """One for each tensor, of its dtype and shape. Waits for the copy, not for what follows."""
        if self._bytes is None or self._ended is None:
            return [tensor.numpy(force=True) for tensor in self._tensors]
        self._ended.synchronize()
        return unpack(self._bytes.numpy(), self._tensors)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all tensors behind each other, uint8, on their device."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def unpack(packed: NDArray[np.uint8], like: Sequence[Tensor]) -> list[Array]:
    """The arrays whose bytes lie in `packed` behind each other, of the dtypes and shapes of `like`.

    Views, except where an element's bytes are not aligned.
    """
    arrays: list[Array] = []
    start = 0
    for tensor in like:
        end = start + tensor.nbytes
        dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
        arrays.append(packed[start:end].view(dtype).reshape(tuple(tensor.shape)))
        start = end
    return arrays
