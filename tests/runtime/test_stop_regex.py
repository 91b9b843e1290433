"""Stop regular expressions: against Python's `re`, byte by byte."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.runtime.regex_syntax import RegexError
from sapwood.runtime.stop_regex import (
    MAX_REGEX_SIZE,
    RegexScanner,
    StopRegex,
    _CharClass,
    character_span,
)

ALPHABET = "abé\n"
TEXT = st.text(ALPHABET, max_size=10)
ATOMS = st.sampled_from(["a", "b", "é", ".", "[ab]", "[^a]", r"\n", r"\w", r"\S", "[a-é]", "()"])
QUANTIFIERS = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?", "{0}"])


def larger(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Nothing that takes more than twice the characters of its parts."""
    pairs = st.tuples(parts, parts)
    return (
        pairs.map("".join)
        | pairs.map("|".join).map("({})".format)
        | st.tuples(parts.map("(?:{})".format), QUANTIFIERS).map("".join)
    )


SMALL_PATTERNS = larger(ATOMS) | larger(larger(ATOMS))
PATTERNS = SMALL_PATTERNS | larger(SMALL_PATTERNS)
# What any ending of a small pattern's match can be.
ENDINGS = ["".join(chars) for n in range(5) for chars in itertools.product(ALPHABET, repeat=n)]


def compiled(pattern: str) -> StopRegex | None:
    """None for what matches the empty text, by the word of `re`."""
    if re.fullmatch(pattern, "", re.ASCII):
        with pytest.raises(RegexError, match="empty text"):
            StopRegex.compile(pattern)
        return None
    return StopRegex.compile(pattern)


def first_match(pattern: str, text: str) -> tuple[int, int] | None:
    """The first end, and its first start, in bytes."""
    regex = re.compile(pattern, re.ASCII)
    for end in range(1, len(text) + 1):
        for start in range(end):
            if regex.fullmatch(text, start, end):
                return len(text[:start].encode()), len(text[:end].encode())
    return None


def scan(regex: StopRegex, data: bytes) -> tuple[int, int] | None:
    scanner = RegexScanner(regex)
    for end, byte in enumerate(data, 1):
        length = scanner.advance(byte)
        if length:
            return end - length, end
    return None


@settings(max_examples=1500, deadline=None)
@given(PATTERNS, TEXT)
def test_the_first_end_then_the_first_start_as_re_finds_them(pattern: str, text: str) -> None:
    regex = compiled(pattern)
    if regex is not None:
        assert scan(regex, text.encode()) == first_match(pattern, text)


@settings(max_examples=100, deadline=None)
@given(SMALL_PATTERNS, TEXT.map(lambda text: text[:6]))
def test_held_is_the_longest_ending_that_begins_a_matching_text(pattern: str, text: str) -> None:
    regex = compiled(pattern)
    if regex is None:
        return
    scanner = RegexScanner(regex)
    matches = re.compile(pattern, re.ASCII).fullmatch
    for end in range(1, len(text) + 1):
        if any([scanner.advance(byte) for byte in text[end - 1].encode()]):
            break
        endings = (text[start:end] for start in range(end))
        held = next((e for e in endings if any(matches(e + rest) for rest in ENDINGS)), "")
        assert scanner.num_held == len(held.encode())


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (r"\n\nQ\d+:", "ok\n\nQ12: next", (2, 8)),
        (r"</?\w+>", "a < b <i>x", (6, 9)),
        ("[^\\x00-\\x7f]", "plain 漢字", (6, 9)),
        ("[\\u4e00-\\u9fff]{2}", "漢ab漢字", (5, 11)),
        ("\\U0001F600", "x😀", (1, 5)),
        (r"[]\-^]{3}", "a-^]", (1, 4)),
        ("a{,2}b", "aaab", (1, 4)),
        ("{a}{", "x{a}{", (1, 5)),
        (r"\d\.\d", "1.x 2.5", (4, 7)),
        ("STOP", "stop", None),
        ("a.b", "a\nb", None),
        (r"\d", "\u0663", None),  # an Arabic digit
    ],
)
def test_syntax(pattern: str, text: str, found: tuple[int, int] | None) -> None:
    assert scan(StopRegex.compile(pattern), text.encode()) == found
    assert first_match(pattern, text) == found


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("", "empty text"),
        ("a*", "empty text"),
        ("a|", "empty text"),
        ("(a?){2}", "empty text"),
        ("a{0}", "empty text"),
        ("((a{0}){999999}){999999}", "empty text"),
        (r"(a)\1", "back-reference"),
        (r"(?P<x>a)(?P=x)", "named"),
        ("(?=a)b", "look-around"),
        ("(?!a)b", "look-around"),
        ("(?<=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        ("(?>a)b", "atomic"),
        ("(?i)a", "flags"),
        ("^a", "anchor"),
        ("a$", "anchor"),
        (r"\ba", "anchor"),
        (r"a\Z", "anchor"),
        ("a++", "possessive"),
        ("a{2}+", "possessive"),
        ("a**", "quantifier after a quantifier"),
        ("*a", "nothing before it"),
        ("a|{2}", "nothing before it"),
        ("a{3,2}", "from 3 to 2"),
        ("(a", "without its"),
        ("a)", "without its"),
        ("[a", "without its"),
        ("[]", "without its"),
        ("[b-a]", "range"),
        (r"[\d-z]", "range"),
        (r"[^\x00-\U0010ffff]", "without a character"),
        (r"\ud800", "no character"),
        (r"\U99999999", "no character"),
        (r"\x1", "hexadecimal"),
        (r"\q", "unknown escape"),
        ("a\\", "nothing after it"),
        ("(" * 60 + "a" + ")" * 60, "nested deeper"),
        ("x" * 513, "513 characters"),
        ("x{257}", "more than 512"),
        ("x{999999}", "more than 512"),
        ("x{1000000}", "more than 6 digits"),
        ("x{9" + "0" * 400 + "}", "more than 6 digits"),
        ("((((x{900}){900}){900}){900})", "more than 512"),
        ("(x?){200}y", "more than 512"),
    ],
)
def test_what_is_not_taken_is_refused_with_its_reason(pattern: str, why: str) -> None:
    with pytest.raises(RegexError, match=why):
        StopRegex.compile(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(a|a)*b",
        "(a*)*b",
        "(a|aa)+b",
        "(.*a){12}b",
        "(a?){20}a{20}b",
        ".{0,150}b",
        "a*" * 20 + "b",
    ],
)
def test_the_steps_of_a_byte_are_bounded_whatever_the_pattern(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    regex = StopRegex.compile(pattern)
    assert regex.size <= MAX_REGEX_SIZE
    num_tests = 0
    meets = _CharClass.meets

    def counted(self: _CharClass, span: tuple[int, int]) -> bool:
        nonlocal num_tests
        num_tests += 1
        return meets(self, span)

    monkeypatch.setattr(_CharClass, "meets", counted)
    scanner = RegexScanner(regex)
    for num_bytes in range(1, 500):
        assert not scanner.advance(ord("a"))
        assert num_tests <= num_bytes * len(regex.classes)
    assert scanner.advance(ord("b"))


def test_a_beginning_is_given_up_as_soon_as_a_character_cannot_become_the_next() -> None:
    scanner = RegexScanner(StopRegex.compile("aé"))
    scanner.advance(ord("a"))
    scanner.advance(0xC3)
    assert scanner.num_held == 2  # é is C3 A9
    scanner = RegexScanner(StopRegex.compile("aé"))
    scanner.advance(ord("a"))
    scanner.advance(0xE2)
    assert scanner.num_held == 0


@pytest.mark.parametrize("broken", [b"\x80", b"\xc3", b"\xe2\x82", b"\xff", b"\xed\xa0\x80"])
def test_bytes_that_are_no_utf8_match_nothing_and_hide_nothing(broken: bytes) -> None:
    assert scan(StopRegex.compile("a.c"), b"a" + broken + b"c") is None
    found = scan(StopRegex.compile("[^x]c"), b"a" + broken + b"bc")
    assert found == (1 + len(broken), 3 + len(broken))


def test_the_span_of_a_beginning_is_that_of_all_characters_that_have_it() -> None:
    spans: dict[bytes, tuple[int, int]] = {}
    code_points = [*range(0xD800), *range(0xE000, 0x110000, 7), 0x10FFFF]
    for code_point in code_points:
        data = chr(code_point).encode()
        for length in range(1, len(data) + 1):
            low, _ = spans.get(data[:length], (code_point, 0))
            spans[data[:length]] = (low, code_point)
    for data, (low, high) in spans.items():
        span = character_span(data)
        assert span is not None
        assert span[0] <= low <= high <= span[1]
        if high < 0xD800:  # every character was tried
            assert span == (low, high)


@pytest.mark.parametrize(
    "data",
    [b"\x80", b"\xc0", b"\xc1\x80", b"\xe0\x80", b"\xed\xa0", b"\xf0\x80", b"\xf4\x90", b"\xf5"],
)
def test_no_character_begins_with_what_utf8_forbids(data: bytes) -> None:
    assert character_span(data) is None
