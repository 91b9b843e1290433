"""Every format of tool calls, by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sapwood.runtime.answer_format import AnswerFormat
from sapwood.runtime.constraints.spec import ConstraintSpec
from sapwood.runtime.errors import ConfigError
from sapwood.runtime.tools.answers import ToolAnswerFormat
from sapwood.runtime.tools.call_grammar import call_constraint
from sapwood.runtime.tools.call_ids import NewCallId, new_call_id, new_short_call_id
from sapwood.runtime.tools.call_syntax import CallSyntax
from sapwood.runtime.tools.generic import GENERIC, generic_instructions, generic_messages
from sapwood.runtime.tools.hermes import HERMES
from sapwood.runtime.tools.interface import ToolFormat
from sapwood.runtime.tools.llama3 import LLAMA3
from sapwood.runtime.tools.mistral import MISTRAL, MISTRAL_ARGS, MISTRAL_SPACED
from sapwood.runtime.tools.pythonic import PYTHONIC
from sapwood.runtime.tools.qwen3_coder import QWEN3_CODER
from sapwood.runtime.tools.tool import Tool, ToolChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntaxToolFormat:
    """A ToolFormat of one call syntax, which the model's template writes as well."""

    name: str
    syntax: CallSyntax
    new_call_id: NewCallId = new_call_id

    @property
    def knows_template(self) -> bool:
        return True

    def constraint(
        self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool = True
    ) -> ConstraintSpec | None:
        return call_constraint(self.syntax, tools, choice, parallel=parallel)

    def answer_format(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        *,
        new_call_id: NewCallId | None = None,
    ) -> AnswerFormat:
        return ToolAnswerFormat(self.syntax, choice.among(tools), new_call_id or self.new_call_id)

    def instructions(
        self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool = True
    ) -> str:
        return ""

    def messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool],
        choice: ToolChoice,
        *,
        parallel: bool = True,
    ) -> Sequence[Mapping[str, Any]]:
        return messages


class GenericToolFormat(SyntaxToolFormat):
    """A ToolFormat for models whose template knows no tools: they are told in words."""

    __slots__ = ()

    @property
    def knows_template(self) -> bool:
        return False

    def instructions(
        self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool = True
    ) -> str:
        return generic_instructions(tools, choice, parallel=parallel)

    def messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool],
        choice: ToolChoice,
        *,
        parallel: bool = True,
    ) -> Sequence[Mapping[str, Any]]:
        instructions = self.instructions(tools, choice, parallel=parallel)
        return generic_messages(messages, instructions)


TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "generic": GenericToolFormat(name="generic", syntax=GENERIC),
        "hermes": SyntaxToolFormat(name="hermes", syntax=HERMES),
        "llama3": SyntaxToolFormat(name="llama3", syntax=LLAMA3),
        "mistral": SyntaxToolFormat(name="mistral", syntax=MISTRAL, new_call_id=new_short_call_id),
        "mistral_args": SyntaxToolFormat(
            name="mistral_args", syntax=MISTRAL_ARGS, new_call_id=new_short_call_id
        ),
        "mistral_spaced": SyntaxToolFormat(
            name="mistral_spaced", syntax=MISTRAL_SPACED, new_call_id=new_short_call_id
        ),
        "pythonic": SyntaxToolFormat(name="pythonic", syntax=PYTHONIC),
        "qwen3_coder": SyntaxToolFormat(name="qwen3_coder", syntax=QWEN3_CODER),
    }
)


def tool_format(name: str) -> ToolFormat:
    """The format of that name. Raises ConfigError for any other."""
    if name not in TOOL_FORMATS:
        raise ConfigError(f"{name!r} is no tool format; known are {', '.join(TOOL_FORMATS)}")
    return TOOL_FORMATS[name]
