"""Which leaf to evict next: what is warm last, whatever the policy.

Knows nothing of blocks' holders; time is a count, not a clock.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from sortedcontainers import SortedList

from sapwood.radix.tree import Node


class EvictionPolicy(Protocol):
    """From a node to its sort key: the candidate with the smallest is evicted first.

    Keys of one policy must be comparable and depend on nothing but the node and the policy.
    """

    def __call__(self, node: Node) -> Any: ...


class LRU:
    """Evict what has not been used for the longest time."""

    def __call__(self, node: Node) -> int:
        return node.last_used


class EvictionQueue:
    """The candidates for eviction, in order of (whether warm, the policy's key, node id).

    Invariant: a node is in the queue if and only if its `entry` is not None, under that entry.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._entries: SortedList = SortedList()

    def __iter__(self) -> Iterator[Node]:
        """The candidates, the next to be evicted first."""
        return (node for *_, node in self._entries)

    def first(self) -> Node | None:
        """The next to be evicted. O(1)."""
        if not self._entries:
            return None
        node: Node = self._entries[0][-1]
        return node

    def update(self, node: Node, is_candidate: bool) -> None:
        """Put a node where its key of now belongs, or take it out. O(log(candidates)).

        The old entry goes by its old key, so that the node may have changed since.
        """
        entry = self._entry(node) if is_candidate else None
        if entry == node.entry:
            return
        if node.entry is not None:
            self._entries.remove(node.entry)
        if entry is not None:
            self._entries.add(entry)
        node.entry = entry

    def check(self) -> None:
        """Assert that every entry is its node's, with the key of now. O(candidates)."""
        for entry in self._entries:
            node: Node = entry[-1]
            assert entry == node.entry == self._entry(node), "an old entry"

    def _entry(self, node: Node) -> tuple[bool, Any, int, Node]:
        return node.num_warm > 0, self._policy(node), node.id, node
