"""Structural tags: what their grammars accept, and documents that are wrong."""

from typing import Any

import pytest

from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.structural_tag import (
    MAX_DEPTH,
    MAX_TEXT_CHARS,
    parse_structural_tag,
    to_lark,
)
from tests.runtime.tools.walks import Walker


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker()


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def schema(of: Any, **options: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": of, **options}


ANY = {"type": "any_text"}
INTEGER = schema({"type": "integer"})
A_TAG, B_TAG = tag("<a>", INTEGER, "</a>"), tag("<b>", text("x"), "</b>")
TRIGGERED: dict[str, Any] = {
    "type": "triggered_tags",
    "triggers": ["<a", "<b"],
    "tags": [A_TAG, B_TAG],
}
SEPARATED: dict[str, Any] = {
    "type": "tags_with_separator",
    "tags": [A_TAG, B_TAG],
    "separator": ", ",
}
ONE, TWO = "<a>1</a>", "<a>1</a>, <b>x</b>"
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (text('a\n"b" \\ é</>/'), ['a\n"b" \\ é</>/'], ["a", ""]),
    (text(""), [""], ["a"]),
    (INTEGER, ["-12"], ["1.5", ""]),
    (schema({"type": "array", "items": {"type": "integer"}}), ["[1,2]"], ["[1, 2]"]),
    ({"type": "regex", "pattern": "[a-c]{2}/\\d"}, ["ab/1"], ["a/1", "ab/x"]),
    ({"type": "grammar", "grammar": 'root ::= "a" ("b" | "c")'}, ["ab", "ac"], ["a"]),
    ({"type": "grammar", "grammar": 'start: x+\nx: "{" | "}"'}, ["{}{"], ["", "a"]),
    (ANY, ["", "anything\n at all é"], []),
    ({**ANY, "excludes": ["no.", "<|x|>"]}, ["nox"], ["a no. b", "<|x|>"]),
    ({**ANY, "excludes_at_start": ["\\s*\\{"]}, ["", "a {"], ["{", "  {a"]),
    (sequence(text("a"), INTEGER, text("b")), ["a1b"], ["ab", "a1"]),
    (either(text("a"), INTEGER), ["a", "7"], ["a7", ""]),
    ({"type": "optional", "content": text("a")}, ["", "a"], ["aa"]),
    ({"type": "star", "content": text("a")}, ["", "aaa"], ["b"]),
    ({"type": "plus", "content": text("a")}, ["a", "aaa"], [""]),
    (tag("<x>", INTEGER, ["</x>", "</y>"]), ["<x>1</x>", "<x>1</y>"], ["<x>1", "1</x>"]),
    (tag("<x>", ANY, ["</x>", "</y>"]), ["<x></x>", "<x>a</z></y>"], ["<x>a", "<x></x>b"]),
    (sequence(ANY, text("END"), INTEGER), ["END1", "a END2"], ["END", "ENDxEND1"]),
    (sequence(tag("<x>", ANY, "</x>"), ANY), ["<x>a</x>", "<x>a</x>b</x>"], ["<x>a"]),
    (sequence(ANY, tag("<x>", INTEGER, "")), ["a<x>1"], ["a", "<x>"]),
    (
        sequence(tag("<x>", either(text("q"), ANY), "</x>"), text("!")),
        ["<x>q</x>!", "<x>z</x>!"],
        ["<x>z</x>"],
    ),
    (
        sequence({"type": "optional", "content": ANY}, text("END")),
        ["END", "a END"],
        ["a"],
    ),
    (
        TRIGGERED,
        ["", "text", ONE, f"t{ONE}t<b>x</b>t", "<c>", "a <"],
        ["<a", "<a>x</a>", "t<b>y</b>", "<a>1"],
    ),
    ({**TRIGGERED, "at_least_one": True}, [ONE, f"{ONE}t{ONE}"], ["", f"t{ONE}"]),
    ({**TRIGGERED, "stop_after_first": True}, ["", "t", f"t{ONE}"], [f"{ONE}t", "<a"]),
    (
        {**TRIGGERED, "stop_after_first": True, "at_least_one": True},
        [ONE, "<b>x</b>"],
        ["", f"t{ONE}", f"{ONE}t"],
    ),
    ({**TRIGGERED, "excludes": ["bad"]}, [f"t{ONE}t"], ["bad", f"{ONE}bad", f"bad{ONE}"]),
    (
        tag("<x>", TRIGGERED, "</x>"),
        ["<x></x>", f"<x>t{ONE}t{ONE}</x>"],
        [f"<x>{ONE}", "<x><a</x>", "<x></x>t"],
    ),
    (SEPARATED, ["", ONE, TWO, f"{TWO}, {ONE}"], ["t", f"{ONE}{ONE}", f"{ONE}, "]),
    ({**SEPARATED, "at_least_one": True}, [ONE, TWO], [""]),
    ({**SEPARATED, "stop_after_first": True}, ["", ONE], [TWO]),
    ({**SEPARATED, "stop_after_first": True, "at_least_one": True}, [ONE], ["", TWO]),
]


@pytest.mark.parametrize(("element", "accepted", "refused"), CASES)
def test_an_element_accepts_just_its_texts(
    walker: Walker, element: Any, accepted: list[str], refused: list[str]
) -> None:
    document = {"type": "structural_tag", "format": element}
    matcher = walker.matcher_of(document)
    assert [answer for answer in accepted if not walker.accepts(matcher, answer)] == []
    assert [answer for answer in refused if walker.accepts(matcher, answer)] == []


def test_the_older_shape_is_free_text_with_tags(walker: Walker) -> None:
    document = {
        "type": "structural_tag",
        "structures": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}],
        "triggers": ["<a"],
    }
    matcher = walker.matcher_of(document)
    assert walker.accepts(matcher, f"t{ONE}t{ONE}")
    assert walker.accepts(matcher, "t")
    assert not walker.accepts(matcher, "t<a>x</a>")


THINKING = sequence(tag("<think>", ANY, "</think>"), INTEGER)


@pytest.mark.parametrize(
    "element",
    [THINKING, sequence(ANY, text("</think>\n"), INTEGER)],
    ids=["tag", "sequence"],
)
def test_a_text_that_spells_a_special_token_is_that_token(walker: Walker, element: Any) -> None:
    document = {"type": "structural_tag", "format": element}
    matcher = walker.matcher_of(document)
    answer = "<think>some</thinking>\n</think>1" if element is THINKING else "some </think>\n1"
    assert walker.accepts(matcher, answer)
    assert not all(map(matcher.copy().advance, answer.encode()))


def test_free_text_has_no_special_token_that_the_document_does_not_name(walker: Walker) -> None:
    document = {"type": "structural_tag", "format": sequence(ANY, text("[ARGS]"))}
    matcher = walker.matcher_of(document)
    assert walker.accepts(matcher, "some[ARGS]")
    allowed = set(walker.special.values()).intersection(walker.allowed(matcher))
    assert allowed == {walker.special["[ARGS]"]}


def test_a_special_token_behind_text_ends_free_text(walker: Walker) -> None:
    document = {"type": "structural_tag", "format": sequence(ANY, text("\n[ARGS]"), INTEGER)}
    matcher = walker.matcher_of(document)
    assert walker.accepts(matcher, "a\nb\n[ARGS]5")
    assert not walker.accepts(matcher, "a[ARGS]5")


def test_tags_with_one_schema_share_its_rule() -> None:
    tags = [tag(f"<{i}>", INTEGER, "</>") for i in range(20)]
    document = {
        "type": "structural_tag",
        "format": {"type": "tags_with_separator", "tags": tags, "separator": ","},
    }
    lark = to_lark(document, special_token_id=lambda text: None, json_schema=lambda schema: schema)
    assert lark.count("%json") == 1


def refusing(what: str) -> Any:
    def json_schema(schema: Any) -> Any:
        if schema != {"type": "object"}:
            raise GrammarError(what)
        return schema

    return json_schema


def test_a_schema_that_is_refused_is_an_object_where_it_is_not_strict() -> None:
    loose = {"type": "structural_tag", "format": schema({"type": "integer"}, strict=False)}
    strict = {"type": "structural_tag", "format": schema({"type": "integer"})}
    gate = refusing("not that")
    lark = to_lark(loose, special_token_id=lambda text: None, json_schema=gate)
    assert '"type": "object"' in lark
    with pytest.raises(GrammarError, match="not that"):
        to_lark(strict, special_token_id=lambda text: None, json_schema=gate)


def nested(depth: int) -> dict[str, Any]:
    element = text("a")
    for _ in range(depth):
        element = {"type": "optional", "content": element}
    return element


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ([], "structural tag"),
        ({"type": "json_schema"}, "structural tag"),
        ({"type": "structural_tag"}, "structures"),
        ({"type": "structural_tag", "format": text("a"), "x": 1}, "'x'"),
        ({"type": "structural_tag", "structures": {}, "triggers": []}, "structures"),
        ({"type": "structural_tag", "structures": [1], "triggers": ["a"]}, "structures[0]"),
        (
            {"type": "structural_tag", "structures": [{"begin": "a"}], "triggers": ["a"]},
            "structures[0].schema",
        ),
    ],
)
def test_a_wrong_document_is_refused(document: Any, place: str) -> None:
    with pytest.raises(GrammarError) as raised:
        parse_structural_tag(document)
    assert place in str(raised.value)


@pytest.mark.parametrize(
    ("element", "place"),
    [
        (1, "format must"),
        ({}, "format.type"),
        ({"type": "any_tokens"}, "format.type is 'any_tokens'"),
        ({"type": ["or"]}, "format.type"),
        ({"type": "const_string"}, "format.value is missing"),
        ({"type": "const_string", "value": 1}, "format.value"),
        (text("\ud800"), "format.value"),
        ({**ANY, "max_tokens": 3}, "'max_tokens'"),
        ({**ANY, "excludes": "x"}, "format.excludes"),
        ({**ANY, "excludes": [""]}, "format.excludes"),
        ({**ANY, "excludes_at_start": [1]}, "format.excludes_at_start"),
        (sequence(), "format.elements is empty"),
        (sequence(text("a"), {"type": "x"}), "format.elements[1].type"),
        (schema({}, style="yaml"), "format.style"),
        (schema({}, strict=1), "format.strict"),
        ({"type": "json_schema"}, "format.json_schema"),
        (tag("a", text("b"), 1), "format.end"),
        (tag("a", text("b"), []), "format.end"),
        (tag("a" * (MAX_TEXT_CHARS + 1), text("b"), "c"), "format.begin"),
        (nested(MAX_DEPTH), "within each other"),
        ({**TRIGGERED, "triggers": ["<a"]}, "'<b>'"),
        ({**TRIGGERED, "triggers": ["<a", "<", "<b"]}, "exactly one"),
        ({**TRIGGERED, "triggers": ["<a", "<b", "<c"]}, "'<c'"),
        ({**TRIGGERED, "tags": []}, "format.tags is empty"),
        ({**TRIGGERED, "tags": [text("a")]}, "format.tags[0].type"),
        ({**TRIGGERED, "at_least_one": "yes"}, "format.at_least_one"),
        ({key: SEPARATED[key] for key in ("type", "tags")}, "format.separator"),
    ],
)
def test_a_wrong_element_is_refused_by_its_place(element: Any, place: str) -> None:
    with pytest.raises(GrammarError) as raised:
        parse_structural_tag({"type": "structural_tag", "format": element})
    assert place in str(raised.value)


@pytest.mark.parametrize(
    ("element", "what"),
    [
        (sequence(ANY, INTEGER), "what follows it is no fixed text"),
        (sequence(ANY, ANY), "what follows it is no fixed text"),
        ({"type": "star", "content": ANY}, "never ends"),
        ({**TRIGGERED, "tags": [tag("<a>", ANY, ""), B_TAG]}, "give the tag an end"),
        ({"type": "grammar", "grammar": "what is this"}, "no rule in Lark"),
        ({"type": "grammar", "grammar": 'start: "a" start'}, "never ends"),
        ({"type": "grammar", "grammar": 'root ::= "a" root'}, "never ends"),
    ],
)
def test_free_text_that_nothing_ends_is_refused(walker: Walker, element: Any, what: str) -> None:
    document = {"type": "structural_tag", "format": element}
    with pytest.raises(GrammarError, match=what):
        walker.matcher_of(document)
