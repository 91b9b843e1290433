"""Lark and EBNF are told apart by their rules, whatever else is in them."""

from pathlib import Path

import pytest

from sapwood import RequestError
from sapwood.runtime.constraints.notation import grammar_spec, notation_of
from sapwood.runtime.constraints.spec import ConstraintKind

LARK = {
    "one rule": 'start: "a"',
    "a terminal": "NUMBER: /[0-9]+/",
    "a hidden rule": '_sep: ","',
    "an inlined rule": '?value: "a" | "b"',
    "a kept rule": '!value: "a"',
    "both marks": '!?value: "a"',
    "a priority": 'start.2: "a"',
    "a negative priority": 'start.-1: "a"',
    "a template": '_list{x}: x ("," x)*',
    "attributes": 'start[capture, max_tokens=5]: "a"',
    "a space before the colon": 'start : "a"',
    "a directive first": "%import common.WS\nstart: WS",
    "our engine's directive": '%llguidance {"no_forcing": true}\nstart: "a"',
    "a schema": 'start: %json {\n  "type": "object"\n}',
    "the other's rule in a string": 'start: "root ::= a"',
    "the other's rule on a line of its own": 'start: "a"\n  | "b ::= c"\n',
    "the other's rule in a comment": '// root ::= "a"\nstart: "b"',
    "the other's rule in a regex": 'start: /x ::= y/ | "z"',
    "the other's sign in a string": 'start: name "::=" value\nname: "a"',
    "a body on the next line": 'start:\n    "a"\n    | "b"',
    "the other line end": '// comment\r\nstart: "a"\r\n',
    "a byte order mark": '\ufeffstart: "a"',
    "an indent": '\n    start: "a"\n    b: "c"',
}
EBNF = {
    "one rule": 'root ::= "a"',
    "no spaces": 'root::="a"',
    "a name with a dash": "my-rule ::= [a-z]+\nroot ::= my-rule",
    "a comment first": '# start: "a"\nroot ::= "b"',
    "the other's rule in a string": 'root ::= "start: x"',
    "the other's rule on a line of its own": 'root ::= (\n  "key: value" |\n  "a: b"\n)',
    "a class with a quote and a colon": 'root ::= [^"\\\\:]+\nx ::= "y"',
    "angle brackets": "<root> ::= <a>",
    "a byte order mark": '\ufeffroot ::= "a"',
    "an indent": '\n    root ::= item+\n    item ::= "- " [^\\n]+ "\\n"\n',
}
NEITHER = {
    "nothing": "",
    "text": "hello",
    "another EBNF": 'root = "a" , "b" ;',
    "a comment": '# root ::= "a"\n// start: "b"',
    "JSON": '{"type": "object"}',
    "an assignment": "root := a",
    "a URL": "//example.com",
}


@pytest.mark.parametrize("text", LARK.values(), ids=LARK)
def test_lark_is_known(text: str) -> None:
    assert notation_of(text) is ConstraintKind.LARK


@pytest.mark.parametrize("text", EBNF.values(), ids=EBNF)
def test_ebnf_is_known(text: str) -> None:
    assert notation_of(text) is ConstraintKind.EBNF


@pytest.mark.parametrize("text", NEITHER.values(), ids=NEITHER)
def test_what_is_neither_is_refused_with_the_way_out(text: str) -> None:
    assert notation_of(text) is None
    with pytest.raises(RequestError, match="name ::= ") as refused:
        grammar_spec(text)
    assert refused.value.param == "constraint"


def test_the_grammars_of_outlines_are_lark() -> None:
    import outlines.grammars

    folder = Path(outlines.grammars.__file__).parent / "grammars"
    texts = [path.read_text() for path in folder.glob("*.lark")]
    assert len(texts) >= 3
    assert {notation_of(text) for text in texts} == {ConstraintKind.LARK}


def test_the_text_of_a_grammar_is_kept() -> None:
    text = ' \nroot ::= "a"\n'
    assert grammar_spec(text).text == text
