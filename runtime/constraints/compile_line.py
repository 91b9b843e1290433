"""The order in which what waits for a compiler is taken up.

Knows no constraints and no threads.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from sortedcontainers import SortedDict

ItemT = TypeVar("ItemT", bound=Hashable)

TURNS = 4


class CompileLine(Generic[ItemT]):
    """Small items first; every fourth time the one that has waited longest.

    What is quick does not wait for all that is slow, and what is slow does not wait for ever: an
    item with n earlier ones in the line is taken within `TURNS * (n + 1)` turns, whatever arrives
    later. Not thread-safe. O(log n).
    """

    def __init__(self) -> None:
        self._by_size: SortedDict[tuple[int, int], ItemT] = SortedDict()  # (size, serial number)
        self._places: OrderedDict[ItemT, tuple[int, int]] = OrderedDict()  # in the order of arrival
        self._num_added = 0
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, item: ItemT, size: int) -> None:
        """Put an item that is not in the line at its end."""
        assert item not in self._places, "an item waits once"
        place = size, self._num_added
        self._num_added += 1
        self._places[item] = place
        self._by_size[place] = item

    def take(self) -> ItemT:
        """The next item, which leaves the line. There must be one."""
        self._num_taken += 1
        if self._num_taken % TURNS == 0:
            item = next(iter(self._places))
        else:
            item = self._by_size.peekitem(0)[1]
        self.discard(item)
        return item

    def discard(self, item: ItemT) -> bool:
        """Take an item out; whether it was there."""
        place = self._places.pop(item, None)
        if place is not None:
            del self._by_size[place]
        return place is not None

    def clear(self) -> None:
        self._places.clear()
        self._by_size.clear()
