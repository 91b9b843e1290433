"""Answers of a server that are asked for once."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Memo(Generic[K, V]):
    """Keeps what was worked out for a key, up to `max_size` in all, and forgets the least recently
    used first. Who asks meanwhile waits for the one that works on it. Errors are not kept.

    For one event loop. Cancelling who waits leaves the work to the others.
    """

    def __init__(self, *, max_size: int, size_of: Callable[[K], int]) -> None:
        self._max_size = max_size
        self._size_of = size_of
        self._size = 0
        self._values: OrderedDict[K, V] = OrderedDict()
        self._at_work: dict[K, asyncio.Task[V]] = {}

    async def get(self, key: K, work: Callable[[], Awaitable[V]]) -> V:
        """The value of `key`, which `work` makes if it is not known. Raises what `work` raises."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        task = self._at_work.get(key)
        if task is None:
            task = asyncio.ensure_future(self._made(key, work))
            self._at_work[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)

    def _forget(self, key: K, done: asyncio.Task[V]) -> None:
        del self._at_work[key]
        if not done.cancelled():
            done.exception()  # who waited has it; where all have left nobody has to be told

    async def _made(self, key: K, work: Callable[[], Awaitable[V]]) -> V:
        value = await work()
        size = self._size_of(key)
        if size <= self._max_size:
            self._values[key] = value
            self._size += size
        while self._size > self._max_size:
            oldest, _ = self._values.popitem(last=False)
            self._size -= self._size_of(oldest)
        return value
