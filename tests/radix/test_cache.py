"""What the prefix cache promises, one claim a test."""

import itertools

import numpy as np
import pytest

from sapwood.radix import (
    Lease,
    LeaseReleased,
    Namespace,
    NamespaceKind,
    NamespacePart,
    PrefixCache,
)
from tests.radix.model import fingerprint


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def run(start: int, stop: int) -> np.ndarray:
    """Consecutive token ids: a prompt like no other."""
    return np.arange(start, stop, dtype=np.int32)


def joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def values(*notes: float) -> np.ndarray:
    return np.array(notes, np.float32)


def numbered(start: int, stop: int) -> np.ndarray:
    """Notes that are all different."""
    return np.arange(start, stop, dtype=np.float32)


def unknown(count: int) -> np.ndarray:
    return np.full(count, np.nan, np.float32)


def lease(cache: PrefixCache, token_ids: np.ndarray, namespace: Namespace = ()) -> Lease:
    """A lease with room for the prompt, its copy done."""
    acquired = cache.acquire(token_ids, len(token_ids), namespace)
    assert acquired is not None
    acquired.copied()
    return acquired


def serve(
    cache: PrefixCache,
    token_ids: np.ndarray,
    namespace: Namespace = (),
    notes: np.ndarray | None = None,
) -> None:
    """A whole request: its tokens stay in the tree, with its notes."""
    served = lease(cache, token_ids, namespace)
    served.publish(token_ids, notes)
    served.release()
    cache.check()


class TestHits:
    @pytest.mark.parametrize("num_shared", [1, 15, 16, 17, 31, 32, 33])
    def test_a_shared_prefix_is_hit_to_the_token(self, num_shared: int) -> None:
        cache = PrefixCache(64, 16)
        serve(cache, run(0, 100))
        prompt = joined(run(0, num_shared), run(500, 540))
        assert cache.match(prompt).num_tokens == num_shared
        hit = cache.acquire(prompt, len(prompt))
        assert hit is not None
        assert hit.num_cached == num_shared
        assert (hit.copy.num_rows if hit.copy else 0) == num_shared % 16

    @pytest.mark.parametrize("block_size", [1, 16, 64])
    def test_a_hit_is_as_long_at_every_block_size(self, block_size: int) -> None:
        cache = PrefixCache(1000, block_size)
        serve(cache, run(0, 200))
        serve(cache, joined(run(0, 70), run(300, 400)))
        for num_shared in (1, 15, 16, 17, 63, 64, 65, 70, 71, 199):
            prompt = joined(run(0, num_shared), run(800, 810))
            assert cache.match(prompt).num_tokens == num_shared
        assert cache.match(joined(run(0, 70), run(300, 350), run(900, 910))).num_tokens == 120

    @pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 32])
    def test_a_hit_leaves_a_token_to_compute(self, num_tokens: int) -> None:
        cache = PrefixCache(64, 16)
        serve(cache, run(0, num_tokens))
        assert cache.match(run(0, num_tokens)).num_tokens == num_tokens - 1
        assert lease(cache, run(0, num_tokens)).num_cached == num_tokens - 1

    def test_an_answer_is_hit_as_well_as_its_prompt(self) -> None:
        cache = PrefixCache(64, 16)
        first = lease(cache, run(0, 100))
        assert first.extend(150)
        first.publish(run(0, 150))
        first.release()
        assert lease(cache, run(0, 200)).num_cached == 150

    def test_the_best_of_many_partly_matching_blocks_is_copied(self) -> None:
        cache = PrefixCache(64, 4)
        for tail in ((1, 2, 3, 4), (1, 2, 9, 9), (1, 7, 7, 7), (5, 5, 5, 5)):
            serve(cache, joined(run(100, 104), tokens(*tail)))
        assert cache.match(joined(run(100, 104), tokens(1, 2, 9, 8, 0))).num_tokens == 7
        assert cache.match(joined(run(100, 104), tokens(1, 2, 5, 5, 0))).num_tokens == 6
        assert cache.match(joined(run(100, 104), tokens(1, 0, 0, 0, 0))).num_tokens == 5
        assert cache.match(joined(run(100, 104), tokens(2, 2, 2, 2, 2))).num_tokens == 4

    def test_tokens_that_share_bytes_do_not_match(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, tokens(0x01020304, 0x01020304))
        assert cache.match(tokens(0x0A020304, 1)).num_tokens == 0
        assert cache.match(tokens(0x01020304, 0x0A020304, 1)).num_tokens == 1

    def test_tokens_may_be_a_strided_view(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 40)[::2])
        assert cache.match(np.ascontiguousarray(run(0, 40)[::2])).num_tokens == 19

    def test_match_says_what_acquire_would_share_and_what_is_held(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 16))
        holder = lease(cache, joined(run(0, 8), run(50, 54)))
        found = cache.match(joined(run(0, 14), run(70, 75)))
        assert (found.num_tokens, found.num_whole_blocks, found.num_held_blocks) == (14, 3, 2)
        holder.release()
        assert cache.match(joined(run(0, 14), run(70, 75))).num_held_blocks == 0

    def test_match_changes_nothing(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 30))
        serve(cache, joined(run(0, 10), run(50, 60)))
        holder = lease(cache, joined(run(0, 20), run(80, 90)))
        before = fingerprint(cache)
        for prompt in (
            run(0, 30),
            run(0, 7),
            run(0, 1),
            run(7, 9),
            joined(run(0, 10), run(50, 99)),
        ):
            cache.match(prompt)
            cache.match(prompt, (NamespacePart(NamespaceKind.TENANT, "unknown"),))
        assert fingerprint(cache) == before
        holder.release()

    def test_an_empty_prompt_can_be_leased(self) -> None:
        cache = PrefixCache(4, 4)
        empty = cache.acquire(tokens(), 3)
        assert empty is not None
        assert (empty.num_cached, empty.num_blocks) == (0, 1)
        empty.publish(tokens())
        cache.check()


class TestCaps:
    @pytest.mark.parametrize("cap", [0, 1, 3, 4, 5, 8, 11, 12, 13, 99])
    def test_no_more_is_taken_than_the_cap(self, cap: int) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 20))
        prompt = joined(run(0, 13), run(50, 60))
        expected = min(cap, 13)
        found = cache.match(prompt, max_cached=cap)
        assert (found.num_tokens, found.num_whole_blocks) == (expected, expected // 4)
        hit = cache.acquire(prompt, len(prompt), max_cached=cap)
        assert hit is not None
        assert (hit.num_cached, hit.num_shared_blocks) == (expected, expected // 4)
        assert (hit.copy.num_rows if hit.copy else 0) == expected % 4
        cache.check()

    def test_a_cap_inside_a_block_copies_its_first_rows(self) -> None:
        cache = PrefixCache(64, 4)
        owner = lease(cache, run(0, 12))
        owner.publish(run(0, 12))
        hit = cache.acquire(run(0, 12), 12, max_cached=6)
        assert hit is not None and hit.copy is not None
        assert (hit.copy.source, hit.copy.num_rows) == (owner.block_table[1], 2)
        assert hit.copy.target == hit.block_table[1] != owner.block_table[1]
        assert hit.block_table[0] == owner.block_table[0]
        cache.check()

    @pytest.mark.parametrize("cap", [0, 4, 6])
    def test_what_was_computed_beyond_a_cap_gives_way_to_what_the_tree_has(self, cap: int) -> None:
        cache = PrefixCache(64, 4)
        owner = lease(cache, run(0, 12))
        owner.publish(run(0, 12))
        hit = cache.acquire(run(0, 12), 12, max_cached=cap)
        assert hit is not None
        hit.copied()
        hit.publish(run(0, 12), numbered(0, 12))
        assert hit.block_table.tolist() == owner.block_table.tolist()
        assert cache.notes(run(0, 12)).tolist() == list(range(12))
        cache.check()

    def test_a_cap_beyond_the_prompt_leaves_a_token_to_compute(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 12))
        for cap in (11, 12, 13):
            assert cache.match(run(0, 12), max_cached=cap).num_tokens == 11
        assert cache.match(tokens(), max_cached=0).num_tokens == 0

    def test_a_capped_match_changes_nothing(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 30))
        before = fingerprint(cache)
        for cap in range(31):
            cache.match(run(0, 30), max_cached=cap)
        assert fingerprint(cache) == before


class TestNotes:
    def test_they_are_those_of_the_longest_cached_prefix_with_its_last_token(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 10), notes=numbered(100, 110))
        assert cache.notes(run(0, 10)).tolist() == list(range(100, 110))
        assert cache.notes(run(0, 7)).tolist() == list(range(100, 107))
        assert cache.notes(joined(run(0, 6), run(50, 60))).tolist() == list(range(100, 106))
        assert cache.notes(run(50, 60)).size == cache.notes(tokens()).size == 0
        assert cache.notes(run(0, 10)).dtype == np.float32

    def test_they_belong_to_a_namespace(self) -> None:
        cache = PrefixCache(64, 4)
        tenant = (NamespacePart(NamespaceKind.TENANT, "t"),)
        serve(cache, run(0, 4), tenant, numbered(0, 4))
        serve(cache, run(0, 4), notes=numbered(10, 14))
        assert cache.notes(run(0, 4), tenant).tolist() == [0, 1, 2, 3]
        assert cache.notes(run(0, 4)).tolist() == [10, 11, 12, 13]

    def test_what_is_read_is_a_copy_and_so_is_what_is_kept(self) -> None:
        cache = PrefixCache(64, 4)
        given = numbered(0, 10)
        serve(cache, run(0, 10), notes=given)
        given[:] = 99
        cache.notes(run(0, 10))[:] = 99
        assert cache.notes(run(0, 10)).tolist() == list(range(10))

    def test_reading_them_changes_nothing(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 30), notes=numbered(0, 30))
        serve(cache, joined(run(0, 10), run(50, 60)))
        before = fingerprint(cache)
        for end in range(31):
            cache.notes(run(0, end))
        assert fingerprint(cache) == before

    def test_the_first_that_is_known_stays(self) -> None:
        cache = PrefixCache(64, 4)
        nan = np.nan
        serve(cache, run(0, 6), notes=values(nan, 1, nan, 3, nan, 5))
        serve(cache, run(0, 6), notes=values(10, 11, nan, nan, 14, 15))
        assert np.array_equal(cache.notes(run(0, 6)), values(10, 1, nan, 3, 14, 5), equal_nan=True)
        serve(cache, run(0, 6))
        assert np.array_equal(cache.notes(run(0, 6)), values(10, 1, nan, 3, 14, 5), equal_nan=True)

    def test_infinite_notes_are_known(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 2), notes=values(-np.inf, np.nan))
        serve(cache, run(0, 2), notes=values(1, np.inf))
        assert cache.notes(run(0, 2)).tolist() == [-np.inf, np.inf]

    def test_unknown_notes_take_no_memory(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 16), notes=unknown(16))
        serve(cache, joined(run(0, 8), run(50, 58)), notes=unknown(16))
        serve(cache, run(0, 20), notes=joined(unknown(19), values(7)))
        with_notes = [bytes(n.tokens) for _, n in cache._tree.walk() if n.notes is not None]
        assert with_notes == [run(8, 20).tobytes()], "only the edge with a known one keeps any"
        assert cache.evict(3) == 3, "the other branch, then the block of the known one"
        assert all(node.notes is None for _, node in cache._tree.walk())

    def test_a_split_edge_keeps_them_on_both_sides(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 12), notes=numbered(0, 12))
        other = joined(run(0, 4), run(50, 54))
        serve(cache, other)
        assert len(list(cache.walk())) == 3
        assert cache.notes(run(0, 12)).tolist() == list(range(12))
        assert np.array_equal(
            cache.notes(other), joined(numbered(0, 4), unknown(4)), equal_nan=True
        )

    def test_a_leaf_that_grows_keeps_them(self) -> None:
        cache = PrefixCache(64, 4)
        growing = lease(cache, run(0, 18))
        for end in (3, 4, 9, 10, 18):
            notes = unknown(end)
            notes[-1] = end
            growing.publish(run(0, end), notes)
            cache.check()
        expected = unknown(18)
        for end in (3, 4, 9, 10, 18):
            expected[end - 1] = end
        assert np.array_equal(cache.notes(run(0, 18)), expected, equal_nan=True)
        assert len(list(cache.walk())) == 1

    def test_a_leaf_that_grows_without_notes_keeps_those_it_has(self) -> None:
        cache = PrefixCache(64, 4)
        growing = lease(cache, run(0, 12))
        growing.publish(run(0, 6), numbered(0, 6))
        growing.publish(run(0, 12))
        expected = joined(numbered(0, 6), unknown(6))
        assert np.array_equal(cache.notes(run(0, 12)), expected, equal_nan=True)

    @pytest.mark.parametrize("given", [None, numbered(10, 17)])
    def test_a_block_that_replaces_a_partly_filled_one_takes_its_notes_over(
        self, given: np.ndarray | None
    ) -> None:
        cache = PrefixCache(64, 4)
        short, long = lease(cache, run(0, 6)), lease(cache, run(0, 7))
        short.publish(run(0, 6), joined(unknown(4), values(4, np.nan)))
        long.publish(run(0, 7), given)
        assert cache.match(run(0, 8)).num_tokens == 7, "the longer one is in the tree"
        rest = unknown(7) if given is None else given
        expected = joined(rest[:4], values(4), rest[5:])
        assert np.array_equal(cache.notes(run(0, 7)), expected, equal_nan=True)
        cache.check()

    def test_rows_that_were_copied_keep_their_notes_in_the_block_of_the_copy(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 8), notes=numbered(0, 8))
        prompt = joined(run(0, 6), run(50, 52))
        hit = lease(cache, prompt)
        assert hit.num_cached == 6
        hit.publish(prompt, joined(unknown(6), values(56, 57)))
        assert cache.notes(prompt).tolist() == [0, 1, 2, 3, 4, 5, 56, 57]
        assert cache.notes(run(0, 8)).tolist() == list(range(8))

    def test_they_are_filled_in_along_every_edge(self) -> None:
        cache = PrefixCache(64, 4)
        prompt = run(0, 18)
        serve(cache, prompt)
        for end in (4, 12):
            serve(cache, joined(run(0, end), run(50, 55)))
        assert len(list(cache.walk())) == 5
        before, version = cache.num_tree_blocks, cache.version
        serve(cache, prompt, notes=numbered(0, 18))
        assert (cache.num_tree_blocks, cache.version) == (before, version)
        assert cache.notes(prompt).tolist() == list(range(18))
        for end in (4, 12):
            other = joined(run(0, end), run(50, 55))
            expected = joined(numbered(0, end), unknown(5))
            assert np.array_equal(cache.notes(other), expected, equal_nan=True)

    def test_they_are_filled_in_above_what_is_added(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 8))
        serve(cache, joined(run(0, 4), run(50, 54)))
        serve(cache, run(0, 14), notes=numbered(0, 14))
        assert cache.notes(run(0, 14)).tolist() == list(range(14))

    @pytest.mark.parametrize("num_tokens", [5, 6, 7])
    def test_only_the_published_tokens_of_a_longer_leaf_are_filled_in(
        self, num_tokens: int
    ) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 7))
        version = cache.version
        serve(cache, run(0, num_tokens), notes=numbered(0, num_tokens))
        expected = joined(numbered(0, num_tokens), unknown(7 - num_tokens))
        assert np.array_equal(cache.notes(run(0, 7)), expected, equal_nan=True)
        assert (cache.num_tree_blocks, cache.version) == (2, version)

    def test_they_are_forgotten_with_their_tokens(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 12), notes=numbered(0, 12))
        assert cache.evict(2) == 2
        assert cache.notes(run(0, 12)).tolist() == [0, 1, 2, 3]
        serve(cache, run(0, 12))
        expected = joined(numbered(0, 4), unknown(8))
        assert np.array_equal(cache.notes(run(0, 12)), expected, equal_nan=True)
        cache.flush()
        serve(cache, run(0, 12))
        assert np.isnan(cache.notes(run(0, 12))).all()

    def test_nothing_is_noted_while_a_copy_is_pending(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 10))
        prompt = joined(run(0, 9), run(50, 60))
        hit = cache.acquire(prompt, len(prompt))
        assert hit is not None and hit.copy is not None
        before = fingerprint(cache)
        hit.publish(prompt, numbered(0, len(prompt)))
        assert fingerprint(cache) == before

    def test_a_fork_publishes_them(self) -> None:
        cache = PrefixCache(64, 4)
        parent = lease(cache, run(0, 10))
        assert parent.fork(run(0, 10), numbered(0, 10)) is not None
        assert cache.notes(run(0, 10)).tolist() == list(range(10))

    def test_a_refused_publication_leaves_none(self) -> None:
        cache = PrefixCache(16, 4)
        serve(cache, run(50, 60))
        holder = lease(cache, run(0, 12))
        holder.publish(run(0, 10))
        before = fingerprint(cache)
        with pytest.raises(ValueError, match="differ"):
            holder.publish(run(50, 60), numbered(0, 10))
        assert fingerprint(cache) == before

    def test_a_disabled_cache_has_none(self) -> None:
        cache = PrefixCache(8, 4, enabled=False)
        serve(cache, run(0, 10), notes=numbered(0, 10))
        assert cache.notes(run(0, 10)).size == 0


class TestNamespaces:
    def test_two_kinds_with_the_same_string_never_meet(self) -> None:
        cache = PrefixCache(64, 4)
        for kind, other in itertools.permutations(NamespaceKind, 2):
            serve(cache, run(0, 20), (NamespacePart(kind, "x"),))
            found = cache.match(run(0, 20), (NamespacePart(other, "x"),))
            assert found.num_tokens == 0
            cache.flush()

    def test_equal_namespaces_share(self) -> None:
        cache = PrefixCache(64, 4)
        parts = (NamespacePart(NamespaceKind.MODEL, "m"), NamespacePart(NamespaceKind.SALT, "s"))
        serve(cache, run(0, 20), parts)
        assert cache.match(run(0, 20), tuple(parts)).num_tokens == 19
        assert cache.match(run(0, 20), parts[:1]).num_tokens == 0
        assert cache.match(run(0, 20)).num_tokens == 0

    def test_an_empty_namespace_leaves_nothing_behind(self) -> None:
        cache = PrefixCache(64, 4)
        empty = fingerprint(cache)
        for salt in range(100):
            serve(cache, run(0, 20), (NamespacePart(NamespaceKind.SALT, str(salt)),))
            cache.flush()
        assert list(cache.walk()) == []
        assert len(cache._tree._roots) == 0
        assert fingerprint(PrefixCache(64, 4)) == empty

    def test_an_untyped_namespace_is_refused(self) -> None:
        cache = PrefixCache(64, 4)
        with pytest.raises(TypeError, match="NamespacePart"):
            cache.match(run(0, 4), ("tenant",))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="NamespaceKind"):
            NamespacePart("tenant", "x")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="string"):
            NamespacePart(NamespaceKind.TENANT, 7)  # type: ignore[arg-type]


class TestSharing:
    def test_a_block_is_written_by_one_lease_only(self) -> None:
        cache = PrefixCache(64, 4)
        parent = lease(cache, run(0, 10))
        child = parent.fork(run(0, 10))
        assert child is not None and child.copy is not None
        assert child.copy.source == parent.block_table[2]
        assert child.copy.target == child.block_table[2] != parent.block_table[2]
        assert child.block_table[:2].tolist() == parent.block_table[:2].tolist()

    def test_publish_adopts_the_blocks_of_the_tree(self) -> None:
        cache = PrefixCache(64, 4)
        first, second = lease(cache, run(0, 14)), lease(cache, run(0, 14))
        first.publish(run(0, 14))
        num_free, own_tail = cache.num_free_blocks, second.block_table[3]
        second.publish(run(0, 14))
        assert second.block_table[:3].tolist() == first.block_table[:3].tolist()
        assert second.block_table[3] == own_tail, "a partly filled block is never adopted"
        assert cache.num_free_blocks == num_free + 3
        assert (first.epoch, second.epoch) == (0, 1)
        assert second.num_shared_blocks == 3
        cache.check()

    def test_leases_share_blocks_only_through_the_tree(self) -> None:
        """Forks that share blocks the tree does not know make the evictable count wrong."""
        cache = PrefixCache(16, 4)
        parent = lease(cache, run(0, 10))
        forks = [parent.fork(run(0, 10)) for _ in range(3)]
        for index, fork in enumerate(forks):
            assert fork is not None
            shared = set(fork.block_table.tolist()) & set(parent.block_table.tolist())
            assert all(cache._pool.in_tree[block] for block in shared)
            fork.copied()
            fork.publish(joined(run(0, 10), tokens(100 + index)))
            cache.check()
        parent.release()
        for num_left in (2, 1, 0):
            cache.check()
            fork = forks.pop()
            assert fork is not None and len(forks) == num_left
            fork.release()
        cache.check()
        num_evictable = cache.num_evictable_blocks
        assert num_evictable == cache.num_tree_blocks > 0
        assert cache.evict(1000) == num_evictable
        assert cache.num_free_blocks == 16

    def test_a_block_published_twice_is_counted_once(self) -> None:
        cache = PrefixCache(64, 4)
        holder = lease(cache, run(0, 10))
        for _ in range(3):
            holder.publish(run(0, 10))
            cache.check()
        assert cache.num_cached_tokens == 10
        assert cache.num_tree_blocks == 3
        assert cache._pool.refs[holder.block_table].tolist() == [2, 2, 2]
        holder.release()
        assert cache.num_evictable_blocks == 3

    def test_rows_of_a_pending_copy_are_not_published(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 10))
        prompt = joined(run(0, 9), run(50, 60))
        hit = cache.acquire(prompt, len(prompt))
        assert hit is not None and hit.copy is not None
        before = fingerprint(cache)
        hit.publish(prompt)
        assert fingerprint(cache) == before
        hit.copied()
        hit.publish(prompt)
        assert cache.match(joined(prompt, run(90, 91))).num_tokens == len(prompt)
        cache.check()

    def test_the_source_of_a_copy_is_held_until_it_is_copied(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 10))
        hit = cache.acquire(joined(run(0, 9), run(50, 60)), 19)
        assert hit is not None and hit.copy is not None
        cache.flush()
        assert cache._pool.refs[hit.copy.source] == 2
        hit.copied()
        assert hit.copy is None
        assert cache.num_evictable_blocks == 1
        cache.flush()
        assert cache.match(run(0, 10)).num_tokens == 8
        cache.check()

    def test_a_source_that_leaves_the_tree_stays_with_its_copier(self) -> None:
        cache = PrefixCache(64, 4)
        owner, other = lease(cache, run(0, 6)), lease(cache, run(0, 8))
        owner.publish(run(0, 6))
        copier = cache.acquire(joined(run(0, 6), run(50, 52)), 8)
        assert copier is not None and copier.copy is not None
        source = copier.copy.source
        other.publish(run(0, 8))
        assert not cache._pool.in_tree[source]
        owner.release()
        assert cache._pool.refs[source] == 1
        cache.check()
        copier.copied()
        assert cache._pool.refs[source] == 0
        cache.check()

    def test_a_source_may_come_back_at_another_place_in_the_tree(self) -> None:
        """Its copier's end must find the leaf the block ends now, or that is never evicted."""
        cache = PrefixCache(64, 4)
        owner, other = lease(cache, run(0, 4)), lease(cache, run(0, 3))
        owner.publish(run(0, 2))
        copier = cache.acquire(joined(run(0, 2), run(50, 52)), 4)
        assert copier is not None and copier.copy is not None
        other.publish(run(0, 3))
        assert not cache._pool.in_tree[copier.copy.source]
        owner.publish(run(0, 4))
        assert cache._pool.in_tree[copier.copy.source]
        for ended in (owner, other, copier):
            ended.release()
            cache.check()
        assert cache.num_evictable_blocks == cache.evict(64) == 1
        cache.check()

    def test_a_longer_leaf_replaces_a_partly_filled_one(self) -> None:
        cache = PrefixCache(64, 4)
        short, long = lease(cache, run(0, 6)), lease(cache, run(0, 7))
        short.publish(run(0, 6))
        long.publish(run(0, 7))
        assert cache.match(run(0, 20)).num_tokens == 7
        assert cache.num_tree_blocks == 2
        assert short.block_table[1] != long.block_table[1]
        short.publish(run(0, 6))
        assert cache._pool.in_tree[long.block_table[1]]
        assert not cache._pool.in_tree[short.block_table[1]]
        cache.check()

    def test_a_leaf_grows_in_place(self) -> None:
        cache = PrefixCache(2000, 16)
        growing = lease(cache, run(0, 20_000))
        for end in range(1000, 20_001, 1000):
            growing.publish(run(0, end))
            cache.check()
        (node,) = cache.walk()
        assert node.token_ids.tolist() == list(range(20_000))
        assert growing.num_shared_blocks == 1250

    def test_a_lease_knows_its_exclusive_blocks(self) -> None:
        cache = PrefixCache(64, 4)
        parent = lease(cache, run(0, 12))
        parent.publish(run(0, 12))
        assert parent.num_exclusive_blocks == 3
        child = lease(cache, joined(run(0, 8), run(50, 54)))
        assert (parent.num_exclusive_blocks, child.num_exclusive_blocks) == (1, 1)
        parent.release()
        assert child.num_exclusive_blocks == 3

    def test_blocks_come_out_as_ascending_runs(self) -> None:
        cache = PrefixCache(64, 4)
        first, second = lease(cache, run(0, 40)), lease(cache, run(100, 140))
        assert first.block_table.tolist() == list(range(10))
        assert second.block_table.tolist() == list(range(10, 20))
        first.release()
        assert lease(cache, run(200, 240)).block_table.tolist() == list(range(10))


class TestRoom:
    def test_a_refusal_leaves_no_trace(self) -> None:
        cache = PrefixCache(8, 4)
        serve(cache, run(0, 16))
        holder = lease(cache, run(100, 112))
        before = fingerprint(cache)
        prompt = joined(run(0, 10), run(50, 60))
        assert cache.acquire(prompt, 100) is None
        assert cache.acquire(prompt, 24) is None
        assert fingerprint(cache) == before, "not even a split"
        assert cache.acquire(prompt, 20) is not None
        holder.release()

    def test_a_request_gets_the_room_it_asked_for(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, run(0, 16))
        for num_tokens, num_blocks in ((0, 3), (9, 3), (12, 3), (13, 4), (30, 8)):
            room = cache.acquire(joined(run(0, 12), tokens(99)), num_tokens)
            assert room is not None
            assert room.num_blocks == len(room.block_table) == num_blocks
            room.release()
        cache.check()

    def test_a_copy_is_given_up_when_its_source_is_in_the_way(self) -> None:
        cache = PrefixCache(4, 4)
        serve(cache, run(0, 6))
        hit = cache.acquire(joined(run(0, 6), run(50, 60)), 16)
        assert hit is not None
        assert (hit.num_cached, hit.copy, hit.num_blocks) == (4, None, 4)
        cache.check()

    def test_a_copy_is_kept_when_its_source_is_held_anyway(self) -> None:
        cache = PrefixCache(5, 4)
        owner = lease(cache, run(0, 6))
        owner.publish(run(0, 6))
        hit = cache.acquire(joined(run(0, 6), run(50, 60)), 16)
        assert hit is not None and hit.copy is not None
        assert (hit.num_cached, hit.num_blocks) == (6, 4)
        cache.check()

    def test_an_extension_is_all_or_nothing(self) -> None:
        cache = PrefixCache(4, 4)
        serve(cache, run(100, 104))
        holder = lease(cache, run(0, 8))
        before = fingerprint(cache)
        assert not holder.extend(17)
        assert holder.extend(8)
        assert fingerprint(cache) == before
        assert holder.extend(16)
        assert holder.num_blocks == 4
        assert cache.num_tree_blocks == 0, "it evicts what it lacks"
        cache.check()

    def test_a_lease_does_not_evict_what_it_takes(self) -> None:
        cache = PrefixCache(4, 4)
        serve(cache, run(0, 8))
        serve(cache, run(100, 108))
        hit = lease(cache, joined(run(0, 8), run(50, 58)))
        assert hit.num_cached == 8
        assert cache.num_tree_blocks == 2
        cache.check()

    def test_nothing_is_left_when_all_leases_end(self) -> None:
        cache = PrefixCache(64, 4)
        leases = [lease(cache, joined(run(0, 9), run(20 * i, 20 * i + 9))) for i in range(2, 5)]
        for index, holder in enumerate(leases):
            if index:
                holder.publish(joined(run(0, 9), run(20 * index + 40, 20 * index + 49)))
            holder.release()
        cache.flush()
        cache.check()
        assert (cache.num_free_blocks, cache.num_cached_tokens) == (64, 0)


class TestVersion:
    def test_it_changes_whenever_a_match_could(self) -> None:
        cache = PrefixCache(64, 4)
        versions = [cache.version]

        def has_changed() -> bool:
            versions.append(cache.version)
            return versions[-1] != versions[-2]

        holder = lease(cache, run(0, 10))
        assert not has_changed()
        holder.publish(run(0, 10))
        assert has_changed()
        holder.publish(run(0, 10))
        lease(cache, joined(run(0, 5), run(50, 60))).release()
        cache.match(run(0, 10))
        holder.release()
        assert not has_changed()
        cache.evict(1)
        assert has_changed()
        cache.flush()
        assert has_changed()
        cache.flush()
        assert not has_changed()


class TestFlush:
    def test_it_keeps_what_leases_hold(self) -> None:
        cache = PrefixCache(64, 4)
        serve(cache, joined(run(0, 8), run(50, 60)))
        holder = lease(cache, joined(run(0, 8), run(70, 71)))
        cache.flush()
        cache.check()
        assert cache.num_tree_blocks == 2
        holder.publish(joined(run(0, 8), run(70, 71)))
        assert cache.match(joined(run(0, 8), run(70, 80))).num_tokens == 9
        holder.release()
        cache.flush()
        assert cache.num_free_blocks == 64

    def test_a_lease_outlives_the_nodes_below_it(self) -> None:
        """Its node was cut and its lower half evicted; releasing it makes the upper a candidate."""
        cache = PrefixCache(64, 4)
        holder = lease(cache, run(0, 8))
        holder.publish(run(0, 8))
        other = lease(cache, run(0, 40))
        other.publish(run(0, 40))
        other.release()
        for end in (12, 20, 4):
            lease(cache, joined(run(0, end), run(90, 91))).release()
        cache.flush()
        cache.check()
        holder.release()
        cache.check()
        assert cache.evict(2) == 2


class TestDepth:
    @pytest.mark.parametrize("block_size", [1, 16])
    def test_five_thousand_prompts_each_one_token_longer(self, block_size: int) -> None:
        cache = PrefixCache(10_000, block_size)
        for num_tokens in range(1, 5001):
            prompt = np.zeros(num_tokens, np.int32)
            holder = lease(cache, prompt)
            assert holder.num_cached == num_tokens - 1
            holder.publish(prompt)
            holder.release()
        cache.check()
        assert cache.num_cached_tokens == 5000
        assert cache.evict(10_000) == -(-5000 // block_size)

    def test_a_deep_tree_needs_no_recursion(self) -> None:
        cache = PrefixCache(10_000, 1)
        depth = 1200
        for num_tokens in range(depth):
            prompt = joined(np.zeros(num_tokens, np.int32), tokens(1))
            holder = lease(cache, prompt)
            holder.publish(prompt)
            holder.release()
        assert max(node.depth for node in cache.walk()) == depth - 2
        cache.check()
        cache.flush()
        cache.check()
        assert cache.num_free_blocks == 10_000


class TestDisabled:
    def test_nothing_is_kept_and_leases_work(self) -> None:
        cache = PrefixCache(8, 4, enabled=False)
        first = lease(cache, run(0, 10))
        first.publish(run(0, 10))
        assert cache.match(run(0, 10)).num_tokens == 0
        second = first.fork(run(0, 10))
        assert second is not None
        assert (second.num_cached, second.num_blocks, second.num_shared_blocks) == (0, 3, 0)
        assert first.extend(20) and not second.extend(20)
        first.release()
        second.release()
        cache.check()
        assert cache.num_free_blocks == 8
        assert cache.version == 0


class TestWalk:
    def test_it_shows_every_node(self) -> None:
        cache = PrefixCache(64, 4)
        namespace = (NamespacePart(NamespaceKind.TENANT, "t"),)
        serve(cache, run(0, 10), namespace)
        serve(cache, joined(run(0, 8), run(50, 54)), namespace)
        holder = lease(cache, joined(run(0, 8), run(50, 54), run(60, 61)), namespace)
        top, old, held = cache.walk()
        assert [n.depth for n in (top, old, held)] == [0, 1, 1]
        assert [n.token_ids.tolist() for n in (old, held)] == [[8, 9], list(range(50, 54))]
        assert [n.num_blocks for n in (top, old, held)] == [2, 1, 1]
        assert [n.num_holders for n in (top, old, held)] == [1, 0, 1]
        assert [n.is_leaf for n in (top, old, held)] == [False, True, True]
        assert top.last_used == held.last_used > old.last_used
        assert top.namespace == namespace
        with pytest.raises(ValueError):
            top.token_ids[0] = 7
        holder.release()


class TestErrors:
    def test_a_released_lease_refuses_every_verb(self) -> None:
        cache = PrefixCache(8, 4)
        ended = lease(cache, run(0, 4))
        ended.release()
        for verb in (
            lambda: ended.copied(),
            lambda: ended.extend(4),
            lambda: ended.publish(run(0, 4)),
            lambda: ended.fork(run(0, 4)),
            lambda: ended.release(),
        ):
            with pytest.raises(LeaseReleased, match="released"):
                verb()
        assert ended.num_blocks == len(ended.block_table) == 0
        cache.check()

    def test_tokens_must_be_one_sequence_of_int32(self) -> None:
        cache = PrefixCache(8, 4)
        for wrong in ([1, 2], np.arange(4), np.arange(4, dtype=np.uint32)):
            with pytest.raises(TypeError, match="int32"):
                cache.match(wrong)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="int32"):
                cache.acquire(wrong, 4)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="one-dimensional"):
            cache.match(np.zeros((2, 2), np.int32))

    def test_negative_sizes_are_refused(self) -> None:
        cache = PrefixCache(8, 4)
        with pytest.raises(ValueError, match="-1 tokens"):
            cache.acquire(run(0, 4), -1)
        with pytest.raises(ValueError, match="-1 tokens"):
            lease(cache, run(0, 4)).extend(-1)
        with pytest.raises(ValueError, match="-1 blocks"):
            cache.evict(-1)
        with pytest.raises(ValueError, match="0 blocks"):
            PrefixCache(0, 4)
        with pytest.raises(ValueError, match="of 0"):
            PrefixCache(4, 0)

    def test_a_negative_cap_is_refused(self) -> None:
        cache = PrefixCache(8, 4)
        with pytest.raises(ValueError, match="-1 tokens"):
            cache.match(run(0, 4), max_cached=-1)
        with pytest.raises(ValueError, match="-1 tokens"):
            cache.acquire(run(0, 4), 4, max_cached=-1)
        cache.check()

    def test_notes_must_be_one_float32_for_each_token(self) -> None:
        cache = PrefixCache(8, 4)
        holder = lease(cache, run(0, 4))
        for wrong in ([1.0] * 4, np.zeros(4), np.zeros(4, np.int32)):
            with pytest.raises(TypeError, match="float32"):
                holder.publish(run(0, 4), wrong)  # type: ignore[arg-type]
        for shape in (3, 5, (4, 1), ()):
            with pytest.raises(ValueError, match="for 4 tokens"):
                holder.publish(run(0, 4), np.zeros(shape, np.float32))
        assert cache.num_cached_tokens == 0

    def test_more_tokens_than_there_is_room_for_are_not_published(self) -> None:
        cache = PrefixCache(8, 4)
        with pytest.raises(ValueError, match="room for 8"):
            lease(cache, run(0, 8)).publish(run(0, 9))

    @pytest.mark.parametrize("changed", [0, 5, 8, 9])
    def test_a_sequence_that_changed_is_not_published(self, changed: int) -> None:
        cache = PrefixCache(8, 4)
        holder = lease(cache, run(0, 12))
        holder.publish(run(0, 10))
        before = fingerprint(cache)
        other = run(0, 12)
        other[changed] = 99
        with pytest.raises(ValueError, match="differ"):
            holder.publish(other)
        assert fingerprint(cache) == before
        cache.check()

    def test_another_sequence_of_the_tree_is_not_published(self) -> None:
        cache = PrefixCache(16, 4)
        serve(cache, run(50, 60))
        holder = lease(cache, run(0, 12))
        holder.publish(run(0, 10))
        before = fingerprint(cache)
        for other in (run(50, 58), run(50, 62)):
            with pytest.raises(ValueError, match="differ"):
                holder.publish(other)
        assert fingerprint(cache) == before

    def test_fewer_tokens_than_before_change_nothing_but_the_order_of_use(self) -> None:
        cache = PrefixCache(8, 4)
        holder = lease(cache, run(0, 12))
        holder.publish(run(0, 10))
        for num_tokens in (9, 8, 3, 0):
            holder.publish(run(0, num_tokens))
            assert (holder.num_shared_blocks, cache.num_cached_tokens) == (2, 10)
            cache.check()
        holder.release()
        assert cache.evict(8) == 3


class TestCheck:
    """It is real: each thing that may go wrong is noticed."""

    def cache(self) -> PrefixCache:
        cache = PrefixCache(32, 4)
        serve(cache, run(0, 10))
        serve(cache, joined(run(0, 4), run(50, 56)))
        held = lease(cache, joined(run(0, 8), run(70, 75)))
        held.publish(joined(run(0, 8), run(70, 75)))
        cache.check()
        return cache

    def test_a_wrong_count_is_noticed(self) -> None:
        cache = self.cache()
        cache._pool.refs[next(iter(cache._leases)).block_table[-1]] += 1
        with pytest.raises(AssertionError, match="counts differ"):
            cache.check()

    def test_a_lease_without_the_blocks_above_its_own_is_noticed(self) -> None:
        cache = self.cache()
        (held,) = cache._leases
        held._table = held._table[1:]
        held.num_blocks -= 1
        with pytest.raises(AssertionError, match="one above"):
            cache.check()

    def test_a_leaf_that_is_no_candidate_is_noticed(self) -> None:
        cache = self.cache()
        leaf = cache._queue.first()
        assert leaf is not None
        cache._queue.update(leaf, False)
        with pytest.raises(AssertionError, match="candidates"):
            cache.check()

    def test_an_entry_with_an_old_key_is_noticed(self) -> None:
        cache = self.cache()
        leaf = cache._queue.first()
        assert leaf is not None
        leaf.last_used += 1
        with pytest.raises(AssertionError, match="old entry"):
            cache.check()

    def test_a_block_lost_from_the_tree_is_noticed(self) -> None:
        cache = self.cache()
        leaf = cache._queue.first()
        assert leaf is not None
        cache._tree.trim(leaf, len(leaf.blocks))
        cache._queue.update(leaf, False)
        with pytest.raises(AssertionError, match="flags differ|candidates"):
            cache.check()
