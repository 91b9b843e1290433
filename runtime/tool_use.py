"""What a conversation's tools ask of its answer: how it is constrained, and how it is read.

Knows no tokens and no templates; how the tools are told to the model is the template's matter.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sapwood.runtime.answer_format import AnswerFormat
from sapwood.runtime.chat import ChatOptions
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec
from sapwood.runtime.errors import RequestError
from sapwood.runtime.tools import ToolChoice, ToolFormat, ToolMode


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one conversation, at least one of which can be called, in its model's format."""

    options: ChatOptions
    tool_format: ToolFormat

    @property
    def answer_format(self) -> AnswerFormat:
        """What reads the answer."""
        return self.tool_format.answer_format(self.options.known_tools, self.options.choice)

    def constraint(self, asked: ConstraintSpec | None) -> ConstraintSpec | None:
        """What the answer must satisfy, where the caller himself has `asked` for something.

        An answer that may call tools is a call or satisfies the JSON schema that was asked for.
        Raises RequestError where the two cannot be had together.
        """
        if asked is None:
            return self._constraint(self.options.choice)
        if self.options.choice.mode is not ToolMode.AUTO:
            raise RequestError(
                "constraint is given, and tool_choice asks for a call and nothing else; leave out "
                "one of them",
                param="constraint",
            )
        if asked.kind is not ConstraintKind.JSON_SCHEMA:
            raise RequestError(
                f"constraint is of the kind {asked.kind}; beside tools that may be called only a "
                'JSON schema is taken: set tool_choice to "none", or leave it out',
                param="constraint",
            )
        return self._call_or(asked)

    def _call_or(self, asked: ConstraintSpec) -> ConstraintSpec | None:
        calls = self._constraint(ToolChoice(ToolMode.REQUIRED))
        if calls is None:
            return asked
        schema = {"type": "json_schema", "json_schema": json.loads(asked.text)}
        either = {"type": "or", "elements": [schema, _format_of(calls)]}
        document = {"type": "structural_tag", "format": either}
        text = json.dumps(document, ensure_ascii=False)
        return replace(asked, kind=ConstraintKind.STRUCTURAL_TAG, text=text)

    def _constraint(self, choice: ToolChoice) -> ConstraintSpec | None:
        return self.tool_format.constraint(
            self.options.known_tools, choice, parallel=self.options.parallel_tool_calls
        )


def tool_use(options: ChatOptions, tool_format: ToolFormat | None) -> ToolUse | None:
    """None where nothing can be called."""
    if tool_format is None or not options.choice.among(options.known_tools):
        return None
    return ToolUse(options, tool_format)


def _format_of(calls: ConstraintSpec) -> Mapping[str, Any]:
    assert calls.kind is ConstraintKind.STRUCTURAL_TAG, "the grammar of calls is one"
    document: dict[str, Any] = json.loads(calls.text)
    structure: Mapping[str, Any] = document["format"]
    return structure
