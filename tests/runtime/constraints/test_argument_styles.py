"""Arguments in Python's notation and in elements: which ones a schema lets through."""

import itertools
from typing import Any

import pytest

from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.spec import Whitespace
from tests.runtime.tools.walks import Walker

OBJECT = {"type": "object", "properties": {"k": {"type": "boolean"}, "n": {"type": "number"}}}
CASES: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "string"}, ['"a\\n"', '""'], ["a", "'a'", "None", '"\\u0041"']),
    ({"type": "integer"}, ["-3"], ["1.5", '"1"']),
    ({"type": "boolean"}, ["True", "False"], ["true", "None"]),
    ({"type": "null"}, ["None"], ["null"]),
    ({"type": ["integer", "null"]}, ["1", "None"], ["True"]),
    ({"enum": ["a", 1, None, True]}, ['"a"', "1", "None", "True"], ['"b"', "null", "2"]),
    ({"const": {"a": [True]}}, ['{"a": [True]}'], ['{"a": [true]}']),
    ({"anyOf": [{"type": "boolean"}, {"type": "string"}]}, ["True", '"x"'], ["1"]),
    ({"type": "array", "items": {"type": "boolean"}}, ["[]", "[True, False]"], ["[1]", "[True,"]),
    (
        {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2},
        ["[None]", "[None, None]"],
        ["[]", "[None, None, None]"],
    ),
    (OBJECT, ["{}", '{"k": True}', '{"k": True, "n": 1.5}'], ['{"n": 1, "k": True}', '{"x": 1}']),
    ({"type": "object"}, ["{}", '{"a": {"b": [None, 1]}}'], ["[]", "{1: 2}"]),
    ({}, ["1", '"x"', "None", '[True, {"a": []}]'], ["null", "x"]),
    ({"$ref": "#/$defs/flag"}, ["True", "1"], ["f()"]),  # not there: any literal
]


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker()


def matcher_of(walker: Walker, schema: Any, style: str, *, strict: bool = False) -> Any:
    element = {"type": "json_schema", "json_schema": schema, "style": style, "strict": strict}
    ended = {"type": "tag", "begin": "(", "content": element, "end": ")"}
    document = {"type": "structural_tag", "format": ended}
    return walker.matcher_of(document, Whitespace.SPACED)


def arguments(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(("schema", "accepted", "refused"), CASES)
def test_a_python_value_is_a_literal_of_its_schema(
    walker: Walker, schema: Any, accepted: list[str], refused: list[str]
) -> None:
    matcher = matcher_of(walker, arguments(v=schema), "python")
    assert [text for text in accepted if not walker.accepts(matcher, f"(v={text})")] == []
    assert [text for text in refused if walker.accepts(matcher, f"(v={text})")] == []


@pytest.mark.parametrize("required", [(), ("a",), ("b",), ("a", "c"), ("a", "b", "c")])
def test_python_arguments_have_commas_between_those_that_are_there(
    walker: Walker, required: tuple[str, ...]
) -> None:
    properties = {name: {"type": "integer"} for name in "abc"}
    schema = {"type": "object", "properties": properties, "required": list(required)}
    matcher = matcher_of(walker, schema, "python")
    for present in itertools.chain.from_iterable(
        itertools.combinations("abc", count) for count in range(4)
    ):
        text = ", ".join(f"{name}=1" for name in present)
        assert walker.accepts(matcher, f"({text})") == (set(required) <= set(present)), text
    assert not walker.accepts(matcher, "(a=1, )")
    assert not walker.accepts(matcher, "(c=1, b=1, a=1)")


def test_elements_have_text_as_it_is_and_other_values_as_json(walker: Walker) -> None:
    schema = {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "n": {"type": ["integer", "null"]},
            "e": {"enum": ["x y", 2]},
        },
        "required": ["s"],
    }
    matcher = matcher_of(walker, schema, "qwen_xml")

    def element(name: str, value: str) -> str:
        return f"<parameter={name}>\n{value}\n</parameter>\n"

    for text in ('say "x"', "", "</param>", "two\nlines\n", "12"):
        assert walker.accepts(matcher, f"({element('s', text)})")
    assert walker.accepts(
        matcher, f"({element('s', 'x')}{element('n', 'null')}{element('e', '2')})"
    )
    assert walker.accepts(matcher, f"({element('s', 'x')}{element('e', 'x y')})")
    for wrong in (element("n", "1"), element("s", "x") + element("n", "x"), element("t", "x")):
        assert not walker.accepts(matcher, f"({wrong})")


@pytest.mark.parametrize("style", ["python", "qwen_xml"])
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "object", "properties": {}, "minProperties": 1}, "minProperties"),
        (arguments(v={"anyOf": [{"type": "boolean"}, {"type": "string"}], "not": {}}), "not"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, None),
        ({"type": "object", "properties": {}, "required": ["a"]}, None),
        (True, None),
    ],
)
def test_what_a_strict_schema_asks_for_and_cannot_have_is_refused(
    walker: Walker, style: str, schema: Any, keyword: str | None
) -> None:
    with pytest.raises(GrammarError) as raised:
        matcher_of(walker, schema, style, strict=True)
    assert raised.value.keyword == keyword
    matcher_of(walker, schema, style, strict=False)


def test_names_that_the_notation_cannot_write_are_refused(walker: Walker) -> None:
    strict = arguments(**{"not-a-name": {"type": "string"}})
    with pytest.raises(GrammarError, match="'not-a-name'"):
        matcher_of(walker, strict, "python", strict=True)
    assert walker.accepts(matcher_of(walker, strict, "python"), "(any=1)")
    matcher_of(walker, strict, "qwen_xml", strict=True)
    broken = arguments(**{"a>b": {"type": "string"}})
    with pytest.raises(GrammarError, match="'a>b'"):
        matcher_of(walker, broken, "qwen_xml", strict=True)


def test_names_beyond_ascii_are_names(walker: Walker) -> None:
    matcher = matcher_of(walker, arguments(año={"type": "integer"}), "python", strict=True)
    assert walker.accepts(matcher, "(año=1)")


NO_SCHEMAS: list[Any] = [
    {"properties": 5},
    {"properties": ["a"]},
    {"properties": {"a": {}}, "required": 5},
    {"properties": {"a": {}}, "required": [["a"]]},
    *(
        arguments(a=value)
        for value in [
            7,
            False,
            {"type": "banana"},
            {"type": 5},
            {"type": [["x"], {}]},
            {"type": []},
            {"enum": 5},
            {"enum": []},
            {"type": "string", "enum": [1]},
            {"anyOf": 5},
            {"anyOf": [5, None]},
            {"type": "array", "items": {"type": "boolean"}, "minItems": "x"},
            {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 1},
            {"type": "object", "properties": {"b": {}}, "required": 5},
        ]
    ),
    arguments(**{"n" * 257: {"type": "integer"}}),
]


@pytest.mark.parametrize("schema", NO_SCHEMAS, ids=str)
@pytest.mark.parametrize("style", ["python", "qwen_xml"])
def test_what_is_no_schema_is_refused_where_it_is_strict_and_else_any(
    walker: Walker, schema: Any, style: str
) -> None:
    assert matcher_of(walker, schema, style) is not None
    with pytest.raises(GrammarError):
        matcher_of(walker, schema, style, strict=True)


def test_an_element_s_value_is_none_that_would_end_it(walker: Walker) -> None:
    schema = arguments(a={"enum": ["x", "</parameter>"]})
    with pytest.raises(GrammarError, match="would end there"):
        matcher_of(walker, schema, "qwen_xml", strict=True)


@pytest.mark.parametrize("style", ["python", "qwen_xml"])
def test_values_of_an_enum_that_are_not_of_its_type_are_not_written(
    walker: Walker, style: str
) -> None:
    schema = arguments(a={"type": ["string", "boolean"], "enum": ["x", None, 1, True]})
    matcher = matcher_of(walker, schema, style, strict=True)
    texts = ["a=None", "a=1"] if style == "python" else [_element("null"), _element("1")]
    assert not any(walker.accepts(matcher, f"({text})") for text in texts)
    text = 'a="x"' if style == "python" else _element("x")
    assert walker.accepts(matcher, f"({text})")


def _element(value: str) -> str:
    return f"<parameter=a>\n{value}\n</parameter>\n"


DEFINITIONS = {
    "unit": {"enum": ["C", "F"], "type": "string"},
    "alias": {"$ref": "#/$defs/unit"},
    "point": {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "flag": {"$ref": "#/$defs/flag"}},
        "required": ["x", "flag"],
    },
    "flag": {"type": "boolean"},
    "loop": {"$ref": "#/$defs/loop"},
    "tree": {"type": "object", "properties": {"kids": {"type": "array"}}},
}
DEFINITIONS["tree"]["properties"]["kids"]["items"] = {"$ref": "#/$defs/tree"}


@pytest.mark.parametrize(
    ("schema", "python", "element", "wrong"),
    [
        ({"$ref": "#/$defs/unit"}, '"C"', "C", "K"),
        ({"$ref": "#/$defs/alias", "description": "d"}, '"F"', "F", "K"),
        (
            {"$ref": "#/$defs/point"},
            '{"x": 1, "flag": True}',
            '{"x": 1, "flag": true}',
            '{"x": 1}',
        ),
        ({"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]}, "None", "null", "K"),
        ({"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]}, '"C"', "C", "True"),
        ({"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}, "None", "null", "[]"),
    ],
)
def test_references_to_definitions_are_followed(
    walker: Walker, schema: Any, python: str, element: str, wrong: str
) -> None:
    schema = {**arguments(a=schema), "$defs": DEFINITIONS}
    keyword = matcher_of(walker, schema, "python", strict=True)
    assert walker.accepts(keyword, f"(a={python})")
    assert not walker.accepts(keyword, f"(a={wrong})")
    elements = matcher_of(walker, schema, "qwen_xml", strict=True)
    assert walker.accepts(elements, f"({_element(element)})")
    assert not walker.accepts(elements, f"({_element(wrong)})")


@pytest.mark.parametrize("name", ["loop", "tree", "absent"])
def test_references_without_an_end_are_refused_in_python(walker: Walker, name: str) -> None:
    schema = {**arguments(a={"$ref": f"#/$defs/{name}"}), "$defs": DEFINITIONS}
    with pytest.raises(GrammarError):
        matcher_of(walker, schema, "python", strict=True)
