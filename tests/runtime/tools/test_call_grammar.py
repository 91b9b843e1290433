"""Grammar and reader are of one definition: what one writes the other reads, and back."""

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.spec import ConstraintKind, Whitespace
from sapwood.runtime.tools import Tool, ToolChoice, ToolMode, checked_tools, tool_format
from sapwood.runtime.tools.argument_schema import argument_schema
from tests.runtime.tools.corpus import (
    ARGUMENTS,
    FORMATS,
    TAKES_ONE_CALL,
    TAKES_TEXT_BEFORE,
    TOOLS,
    read,
    written,
)
from tests.runtime.tools.walks import Walker

AUTO, REQUIRED = ToolChoice(), ToolChoice(ToolMode.REQUIRED)

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "units": {"enum": ["metric", "imperial"]},
        "hourly": {"type": "boolean"},
        "after": {"type": ["string", "null"]},
        "where": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "exact": {"type": "boolean"}},
            "required": ["lat"],
        },
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["city", "units"],
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}}


def tools_of(**parameters: Any) -> tuple[Tool, ...]:
    functions = [{"name": name, "parameters": schema} for name, schema in parameters.items()]
    return checked_tools([{"type": "function", "function": function} for function in functions])


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker()


def matcher_of(
    walker: Walker, name: str, tools: tuple[Tool, ...], choice: ToolChoice, parallel: bool = True
) -> Any:
    spec = tool_format(name).constraint(tools, choice, parallel=parallel)
    assert spec is not None
    assert (spec.kind, spec.whitespace) == (ConstraintKind.STRUCTURAL_TAG, Whitespace.SPACED)
    return walker.matcher(spec)


@pytest.mark.parametrize("choice", [AUTO, REQUIRED], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_the_grammar_accepts_what_the_reader_reads(
    walker: Walker, name: str, choice: ToolChoice
) -> None:
    matcher = matcher_of(walker, name, TOOLS, choice)
    for i, arguments in enumerate(ARGUMENTS):
        calls = [("ping", arguments)]
        if name not in TAKES_ONE_CALL:
            calls.append(("ping.all-2", ARGUMENTS[i - 1]))
        text = written(name, calls)
        assert walker.accepts(matcher, text), text
        if choice is AUTO and name in TAKES_TEXT_BEFORE:
            assert walker.accepts(matcher, f"Let me see.\n{text}")
        assert not walker.accepts(matcher, f"{text} and more")
        assert len(read(name, [text]).calls) == len(calls)


@pytest.mark.parametrize("choice", [AUTO, REQUIRED, ToolChoice.named("weather")], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_the_reader_reads_what_the_grammar_generates(
    walker: Walker, name: str, choice: ToolChoice
) -> None:
    """Random walks through the real masks: whole calls, with arguments that satisfy the schema."""
    tools = tools_of(weather=WEATHER, stop=EMPTY)
    validators = {tool.name: Draft202012Validator(tool.parameters or {}) for tool in tools}
    matcher = matcher_of(walker, name, tools, choice)
    rng = random.Random(f"{name} {choice}")
    start = beginning(name) if choice is AUTO else ""
    num_calls = num_whole = 0
    for _ in range(12):
        text = walker.draw(matcher, rng, start)
        if text is None:
            continue
        num_whole += 1
        transcript = read(name, [text], tools)
        assert transcript.content == "", text
        assert transcript.calls, text
        assert choice.name is None or [call[0] for call in transcript.calls] == [choice.name]
        for tool_name, arguments in transcript.calls:
            validators[tool_name].validate(json.loads(arguments))
        assert read(name, [*text, ""], tools).as_tuple() == transcript.as_tuple()
        num_calls += len(transcript.calls)
    assert num_whole >= 8
    assert num_calls >= num_whole


CONTRADICTORY = "extract_parameters_v1"  # it requires a list that is one of some strings
BFCL = Path(__file__).parents[2] / "data" / "bfcl" / "functions.jsonl"


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_real_functions_are_read_and_satisfy_their_schemas(
    walker: Walker, name: str
) -> None:
    """Two walks for each of the 300 functions of BFCL that are vendored."""
    rng = random.Random(name)
    num_whole = 0
    functions = [json.loads(line) for line in BFCL.read_text().splitlines()]
    for function in functions:
        tools = tools_of(**{function["name"]: function["parameters"]})
        validator = Draft202012Validator(function["parameters"])
        matcher = matcher_of(walker, name, tools, REQUIRED)
        for text in filter(None, (walker.draw(matcher, rng) for _ in range(2))):
            transcript = read(name, [text], tools)
            assert transcript.content == "" and transcript.calls, text
            for _, arguments in transcript.calls:
                if function["name"] != CONTRADICTORY:
                    validator.validate(json.loads(arguments))
            num_whole += 1
    assert num_whole > len(functions)


def beginning(name: str) -> str:
    """What makes an answer of free text one of calls."""
    if name in ("hermes", "qwen3_coder"):
        return "<tool_call>"
    if name.startswith("mistral"):
        return "[TOOL_CALLS]"
    return "[weather(" if name == "pythonic" else '{"name": "weather"'


@pytest.mark.parametrize("name", FORMATS)
def test_free_answers_may_be_any_text_and_are_read_as_it(walker: Walker, name: str) -> None:
    tools = tools_of(weather=WEATHER, stop=EMPTY)
    matcher = matcher_of(walker, name, tools, AUTO)
    for text in ("", "Hello.", "{}", '{"a": [1]}', "[1, 2]", "[x](y)", '{"name": "other"}'):
        assert walker.accepts(matcher, text), text
        assert read(name, [text], tools).as_tuple() == (text, [])
    rng = random.Random(name)
    for _ in range(10):
        text = walker.draw(matcher, rng, rng.choice(["", "{", "[", '{"name": "w', "<"]))
        if text is not None:
            content, calls = read(name, [text], tools).as_tuple()
            assert calls or content == text


@pytest.mark.parametrize("name", FORMATS)
def test_a_trigger_of_free_text_has_to_go_on_as_a_call(walker: Walker, name: str) -> None:
    matcher = matcher_of(walker, name, TOOLS, AUTO)
    text = written(name, [("ping", {"text": "x"})])
    parts = re.findall("|".join([*map(re.escape, walker.special), "."]), text, re.DOTALL)
    start = len(beginning(name).replace("weather", "ping"))
    cuts = [cut for cut in itertools.accumulate(parts) if start <= len(cut) < len(text)]
    assert cuts
    for cut in cuts:
        assert not walker.accepts(matcher, cut), cut


@pytest.mark.parametrize("name", FORMATS)
def test_a_special_token_that_is_spelled_out_is_no_trigger(walker: Walker, name: str) -> None:
    """Free text may have any characters but these: the reader could not tell them apart."""
    matcher = matcher_of(walker, name, TOOLS, AUTO)
    for marker in tool_format(name).answer_format(TOOLS, AUTO).markers:
        if marker not in walker.special or marker == "[ARGS]":
            continue
        assert not all(map(matcher.copy().advance, b"x" + marker.encode()))


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in TAKES_ONE_CALL])
@pytest.mark.parametrize("choice", [AUTO, REQUIRED], ids=str)
def test_without_parallel_calls_there_is_one(walker: Walker, name: str, choice: ToolChoice) -> None:
    one = written(name, [("ping", {"text": "x"})])
    two = written(name, [("ping", {"text": "x"}), ("ping", {"text": "y"})])
    several = matcher_of(walker, name, TOOLS, choice)
    single = matcher_of(walker, name, TOOLS, choice, parallel=False)
    assert walker.accepts(several, one)
    assert walker.accepts(several, two)
    assert walker.accepts(single, one)
    assert not walker.accepts(single, two)


@pytest.mark.parametrize("name", FORMATS)
def test_required_takes_no_text_and_a_named_tool_no_other(walker: Walker, name: str) -> None:
    required = matcher_of(walker, name, TOOLS, REQUIRED)
    named = matcher_of(walker, name, TOOLS, ToolChoice.named("ping"))
    assert not walker.accepts(required, "")
    assert not walker.accepts(required, "text")
    assert walker.accepts(named, written(name, [("ping", {"text": "x"})]))
    assert not walker.accepts(named, written(name, [("ping.all-2", {"text": "x"})]))
    twice = [("ping", {"text": "x"})] * 2
    assert not walker.accepts(named, written(name, twice))


@pytest.mark.parametrize("choice", [AUTO, REQUIRED], ids=str)
def test_a_tokenizer_may_have_the_tags_as_special_tokens(choice: ToolChoice) -> None:
    walker = Walker(("<|end|>", "<tool_call>", "</tool_call>"))
    matcher = matcher_of(walker, "hermes", TOOLS, choice)
    text = written("hermes", [("ping", {"text": "</tool_call>"}), ("ping", {})])
    assert walker.accepts(matcher, text)
    spelled = text.encode()
    assert not all(map(matcher.copy().advance, spelled))


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_to_call_is_no_constraint(name: str) -> None:
    assert tool_format(name).constraint(TOOLS, ToolChoice(ToolMode.NONE)) is None
    assert tool_format(name).constraint((), AUTO) is None


UNENFORCEABLE = {
    "type": "object",
    "properties": {"text": {"type": "string", "pattern": "^(?=x)"}},
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_schema_that_cannot_be_enforced_loosens_its_own_tool_alone(
    walker: Walker, name: str
) -> None:
    tools = tools_of(odd=UNENFORCEABLE, weather=WEATHER)
    matcher = matcher_of(walker, name, tools, REQUIRED)
    assert walker.accepts(matcher, written(name, [("odd", {"text": "x"})]))
    assert walker.accepts(
        matcher, written(name, [("weather", {"city": "Rome", "units": "metric"})])
    )
    assert not walker.accepts(matcher, written(name, [("weather", {"city": "Rome"})]))


@pytest.mark.parametrize("name", FORMATS)
def test_a_schema_that_nothing_satisfies_does_not_refuse_the_others(
    walker: Walker, name: str
) -> None:
    parameters = {
        "type": "object",
        "properties": {"value": {"type": "array", "enum": ["a", "b"]}},
        "required": ["value"],
    }
    matcher = matcher_of(walker, name, tools_of(odd=parameters, weather=WEATHER), REQUIRED)
    assert walker.accepts(matcher, written(name, [("odd", {"value": "a"})]))


@pytest.mark.parametrize("name", FORMATS)
def test_a_strict_schema_that_cannot_be_enforced_is_refused(walker: Walker, name: str) -> None:
    strict = [Tool(name="odd", parameters=UNENFORCEABLE, strict=True)]
    spec = tool_format(name).constraint(strict, REQUIRED)
    assert spec is not None
    with pytest.raises(GrammarError):
        walker.matcher(spec)


@pytest.mark.parametrize(
    ("parameters", "closes"),
    [
        (None, True),
        ({"properties": {"a": {}}}, True),
        ({"properties": {"a": {"properties": {"b": {}}}}}, True),
        ({"properties": {"a": {}}, "additionalProperties": True}, False),
        ({"properties": {"a": {}}, "required": ["b"]}, False),
        ({"properties": {"a": {}}, "required": 5}, False),
        ({"properties": {"a": {}}, "required": [["a"]]}, False),
        ({"properties": 5}, False),
        ({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]}, False),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, False),
        ({}, False),
    ],
)
def test_arguments_are_those_that_the_schema_names(parameters: Any, closes: bool) -> None:
    schema = argument_schema(Tool(name="f", parameters=parameters))
    assert schema["type"] == "object"
    assert (schema.get("additionalProperties") is False) == closes
    if not closes:
        assert "false" not in json.dumps(schema)


def test_objects_within_are_closed_as_well() -> None:
    inner = {"properties": {"b": {"type": "integer"}}}
    parameters = {"properties": {"a": {"items": inner}}, "$defs": {"d": inner}}
    schema = argument_schema(Tool(name="f", parameters=parameters))
    closed = {**inner, "additionalProperties": False}
    assert schema["properties"]["a"]["items"] == closed
    assert schema["$defs"]["d"] == closed
    assert "additionalProperties" not in inner


def test_descriptions_are_no_part_of_the_grammar_and_arguments_of_their_names_are() -> None:
    note = {"description": "x" * 1000, "title": "T", "default": 1, "examples": [1]}
    names = {name: {"type": "integer", **note} for name in note}
    deep = {"type": "array", "items": {"anyOf": [{"properties": names, **note}]}, **note}
    enum = {"enum": [{"title": 1, "description": "d"}]}
    parameters = {"properties": {**names, "deep": deep, "enum": enum}, "$defs": {"d": note}, **note}
    schema = argument_schema(Tool(name="f", parameters=parameters))
    plain = {name: {"type": "integer"} for name in note}
    [inner] = schema["properties"]["deep"]["items"]["anyOf"]
    assert inner["properties"] == plain
    assert schema["properties"].items() >= {**plain, "enum": enum}.items()
    assert schema["$defs"] == {"d": {}}
    assert not schema.keys() & note.keys()
