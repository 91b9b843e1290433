"""What is xgrammar's own: finished answers are checked, structural tags, named special tokens."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from sapwood.runtime.constraints.interface import (
    ConstraintBackend,
    GrammarError,
    Matcher,
    Vocabulary,
)
from sapwood.runtime.constraints.schema_check import SchemaChecker
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec, Whitespace
from sapwood.runtime.constraints.xgrammar_backend import MAX_FORCED_TOKENS, XgrammarBackend
from sapwood.runtime.constraints.xgrammar_documents import (
    named_tokens,
    refuse_what_is_not_enforced,
    structural_tag,
)

DEADLINE = 30.0
INTEGER = {"type": "integer"}


@pytest.fixture(scope="module")
def backend(backend_named: Callable[[str], ConstraintBackend]) -> XgrammarBackend:
    backend = backend_named("xgrammar")
    assert isinstance(backend, XgrammarBackend)
    return backend


def tag_spec(document: Any, whitespace: Whitespace = Whitespace.COMPACT) -> ConstraintSpec:
    return ConstraintSpec(
        kind=ConstraintKind.STRUCTURAL_TAG, text=json.dumps(document), whitespace=whitespace
    )


def tag_of(element: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": element}


def is_allowed(matcher: Matcher, vocabulary: Vocabulary, token: int) -> bool:
    mask = np.empty(vocabulary.mask_size, dtype=np.int32)
    matcher.fill_mask(mask)
    return bool(np.unpackbits(mask.view(np.uint8), bitorder="little")[token])


def takes(matcher: Matcher, vocabulary: Vocabulary, text: str) -> bool:
    return all(map(matcher.advance, vocabulary.encode(text))) and matcher.is_accepting


@pytest.mark.parametrize(
    ("schema", "sound", "wrong"),
    [
        ({"type": "array", "uniqueItems": True}, "[1,2]", "[1,1]"),
        ({"not": {"type": "string"}}, "1", '"a"'),
        ({"if": INTEGER, "then": {"minimum": 3}}, "5", "1"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, '{"a":1,"b":1}', '{"a":1}'),
        ({"type": "string", "enum": ["a", 1]}, '"a"', "1"),
    ],
)
def test_what_the_masks_let_through_the_verdict_does_not(
    backend: XgrammarBackend, vocabulary: Vocabulary, schema: Any, sound: str, wrong: str
) -> None:
    spec = ConstraintSpec.json_schema(schema, whitespace=Whitespace.COMPACT)
    grammar = backend.compile(spec, deadline=DEADLINE)
    assert takes(grammar.matcher(), vocabulary, wrong), "else there is nothing to check"
    assert grammar.matcher().verdict(sound.encode()) is None
    assert grammar.matcher().verdict(wrong.encode())


@pytest.mark.parametrize("answer", [b"NaN", b'"\xed\xa0\x80"', b'"a\tb"', b"1 2", b"", b"[" * 9999])
def test_an_answer_that_is_no_json_is_wrong(backend: XgrammarBackend, answer: bytes) -> None:
    grammar = backend.compile(ConstraintSpec.json_schema({}), deadline=DEADLINE)
    assert grammar.matcher().verdict(answer)


def test_a_verdict_that_takes_too_long_is_a_wrong_answer(backend: XgrammarBackend) -> None:
    """A pattern whose search is exponential in Python: 2**40 ways to split forty letters."""
    schema = {"anyOf": [{"type": "string", "pattern": "^(a+)+b$"}, {"const": "a" * 40}]}
    grammar = backend.compile(ConstraintSpec.json_schema(schema), deadline=DEADLINE)
    assert "could not be checked" in str(grammar.matcher().verdict(b'"' + b"a" * 40 + b'"'))
    assert grammar.matcher().verdict(b'"aab"') is None


def test_a_pattern_that_cannot_be_checked_is_refused(backend: XgrammarBackend) -> None:
    spec = ConstraintSpec.json_schema({"type": "string", "pattern": r"\p{L}+"})
    with pytest.raises(GrammarError, match="pattern"):
        backend.compile(spec, deadline=DEADLINE)


@pytest.mark.parametrize(
    "pattern", [r"[^\w]", r"\W", r"a|^b", r"\Aab", "[[:alpha:]--[a]]", "(?i)a"]
)
def test_expressions_that_xgrammar_would_read_otherwise_are_refused_or_read_as_meant(
    backend: XgrammarBackend, vocabulary: Vocabulary, pattern: str
) -> None:
    try:
        grammar = backend.compile(ConstraintSpec.regex(pattern), deadline=DEADLINE)
    except GrammarError:
        return
    assert pattern == "[[:alpha:]--[a]]", "to Python a set, two dashes, a set and a bracket"
    assert takes(grammar.matcher(), vocabulary, "a--a]")


def test_its_dot_is_no_line_feed(backend: XgrammarBackend, vocabulary: Vocabulary) -> None:
    matcher = backend.compile(ConstraintSpec.regex("a.b"), deadline=DEADLINE).matcher()
    assert not takes(matcher.copy(), vocabulary, "a\nb")
    assert takes(matcher, vocabulary, "a😀b")


def test_a_pattern_for_whitespace_is_refused(backend: XgrammarBackend) -> None:
    spec = ConstraintSpec(
        kind=ConstraintKind.JSON_SCHEMA, text="{}", whitespace_pattern="[ ]", backend="xgrammar"
    )
    with pytest.raises(GrammarError, match="whitespace pattern"):
        backend.compile(spec, deadline=DEADLINE)


def test_a_grammar_that_forces_tokens_without_end_is_cut(
    backend: XgrammarBackend, vocabulary: Vocabulary
) -> None:
    spec = ConstraintSpec(kind=ConstraintKind.EBNF, text='root ::= "#" root')
    matcher = backend.compile(spec, deadline=DEADLINE).matcher()
    assert matcher.forced_tokens() == list(vocabulary.encode("#")) * MAX_FORCED_TOKENS


def test_lark_is_refused_by_its_name(backend: XgrammarBackend) -> None:
    with pytest.raises(GrammarError, match="lark"):
        backend.compile(ConstraintSpec(kind=ConstraintKind.LARK, text='start: "a"'), deadline=1.0)


@pytest.mark.parametrize(
    "document",
    [
        {
            "structures": [{"begin": "<f>", "schema": INTEGER, "end": "</f>"}],
            "triggers": ["<f"],
        },
        tag_of(
            {
                "type": "triggered_tags",
                "triggers": ["<f"],
                "tags": [
                    {
                        "type": "tag",
                        "begin": "<f>",
                        "content": {"type": "json_schema", "json_schema": INTEGER},
                        "end": "</f>",
                    }
                ],
            }
        ),
    ],
)
def test_both_forms_of_a_structural_tag_are_taken(
    backend: XgrammarBackend, vocabulary: Vocabulary, document: Any
) -> None:
    matcher = backend.compile(tag_spec(document), deadline=DEADLINE).matcher()
    assert takes(matcher.copy(), vocabulary, "the dog <f>12</f> and a tree")
    assert not takes(matcher, vocabulary, "the dog <f>the")


def test_json_in_a_structural_tag_has_the_whitespace_asked_for(
    backend: XgrammarBackend, vocabulary: Vocabulary
) -> None:
    schema = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
    document = tag_of({"type": "json_schema", "json_schema": schema, "style": "json"})
    texts = ['{"a":1,"b":2}', '{"a": 1, "b": 2}', '{ "a" : 1 }']
    taken = {
        Whitespace.COMPACT: [True, False, False],
        Whitespace.SPACED: [False, True, False],
        Whitespace.BOUNDED: [True, True, True],
    }
    for whitespace, expected in taken.items():
        matcher = backend.compile(tag_spec(document, whitespace), deadline=DEADLINE).matcher()
        assert [takes(matcher.copy(), vocabulary, text) for text in texts] == expected


@pytest.mark.parametrize("token", ["<|im_start|>", 1])
def test_a_special_token_that_a_structural_tag_names_is_allowed_where_it_is_due(
    backend: XgrammarBackend, vocabulary: Vocabulary, token: str | int
) -> None:
    assert vocabulary.token_bytes[1] == b"<|im_start|>"
    elements = [{"type": "token", "token": token}, {"type": "json_schema", "json_schema": INTEGER}]
    document = tag_of({"type": "sequence", "elements": elements})
    matcher = backend.compile(tag_spec(document), deadline=DEADLINE).matcher()
    assert matcher.forced_tokens() == [1]
    assert matcher.advance(1)
    assert not is_allowed(matcher, vocabulary, 1)
    assert takes(matcher, vocabulary, "12")


def test_what_a_tag_names_is_found_in_tags_and_triggers_alone() -> None:
    document = tag_of(
        {
            "type": "triggered_tags",
            "triggers": ["<a>"],
            "tags": [
                {"type": "tag", "begin": "<a>x", "content": {"type": "any_text"}, "end": ["b"]}
            ],
        }
    )
    assert named_tokens(document) == (set(), {"<a>", "<a>x", "b"})


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("uniqueItems", {"type": "array", "items": {"type": "array", "uniqueItems": True}}),
        ("not", {"properties": {"not": {"not": INTEGER}}}),
        ("maxLength", {"$defs": {"a": {"type": "string", "maxLength": 3}}}),
        ("minimum", {"anyOf": [INTEGER], "minimum": 3}),
        ("type", {"type": "string", "enum": ["a", 1]}),
        ("if", {"prefixItems": [{"if": INTEGER}]}),
    ],
)
def test_json_in_a_structural_tag_has_no_keyword_that_is_not_enforced(
    keyword: str, schema: Any
) -> None:
    with pytest.raises(GrammarError) as caught:
        refuse_what_is_not_enforced(schema)
    assert caught.value.keyword == keyword


def test_names_of_properties_are_no_keywords() -> None:
    refuse_what_is_not_enforced({"properties": {"not": INTEGER, "if": INTEGER}, "required": ["if"]})


@pytest.mark.parametrize(
    "document",
    [
        "text",
        {"structures": [{"begin": "a"}], "triggers": []},
        tag_of({"type": "unheard_of"}),
        tag_of({"type": "any_text", "excludes_at_start": ["a"]}),
        tag_of({"type": "json_schema", "json_schema": {"not": INTEGER}}),
        tag_of({"type": "regex", "pattern": "(?=a)"}),
    ],
)
def test_a_structural_tag_that_is_not_understood_is_refused(document: Any) -> None:
    with pytest.raises(GrammarError):
        structural_tag(json.dumps(document))


def test_what_xgrammar_warns_of_is_refused(backend: XgrammarBackend) -> None:
    """It goes without a multiple of 3 between bounds, and says so on stderr only."""
    schema = {"type": "integer", "minimum": 5, "multipleOf": 3}
    document = tag_of({"type": "json_schema", "json_schema": schema})
    with pytest.raises(GrammarError, match="multipleOf"):
        backend.compile(tag_spec(document), deadline=DEADLINE)


def test_a_contradiction_is_refused(backend: XgrammarBackend) -> None:
    spec = ConstraintSpec.json_schema({"type": "integer", "minimum": 5, "maximum": 3})
    with pytest.raises(GrammarError):
        backend.compile(spec, deadline=DEADLINE)


def test_a_missing_package_is_told_with_the_way_out(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ModuleNotFoundError, match="pip install xgrammar") as caught:
        XgrammarBackend(vocabulary)
    assert caught.value.name == "xgrammar"


def test_a_closed_checker_passes_nothing() -> None:
    checker = SchemaChecker()
    assert checker.verdict(json.dumps(INTEGER), b"1") is None
    checker.close()
    assert "closed" in str(checker.verdict(json.dumps(INTEGER), b"1"))
