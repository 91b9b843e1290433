"""The scanner of JSON objects, against the standard library's parser."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.runtime.tools.json_scanner import MAX_DEPTH, JsonObjectScanner

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


def scanned(text: str) -> tuple[int, JsonObjectScanner]:
    """Where the scanner stops, given the text in single characters."""
    scanner, at = JsonObjectScanner(), 0
    while at < len(text):
        stop = scanner(text[: at + 1], at)
        if stop == at:
            break
        at = stop
    return at, scanner


@settings(max_examples=60, deadline=None)
@given(value=st.dictionaries(st.text(max_size=4), values, max_size=4), indent=st.booleans())
def test_every_object_ends_at_its_last_brace(value: dict[str, Any], indent: bool) -> None:
    text = json.dumps(value, indent=1 if indent else None)
    end, scanner = scanned(text + "}x")
    assert (end, scanner.is_complete, scanner.is_broken) == (len(text), True, False)
    whole = JsonObjectScanner()
    assert whole(text + "}x", 0) == len(text)


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet='{}[]",:\\ua1-.e0tf\n ', max_size=20))
def test_an_object_is_complete_exactly_where_the_parser_takes_it(text: str) -> None:
    text = "{" + text
    end, scanner = scanned(text)
    if scanner.is_complete:
        json.loads(text[:end])
    else:
        for stop in range(end + 1, len(text) + 1):
            with pytest.raises(ValueError):
                json.loads(text[:stop])


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("[1]", 0),
        ('{"a": 01}', 7),
        ('{"a": 1,}', 8),
        ('{"a" 1}', 5),
        ('{"a": "\n"}', 7),
        ('{"a": "\\x"}', 8),
        ('{"a": "\\u12g4"}', 11),
        ('{"a": trve}', 8),
        ('{"a": [1}', 8),
        ('{"a": 1.}', 8),
        ('{"a": -}', 7),
        ("{a: 1}", 1),
        ('{"a": NaN}', 6),
    ],
)
def test_it_breaks_at_the_first_character_that_is_wrong(text: str, end: int) -> None:
    stop, scanner = scanned(text)
    assert (stop, scanner.is_broken) == (end, True)


def test_depth_is_bounded() -> None:
    text = '{"a": ' * (MAX_DEPTH + 1)
    stop, scanner = scanned(text)
    assert scanner.is_broken
    assert stop == len('{"a": ') * MAX_DEPTH
