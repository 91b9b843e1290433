"""Arrays arrive whole on a device that copies late, as a GPU does."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood.kernels.staging import ALIGNMENT, Staging

CPU = torch.device("cpu")


@dataclass
class LateTransfers:
    """A device that does what it was asked for in that order, and only when somebody waits."""

    queue: deque["LateWork"] = field(default_factory=deque)
    num_copies: int = 0
    num_host_buffers: int = 0

    def host_buffer(self, num_bytes: int) -> Tensor:
        self.num_host_buffers += 1
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8)

    def device_buffer(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0x5A, dtype=torch.uint8)

    def copy(self, source: Tensor, target: Tensor) -> "LateWork":
        self.num_copies += 1
        return self.ask(lambda: target.copy_(source))

    def ask(self, work: Callable[[], object]) -> "LateWork":
        self.queue.append(LateWork(self, work))
        return self.queue[-1]

    def catch_up(self, last: "LateWork | None" = None) -> None:
        """Do all that was asked for, or all up to one thing."""
        while self.queue and (last is None or last in self.queue):
            self.queue.popleft().work()


@dataclass(eq=False)
class LateWork:
    device: LateTransfers
    work: Callable[[], object]

    def wait(self) -> None:
        self.device.catch_up(self)


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


def test_a_buffer_is_not_filled_again_while_its_copy_is_under_way() -> None:
    device = LateTransfers()
    staging = Staging(CPU, transfers=device, num_buffers=3)
    steps = [(staging.send(arrays_of(seed)), seed) for seed in range(20)]
    device.catch_up()
    for sent, seed in steps:
        check_equal(sent, arrays_of(seed))


def test_the_host_does_not_wait_while_there_is_a_buffer_left() -> None:
    device = LateTransfers()
    staging = Staging(CPU, transfers=device, num_buffers=3)
    for seed in range(3):
        staging.send(arrays_of(seed))
    assert len(device.queue) == 3
    staging.send(arrays_of(3))
    assert len(device.queue) == 3  # the oldest was waited for, and no other


def test_a_step_larger_than_its_buffer_gets_a_larger_one_which_is_kept() -> None:
    device = LateTransfers()
    staging = Staging(CPU, transfers=device, num_buffers=1)
    for num_rows in (1, 30_000, 2, 30_000):
        arrays = arrays_of(num_rows, num_rows)
        sent = staging.send(arrays)
        device.catch_up()
        check_equal(sent, arrays)
    assert device.num_host_buffers == 2


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
    sent = Staging(CPU).send(arrays)
    check_equal(sent, arrays)
    assert all(sent[name].numpy().base is not None for name in arrays)
    arrays["ids"][0] = 5000
    assert sent["ids"][0] == 5000
