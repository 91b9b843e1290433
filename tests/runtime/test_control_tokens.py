"""Real and quoted control tokens: whatever a message spells, the template's are the real ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood.runtime.control_tokens import (
    NONCHARACTERS,
    ControlTokens,
    strings_in,
    unescaped,
    unused_characters,
)
from sapwood.runtime.errors import RequestError

MARK = NONCHARACTERS[0]
# Tokens that overlap, begin with each other and have single letters.
SPELLINGS = ("<a>", "<<a>", "<a>>", "aba", "<", "|x|", "a\n")
SETS = st.sets(st.sampled_from(SPELLINGS), min_size=1)
TEXTS = st.text("<a>b|x \n", min_size=1, max_size=8)


def composed(tokens: ControlTokens, parts: list[tuple[bool, str]]) -> str:
    """What a template renders that writes the true ones and takes the others from messages."""
    return "".join(text if ours else tokens.marked(text, MARK) for ours, text in parts)


@given(SETS, st.data())
def test_exactly_the_templates_tokens_are_real(spellings: set[str], data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(TEXTS, st.sampled_from(sorted(spellings))), max_size=4))
    tokens = ControlTokens(spellings)
    parts = [part for text, token in pairs for part in ((False, text), (True, token))]
    content = tokens.read(composed(tokens, parts), MARK)
    expected, place = [], 0
    for is_ours, text in parts:
        if is_ours:
            expected.append((place, place + len(text)))
        place += len(text)
    assert content.text == "".join(text for _, text in parts)
    assert list(content.controls) == expected


@given(st.sets(st.text("ab<|", min_size=1, max_size=5), min_size=1), st.text("ab<|", max_size=20))
def test_tokens_are_found_leftmost_and_longest(spellings: set[str], text: str) -> None:
    expected, place = [], 0
    while place < len(text):
        fits = [token for token in spellings if text.startswith(token, place)]
        if fits:
            length = max(map(len, fits))
            expected.append((place, place + length))
            place += length
        else:
            place += 1
    assert list(ControlTokens(spellings).read(text, None).controls) == expected


def test_text_that_spells_nothing_gets_no_marks() -> None:
    tokens = ControlTokens(["<|im_start|>", "<|im_end|>"])
    for text in ("", "hello", "a < b", "im_end", "|im_end |", "x <| y"):
        assert not tokens.touch(text)
        assert tokens.marked(text, MARK) == text


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("a<|end|>b", "a~<|end|>b"),
        ("<|end|><|end|>", "~<|end|>~<|end|>"),
        ("a <|en", "a ~<|en"),
        ("<", "~<"),
        ("d|> a", "~d|> a"),
    ],
)
def test_marks_stand_before_spellings_and_before_parts_at_the_edges(text: str, marked: str) -> None:
    assert ControlTokens(["<|end|>"]).marked(text, MARK) == marked.replace("~", MARK)


def test_marking_keeps_what_templates_do_with_text() -> None:
    tokens = ControlTokens(["<|end|>"])
    text = "  <think> a </think> \n<|end|> b "
    marked = tokens.marked(text, MARK)
    assert marked != text
    assert marked.strip().replace(MARK, "") == text.strip()
    for word in ("<think>", "</think>", "\n"):
        assert [part.replace(MARK, "") for part in marked.split(word)] == text.split(word)


def test_a_quoted_token_is_noted_and_an_edge_that_comes_to_nothing_is_not() -> None:
    tokens = ControlTokens(["<|end|>"])
    quoted = tokens.read(tokens.marked("<|end|>", MARK) + "<|end|>", MARK)
    assert (quoted.controls, quoted.has_quoted) == (((7, 14),), True)
    harmless = tokens.read(tokens.marked("a <", MARK) + " <|end|>", MARK)
    assert (harmless.controls, harmless.has_quoted) == (((4, 11),), False)
    across = tokens.read(tokens.marked("<|en", MARK) + "d|>", MARK)
    assert (across.text, across.controls, across.has_quoted) == ("<|end|>", (), True)


def test_an_added_token_that_is_no_control_token_hides_what_it_begins_before() -> None:
    tokens = ControlTokens(["<|end|>"], ["<|end|>\n", "<think>"])
    assert tokens.read("<|end|>\n<think><|end|>", None).controls == ((15, 22),)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["<a>", "x", "é", ""])), max_size=6))
def test_keys_tell_real_from_quoted_and_nothing_else(parts: list[tuple[bool, str]]) -> None:
    tokens = ControlTokens(["<a>"])
    content = tokens.read(composed(tokens, parts), MARK)
    keyed, places = content.keyed()
    assert keyed.replace(b"\xff", b"") == content.text.encode()
    assert (
        keyed.count(b"\xff")
        == len(content.controls)
        == sum(ours and text == "<a>" for ours, text in parts)
    )
    assert all(keyed[place : place + 4] == b"\xff<a>" for place in places)


def test_a_mark_is_a_character_that_no_text_has() -> None:
    assert unused_characters(["a", NONCHARACTERS[0] + NONCHARACTERS[2]], 2) == (
        NONCHARACTERS[1] + NONCHARACTERS[3]
    )
    assert unused_characters(["a \\ufdd0"], 1) == NONCHARACTERS[1]
    with pytest.raises(RequestError, match="noncharacters"):
        unused_characters([NONCHARACTERS[1:]], 2)


def test_an_escaped_mark_is_restored_and_nothing_else() -> None:
    tokens = ControlTokens(["<|end|>"])
    written = repr([tokens.marked("\\<|end|>\n", MARK), "\ufdd1"])
    assert MARK not in written
    assert unescaped(written, MARK).replace(MARK, "") == repr(["\\<|end|>\n", "\ufdd1"])


def test_all_strings_of_a_value_are_seen() -> None:
    value = [{"a": ["b", {"c": "d"}], "e": None, "f": 1}]
    assert list(strings_in(value)) == ["a", "b", "c", "d", "e", "f"]
