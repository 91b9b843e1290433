"""Stops over token bytes: against a naive search, for any split into tokens."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood import SamplingParams
from sapwood.runtime.stop import StopMatch, StopMatcher
from sapwood.runtime.stop_regex import StopRegex

# A tiny alphabet, so that strings overlap, repeat and begin with each other.
TEXT = st.text("abc", max_size=40)
STOPS = st.lists(st.text("abc", min_size=1, max_size=6), max_size=4).map(tuple)
PATTERNS = ("ab*c", "a.b", "(ab|bc){2}", "c[^b]+b", "b?c", "aa|cabb")
REGEXES = st.lists(st.sampled_from(PATTERNS), max_size=3).map(tuple)


def matcher_of(stops: tuple[str, ...], patterns: tuple[str, ...] = (), **kwargs) -> StopMatcher:
    return StopMatcher(stops, map(StopRegex.compile, patterns), **kwargs)


def split(text: str, cuts: list[int]) -> list[bytes]:
    data = text.encode()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[start:end] for start, end in zip(edges, edges[1:], strict=False)]


def naive_match(
    text: str, stops: tuple[str, ...], patterns: tuple[str, ...] = ()
) -> StopMatch | None:
    """The first end, then the first start, then the order in which they were given."""
    given = [(stop, re.compile(re.escape(stop))) for stop in stops]
    given += [(pattern, re.compile(pattern)) for pattern in patterns]
    for end in range(1, len(text) + 1):
        for start in range(end):
            for reason, regex in given:
                if regex.fullmatch(text, start, end):
                    return StopMatch(reason, start)
    return None


def naive_held(text: str, stops: tuple[str, ...]) -> int:
    """Where another string ends inside of one, that one never matches and begins nothing."""
    live = [stop for stop in stops if not any(other in stop[:-1] for other in stops)]
    prefixes = [stop[:length] for stop in live for length in range(1, len(stop))]
    return max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)


@given(TEXT, STOPS, REGEXES, st.lists(st.integers(0, 40), max_size=8))
def test_the_earliest_end_is_found_for_any_split_into_tokens(
    text: str, stops: tuple[str, ...], patterns: tuple[str, ...], cuts: list[int]
) -> None:
    matcher = matcher_of(stops, patterns)
    found = None
    for token in split(text, cuts):
        found = matcher.feed(token)
        if found is not None:
            break
    assert found == naive_match(text, stops, patterns)


@given(TEXT, STOPS)
def test_held_is_the_longest_ending_that_begins_a_stop_string(
    text: str, stops: tuple[str, ...]
) -> None:
    matcher = matcher_of(stops)
    for end in range(1, len(text) + 1):
        if matcher.feed(text[end - 1 : end].encode()) is not None:
            break
        assert matcher.num_held == naive_held(text[:end], stops)


@given(TEXT, STOPS, REGEXES, st.integers(0, 5))
def test_the_first_min_tokens_tokens_take_no_part_in_a_match(
    text: str, stops: tuple[str, ...], patterns: tuple[str, ...], min_tokens: int
) -> None:
    tokens = [text[i : i + 2].encode() for i in range(0, len(text), 2)]
    skipped = sum(map(len, tokens[:min_tokens]))
    expected = naive_match(text[skipped:], stops, patterns)
    if expected is not None:
        expected = StopMatch(expected.reason, expected.text_len + skipped)
    matcher = matcher_of(stops, patterns, min_tokens=min_tokens)
    found = next((match for match in map(matcher.feed, tokens) if match is not None), None)
    assert found == expected


def test_a_stop_inside_one_token_keeps_the_text_before_it() -> None:
    assert StopMatcher(["STOP"]).feed(b"fine STOP and more") == StopMatch("STOP", 5)


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert StopMatcher(["b", "ab"]).feed(b"xab") == StopMatch("ab", 1)
    assert matcher_of(("b",), ("a+b",)).feed(b"xaab") == StopMatch("a+b", 1)


def test_of_a_string_and_a_pattern_that_match_the_same_the_string_is_the_reason() -> None:
    assert matcher_of(("ab",), ("a.",)).feed(b"xab") == StopMatch("ab", 1)


def test_of_two_that_begin_together_the_shorter_ends_first() -> None:
    assert StopMatcher(["abc", "ab"]).feed(b"xabc") == StopMatch("ab", 1)


def test_a_failed_beginning_may_contain_another_beginning() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.feed(b"aaa") is None
    assert matcher.num_held == 2
    assert matcher.feed(b"b") == StopMatch("aab", 1)


def test_a_string_that_another_one_always_forestalls_holds_nothing_back() -> None:
    matcher = StopMatcher(["a", "baa"])
    assert matcher.feed(b"b") is None
    assert matcher.num_held == 0


def test_what_a_string_or_a_pattern_may_still_match_is_held() -> None:
    matcher = matcher_of(("xyz",), ("b[0-9]+c",))
    assert matcher.feed(b"ab12xy") is None
    assert matcher.num_held == 2
    assert matcher.feed(b" b12") is None
    assert matcher.num_held == 3
    assert matcher.feed(b"c") == StopMatch("b[0-9]+c", 7)


def test_without_stops_nothing_is_held() -> None:
    matcher = StopMatcher()
    assert matcher.feed(b"anything") is None
    assert matcher.num_held == 0


def test_parameters_without_stops_need_no_matcher() -> None:
    assert StopMatcher.of(SamplingParams()) is None


def test_a_matcher_of_parameters_stops_at_all_that_they_name() -> None:
    sampling = SamplingParams(stop="END", stop_regex=r"\d{3}", min_tokens=1)
    for text, match in ((b"an END", StopMatch("END", 10)), (b"a 123", StopMatch(r"\d{3}", 9))):
        matcher = StopMatcher.of(sampling)
        assert matcher is not None
        assert matcher.feed(b"END 123") is None
        assert matcher.feed(text) == match


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])
