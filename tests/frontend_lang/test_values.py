"""An answer becomes a value of the type that was asked for."""

import datetime
import enum
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outlines.types import Choice, JsonSchema, Regex
from outlines.types.dsl import python_types_to_terms, to_regex
from pydantic import BaseModel
from typing_extensions import TypedDict

from sapwood.frontend_lang.options import Options
from sapwood.frontend_lang.values import AnswerError, parse_value
from sapwood.runtime.constraints.spec import ConstraintSpec
from sapwood.runtime.errors import SapwoodError


class Colour(enum.Enum):
    RED = "red"
    BOTH = "red, green"
    THREE = 3


class Birth(BaseModel):
    name: str
    day: datetime.date


@dataclass
class Point:
    x: int
    y: int = 0


class Movie(TypedDict):
    title: str


def search(query: str, limit: int = 3) -> None: ...


Count = NewType("Count", int)


def value_of(output_type: Any, text: str) -> Any:
    return parse_value(Options(output_type=output_type), text)


@pytest.mark.parametrize(
    ("output_type", "text", "value"),
    [
        (int, "-42", -42),
        (Count, "7", 7),
        (Annotated[int, "a note"], "7", 7),
        (float, "4.5e3", 4500.0),
        (int | float, "4.5", 4.5),
        (str, '"a, b"', "a, b"),
        (bool, "False", False),
        (int | None, "None", None),
        (datetime.date, "2024-02-29", datetime.date(2024, 2, 29)),
        (datetime.time, "10:00:01", datetime.time(10, 0, 1)),
        (datetime.datetime, "2024-02-29 10:00:01", datetime.datetime(2024, 2, 29, 10, 0, 1)),
        (Literal["a", "ab", 3], "ab", "ab"),
        (Literal["a", "ab", 3], "3", 3),
        (Colour, "red, green", Colour.BOTH),
        (Colour, "3", Colour.THREE),
        (list[int], "[]", []),
        (list[Colour], '["red, green", "red", 3]', [Colour.BOTH, Colour.RED, Colour.THREE]),
        (tuple[int, str], '(1, "x")', (1, "x")),
        (tuple[bool, ...], "(True, False)", (True, False)),
        (dict[str, list[int]], '{"a":[1, 2], "b":[]}', {"a": [1, 2], "b": []}),
        (dict[int, str], '{"1":"x"}', {1: "x"}),
        (dict, '{"a": [null]}', {"a": [None]}),
        (Birth, '{"name": "Ada", "day": "1815-12-10"}', Birth(name="Ada", day="1815-12-10")),
        (Birth | None, "None", None),
        (Birth | Point, '{"x": 1}', Point(1)),
        (list[Point], '[{"x": 1}, {"x": 2, "y": 3}]', [Point(1), Point(2, 3)]),
        (Movie, ' {"title": "M"}\n', {"title": "M"}),
        (search, '{"query": "q", "limit": 1}', {"query": "q", "limit": 1}),
        (JsonSchema('{"type": "array"}'), "[1]", [1]),
        (Regex("a+"), "aa", "aa"),
        (Choice(["a", "b"]), "b", "b"),
        (ConstraintSpec.regex("[0-9]"), "1", "1"),
        (ConstraintSpec.json_schema(True), "1", 1),
    ],
)
def test_the_text_of_a_type_becomes_its_value(output_type: Any, text: str, value: Any) -> None:
    found = value_of(output_type, text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("options", "text", "value"),
    [
        ({"dtype": int}, "42\n", 42),
        ({"dtype": "float"}, "-.5", -0.5),
        ({"dtype": bool}, "True", True),
        ({"dtype": "str"}, '"two words"', "two words"),
        ({"json_schema": {"type": "object"}}, '{"a": 1}', {"a": 1}),
        ({"regex": "[0-9]+"}, "12", "12"),
        ({}, " as it is\n", " as it is\n"),
    ],
)
def test_other_options_have_their_values_too(options: Any, text: str, value: Any) -> None:
    assert parse_value(options, text) == value


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": int}, ""),
        ({"dtype": str}, '"cut off'),
        ({"dtype": bool}, "Tru"),
        ({"json_schema": "{}"}, '{"a": '),
        ({"output_type": int}, "12a"),
        ({"output_type": datetime.date}, "2023-02-29"),
        ({"output_type": Birth}, '{"name": "Ada", "day": "18'),
        ({"output_type": Birth}, '{"name": "Ada", "day": "soon"}'),
        ({"output_type": list[int]}, "[1, 2"),
        ({"output_type": Literal["a"]}, "b"),
    ],
)
def test_an_answer_that_is_no_value_says_so_and_shows_itself(options: Any, text: str) -> None:
    with pytest.raises(AnswerError, match=re.escape(repr(text)[:20])) as caught:
        parse_value(options, text)
    assert isinstance(caught.value, SapwoodError) and isinstance(caught.value, ValueError)


def test_an_answer_that_was_cut_says_after_how_many_tokens() -> None:
    meta = {"finish_reason": {"type": "length"}, "completion_tokens": 10}
    with pytest.raises(AnswerError, match="was cut after 10 tokens, .*raise max_tokens"):
        parse_value({"json_schema": "{}"}, '{"a": ', meta)


TYPES: list[Any] = [
    list[int],
    tuple[int, bool],
    dict[str, float],
    list[Literal["a", "a, b", 1]],
    dict[int, list[datetime.time]],
    float | None,
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TYPES), st.data())
def test_every_text_that_the_constraint_lets_through_is_a_value(
    output_type: Any, data: st.DataObject
) -> None:
    pattern = to_regex(python_types_to_terms(output_type))
    text = data.draw(st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True))
    value = value_of(output_type, text)
    if isinstance(value, list | dict):
        assert bool(value) == (len(text) > 2)
