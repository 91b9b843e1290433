"""Stop strings over token bytes: against a naive search, for any split into tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood.runtime.stop import StopMatch, StopMatcher

# A tiny alphabet, so that strings overlap, repeat and begin with each other.
TEXT = st.binary(max_size=40).map(lambda data: bytes(b"abc"[byte % 3] for byte in data))
STOPS = st.lists(TEXT.filter(bool).map(lambda stop: stop[:6]), max_size=4).map(tuple)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[start:end] for start, end in zip(edges, edges[1:], strict=False)]


def naive_match(data: bytes, stops: tuple[bytes, ...]) -> StopMatch | None:
    for end in range(1, len(data) + 1):
        hits = [stop for stop in stops if data[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return StopMatch(stops.index(longest), end - len(longest))
    return None


def naive_held(data: bytes, stops: tuple[bytes, ...]) -> int:
    """Where another string ends inside of one, that one never matches and begins nothing."""
    live = [stop for stop in stops if not any(other in stop[:-1] for other in stops)]
    prefixes = [stop[:length] for stop in live for length in range(1, len(stop))]
    return max((len(prefix) for prefix in prefixes if data.endswith(prefix)), default=0)


@given(TEXT, STOPS, st.lists(st.integers(0, 40), max_size=8))
def test_the_earliest_end_is_found_for_any_split_into_tokens(
    data: bytes, stops: tuple[bytes, ...], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    found = None
    for token in split(data, cuts):
        found = matcher.feed(token)
        if found is not None:
            break
    assert found == naive_match(data, stops)


@given(TEXT, STOPS)
def test_held_is_the_longest_ending_that_begins_a_stop_string(
    data: bytes, stops: tuple[bytes, ...]
) -> None:
    matcher = StopMatcher(stops)
    for end in range(1, len(data) + 1):
        if matcher.feed(data[end - 1 : end]) is not None:
            break
        assert matcher.num_held == naive_held(data[:end], stops)


@given(TEXT, STOPS, st.integers(0, 5))
def test_the_first_min_tokens_tokens_take_no_part_in_a_match(
    data: bytes, stops: tuple[bytes, ...], min_tokens: int
) -> None:
    tokens = [data[i : i + 2] for i in range(0, len(data), 2)]
    skipped = sum(map(len, tokens[:min_tokens]))
    expected = naive_match(data[skipped:], stops)
    if expected is not None:
        expected = StopMatch(expected.stop_index, expected.text_len + skipped)
    matcher = StopMatcher(stops, min_tokens=min_tokens)
    found = next((match for match in map(matcher.feed, tokens) if match is not None), None)
    assert found == expected


def test_a_stop_inside_one_token_keeps_the_text_before_it() -> None:
    assert StopMatcher([b"STOP"]).feed(b"fine STOP and more") == StopMatch(0, 5)


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert StopMatcher([b"b", b"ab"]).feed(b"xab") == StopMatch(1, 1)


def test_of_two_that_begin_together_the_shorter_ends_first() -> None:
    assert StopMatcher([b"abc", b"ab"]).feed(b"xabc") == StopMatch(1, 1)


def test_a_failed_beginning_may_contain_another_beginning() -> None:
    matcher = StopMatcher([b"aab"])
    assert matcher.feed(b"aaa") is None
    assert matcher.num_held == 2
    assert matcher.feed(b"b") == StopMatch(0, 1)


def test_a_string_that_another_one_always_forestalls_holds_nothing_back() -> None:
    matcher = StopMatcher([b"a", b"baa"])
    assert matcher.feed(b"b") is None
    assert matcher.num_held == 0


def test_without_stop_strings_nothing_is_held() -> None:
    matcher = StopMatcher([])
    assert matcher.feed(b"anything") is None
    assert matcher.num_held == 0


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([b""])
