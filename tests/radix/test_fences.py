"""Blocks that a step in flight may read or write: nobody gets them before it has ended."""

import numpy as np
import pytest

from sapwood.radix import LeaseReleased, PrefixCache
from tests.radix.test_cache import lease, run, serve


def counts(cache: PrefixCache) -> tuple[int, int]:
    cache.check()
    return cache.num_free_blocks, cache.num_evictable_blocks


def test_a_lease_that_ends_holds_its_blocks_until_its_last_step_has_ended() -> None:
    cache = PrefixCache(8, 4)
    ended = lease(cache, run(0, 10))
    ended.launched(1)
    ended.launched(2)
    ended.publish(run(0, 8))
    ended.release()
    assert counts(cache) == (5, 0)
    cache.ended(1)
    assert counts(cache) == (5, 0)
    cache.ended(2)
    assert counts(cache) == (6, 2)


def test_a_lease_that_no_step_in_flight_knows_gives_its_blocks_back_at_once() -> None:
    cache = PrefixCache(8, 4)
    flying, ended, never = (lease(cache, run(i, i + 4)) for i in (0, 100, 200))
    ended.launched(1)
    flying.launched(1)
    cache.ended(1)
    flying.launched(2)
    ended.release()
    never.release()
    assert counts(cache) == (7, 0)
    flying.release()
    assert counts(cache) == (7, 0)


def test_a_block_that_publish_replaced_is_held_until_the_step_in_flight_has_ended() -> None:
    cache = PrefixCache(16, 4)
    first, second = lease(cache, run(0, 8)), lease(cache, run(0, 8))
    replaced = second.block_table.copy()
    second.launched(1)
    first.publish(run(0, 8))
    second.publish(run(0, 8))
    assert not set(replaced) & set(second.block_table)
    assert counts(cache) == (12, 0)
    others = cache.acquire(run(500, 548), 48)
    assert others is not None and not set(replaced) & set(others.block_table)
    cache.ended(1)
    assert counts(cache) == (2, 0)


def test_what_is_behind_a_fence_is_neither_evicted_nor_flushed() -> None:
    cache = PrefixCache(4, 4)
    ended = lease(cache, run(0, 12))
    ended.launched(1)
    ended.publish(run(0, 12))
    ended.release()
    assert cache.evict(4) == 0
    cache.flush()
    assert cache.num_tree_blocks == 3
    assert cache.acquire(run(500, 508), 8) is None
    cache.ended(1)
    assert cache.acquire(run(500, 508), 8) is not None


def test_a_prefix_behind_a_fence_is_a_hit_all_the_same() -> None:
    cache = PrefixCache(8, 4)
    ended = lease(cache, run(0, 10))
    ended.launched(1)
    ended.publish(run(0, 10))
    ended.release()
    hit = lease(cache, run(0, 12))
    assert hit.num_cached == 10
    cache.ended(1)
    assert counts(cache) == (4, 1)  # the partly filled leaf, which was copied
    hit.release()
    assert counts(cache) == (5, 3)


def test_the_source_of_a_copy_is_held_until_the_step_that_copies_has_ended() -> None:
    cache = PrefixCache(8, 4)
    serve(cache, run(0, 6))
    copier = cache.acquire(run(0, 8), 8)
    assert copier is not None and copier.copy is not None
    copier.launched(1)
    copier.release()  # aborted before it was committed
    assert counts(cache) == (5, 0)
    cache.ended(1)
    assert counts(cache) == (6, 2)


def test_steps_end_in_their_order_and_once() -> None:
    cache = PrefixCache(8, 4)
    held = lease(cache, run(0, 4))
    held.launched(3)
    cache.ended(3)
    for step in (2, 3):
        with pytest.raises(ValueError, match="ended"):
            cache.ended(step)
        with pytest.raises(ValueError, match="has ended"):
            held.launched(step)
    held.launched(5)
    with pytest.raises(ValueError, match="after a later one"):
        held.launched(4)
    held.release()
    with pytest.raises(LeaseReleased):
        held.launched(6)


def test_without_a_tree_blocks_are_behind_the_fence_as_well() -> None:
    cache = PrefixCache(4, 4, enabled=False)
    ended = lease(cache, run(0, 8))
    ended.launched(1)
    table = np.sort(ended.block_table)
    ended.release()
    assert counts(cache) == (2, 0)
    other = lease(cache, run(0, 8))
    assert not set(table) & set(other.block_table)
    cache.ended(1)
    assert counts(cache) == (2, 0)
