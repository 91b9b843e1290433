"""The bounds hold, and what was used last stays."""

from hypothesis import given
from hypothesis import strategies as st

from sapwood.runtime.constraints.bounded_cache import BoundedCache


def test_what_was_used_longest_ago_is_dropped_first() -> None:
    cache: BoundedCache[str, int] = BoundedCache(max_entries=2, max_bytes=100)
    cache.put("a", 1, 10)
    cache.put("b", 2, 10)
    assert cache.get("a") == 1
    cache.put("c", 3, 10)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)


def test_bytes_are_a_bound_of_their_own() -> None:
    cache: BoundedCache[str, int] = BoundedCache(max_entries=100, max_bytes=100)
    for name in "abc":
        cache.put(name, 0, 40)
    assert (len(cache), cache.num_bytes) == (2, 80)


def test_what_is_too_large_is_not_kept_and_drops_nothing() -> None:
    cache: BoundedCache[str, int] = BoundedCache(max_entries=100, max_bytes=100)
    cache.put("a", 1, 60)
    cache.put("b", 2, 101)
    assert (cache.get("a"), cache.get("b")) == (1, None)
    cache.put("a", 3, 101)  # the old value would be wrong
    assert cache.get("a") is None


operations = st.lists(st.tuples(st.sampled_from("pgd"), st.integers(0, 5), st.integers(0, 12)))


@given(operations)
def test_it_does_what_a_list_of_the_last_used_would_do(steps: list[tuple[str, int, int]]) -> None:
    cache: BoundedCache[int, int] = BoundedCache(max_entries=3, max_bytes=20)
    naive: list[tuple[int, int]] = []  # (key, bytes), the last used at the end
    for verb, key, size in steps:
        found = [entry for entry in naive if entry[0] == key]
        rest = [entry for entry in naive if entry[0] != key]
        if verb == "g":
            assert cache.get(key) == (found[0][1] if found else None)
            naive = rest + found
        elif verb == "d":
            cache.discard(key)
            naive = rest
        else:
            cache.put(key, size, size)
            naive = rest + [(key, size)] if size <= 20 else rest
            while len(naive) > 3 or sum(entry[1] for entry in naive) > 20:
                naive.pop(0)
        cache.check()
        assert len(cache) == len(naive)
