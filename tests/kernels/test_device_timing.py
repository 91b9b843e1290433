"""Timing on a device, of a device that only counts."""

from collections.abc import Callable

import pytest
import torch

from sapwood.kernels import device_timing
from sapwood.kernels.device_timing import MAX_REPEATS, MIN_REPEATS, WARM_UPS, DeviceTimer


class Device:
    """A clock in milliseconds that work moves on, with the events of torch.cuda."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_calls = 0

    def work(self, milliseconds: float) -> Callable[[], None]:
        def function() -> None:
            self.num_calls += 1
            # The first calls compile, and are not to be counted.
            self.now += milliseconds if self.num_calls > WARM_UPS else 1000.0

        return function

    def wait(self, *_: object) -> None:
        self.now += 7.0

    def make_event(self, **_: object) -> "Event":
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._time = 0.0

    def record(self) -> None:
        self._time = self._device.now

    def elapsed_time(self, end: "Event") -> float:
        return end._time - self._time


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(torch.cuda, "Event", found.make_event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", found.wait)
    monkeypatch.setattr(device_timing, "L2_FLUSH_BYTES", 64)
    return found


def test_neither_compiling_nor_the_head_start_is_counted(device: Device) -> None:
    assert DeviceTimer(torch.device("cpu"))(device.work(2.0)) == pytest.approx(2e-3)


@pytest.mark.parametrize(("milliseconds", "repeats"), [(0.001, MAX_REPEATS), (900.0, MIN_REPEATS)])
def test_short_work_is_repeated_more_often(
    device: Device, milliseconds: float, repeats: int
) -> None:
    DeviceTimer(torch.device("cpu"), seconds=0.1)(device.work(milliseconds))
    assert device.num_calls == WARM_UPS + 3 + repeats
