"""Rules of which no answer is finite are refused, and no grammar is that has a finite one."""

from pathlib import Path

import outlines.grammars
import pytest

from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.lark_endings import refuse_endless


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        ('start: "a" start', "that an answer begins with"),
        ('?start : "a"i start -> item', "that an answer begins with"),
        ("start: start", "that an answer begins with"),
        ('start: x "b"\nx: "a" y\ny: "c" | z x\nz: x z', "'z'"),
        ('start: "b" | "a" x\nx: "c" x', "'x'"),
        ('start: "b" | ("a" x)?\nx: "c" x', "'x'"),
        ('start: ("a" start)+', "that an answer begins with"),
        ('start: ("a" | "b") start', "that an answer begins with"),
        ('start: "a" start{1,3}', "that an answer begins with"),
        ('start: "a"{0,3} start', "that an answer begins with"),
        ('start: "a"? start~2', "that an answer begins with"),
        ('start: "a".."z" start', "that an answer begins with"),
        ('start: /[(]"\\/ | / start\n%import common.INT', "that an answer begins with"),
        ('start: "| \\" |" start // | "b"\n# x:', "that an answer begins with"),
        ("start: <|call|> <[1-5]> start", "that an answer begins with"),
        ('start: %json {"anyOf": [{"const": "|"}]} start', "that an answer begins with"),
        ("%ignore / +/\nstart: WORD start\nWORD: /a|b/", "that an answer begins with"),
        ('start: a-b\na-b: "x" a-b', "that an answer begins with"),
    ],
)
def test_a_rule_that_never_ends_is_refused_by_its_name(grammar: str, rule: str) -> None:
    with pytest.raises(GrammarError, match="give that rule an alternative") as refused:
        refuse_endless(grammar)
    assert f"the rule {rule} never ends" in str(refused.value)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" start | "b"',
        'start: "a" start\n  | "b"',
        'start: "a" start |',
        'start: "a" start?',
        'start: "a" start*',
        'start: "a" [start]',
        'start: "a" (start "b")?',
        'start: ("a" | start "b")',
        'start: "a" start{0,2}',
        'start: "a" start{,2}',
        'start: "a" start~0..2',
        'start: x\nx: "a" y | "b"\ny: x x',
        'start: "a" nowhere',
        # what is not judged
        'start: "a" X\nX: "b" X',
        'start[capture]: "a" start',
        "start: 'a' start",
        'start: x::1\nx::_: "a" x::incr(_)',
        'start: "a" %lark {\nstart: "b" start\n}',
        'start: "a" start & "b"',
    ],
)
def test_a_grammar_that_may_have_a_finite_answer_is_taken(grammar: str) -> None:
    refuse_endless(grammar)


def test_the_grammars_of_outlines_are_taken() -> None:
    folder = Path(outlines.grammars.__file__).parent / "grammars"
    texts = [path.read_text() for path in folder.glob("*.lark")]
    assert len(texts) >= 3
    for text in texts:
        refuse_endless(text)
