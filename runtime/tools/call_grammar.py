"""A call syntax as a constraint: the document of a structural tag."""

import json
import re
from collections.abc import Sequence
from typing import Any

from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec, Whitespace
from sapwood.runtime.tools.argument_schema import argument_schema
from sapwood.runtime.tools.call_syntax import CallSyntax
from sapwood.runtime.tools.tool import Tool, ToolChoice, ToolMode

_Element = dict[str, Any]


def call_constraint(
    syntax: CallSyntax, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool
) -> ConstraintSpec | None:
    """What an answer must satisfy; None where nothing can be called."""
    callable_tools = choice.among(tools)
    if not callable_tools:
        return None
    writer = _CallGrammar(syntax, callable_tools, several=_several(syntax, choice, parallel))
    is_free = choice.mode is ToolMode.AUTO
    document = {
        "type": "structural_tag",
        "format": writer.free_answer() if is_free else writer.calls_alone(),
    }
    return ConstraintSpec(
        kind=ConstraintKind.STRUCTURAL_TAG,
        text=json.dumps(document, ensure_ascii=False),
        whitespace=Whitespace.SPACED,
    )


def _several(syntax: CallSyntax, choice: ToolChoice, parallel: bool) -> bool:
    return parallel and syntax.separator is not None and choice.mode is not ToolMode.NAMED


class _CallGrammar:
    """Writes the elements of one document."""

    def __init__(self, syntax: CallSyntax, tools: Sequence[Tool], *, several: bool) -> None:
        self._syntax = syntax
        self._tools = tools
        self._several = several
        self._arguments = {tool.name: self._arguments_of(tool) for tool in tools}

    def calls_alone(self) -> _Element:
        """Calls and nothing else, as the model begins them."""
        trigger = "" if self._syntax.bare else self._syntax.trigger
        return self._announced_calls(trigger)

    def free_answer(self) -> _Element:
        """Any text, then calls or none."""
        if self._syntax.bare:
            return self._bare_calls_or_text()
        return {
            "type": "triggered_tags",
            "triggers": [self._syntax.trigger],
            "tags": [self._announced_calls(self._syntax.trigger)],
            "stop_after_first": True,
        }

    def _bare_calls_or_text(self) -> _Element:
        """An answer that begins with a call is one: as text it may not begin so."""
        names = "|".join(re.escape(tool.name) for tool in self._tools)
        text: _Element = {"type": "any_text", "excludes_at_start": [self._syntax.bare_head(names)]}
        options = [self._bare_calls(), text]
        if self._syntax.trigger:
            text["excludes"] = [self._syntax.trigger]
            options.append(self._announced_calls(self._syntax.trigger))
        return {"type": "or", "elements": options}

    def _announced_calls(self, trigger: str) -> _Element:
        return _tag(trigger + self._syntax.opening, self._calls(), self._syntax.closing)

    def _bare_calls(self) -> _Element:
        """The first call's head may have other whitespace: nothing yet says that it is a call."""
        elements = [_or([self._bare_call(tool) for tool in self._tools])]
        if self._several:
            more = _sequence(_text(self._syntax.separator or ""), self._calls())
            elements.append({"type": "optional", "content": more})
        return _sequence(*elements, _text(self._syntax.closing))

    def _bare_call(self, tool: Tool) -> _Element:
        head = {"type": "regex", "pattern": self._syntax.bare_head(re.escape(tool.name))}
        rest = _text(self._syntax.before_arguments[1:])
        return _sequence(
            head, rest, self._arguments[tool.name], _text(self._syntax.after_arguments)
        )

    def _calls(self) -> _Element:
        return {
            "type": "tags_with_separator",
            "tags": [self._call(tool) for tool in self._tools],
            "separator": self._syntax.separator or "",
            "at_least_one": True,
            "stop_after_first": not self._several,
        }

    def _call(self, tool: Tool) -> _Element:
        begin = self._syntax.begin(tool.name)
        return _tag(begin, self._arguments[tool.name], self._syntax.after_arguments)

    def _arguments_of(self, tool: Tool) -> _Element:
        return {
            "type": "json_schema",
            "json_schema": argument_schema(tool),
            "style": self._syntax.style.value,
            "strict": tool.strict,
        }


def _tag(begin: str, content: _Element, end: str) -> _Element:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _text(value: str) -> _Element:
    return {"type": "const_string", "value": value}


def _sequence(*elements: _Element) -> _Element:
    return {"type": "sequence", "elements": list(elements)}


def _or(elements: list[_Element]) -> _Element:
    return {"type": "or", "elements": elements}
