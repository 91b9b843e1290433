"""From arrays of the processor to tensors of a device, in one copy a step.

A copy from ordinary memory makes the host wait, and each copy costs some microseconds to start,
whatever its size. So all arrays of a step are put behind each other into one page-locked buffer,
which is copied as a whole while the host goes on. The buffers are used in turn: one is filled again
when its copy has ended.

    host    [ input_ids | positions    | slots ...         ]   page-locked, one of a few
                 |            |           |                     one copy, in the stream's order
    device  [ input_ids | positions    | slots ...         ]   and a view of it for each array
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.generic]

# Of each array in its buffer, bytes: wide loads want 16, and a kernel that is compiled for aligned
# addresses then meets no others.
ALIGNMENT = 64
# Two steps may be on their way and a third be in preparation, and each sends twice, its rows and
# its attention. With fewer, the host would wait for the device to come to a copy.
NUM_BUFFERS = 6
_SMALLEST_BUFFER = 2**16  # bytes


class CopyUnderWay(Protocol):
    """A copy that the device has been asked for."""

    def wait(self) -> None:
        """Return when its source may be written again."""
        ...


class Transfers(Protocol):
    """Memory on both sides, and what brings bytes from one to the other."""

    def host_buffer(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] that the device can read by itself; contents undefined."""
        ...

    def device_buffer(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], not used by anything queued before; contents undefined."""
        ...

    def copy(self, source: Tensor, target: Tensor) -> CopyUnderWay:
        """Ask for a copy between two tensors of one size, behind what was asked for before."""
        ...


class Staging:
    """Sends arrays to one device, each call in one copy on the current stream.

    Belongs to one thread. On a CPU nothing is copied: tensors share their arrays' memory.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        transfers: Transfers | None = None,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        """`transfers`: those of CUDA where the device is one, if they are not given."""
        if transfers is None and device.type == "cuda":
            transfers = CudaTransfers(device)
        self._transfers = transfers
        self._ring = [_HostBuffer() for _ in range(num_buffers)]
        self._turn = 0

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
        """The sections into the next buffer, and that to `target` uint8."""
        assert self._transfers is not None
        if not len(target):
            return
        buffer = self._ring[self._turn]
        self._turn = (self._turn + 1) % len(self._ring)
        host = buffer.free(len(target), self._transfers)
        memory = host.numpy()
        for section in sections:
            room = memory[section.start : section.end].view(section.array.dtype)
            room[:] = section.array.reshape(-1)
        buffer.under_way = self._transfers.copy(host, target)


@dataclass(slots=True)
class _HostBuffer:
    """One buffer of the ring and the copy that reads it. Only `Staging` changes it."""

    memory: Tensor | None = None
    under_way: CopyUnderWay | None = None

    def free(self, num_bytes: int, transfers: Transfers) -> Tensor:
        """Its first `num_bytes`, once nothing reads them any more; larger memory if it takes it."""
        if self.under_way is not None:
            self.under_way.wait()
            self.under_way = None
        if self.memory is None or len(self.memory) < num_bytes:
            room = max(_SMALLEST_BUFFER, 2 ** math.ceil(math.log2(num_bytes)))
            self.memory = transfers.host_buffer(room)
        return self.memory[:num_bytes]


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


class CudaTransfers:
    """Page-locked memory on the host and copies on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def device_buffer(self, num_bytes: int) -> Tensor:
        # The allocator gives memory to one stream, in whose order it was given back.
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def copy(self, source: Tensor, target: Tensor) -> CopyUnderWay:
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _CudaCopy(event)


class _CudaCopy(NamedTuple):
    """Told by an event behind it."""

    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()
