"""What a model may call, and whether it has to: tools and the choice among them.

Both come from whoever asks, so they are checked and copied here. Knows no format of calls.
"""

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sapwood.runtime.errors import RequestError
from sapwood.runtime.plain_json import plain_json

MAX_TOOLS = 128
MAX_TOOLS_CHARS = 1_048_576  # of all of them, as JSON
MAX_PARAMETERS_CHARS = 262_144  # of one tool's schema, as JSON
MAX_DESCRIPTION_CHARS = 65_536

MAX_NAME_CHARS = 64

_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME_CHARS}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. Made by `checked_tools`.

    `parameters` is the JSON schema of its arguments, an object; None: it takes none. `strict`:
    the arguments of every call satisfy it, or the request is refused.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def as_json(self) -> dict[str, Any]:
        """The tool as templates know it, which is OpenAI's shape without `strict`."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class ToolMode(StrEnum):
    """What the model has to do with the tools."""

    NONE = "none"  # it does not see them
    AUTO = "auto"  # it may call them
    REQUIRED = "required"  # it calls at least one, and says nothing else
    NAMED = "named"  # it calls the one that is named, once


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`name` is set in the mode NAMED only."""

    mode: ToolMode = ToolMode.AUTO
    name: str | None = None

    def __post_init__(self) -> None:
        if (self.mode is ToolMode.NAMED) != (self.name is not None):
            raise ValueError("a name goes with the mode NAMED and with no other")

    @classmethod
    def named(cls, name: str) -> "ToolChoice":
        return cls(ToolMode.NAMED, name)

    def among(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.mode is ToolMode.NONE:
            return ()
        return tuple(tool for tool in tools if self.name in (None, tool.name))


def checked_tools(value: Any) -> tuple[Tool, ...]:
    """The tools of a request, in OpenAI's shape: {"type": "function", "function": {...}}.

    Raises RequestError, with `param` such as "tools[0].function.name", for any other shape, two
    tools of one name, too many or too large ones.
    """
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise _wrong("tools", "must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise _wrong("tools", f"has {len(value)} tools, the limit is {MAX_TOOLS}; send fewer")
    tools = tuple(_checked_tool(tool, f"tools[{i}]") for i, tool in enumerate(value))
    _check_names(tools)
    num_chars = sum(len(json.dumps(tool.as_json(), ensure_ascii=False)) for tool in tools)
    if num_chars > MAX_TOOLS_CHARS:
        raise _wrong(
            "tools",
            f"has {num_chars} characters as JSON, the limit is {MAX_TOOLS_CHARS}; shorten it",
        )
    return tools


def checked_tool_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    """The choice of a request: None, a word, or {"type": "function", "function": {"name": ...}}.

    None is "auto" where there are tools and "none" where there are not. Raises RequestError, with
    `param` set, for anything else and for a tool that is not among `tools`.
    """
    if value is None:
        return ToolChoice(ToolMode.AUTO if tools else ToolMode.NONE)
    if isinstance(value, Mapping):
        return ToolChoice.named(_chosen_name(value, tools))
    if value not in ("none", "auto", "required"):
        raise _wrong(
            "tool_choice",
            f'is {_shown(value)}; it must be "none", "auto", "required" or '
            '{"type": "function", "function": {"name": ...}}',
        )
    mode = ToolMode(value)
    if mode is ToolMode.REQUIRED and not tools:
        raise _wrong("tool_choice", 'is "required", but there are no tools; send some')
    return ToolChoice(mode if tools else ToolMode.NONE)


def _checked_tool(value: Any, where: str) -> Tool:
    _check_keys(value, where, ("type", "function"))
    if value.get("type") != "function":
        raise _wrong(f"{where}.type", 'must be "function"; only functions can be called')
    function, where = value.get("function"), f"{where}.function"
    _check_keys(function, where, ("name", "description", "parameters", "strict"))
    return Tool(
        name=_checked_name(function.get("name"), f"{where}.name"),
        description=_checked_description(function.get("description"), f"{where}.description"),
        parameters=_checked_parameters(function.get("parameters"), f"{where}.parameters"),
        strict=_checked_strict(function.get("strict"), f"{where}.strict"),
    )


def _checked_name(name: Any, where: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(where, "must be 1 to 64 letters of a-z, A-Z, 0-9, _, . and -")
    return name


def _checked_description(description: Any, where: str) -> str:
    if description is None:
        return ""
    if not isinstance(description, str):
        raise _wrong(where, "must be a string")
    if len(description) > MAX_DESCRIPTION_CHARS:
        raise _wrong(
            where,
            f"has {len(description)} characters, the limit is {MAX_DESCRIPTION_CHARS}; shorten it",
        )
    return str(plain_json(description, where, param=where))


def _checked_parameters(parameters: Any, where: str) -> Mapping[str, Any] | None:
    if parameters is None:
        return None
    if not isinstance(parameters, Mapping):
        raise _wrong(where, "must be a JSON schema of an object")
    if parameters.get("type", "object") != "object":
        raise _wrong(f"{where}.type", 'must be "object"; arguments are passed by name')
    plain: dict[str, Any] = plain_json(parameters, where, param=where)
    num_chars = len(json.dumps(plain, ensure_ascii=False))
    if num_chars > MAX_PARAMETERS_CHARS:
        raise _wrong(
            where,
            f"has {num_chars} characters as JSON, the limit is {MAX_PARAMETERS_CHARS}; shorten it",
        )
    return plain


def _checked_strict(strict: Any, where: str) -> bool:
    if strict is not None and not isinstance(strict, bool):
        raise _wrong(where, "must be true or false")
    return bool(strict)


def _check_names(tools: Sequence[Tool]) -> None:
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in seen:
            raise _wrong(
                f"tools[{i}].function.name",
                f"is {tool.name!r}, as that of a tool before it; give each its own",
            )
        seen.add(tool.name)


def _chosen_name(value: Mapping[str, Any], tools: Sequence[Tool]) -> str:
    _check_keys(value, "tool_choice", ("type", "function"))
    if value.get("type") != "function":
        raise _wrong("tool_choice.type", 'must be "function"')
    function = value.get("function")
    _check_keys(function, "tool_choice.function", ("name",))
    assert isinstance(function, Mapping)
    name = function.get("name")
    if name not in [tool.name for tool in tools]:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise _wrong(
            "tool_choice.function.name",
            f"is {_shown(name)}, which is no tool of this request ({known})",
        )
    return str(name)


def _check_keys(value: Any, where: str, known: Sequence[str]) -> None:
    if not isinstance(value, Mapping):
        raise _wrong(where, "must be an object")
    for key in value:
        if key not in known:
            raise _wrong(
                f"{where}.{str(key)[:MAX_NAME_CHARS]}", f"is unknown; known are {', '.join(known)}"
            )


def _shown(value: Any) -> str:
    """A wrong value in an error, which is not to be as long as the value."""
    return reprlib.repr(value)


def _wrong(where: str, what: str) -> RequestError:
    return RequestError(f"{where} {what}", param=where)
