"""The constraint of a Python type is what outlines means by it."""

import datetime
import enum
import json
import re
from dataclasses import dataclass, replace
from typing import Any, Literal, Optional, Union

import outlines.grammars
import pytest
from outlines import types
from outlines.types import CFG, Choice, JsonSchema, Regex, at_least, either, optional
from outlines.types.dsl import python_types_to_terms, to_regex
from pydantic import BaseModel
from typing_extensions import TypedDict

from sapwood import ConstraintSpec, RequestError, SamplingParams, Whitespace, constraint_of
from sapwood.runtime.constraints.spec import ConstraintKind

K = ConstraintKind


class Person(BaseModel):
    name: str
    age: int


class Node(BaseModel):
    value: int
    children: list["Node"] = []


@dataclass
class Point:
    x: int
    y: int = 0


class Movie(TypedDict):
    title: str


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Mixed(enum.Enum):
    ONE = 1
    TWO = "two"


def search(query: str, limit: int = 3) -> None: ...


def at(place: str) -> None: ...


def schema(output_type: Any) -> Any:
    spec = constraint_of(output_type)
    assert spec.kind is K.JSON_SCHEMA
    SamplingParams(constraint=spec)
    return json.loads(spec.text)


# -- JSON ------------------------------------------------------------------------------------------


def test_a_pydantic_model_is_its_schema_with_properties_in_order() -> None:
    assert schema(Person) == Person.model_json_schema() | {"additionalProperties": False}
    assert list(schema(Person)["properties"]) == ["name", "age"]


def test_a_recursive_model_stays_recursive() -> None:
    found = schema(Node)
    assert found["$ref"] == "#/$defs/Node"


@pytest.mark.parametrize(
    ("output_type", "properties", "required"),
    [
        (Point, {"x", "y"}, ["x"]),
        (Movie, {"title"}, ["title"]),
        (search, {"query", "limit"}, ["query"]),
        (JsonSchema(Point), {"x", "y"}, ["x"]),
        (JsonSchema(Movie), {"title"}, ["title"]),
    ],
)
def test_types_with_fields_are_objects(
    output_type: Any, properties: set[str], required: list[str]
) -> None:
    found = schema(output_type)
    assert set(found["properties"]) == properties
    assert found["required"] == required


def test_objects_of_types_are_closed_unless_they_say_otherwise() -> None:
    class Open(BaseModel, extra="allow"):
        inner: Person
        anything: dict[str, int]
        properties: Any = None

    found = schema(Open)
    assert found["additionalProperties"] is True
    assert set(found["properties"]) == {"inner", "anything", "properties"}
    assert found["properties"]["anything"]["additionalProperties"] == {"type": "integer"}
    assert found["$defs"]["Person"]["additionalProperties"] is False
    assert schema(Point)["additionalProperties"] is schema(search)["additionalProperties"] is False


def test_a_schema_is_taken_as_it_is() -> None:
    assert schema(JsonSchema(Person)) == Person.model_json_schema()
    assert "additionalProperties" not in schema(either(JsonSchema(Person)))["anyOf"][0]


def test_a_schema_may_be_a_dict_a_string_or_a_genson_builder() -> None:
    from genson import SchemaBuilder

    given = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"const": "ü"}}}
    assert schema(JsonSchema(given)) == given
    assert schema(JsonSchema(json.dumps(given))) == given
    builder = SchemaBuilder()
    builder.add_object({"a": 1})
    assert schema(builder)["properties"] == {"a": {"type": "integer"}}
    assert schema(JsonSchema(builder)) | {"additionalProperties": False} == schema(builder)


def test_dict_alone_is_an_object() -> None:
    assert schema(dict) == {"type": "object"}


def test_alternatives_of_schemas_stay_a_schema_with_its_references() -> None:
    found = schema(Person | Node)
    assert found["anyOf"][0] == schema(Person)
    node = found["anyOf"][1]
    assert node["$ref"] == "#/anyOf/1/$defs/Node"
    assert node["$defs"]["Node"]["properties"]["children"]["items"]["$ref"] == node["$ref"]


def test_references_of_a_schema_with_a_name_of_its_own_stay() -> None:
    named = {"$id": "urn:a", "$ref": "#/$defs/A", "$defs": {"A": {"type": "null"}}}
    assert schema(either(JsonSchema(named), JsonSchema(Person)))["anyOf"][0] == named


def test_functions_in_an_enum_are_alternatives() -> None:
    class Tools(enum.Enum):
        SEARCH = search
        FIND = at

    [first, second] = schema(Tools)["anyOf"]
    assert set(first["properties"]) == {"query", "limit"}
    assert set(second["properties"]) == {"place"}


def test_whitespace_is_bounded_unless_it_is_said() -> None:
    assert constraint_of(Person).whitespace is Whitespace.BOUNDED
    assert constraint_of(Person, whitespace=Whitespace.COMPACT).whitespace is Whitespace.COMPACT
    assert constraint_of(Person, whitespace_pattern=r"[ ]?").whitespace_pattern == r"[ ]?"
    own = JsonSchema(Person, whitespace_pattern=r"\n?")
    assert constraint_of(own).whitespace_pattern == r"\n?"
    assert constraint_of(own, whitespace_pattern=" ").whitespace_pattern == " "
    spaced = constraint_of(own, whitespace=Whitespace.SPACED)
    assert (spaced.whitespace, spaced.whitespace_pattern) == (Whitespace.SPACED, None)


def test_an_empty_whitespace_pattern_is_compact() -> None:
    for spec in (
        constraint_of(Person, whitespace_pattern=""),
        constraint_of(JsonSchema(Person, whitespace_pattern="")),
    ):
        assert (spec.whitespace, spec.whitespace_pattern) == (Whitespace.COMPACT, None)


# -- choices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output_type", "choices"),
    [
        (Literal["a", "b.c"], ["a", "b.c"]),
        (Literal["yes"], ["yes"]),
        (Colour, ["red", "green"]),
        (Choice(["x", "y|z"]), ["x", "y|z"]),
        (either("a", "b"), ["a", "b"]),
        (Literal["a"] | Literal["b", "a"] | Colour, ["a", "b", "red", "green"]),
        (Choice([Colour, "blue"]), ["red", "green", "blue"]),
        ("hello (world)", ["hello (world)"]),
    ],
)
def test_plain_strings_are_a_choice_and_no_regex(output_type: Any, choices: list[str]) -> None:
    spec = constraint_of(output_type)
    assert spec == ConstraintSpec.choice(choices)
    SamplingParams(constraint=spec)


def test_no_choices_at_all_are_refused() -> None:
    class Empty(enum.Enum):
        pass

    for nothing in (Empty, Choice([])):
        with pytest.raises(RequestError, match="no choices"):
            constraint_of(nothing)


# -- regular expressions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output_type", "taken", "refused"),
    [
        (int, ["0", "-12"], ["01", "1.5", ""]),
        (float, ["1.5", "-2e10"], [".5"]),
        (bool, ["True", "False"], ["true"]),
        (str, ['"a b"', '""'], ["a"]),
        (datetime.date, ["2024-02-29"], ["2024-13-01"]),
        (datetime.time, ["23:59:00"], ["24:00:00"]),
        (datetime.datetime, ["2024-02-29 23:59:00"], ["2024-02-29"]),
        (Regex("[a-c]{2}"), ["ab"], ["a", "ad"]),
        (Literal[1, 2], ["1", "2"], ["3"]),
        (Literal["a", 2], ["a", "2"], ["'a'"]),
        (Literal[True], ["True"], ["true"]),
        (Mixed, ["1", "two"], ["2"]),
        (1.5, ["1.5"], ["1x5"]),
        (Optional[Literal["a"]], ["a", "None"], ["null"]),  # noqa: UP045
        (Union[int, bool], ["3", "True"], ["x"]),  # noqa: UP007
        (int | None, ["3", "None"], [""]),
        (list[datetime.date], ["[2024-02-29, 2024-03-01]"], ["[]"]),
        (list[int], ["[1]", "[1, 2]"], ["[]", "[1,2]"]),
        (list[Literal["a"]], ['["a"]'], ["[a]"]),
        (tuple[int, str], ['(1, "a")'], ['[1, "a"]']),
        (tuple[int, ...], ["(1, 2, 3)"], ["()"]),
        (dict[str, int], ["{}", '{"a":1, "b":2}'], ['{"a": 1}']),
        (either("a", Regex("[0-9]")), ["a", "7"], ["b"]),
        (at_least(2, "ab") + optional("c"), ["abab", "ababc"], ["ab"]),
        (types.email, ["a@b.cd"], ["a@"]),
        (types.ipv4, ["127.0.0.1"], ["256.1.1.1"]),
    ],
)
def test_other_types_are_outlines_regular_expression(
    output_type: Any, taken: list[str], refused: list[str]
) -> None:
    spec = constraint_of(output_type)
    assert spec.kind is K.REGEX
    of_outlines = to_regex(python_types_to_terms(output_type))
    assert spec.text == of_outlines.replace(r"(\d{4})", "([0-9]{4})")
    SamplingParams(constraint=spec)
    assert all(re.fullmatch(spec.text, text) for text in taken)
    assert not any(re.fullmatch(spec.text, text) for text in refused)


@pytest.mark.parametrize(
    "output_type", [datetime.date, datetime.datetime, list[datetime.date], datetime.date | None]
)
def test_dates_have_digits_that_python_reads(output_type: Any) -> None:
    assert r"\d" not in constraint_of(output_type).text
    assert not re.fullmatch(constraint_of(datetime.date).text, "٢٠٢٤-02-29")


def test_whitespace_says_nothing_of_what_is_not_json() -> None:
    for output_type in (int, Colour):
        assert constraint_of(output_type, whitespace=Whitespace.COMPACT) == constraint_of(
            output_type
        )
    with pytest.raises(RequestError, match="for JSON"):
        SamplingParams(constraint=constraint_of(int, whitespace_pattern=" "))


# -- grammars, specs and what is not understood ----------------------------------------------------


def test_a_grammar_is_in_the_notation_it_is_written_in() -> None:
    lark = constraint_of(CFG(outlines.grammars.arithmetic))
    assert (lark.kind, lark.text) == (K.LARK, outlines.grammars.arithmetic)
    assert constraint_of(CFG('root ::= "a"')).kind is K.EBNF
    with pytest.raises(RequestError, match="no rule"):
        constraint_of(CFG("no grammar"))


def test_a_spec_is_taken_as_it_is_but_for_the_options_that_are_given() -> None:
    given = ConstraintSpec.json_schema({"type": "array"}, whitespace=Whitespace.SPACED)
    assert constraint_of(given) is given
    changed = constraint_of(given, whitespace=Whitespace.COMPACT, backend="xgrammar")
    assert changed == replace(given, whitespace=Whitespace.COMPACT, backend="xgrammar")
    assert constraint_of(int, backend="outlines_core").backend == "outlines_core"


@pytest.mark.parametrize(
    "unknown",
    [
        None,
        object,
        3 + 4j,
        list,
        list[object],
        tuple,
        dict | str,
        Person | dict,
        lambda x: x,
        JsonSchema,
        {"type": "object"},
        [1, 2],
        b"abc",
        list[Any],
    ],
)
def test_what_is_not_understood_is_refused_with_a_way_out(unknown: Any) -> None:
    with pytest.raises(RequestError, match="no constraint can be made of .*give a JsonSchema") as e:
        constraint_of(unknown)
    assert e.value.param == "constraint"
    assert len(str(e.value)) < 500
    assert "open an issue" not in str(e.value)


@pytest.mark.parametrize(
    ("mistaken", "way_out"),
    [
        ({"type": "object"}, "give a schema as JsonSchema"),
        (["red", "blue"], "give choices as Choice"),
        (list, "name the type of the items"),
    ],
)
def test_a_likely_mistake_is_told_its_own_way_out(mistaken: Any, way_out: str) -> None:
    with pytest.raises(RequestError, match=way_out):
        constraint_of(mistaken)
