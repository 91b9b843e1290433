"""Expressions in explicit words match what they matched before."""

import re

import pytest

from sapwood.runtime.constraints.explicit_regex import read, restricted, without_anchors, written
from sapwood.runtime.regex_syntax import RegexError

TEXTS = [
    "",
    "a",
    "ab",
    "aab",
    "b",
    "1",
    "12",
    " ",
    "\n",
    "日本",
    "a\nb",
    "]",
    "-",
    "^",
    "\\",
    "a|b",
]
PATTERNS = [
    "a|ab",
    "(a|b){2,3}",
    "[^a]*",
    r"\d+",
    r"\w?\s*",
    ".*",
    r"[\]^\-]",
    r"\\",
    r"a\|b",
    "(?:)",
    "[一-龥]{2}",
    "a*?b",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_expression_written_anew_matches_the_same(pattern: str) -> None:
    anew = written(read(pattern), lambda code_point: f"\\U{code_point:08X}")
    for text in TEXTS:
        assert bool(re.fullmatch(anew, text)) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize("pattern", PATTERNS)
def test_restricted_to_some_characters_it_matches_what_has_only_those(pattern: str) -> None:
    tree = restricted(read(pattern), ((0x61, 0x61), (0x4E00, 0x9FFF)))
    anew = None if tree is None else written(tree, lambda code_point: f"\\U{code_point:08X}")
    for text in TEXTS:
        expected = bool(re.fullmatch(pattern, text)) and bool(re.fullmatch("[a一-鿿]*", text))
        assert (anew is not None and bool(re.fullmatch(anew, text))) == expected, text


@pytest.mark.parametrize("pattern", [r"\D", r"[\W]", r"[^\d]", r"[^]\s]", r"a[^b\w]c"])
def test_a_class_that_would_be_wider_than_pythons_is_refused(pattern: str) -> None:
    with pytest.raises(RegexError, match="negated"):
        read(pattern)


@pytest.mark.parametrize(
    "pattern", [r"\\D", r"[^\\d]", r"[\d^]", r"[^a]\w", r"\[^\d".replace("^", "")]
)
def test_what_only_looks_like_such_a_class_is_taken(pattern: str) -> None:
    read(pattern)


@pytest.mark.parametrize(
    ("pattern", "without"),
    [("^a$", "a"), (r"a\$", r"a\$"), (r"a\\$", r"a\\"), ("a", "a"), ("^", ""), ("$", "")],
)
def test_anchors_at_the_ends_are_taken_off_and_escaped_ones_are_not(
    pattern: str, without: str
) -> None:
    assert without_anchors(pattern) == without
