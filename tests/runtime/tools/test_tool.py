"""Tools and choices of a request: what is taken, and what refuses names its place."""

from typing import Any

import pytest

from sapwood.runtime.errors import ConfigError, RequestError
from sapwood.runtime.tools import (
    TOOL_FORMATS,
    ToolChoice,
    ToolMode,
    checked_tool_choice,
    checked_tools,
    tool_format,
)
from sapwood.runtime.tools.tool import MAX_DESCRIPTION_CHARS, MAX_PARAMETERS_CHARS, MAX_TOOLS


def wire(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def test_tools_are_copied_and_told_to_templates_in_openai_s_shape() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool = checked_tools([wire("f", description="Does it.", parameters=parameters, strict=True)])[0]
    parameters["properties"] = {}
    assert tool.strict
    assert tool.as_json() == {
        "type": "function",
        "function": {
            "name": "f",
            "description": "Does it.",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    }
    assert checked_tools(None) == checked_tools([]) == ()
    assert not checked_tools([wire(strict=None, description=None)])[0].strict


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("f", "tools"),
        ({"f": 1}, "tools"),
        (["f"], "tools[0]"),
        ([{"type": "retrieval"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{**wire(), "extra": 1}], "tools[0].extra"),
        ([wire(extra=1)], "tools[0].function.extra"),
        ([wire(), wire("a b")], "tools[1].function.name"),
        ([wire("")], "tools[0].function.name"),
        ([wire("x" * 65)], "tools[0].function.name"),
        ([wire("f\n")], "tools[0].function.name"),
        ([wire(None)], "tools[0].function.name"),
        ([wire("f"), wire("g"), wire("f")], "tools[2].function.name"),
        ([wire(description=1)], "tools[0].function.description"),
        ([wire(description="x" * (MAX_DESCRIPTION_CHARS + 1))], "tools[0].function.description"),
        ([wire(description="\ud800")], "tools[0].function.description"),
        ([wire(parameters=[])], "tools[0].function.parameters"),
        ([wire(parameters={"type": "string"})], "tools[0].function.parameters.type"),
        ([wire(parameters={"x": object()})], "tools[0].function.parameters"),
        (
            [wire(parameters={"title": "x" * MAX_PARAMETERS_CHARS})],
            "tools[0].function.parameters",
        ),
        ([wire(strict="yes")], "tools[0].function.strict"),
        ([wire(f"f{i}") for i in range(MAX_TOOLS + 1)], "tools"),
        ([wire(f"f{i}", parameters={"title": "x" * 200_000}) for i in range(6)], "tools"),
    ],
)
def test_a_wrong_tool_is_refused_by_its_place(tools: Any, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        checked_tools(tools)
    assert raised.value.param == param
    assert str(raised.value).startswith(param)


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        (None, ToolChoice(ToolMode.AUTO)),
        ("auto", ToolChoice(ToolMode.AUTO)),
        ("none", ToolChoice(ToolMode.NONE)),
        ("required", ToolChoice(ToolMode.REQUIRED)),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice.named("f")),
    ],
)
def test_a_choice_is_a_word_or_a_tool(value: Any, choice: ToolChoice) -> None:
    tools = checked_tools([wire("f"), wire("g")])
    assert checked_tool_choice(value, tools) == choice
    names = [tool.name for tool in choice.among(tools)]
    assert names == {"none": [], "named": ["f"]}.get(choice.mode, ["f", "g"])


@pytest.mark.parametrize("value", [None, "none", "auto"])
def test_without_tools_nothing_is_called(value: Any) -> None:
    assert checked_tool_choice(value, ()) == ToolChoice(ToolMode.NONE)


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("any", "tool_choice"),
        (1, "tool_choice"),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "tool", "function": {"name": "f"}}, "tool_choice.type"),
        ({"type": "function", "function": {"name": "h"}}, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": ["f"]}}, "tool_choice.function.name"),
        ({"type": "function", "name": "f"}, "tool_choice.name"),
    ],
)
def test_a_wrong_choice_is_refused(value: Any, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        checked_tool_choice(value, checked_tools([wire("f")]))
    assert raised.value.param == param


@pytest.mark.parametrize(
    "value",
    [
        "x" * 100_000,
        ["x" * 100_000],
        {"x" * 100_000: 1},
        {"type": "function", "function": {"name": "x" * 100_000}},
    ],
    ids=("word", "list", "key", "name"),
)
def test_a_refusal_is_not_as_long_as_what_it_refuses(value: Any) -> None:
    with pytest.raises(RequestError) as raised:
        checked_tool_choice(value, checked_tools([wire("f")]))
    assert len(str(raised.value)) < 400
    assert len(raised.value.param or "") < 100


def test_a_call_cannot_be_required_without_tools() -> None:
    with pytest.raises(RequestError, match="no tools"):
        checked_tool_choice("required", ())


def test_formats_are_known_by_their_names() -> None:
    for name, known in TOOL_FORMATS.items():
        assert tool_format(name) is known
        assert known.name == name
    with pytest.raises(ConfigError, match="hermes"):
        tool_format("xml")
