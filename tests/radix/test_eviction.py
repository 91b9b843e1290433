"""Eviction takes leaves in the policy's order, from their end, and only what nobody holds."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sapwood.radix import LRU, EvictionPolicy, Lease, Node, PrefixCache


class MRU:
    """The most recently used first."""

    def __call__(self, node: Node) -> int:
        return -node.last_used


class Oldest:
    """The first node made first."""

    def __call__(self, node: Node) -> int:
        return node.id


class Longest:
    """The longest edge first, then the least recently used: the key changes with every trim."""

    def __call__(self, node: Node) -> tuple[int, int]:
        return -len(node.blocks), node.last_used


class Constant:
    """All alike: the node id decides."""

    def __call__(self, node: Node) -> int:
        return 0


POLICIES: list[Callable[[], EvictionPolicy]] = [LRU, MRU, Oldest, Longest, Constant]


def next_victim(cache: PrefixCache, policy: EvictionPolicy) -> tuple[bool, Any, int, int] | None:
    """By looking at every node: warmth, key, id and last block of the leaf that goes first."""
    nodes = [node for _, node in cache._tree.walk()]
    parents = {node.parent for node in nodes}
    held = {block for lease in cache._leases for block in lease.held_blocks().tolist()}
    leaves = [n for n in nodes if n not in parents and int(n.blocks[-1]) not in held]
    keys = ((n.num_warm > 0, policy(n), n.id, int(n.blocks[-1])) for n in leaves)
    return min(keys, default=None)


def fill(cache: PrefixCache, choose: random.Random, num_requests: int) -> list[Lease]:
    """Random requests over few tokens; some of their leases are kept."""
    kept: list[Lease] = []
    for _ in range(num_requests):
        prompt = np.array([choose.randrange(2) for _ in range(choose.randint(1, 12))], np.int32)
        lease = cache.acquire(prompt, len(prompt))
        if lease is None:
            continue
        lease.copied()
        lease.publish(prompt)
        if choose.random() < 0.2:
            cache.warm(prompt)
        if choose.random() < 0.1:
            kept.append(lease)
        else:
            lease.release()
    return kept


@pytest.mark.parametrize("make_policy", POLICIES)
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_the_order_is_the_policys(
    make_policy: Callable[[], EvictionPolicy], block_size: int
) -> None:
    policy = make_policy()
    for seed in range(12):
        choose = random.Random(seed)
        cache = PrefixCache(60, block_size, policy=make_policy)
        kept = fill(cache, choose, 40)
        while (victim := next_victim(cache, policy)) is not None:
            num_evictable = cache.num_evictable_blocks
            assert cache.evict(1) == 1
            assert cache._pool.refs[victim[-1]] == 0, "another block went"
            assert cache.num_evictable_blocks == num_evictable - 1
            cache.check()
            if choose.random() < 0.1:
                kept += fill(cache, choose, 1)
        assert cache.num_evictable_blocks == 0
        for lease in kept:
            lease.release()
            cache.check()
        cache.flush()
        assert cache.num_free_blocks == cache.num_blocks


@pytest.mark.parametrize("make_policy", [p for p in POLICIES if p is not Longest])
def test_many_at_once_are_the_same_as_one_by_one(
    make_policy: Callable[[], EvictionPolicy],
) -> None:
    """True of every policy whose key does not change while a leaf is trimmed, as Longest's does."""
    for seed in range(20):
        caches = [PrefixCache(60, 2, policy=make_policy) for _ in range(2)]
        for cache in caches:
            fill(cache, random.Random(seed), 30)
        num_blocks = random.Random(seed).randint(1, 40)
        at_once = caches[0].evict(num_blocks)
        assert at_once == sum(caches[1].evict(1) for _ in range(num_blocks))
        assert [(n.token_ids.tolist(), n.last_used) for n in caches[0].walk()] == [
            (n.token_ids.tolist(), n.last_used) for n in caches[1].walk()
        ]


def prompt(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def serve(cache: PrefixCache, token_ids: np.ndarray) -> None:
    lease = cache.acquire(token_ids, len(token_ids))
    assert lease is not None
    lease.copied()
    lease.publish(token_ids)
    lease.release()


def test_a_held_block_is_never_evicted() -> None:
    cache = PrefixCache(8, 2)
    holder = cache.acquire(prompt(1, 2, 3, 4), 4)
    assert holder is not None
    holder.publish(prompt(1, 2, 3, 4))
    serve(cache, prompt(1, 2, 3, 4, 5, 6, 7, 8))
    assert cache.evict(8) == 2
    assert cache.match(prompt(1, 2, 3, 4, 5)).num_tokens == 4
    assert cache.evict(8) == 0
    cache.check()
    holder.release()
    assert cache.evict(8) == 2


def test_a_leaf_is_trimmed_from_its_end_as_far_as_needed() -> None:
    cache = PrefixCache(8, 2)
    serve(cache, prompt(1, 2, 3, 4, 5, 6, 7))
    assert cache.evict(1) == 1
    assert cache.match(prompt(1, 2, 3, 4, 5, 6, 7, 8)).num_tokens == 6
    assert cache.evict(2) == 2
    assert cache.match(prompt(1, 2, 3, 4, 5, 6, 7, 8)).num_tokens == 2
    cache.check()


def test_a_hit_keeps_what_it_used_and_not_what_is_beyond() -> None:
    cache = PrefixCache(16, 2)
    serve(cache, prompt(1, 2, 3, 4, 5, 6))
    serve(cache, prompt(7, 8, 9, 10))
    serve(cache, prompt(1, 2, 3, 4, 11))
    assert cache.evict(1) == 1
    assert cache.match(prompt(1, 2, 3, 4, 5, 6, 0)).num_tokens == 4
    assert cache.match(prompt(7, 8, 9, 10, 0)).num_tokens == 4
    assert cache.evict(2) == 2
    assert cache.match(prompt(7, 8, 9, 10, 0)).num_tokens == 0
    assert cache.match(prompt(1, 2, 3, 4, 11, 0)).num_tokens == 5


def test_the_source_of_a_copy_counts_as_used() -> None:
    cache = PrefixCache(16, 2)
    serve(cache, prompt(1, 2, 3, 4, 5, 6))
    serve(cache, prompt(7, 8))
    serve(cache, prompt(1, 2, 3, 9))
    assert cache.evict(2) == 2
    assert cache.match(prompt(7, 8, 0)).num_tokens == 0
    assert cache.match(prompt(1, 2, 3, 4, 0)).num_tokens == 4


def test_each_cache_has_a_policy_of_its_own() -> None:
    made: list[LRU] = []

    def make() -> LRU:
        made.append(LRU())
        return made[-1]

    PrefixCache(4, policy=make)
    PrefixCache(4, policy=make)
    assert len(made) == 2


def test_a_warm_prefix_outlasts_everything_that_is_not() -> None:
    cache = PrefixCache(16, 2)
    serve(cache, prompt(1, 2, 3, 4))
    assert cache.warm(prompt(1, 2, 3, 4)) is not None
    serve(cache, prompt(5, 6, 7, 8))
    assert cache.evict(2) == 2
    assert cache.match(prompt(5, 6, 7, 8, 0)).num_tokens == 0
    assert cache.match(prompt(1, 2, 3, 4, 0)).num_tokens == 4


def test_what_is_warm_goes_as_well_when_nothing_else_is_left() -> None:
    cache = PrefixCache(4, 2)
    serve(cache, prompt(1, 2, 3, 4))
    warm = cache.warm(prompt(1, 2, 3, 4))
    assert warm is not None and cache.num_warm_blocks == 2
    assert cache.num_evictable_blocks == 2
    lease = cache.acquire(prompt(5, 6, 7, 8, 9, 10, 11), 7)
    assert lease is not None, "warmth kept a request out"
    assert cache.num_warm_blocks == 0
    cache.check()
    cache.cool(warm)
    cache.check()


def test_what_comes_after_a_warm_prefix_is_not_warm() -> None:
    cache = PrefixCache(16, 2)
    serve(cache, prompt(1, 2, 3, 4))
    assert cache.warm(prompt(1, 2, 3, 4)) is not None
    serve(cache, prompt(1, 2, 3, 4, 5, 6))
    assert cache.num_warm_blocks == 2
    assert cache.evict(1) == 1
    assert cache.match(prompt(1, 2, 3, 4, 5, 6, 0)).num_tokens == 4


def test_a_block_of_two_warm_prefixes_is_counted_once_and_cools_with_the_second() -> None:
    cache = PrefixCache(16, 2)
    for last in (5, 7):
        serve(cache, prompt(1, 2, 3, 4, last, 6))
    first, second = (cache.warm(prompt(1, 2, 3, 4, last, 6)) for last in (5, 7))
    assert first is not None and second is not None
    assert cache.num_warm_blocks == 4
    cache.cool(first)
    assert cache.num_warm_blocks == 3
    assert cache.warm_prefixes(prompt(1, 2, 3, 4, 5, 6)) == []
    assert cache.warm_prefixes(prompt(1, 2, 3, 4, 7, 6, 9)) == [second]
    cache.cool(second)
    assert cache.num_warm_blocks == 0
    with pytest.raises(ValueError, match="not warm"):
        cache.cool(second)


def test_only_whole_blocks_are_warm_and_nothing_that_is_not_cached() -> None:
    cache = PrefixCache(16, 4)
    serve(cache, prompt(1, 2, 3, 4, 5, 6))
    assert cache.warm(prompt(1, 2, 3)) is None
    assert cache.warm(prompt(9, 9, 9, 9)) is None
    assert cache.warm(prompt(1, 2, 3, 4, 5, 6)) is not None
    assert cache.num_warm_blocks == 1
    cache.check()
