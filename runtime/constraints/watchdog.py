"""Tells when something takes longer than it may. Ends nothing itself."""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT", bound=Hashable)


class Watchdog(Generic[ItemT]):
    """Calls `on_overrun` with each item that has been watched for `limit` seconds, once.

    It does so on a thread of its own, which sleeps while nothing is due and is woken only by the
    first of several items: all have the same limit, so that they are due in the order of their
    start.
    """

    def __init__(
        self, *, limit: float, on_overrun: Callable[[ItemT], None], clock: Callable[[], float]
    ) -> None:
        self._limit = limit
        self._on_overrun = on_overrun
        self._clock = clock
        self._due: OrderedDict[ItemT, float] = OrderedDict()  # when, the earliest first
        self._wakes_at = math.inf
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, name="sapwood-constraint-deadlines", daemon=True
        )
        self._thread.start()

    @contextmanager
    def watching(self, item: ItemT) -> Iterator[None]:
        """Watch an item within the block."""
        self.watch(item)
        try:
            yield
        finally:
            self.forget(item)

    def watch(self, item: ItemT) -> None:
        """Watch an item until it is forgotten."""
        with self._changed:
            self._due[item] = self._clock() + self._limit
            if self._due[item] < self._wakes_at:
                self._changed.notify()

    def forget(self, item: ItemT) -> None:
        """Watch an item no more, if it is watched."""
        with self._changed:
            self._due.pop(item, None)

    def close(self) -> None:
        """Watch no more, and wait for the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (item := self._next_overdue()) is not None:
            self._on_overrun(item)

    def _next_overdue(self) -> ItemT | None:
        """Waits for one; None once it is closed."""
        with self._changed:
            while not self._closed:
                item = next(iter(self._due), None)
                if item is None:
                    self._sleep(math.inf)
                elif self._due[item] > self._clock():
                    self._sleep(self._due[item])
                else:
                    del self._due[item]
                    return item
        return None

    def _sleep(self, until: float) -> None:
        self._wakes_at = until
        self._changed.wait(None if until == math.inf else until - self._clock())
        self._wakes_at = -math.inf  # awake
