"""The pool counts holders, and refuses what would make its counts wrong."""

import numpy as np
import pytest

from sapwood.radix import BlockPool, OutOfBlocks


def blocks(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(8, 4)
    pool.allocate(5)
    with pytest.raises(OutOfBlocks, match="4 blocks were asked for, 3 of 8"):
        pool.allocate(4)
    assert pool.num_free == 3
    assert pool.allocate(3).tolist() == [5, 6, 7]
    assert pool.allocate(0).tolist() == []
    pool.check()


def test_released_runs_come_out_ascending() -> None:
    pool = BlockPool(12, 4)
    first, second, third = (pool.allocate(4) for _ in range(3))
    for run in (second, first, third):
        pool.release(run)
    assert [pool.allocate(4).tolist() for _ in range(3)] == [
        [8, 9, 10, 11],
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    pool.check()


def test_single_blocks_come_out_ascending() -> None:
    pool = BlockPool(12, 4)
    pool.release(pool.allocate(6))
    assert [int(pool.allocate(1)[0]) for _ in range(12)] == list(range(12))


def test_the_tree_and_leases_are_counted_as_holders() -> None:
    pool = BlockPool(8, 4)
    pool.allocate(3)
    pool.enter_tree(blocks(0, 1))
    pool.hold(blocks(0))
    assert pool.refs.tolist() == [3, 2, 1, 0, 0, 0, 0, 0]
    assert pool.num_evictable == 0
    pool.release(blocks(0, 1, 2))
    assert (pool.num_evictable, pool.num_free) == (1, 6)
    pool.leave_tree(blocks(0, 1))
    assert (pool.num_evictable, pool.num_free, pool.num_tree_blocks) == (0, 7, 0)
    assert pool.refs.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    pool.check()


def test_only_blocks_of_the_tree_get_another_holder() -> None:
    pool = BlockPool(8, 4)
    pool.allocate(2)
    pool.enter_tree(blocks(0))
    with pytest.raises(ValueError, match="publish them first"):
        pool.hold(blocks(0, 1))
    pool.check()


def test_what_would_spoil_the_counts_is_refused() -> None:
    pool = BlockPool(8, 4)
    pool.allocate(2)
    pool.enter_tree(blocks(0))
    with pytest.raises(ValueError, match=r"no lease holds blocks \[5\]"):
        pool.release(blocks(0, 5))
    pool.release(blocks(0))
    with pytest.raises(ValueError, match=r"no lease holds blocks \[0\]"):
        pool.release(blocks(0))
    with pytest.raises(ValueError, match="outside the tree"):
        pool.enter_tree(blocks(0))
    with pytest.raises(ValueError, match="held"):
        pool.enter_tree(blocks(4))
    with pytest.raises(ValueError, match="in the tree to leave"):
        pool.leave_tree(blocks(1))
    with pytest.raises(ValueError, match="-1 blocks"):
        pool.allocate(-1)
    pool.check()
    assert pool.refs.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_check_notices_what_is_wrong() -> None:
    def spoilt(name: str, index: int, value: int) -> BlockPool:
        pool = BlockPool(8, 4)
        pool.allocate(3)
        pool.enter_tree(blocks(0, 1))
        pool.release(blocks(0))
        pool.check()
        getattr(pool, name)[index] = value
        return pool

    for pool in (spoilt("refs", 5, 1), spoilt("refs", 0, 0), spoilt("in_tree", 0, 0)):
        with pytest.raises(AssertionError):
            pool.check()
    pool = spoilt("refs", 2, 1)
    pool.num_evictable += 1
    with pytest.raises(AssertionError):
        pool.check()
