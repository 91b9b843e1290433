"""Patterns are refused by name or mean what they mean in Python and in ECMA-262."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.llguidance_backend import LlguidanceBackend
from sapwood.runtime.constraints.regex_text import MAX_WEIGHT, ecma_to_rust, python_to_rust
from sapwood.runtime.constraints.spec import ConstraintSpec
from tests.runtime.constraints.byte_backend import accepts, compiled, vocabulary

BACKEND = LlguidanceBackend(vocabulary())


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("(?=a)b", "look-ahead"),
        ("(?!a)b", "look-ahead"),
        ("(?<=a)b", "look-behind"),
        ("(?<!a)b", "look-behind"),
        (r"(a)\1", "back-reference"),
        ("(?P<x>a)(?P=x)", "back-reference"),
        (r"\bword", "word boundary"),
        ("(?>a+)b", "atomic"),
        ("(a)?(?(1)b|c)", "conditional"),
        ("a++b", "possessive"),
        ("(?m)^a", "the flag m"),
        ("a(?i)b", "not at its beginning"),
        ("(a", "without its ) (character 2); close it"),
        ("a)", "without its ( (character 1); open it"),
        ("[a", "without its ] (character 0); close it"),
        ("*a", "nothing to repeat"),
        ("a**", "nothing to repeat"),
        ("[z-a]", "end comes before"),
        (r"[\d-z]", "single characters"),
        (r"\q", "unknown escape"),
        ("a\\", "backslash at the end"),
        (r"\x4", "hexadecimal"),
        ("(" * 100 + ")" * 100, "nested deeper"),
        ("(a{1000}){1000}", f"{MAX_WEIGHT} characters"),
        ("()" * 40_000, "80000 characters"),  # empty groups weigh nothing
    ],
)
def test_what_is_not_taken_is_refused_by_name(pattern: str, named: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(named)):
        python_to_rust(pattern)


@pytest.mark.parametrize("pattern", ["a^b", "a$b", "(a$|b)c"])
def test_an_anchor_inside_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(GrammarError, match=r"has [$^]"):
        compiled(BACKEND, pattern)


SAMPLES = (
    *("", "a", "b", "ab", "abc", "aab", "1", "12", "a1", "_", " ", "\t", "\n", "é", "日本", "😀"),
    *("[", "]", "a]", "&", "&&", "-", "a-b", "\\", "/", "<", "~", "#", "K", "k", "²", "\x1c"),
    *("{", "a{,2}", "aa", "aaa", "^", "$", ".", "A", "ABC", "word", "\x08", "\x07", "\x0b"),
)


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@pytest.mark.parametrize(
    "pattern",
    [
        *("^abc$", "abc", "(^a|b)$", "a$|^b", r"\Aa\Z", "a|", "", "x*", "a{,2}", "a{2}", "a{1,}?"),
        *("[]a]", "[^]a]", "[[a]", "[a&&b]", "[&]+", "[+--]*", "[~~]", "[a-]", "[-a]", r"[\]a]"),
        *(r"\d", r"\w+", r"\s", r"\D", r"\W", r"\S", r"[\d\s]", r"[^\w]", r"[\b]", r"\a|\v|\f"),
        *(
            r"\x41",
            r"\u00e9",
            r"\U0001F600",
            r"\0|\141",
            r"\/|\<|\~|\#|\&",
            ".",
            "(?s).",
            "(?i)abc",
        ),
        *("(?i:k)", "(?P<name>a)(?:b)", "(?#note)a", "日本|😀", "{", "a{", "a{b", r"[\x41-C]+"),
        *("(a|ab)(c|bcd)?", "[^a]", "(?i)[a-c]+", "a+?b*?", r"\.|\^|\$|\[|\{", "[.]", "[$^]"),
    ],
)
def test_a_pattern_accepts_what_it_matches_whole_in_python(pattern: str) -> None:
    grammar = compiled(BACKEND, pattern)
    for text in SAMPLES:
        assert accepts(grammar, text) == bool(re.fullmatch(pattern, text)), text


@st.composite
def patterns(draw: st.DrawFn, depth: int = 3) -> str:
    if not depth or draw(st.booleans()):
        atoms = ("a", "b", ".", r"\d", "[ab]", "[^a]", r"\w", "é", "1", "[a-b1]")
        return draw(st.sampled_from(atoms))
    part, other = draw(patterns(depth - 1)), draw(patterns(depth - 1))
    shapes = ("{0}{1}", "(?:{0}|{1})", "({0})*", "({0})+{1}", "(?:{0}){{1,2}}", "({0})?{1}")
    return draw(st.sampled_from(shapes)).format(part, other)


@settings(max_examples=150, deadline=None)
@given(patterns(), st.lists(st.text("ab1é\n", max_size=5), min_size=5, max_size=5))
def test_random_patterns_accept_what_python_does(pattern: str, texts: list[str]) -> None:
    grammar = compiled(BACKEND, pattern)
    for text in texts:
        assert accepts(grammar, text) == bool(re.fullmatch(pattern, text)), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("a", ["a", "xay"], ["", "b"]),
        ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
        ("a($|,)", ["a", "a,b"], ["ab"]),
        (r"^\d$", ["1"], ["٣"]),
        (r"^\w$", ["a", "_"], ["é"]),
        (r"^\s$", [" ", "\ufeff"], ["a"]),
        (r"^[^]$", ["a"], ["", "ab"]),
        (r"^\u{1F600}$", ["😀"], ["u"]),
        (r"^\ud83d\ude00$", ["😀"], []),
        (r"^(?<year>\d{4})$", ["2024"], ["24"]),
        (r"^a{,2}$", ["a{,2}"], ["aa"]),
        (r"^\p{L}$", ["é"], ["1"]),
        (r"^.$", ["é"], ["\u2028"]),
    ],
)
def test_a_pattern_of_a_schema_means_what_it_does_in_ecma_262(
    pattern: str, matching: list[str], others: list[str]
) -> None:
    spec = ConstraintSpec.json_schema({"type": "string", "pattern": pattern})
    grammar = BACKEND.compile(spec, deadline=5)
    assert all(accepts(grammar, f'"{text}"') for text in matching)
    assert not any(accepts(grammar, f'"{text}"') for text in others)


def test_every_literal_is_spelled_so_that_it_means_itself() -> None:
    assert ecma_to_rust("a-é#") == r"a\x{2d}\x{e9}\x{23}"


DIGITS_OF_OTHER_SCRIPTS = ("٣", "३", "３")


@pytest.mark.parametrize("pattern", [r"\d", r"[\d.]", r"[^\D]", r"\D", r"[^\d]", r"[^\d.]"])
def test_a_digit_is_one_of_ten_and_no_other_passes_for_anything_else(pattern: str) -> None:
    """int() of Python reads digits of other scripts, and most others do not; so neither \\d nor
    \\D has them."""
    grammar = compiled(BACKEND, pattern)
    for text in (*"0123456789.a", *DIGITS_OF_OTHER_SCRIPTS):
        expected = bool(re.fullmatch(pattern, text)) and text not in DIGITS_OF_OTHER_SCRIPTS
        assert accepts(grammar, text) == expected, text


@pytest.mark.parametrize("pattern", [r"\w", r"[\w.]", r"[^\W]", r"\W", r"[^\w]"])
def test_a_word_has_letters_and_numbers_and_marks_are_in_dispute(pattern: str) -> None:
    """Rust's words have marks and joining punctuation, Python's have not: nobody's answer does."""
    grammar = compiled(BACKEND, pattern)
    for text in "aé日ß_7²½Ⅷ٣":
        assert accepts(grammar, text) == bool(re.fullmatch(pattern, text)), text
    for text in "\u0301\u203f\u200d":
        assert not accepts(grammar, text), ascii(text)


@pytest.mark.parametrize("pattern", ["a{" + "9" * 5000 + "}", "(a{999999}){0}b{,99999999999}"])
def test_a_count_of_any_length_is_beyond_the_limit(pattern: str) -> None:
    with pytest.raises(GrammarError, match=f"{MAX_WEIGHT} characters"):
        python_to_rust(pattern)


def test_a_count_in_digits_of_other_scripts_is_text() -> None:
    assert accepts(compiled(BACKEND, "a{٣}"), "a{٣}")
