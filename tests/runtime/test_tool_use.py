"""What tools ask of an answer, alone and beside what the caller asks."""

import json
from typing import Any

import pytest

from sapwood.runtime.chat import ChatOptions
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec, Whitespace
from sapwood.runtime.errors import RequestError
from sapwood.runtime.tool_use import ToolUse, tool_use
from sapwood.runtime.tools import TOOL_FORMATS

HERMES = TOOL_FORMATS["hermes"]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
NAMED = {"type": "function", "function": {"name": "g"}}
SCHEMA = ConstraintSpec.json_schema({"type": "integer"}, whitespace=Whitespace.COMPACT)


def use(tool_choice: Any = None, **options: Any) -> ToolUse:
    found = tool_use(ChatOptions(tools=TOOLS, tool_choice=tool_choice, **options), HERMES)
    assert found is not None
    return found


def document(spec: ConstraintSpec | None) -> dict[str, Any]:
    assert spec is not None and spec.kind is ConstraintKind.STRUCTURAL_TAG
    value: dict[str, Any] = json.loads(spec.text)
    return value


def test_nothing_is_asked_where_nothing_can_be_called() -> None:
    assert tool_use(ChatOptions(), HERMES) is None
    assert tool_use(ChatOptions(tools=TOOLS, tool_choice="none"), HERMES) is None
    assert tool_use(ChatOptions(tools=TOOLS), None) is None


@pytest.mark.parametrize("tool_choice", ["auto", "required", NAMED])
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_are_constrained_as_the_format_says(tool_choice: Any, parallel: bool) -> None:
    tools = use(tool_choice, parallel_tool_calls=parallel)
    options = tools.options
    expected = HERMES.constraint(options.known_tools, options.choice, parallel=parallel)
    assert expected is not None and tools.constraint(None) == expected


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_a_call_that_has_to_be_leaves_no_room_for_another_constraint(tool_choice: Any) -> None:
    with pytest.raises(RequestError, match="leave out one of them") as refusal:
        use(tool_choice).constraint(SCHEMA)
    assert refusal.value.param == "constraint"


def test_an_answer_that_may_be_a_call_may_else_follow_a_schema() -> None:
    both = use("auto").constraint(SCHEMA)
    either = document(both)["format"]
    schema, calls = either["elements"]
    assert either["type"] == "or"
    assert schema == {"type": "json_schema", "json_schema": {"type": "integer"}}
    assert calls == document(use("required").constraint(None))["format"]
    assert both is not None and both.whitespace is SCHEMA.whitespace


def test_beside_tools_no_other_constraint_than_a_schema_is_taken() -> None:
    with pytest.raises(RequestError, match="kind regex") as refusal:
        use("auto").constraint(ConstraintSpec.regex("a+"))
    assert refusal.value.param == "constraint"
