"""From arrays of the processor to tensors of a device, what belongs together in one copy.

A copy from ordinary memory makes the host wait until the device has done all it was asked for, and
each copy costs some microseconds to start, whatever its size. So all arrays of a call are put
behind each other into one page-locked buffer, which is copied as a whole while the host goes on.

    host    [ input_ids | positions    | slots ...         ]   page-locked
                 |            |           |                     one copy, in the stream's order
    device  [ input_ids | positions    | slots ...         ]   and a view of it for each array

A buffer is filled once, for one copy, and given back to its allocator, which keeps it until that
copy has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.generic]

# Of each array in its buffer, bytes: wide loads want 16, and a kernel that is compiled for aligned
# addresses then meets no others.
ALIGNMENT = 64


class Transfers(Protocol):
    """Memory on both sides, and what brings bytes from one to the other."""

    def host_buffer(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] that the device can read by itself; contents undefined.

        No copy asked for before still reads it.
        """
        ...

    def device_buffer(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], not used by anything queued before; contents undefined."""
        ...

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Ask for a copy between two tensors of one size, behind what was asked for before.

        `source` may be given back at once: nobody gets its memory before the copy has ended.
        """
        ...


class Staging:
    """Sends arrays to one device, each call in one copy on the current stream.

    On a CPU nothing is copied: tensors share their arrays' memory.
    """

    def __init__(self, device: torch.device, *, transfers: Transfers | None = None) -> None:
        """`transfers`: torch's where the device is no CPU, if they are not given."""
        if transfers is None and device.type != "cpu":
            transfers = TorchTransfers(device)
        self._transfers = transfers

    def send(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        """A tensor on the device for each array, with its dtype and shape.

        What is queued on the current stream from now on may read them. The caller writes an array
        no more where it is on a CPU. O(bytes) on the host.
        """
        if self._transfers is None:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        sections = list(_sections(arrays))
        num_bytes = sections[-1].end if sections else 0
        target = self._transfers.device_buffer(num_bytes)
        self._copy(sections, target)
        return {
            section.name: _typed(target[section.start : section.end], section.array)
            for section in sections
        }

    def send_into(self, static: Tensor, array: Array) -> None:
        """Overwrite the first elements of a contiguous `static` with all of `array`, in order.

        For tensors whose address must stay. They have the same dtype, and there is room. What was
        queued on the current stream before still reads the old values, what comes after the new.
        """
        flat = static.view(-1)[: array.size]
        if self._transfers is None:
            flat.copy_(torch.from_numpy(array.reshape(-1)))
            return
        self._copy([_Section("", array, 0, array.nbytes)], flat.view(torch.uint8))

    def _copy(self, sections: list[_Section], target: Tensor) -> None:
        """The sections into a buffer of their own, and that to `target` uint8."""
        assert self._transfers is not None
        if not len(target):
            return
        host = self._transfers.host_buffer(len(target))
        memory = host.numpy()
        for section in sections:
            room = memory[section.start : section.end].view(section.array.dtype)
            room[:] = section.array.reshape(-1)
        self._transfers.copy(host, target)


def send(arrays: Mapping[str, Array], device: torch.device) -> dict[str, Tensor]:
    """`Staging.send`, for callers that have none."""
    return Staging(device).send(arrays)


class _Section(NamedTuple):
    """Bytes `[start, end)` of a buffer, for one array."""

    name: str
    array: Array
    start: int
    end: int


def _sections(arrays: Mapping[str, Array]) -> Iterator[_Section]:
    end = 0
    for name, array in arrays.items():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + array.nbytes
        yield _Section(name, array, start, end)


def _typed(memory: Tensor, array: Array) -> Tensor:
    """uint8 [bytes] seen as the dtype and shape of `array`."""
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return memory.view(dtype).view(array.shape)


class TorchTransfers:
    """Page-locked memory on the host, for CUDA, and copies on the current stream.

    torch's allocator of page-locked memory notes the stream of each copy that does not make the
    host wait, and gives memory out again when that stream has come past it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def device_buffer(self, num_bytes: int) -> Tensor:
        # The allocator gives memory to one stream, in whose order it was given back.
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)
