"""A cache with two bounds. Knows nothing of what it keeps."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[ValueT]):
    value: ValueT
    num_bytes: int


class BoundedCache(Generic[KeyT, ValueT]):
    """The entries used last, at most `max_entries` of them and `max_bytes` in all.

    Not thread-safe. Every operation is O(1), but for what `put` has to drop.
    """

    def __init__(self, *, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[KeyT, _Entry[ValueT]] = OrderedDict()  # the last used at the end
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, key: KeyT) -> ValueT | None:
        """What is kept under `key`, which counts as used now."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry.value

    def put(self, key: KeyT, value: ValueT, num_bytes: int) -> None:
        """Keep a value, and drop those used longest ago where it takes their room.

        A value of more than `max_bytes` is not kept, and none is dropped for it.
        """
        self.discard(key)
        if num_bytes > self._max_bytes:
            return
        self._entries[key] = _Entry(value, num_bytes)
        self._num_bytes += num_bytes
        while len(self._entries) > self._max_entries or self._num_bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._num_bytes -= dropped.num_bytes

    def discard(self, key: KeyT) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes

    def clear(self) -> None:
        self._entries.clear()
        self._num_bytes = 0

    def check(self) -> None:
        """Assert the bounds and that the bytes add up. O(entries)."""
        assert len(self._entries) <= self._max_entries
        assert self._num_bytes == sum(entry.num_bytes for entry in self._entries.values())
        assert self._num_bytes <= self._max_bytes
