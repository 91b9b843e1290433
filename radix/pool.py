"""The blocks of the KV cache and who holds them. Knows nothing of tokens, keys or values."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

BlockIds: TypeAlias = npt.NDArray[np.int32]


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free."""


class BlockPool:
    """The only reference counts in the system: how many holders each block has.

    A holder is a lease or the prefix tree. Block ids given to a method are distinct. (Indexing
    with intp is three times as fast as with int32, conversion included.)

    Invariants: `refs[b]` is the number of holders of block `b`, and a block with none is free;
    `in_tree[b]` says that the tree is one of them; only blocks of the tree have several holders
    or ever had; `num_evictable` counts the blocks that the tree alone holds.
    """

    __slots__ = (
        "_free",
        "block_size",
        "in_tree",
        "num_blocks",
        "num_evictable",
        "num_free",
        "num_tree_blocks",
        "refs",
    )

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """`block_size` is in tokens. Raises ValueError unless both are positive."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a pool needs at least one block of at least one token, got {num_blocks} blocks "
                f"of {block_size}; give it more memory"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.refs: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.in_tree: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self.num_free = num_blocks
        self.num_evictable = 0
        self.num_tree_blocks = 0
        # A stack whose top is at num_free. Runs lie on it descending, so that they come off
        # ascending: neighbouring blocks let attention read the cache without a gather.
        self._free: BlockIds = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)

    def allocate(self, num_blocks: int) -> BlockIds:
        """Take free blocks, all or none, each with one holder; ids come out ascending.

        Raises OutOfBlocks if fewer are free, ValueError for a negative number.
        O(n log n) in `num_blocks`.
        """
        if num_blocks < 0:
            raise ValueError(f"cannot allocate {num_blocks} blocks; ask for zero or more")
        if num_blocks > self.num_free:
            raise OutOfBlocks(
                f"{num_blocks} blocks were asked for, {self.num_free} of {self.num_blocks} are "
                "free; evict or release some first"
            )
        top = self.num_free
        self.num_free = top - num_blocks
        block_ids = np.sort(self._free[self.num_free : top])
        self.refs[block_ids.astype(np.intp)] = 1
        return block_ids

    def hold(self, block_ids: BlockIds) -> None:
        """Add a holder to blocks of the tree. O(n).

        Raises ValueError if one is not in the tree: leases share blocks only through the tree,
        or the evictable ones could not be counted.
        """
        if not block_ids.size:
            return
        index = block_ids.astype(np.intp)
        if np.count_nonzero(self.in_tree.take(index)) < index.size:
            raise ValueError(
                f"only blocks of the tree can get another holder, got {block_ids.tolist()}; "
                "publish them first"
            )
        counts = self.refs.take(index)
        self.num_evictable -= int(np.count_nonzero(counts == 1))
        self.refs[index] = counts + 1

    def release(self, block_ids: BlockIds) -> None:
        """Take a lease away as a holder of each block; those without one are free at once. O(n).

        Raises ValueError if no lease holds one.
        """
        if not block_ids.size:
            return
        index = block_ids.astype(np.intp)
        in_tree = self.in_tree.take(index)
        counts = self.refs.take(index)
        num_leases = counts - in_tree
        if np.count_nonzero(num_leases) < index.size:
            raise ValueError(
                f"no lease holds blocks {block_ids[num_leases == 0].tolist()}; "
                "release each block once per hold"
            )
        self.refs[index] = counts - 1
        is_last = num_leases == 1
        num_evictable = int(np.count_nonzero(is_last & in_tree))
        self.num_evictable += num_evictable
        if num_evictable < np.count_nonzero(is_last):
            self._free_blocks(block_ids[is_last > in_tree])

    def num_shared(self, block_ids: BlockIds) -> int:
        """How many of the blocks have more than one holder. O(n)."""
        return int(np.count_nonzero(self.refs.take(block_ids.astype(np.intp)) > 1))

    def num_exclusive(self, block_ids: BlockIds) -> int:
        """How many of the blocks have exactly one holder besides the tree. O(n)."""
        index = block_ids.astype(np.intp)
        return int(np.count_nonzero(self.refs.take(index) - self.in_tree.take(index) == 1))

    def enter_tree(self, block_ids: BlockIds) -> None:
        """Make the tree another holder of blocks that a lease holds. O(n).

        Raises ValueError if one is free or in the tree already.
        """
        index = block_ids.astype(np.intp)
        counts = self.refs.take(index)
        num_held = np.count_nonzero(counts)
        if num_held < index.size or np.count_nonzero(self.in_tree.take(index)):
            raise ValueError(
                f"blocks {block_ids.tolist()} must be held and outside the tree to enter it"
            )
        self.in_tree[index] = True
        self.refs[index] = counts + 1
        self.num_tree_blocks += block_ids.size

    def leave_tree(self, block_ids: BlockIds) -> None:
        """Take the tree away as a holder; blocks that no lease holds are free at once. O(n).

        Raises ValueError if one is not in the tree.
        """
        index = block_ids.astype(np.intp)
        if np.count_nonzero(self.in_tree.take(index)) < index.size:
            raise ValueError(f"blocks {block_ids.tolist()} must be in the tree to leave it")
        counts = self.refs.take(index) - 1
        self.in_tree[index] = False
        self.refs[index] = counts
        self.num_tree_blocks -= block_ids.size
        freed = block_ids[counts == 0]
        self.num_evictable -= freed.size
        self._free_blocks(freed)

    def check(self) -> None:
        """Assert the invariants that need no knowledge of the holders. O(blocks)."""
        assert (self.refs >= 0).all(), "a block has a negative number of holders"
        free = np.sort(self._free[: self.num_free])
        assert np.array_equal(free, np.flatnonzero(self.refs == 0)), "the free blocks differ"
        assert (self.refs[self.in_tree] > 0).all(), "a block of the tree is free"
        assert self.num_tree_blocks == np.count_nonzero(self.in_tree)
        assert self.num_evictable == np.count_nonzero(self.in_tree & (self.refs == 1))

    def _free_blocks(self, block_ids: BlockIds) -> None:
        """Put blocks without a holder on the stack, the first on top."""
        end = self.num_free + block_ids.size
        self._free[self.num_free : end] = block_ids[::-1]
        self.num_free = end
