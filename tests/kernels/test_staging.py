"""Arrays arrive whole on a device that copies late, as a GPU does."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood.kernels.staging import ALIGNMENT, Staging, send

CPU = torch.device("cpu")


@dataclass
class LateTransfers:
    """A device that does what it was asked for in that order, and only when it catches up."""

    queue: deque[Callable[[], object]] = field(default_factory=deque)
    num_copies: int = 0

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8)

    def device_buffer(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0x5A, dtype=torch.uint8)

    def copy(self, source: Tensor, target: Tensor) -> None:
        self.num_copies += 1
        self.ask(lambda: target.copy_(source))

    def ask(self, work: Callable[[], object]) -> None:
        self.queue.append(work)

    def catch_up(self) -> None:
        """Do all that was asked for."""
        while self.queue:
            self.queue.popleft()()


def arrays_of(seed: int, num_rows: int = 5) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "ids": random.integers(0, 1000, num_rows).astype(np.int64),
        "tiles": random.integers(0, 1000, (3, 8)).astype(np.int32),
        "none": np.empty(0, np.int64),
        "scores": random.random((num_rows, 3), dtype=np.float32),
        "flags": random.integers(0, 2, 7).astype(np.bool_),
    }


def check_equal(tensors: dict[str, Tensor], arrays: dict[str, np.ndarray]) -> None:
    assert list(tensors) == list(arrays)
    for name, array in arrays.items():
        assert tensors[name].numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensors[name].numpy(), array)


def test_all_arrays_of_a_call_arrive_in_one_copy() -> None:
    device = LateTransfers()
    sent = Staging(CPU, transfers=device).send(arrays_of(1))
    assert device.num_copies == 1
    device.catch_up()
    check_equal(sent, arrays_of(1))


def test_every_array_is_aligned_in_its_buffer() -> None:
    sent = Staging(CPU, transfers=LateTransfers()).send(arrays_of(1))
    assert all(
        tensor.storage_offset() * tensor.itemsize % ALIGNMENT == 0 for tensor in sent.values()
    )


def test_what_is_on_a_device_has_the_dtype_and_shape_of_its_array() -> None:
    """On a device that has no numbers."""
    arrays = {**arrays_of(1), "params": np.arange(6.0).reshape(2, 3).T}
    sent = send(arrays, torch.device("meta"))
    for name, array in arrays.items():
        assert sent[name].device.type == "meta"
        assert (sent[name].dtype, sent[name].shape) == (torch.from_numpy(array).dtype, array.shape)


def test_no_buffer_is_filled_again_while_its_copy_is_under_way() -> None:
    """And the host waits for none of them, whatever their sizes, and may use its arrays again."""
    device = LateTransfers()
    staging = Staging(CPU, transfers=device)
    steps = [(num_rows, num_rows % 3) for num_rows in (1, 30_000, 2, 30_000, *range(16))]
    sent = []
    for num_rows, seed in steps:
        arrays = arrays_of(seed, num_rows)
        sent.append(staging.send(arrays))
        for array in arrays.values():
            array.fill(0)
    assert len(device.queue) == len(steps)
    device.catch_up()
    for tensors, (num_rows, seed) in zip(sent, steps, strict=True):
        check_equal(tensors, arrays_of(seed, num_rows))


def test_nothing_to_send_is_no_copy() -> None:
    device = LateTransfers()
    sent = Staging(CPU, transfers=device).send({"ids": np.empty(0, np.int64)})
    assert sent["ids"].shape == (0,) and sent["ids"].dtype == torch.int64
    assert Staging(CPU, transfers=device).send({}) == {}
    assert device.num_copies == 0


@pytest.mark.parametrize("device", [None, LateTransfers()], ids=["cpu", "late"])
def test_a_static_tensor_is_overwritten_from_its_beginning(device: LateTransfers | None) -> None:
    static = torch.full((4, 3), 7, dtype=torch.int32)
    address = static.data_ptr()
    array = np.arange(4, dtype=np.int32).reshape(2, 2)
    Staging(CPU, transfers=device).send_into(static, array)
    if device is not None:
        device.catch_up()
    assert static.flatten().tolist() == [0, 1, 2, 3, 7, 7, 7, 7, 7, 7, 7, 7]
    assert static.data_ptr() == address


def test_a_cpus_tensors_are_the_arrays_themselves() -> None:
    arrays = arrays_of(1)
    sent = send(arrays, CPU)
    check_equal(sent, arrays)
    assert all(sent[name].numpy().base is not None for name in arrays)
    arrays["ids"][0] = 5000
    assert sent["ids"][0] == 5000
