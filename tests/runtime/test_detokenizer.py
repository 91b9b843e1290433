"""Text in pieces: the same text for every split, as early as it is certain and not earlier."""

import itertools
import re
from os.path import commonprefix

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood import SamplingParams
from sapwood.runtime.detokenizer import IncrementalDetokenizer
from sapwood.runtime.stop import StopMatcher

# Whole characters of one to four bytes, and pieces of them.
PIECES = [b"a", b"b", "é".encode(), "漢".encode(), "😀".encode(), b"\xf0", b"\x9f\x98", b"\x80"]
DATA = st.lists(st.sampled_from(PIECES), max_size=10).map(b"".join)
STOPS = st.lists(
    st.lists(st.sampled_from(["a", "b", "é", "漢", "😀"]), min_size=1, max_size=3).map("".join),
    max_size=3,
)
CONTINUATIONS = [
    b"~",
    *map(bytes, itertools.chain.from_iterable(
        itertools.product([0x80, 0x90, 0xA0], repeat=length) for length in range(4)
    )),
]  # fmt: skip


def final_text(data: bytes, stops: list[str]) -> str:
    """The text of a whole answer, by the definition."""
    encoded = [stop.encode() for stop in stops]
    for end in range(1, len(data) + 1):
        hits = [stop for stop in encoded if data[:end].endswith(stop)]
        if hits:
            return data[: end - max(map(len, hits))].decode(errors="replace")
    return data.decode(errors="replace")


def detokenizer_over(tokens: list[bytes], stops: list[str]) -> IncrementalDetokenizer:
    """Token id i is the i-th token."""
    return IncrementalDetokenizer(tokens, StopMatcher(stops))


@given(st.lists(DATA.map(lambda data: data[:5]), max_size=8), STOPS, st.lists(st.integers(1, 3)))
def test_pieces_join_to_the_text_of_the_whole(
    tokens: list[bytes], stops: list[str], group_sizes: list[int]
) -> None:
    detokenizer = detokenizer_over(tokens, stops)
    ids = iter(range(len(tokens)))
    pieces = [detokenizer.add(list(itertools.islice(ids, size))) for size in group_sizes]
    pieces.append(detokenizer.add(ids, finished=True))
    assert "".join(pieces) == final_text(b"".join(tokens), stops)


@given(DATA, st.lists(st.integers(0, 40), max_size=6), STOPS)
def test_any_split_over_tokens_gives_the_same_text(
    data: bytes, cuts: list[int], stops: list[str]
) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    tokens = [data[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    detokenizer = detokenizer_over(tokens, stops)
    pieces = [detokenizer.add([i]) for i in range(len(tokens))]
    assert "".join(pieces) + detokenizer.add([], finished=True) == final_text(data, stops)


@given(DATA, STOPS)
def test_what_is_out_is_all_that_is_certain_and_no_more(data: bytes, stops: list[str]) -> None:
    """Certain is what every continuation agrees on."""
    tokens = [data[i : i + 1] for i in range(len(data))]
    rests = [stop.encode()[i:] for stop in stops for i in range(len(stop.encode()))]
    detokenizer = detokenizer_over(tokens, stops)
    out = ""
    for i in range(len(tokens)):
        out += detokenizer.add([i])
        futures = [data[: i + 1] + rest for rest in [*CONTINUATIONS, *rests]]
        assert out == commonprefix([final_text(future, stops) for future in futures])


@pytest.mark.parametrize("text", ["😀", "漢字かな", "naïve", "👩\u200d👩\u200d👧", "ไทย"])
def test_no_half_character_is_ever_shown(text: str) -> None:
    tokens = [bytes([byte]) for byte in text.encode()]
    detokenizer = detokenizer_over(tokens, [])
    pieces = [detokenizer.add([i]) for i in range(len(tokens))]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert detokenizer.add([], finished=True) == ""


def test_an_answer_cut_inside_a_character_ends_in_one_replacement_character() -> None:
    detokenizer = detokenizer_over([b"ok \xf0\x9f", b"\x98"], [])
    assert detokenizer.add([0]) == "ok "
    assert detokenizer.add([1], finished=True) == "\ufffd"


def test_a_stop_string_split_over_tokens_never_shows() -> None:
    detokenizer = detokenizer_over([b"yes\n", b"\nQues", b"tion", b": next"], ["\n\nQuestion:"])
    assert [detokenizer.add([i]) for i in range(4)] == ["yes", "", "", ""]
    assert detokenizer.add([], finished=True) == ""


def test_a_stop_that_did_not_come_is_given_back() -> None:
    detokenizer = detokenizer_over([b"a\n\nQues", b"tionable"], ["\n\nQuestion:"])
    assert detokenizer.add([0]) == "a"
    assert detokenizer.add([1]) == "\n\nQuestionable"


def test_what_was_held_comes_out_when_the_answer_ends() -> None:
    detokenizer = detokenizer_over([b"a\n\nQues"], ["\n\nQuestion:"])
    assert detokenizer.add([0], finished=True) == "a\n\nQues"


def test_before_min_tokens_a_stop_string_is_ordinary_text() -> None:
    detokenizer = IncrementalDetokenizer([b"END", b"x"], StopMatcher(["END"], min_tokens=2))
    assert [detokenizer.add([i]) for i in (0, 1, 0)] == ["END", "x", ""]


PATTERNS = ["a[^b]*漢", "é+b", "(ab|é.){2}", "b😀?a"]
CHARACTERS = "abé漢😀"


def text_before(pattern: str, text: str) -> str | None:
    """What is in front of the match that ends first; None if there is none."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            if re.compile(pattern).fullmatch(text, start, end):
                return text[:start]
    return None


def may_begin_a_match(pattern: str, ending: str) -> bool:
    """No ending of these patterns takes more than three characters."""
    rests = itertools.chain.from_iterable(
        itertools.product(CHARACTERS, repeat=length) for length in range(4)
    )
    return any(re.fullmatch(pattern, ending + "".join(rest)) for rest in rests)


@settings(deadline=None)
@given(st.sampled_from(PATTERNS), st.text(CHARACTERS, max_size=8), st.integers(1, 5))
def test_in_front_of_a_pattern_all_is_shown_but_what_may_begin_a_match(
    pattern: str, text: str, token_len: int
) -> None:
    data = text.encode()
    tokens = [data[i : i + token_len] for i in range(0, len(data), token_len)]
    stops = StopMatcher.of(SamplingParams(stop_regex=pattern))
    detokenizer = IncrementalDetokenizer(tokens, stops)
    whole = text_before(pattern, text)
    out = ""
    for i in range(len(tokens)):
        out += detokenizer.add([i])
        so_far = b"".join(tokens[: i + 1]).decode(errors="ignore")
        if text_before(pattern, so_far) is not None:
            break
        assert (text if whole is None else whole).startswith(out)
        if len(so_far.encode()) == min(len(data), (i + 1) * token_len):  # not inside a character
            held = so_far.removeprefix(out)
            assert not held or may_begin_a_match(pattern, held)
            assert not any(may_begin_a_match(pattern, so_far[i:]) for i in range(len(out)))
    assert out + detokenizer.add([], finished=True) == (text if whole is None else whole)


def test_a_pattern_split_over_tokens_never_shows() -> None:
    stops = StopMatcher.of(SamplingParams(stop_regex=r"\n\nQ\d+:"))
    detokenizer = IncrementalDetokenizer([b"yes\n", b"\nQ", b"1", b"2: next"], stops)
    assert [detokenizer.add([i]) for i in range(4)] == ["yes", "", "", ""]
    assert detokenizer.add([], finished=True) == ""


def test_a_pattern_that_did_not_come_is_given_back() -> None:
    stops = StopMatcher.of(SamplingParams(stop_regex=r"\n\nQ\d+:"))
    detokenizer = IncrementalDetokenizer([b"a\n\nQ1", b" and"], stops)
    assert detokenizer.add([0]) == "a"
    assert detokenizer.add([1]) == "\n\nQ1 and"


def test_an_id_beyond_the_table_adds_nothing() -> None:
    detokenizer = detokenizer_over([b"a"], [])
    assert detokenizer.add([0, 7, -1, 0]) == "aa"
