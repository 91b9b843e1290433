"""The seam between a conversation with tools and the format that its model writes calls in."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sapwood.runtime.answer_format import AnswerFormat
from sapwood.runtime.constraints.spec import ConstraintSpec
from sapwood.runtime.tools.call_ids import NewCallId
from sapwood.runtime.tools.tool import Tool, ToolChoice


class ToolFormat(Protocol):
    """How one family of models is told of tools and writes calls. A frozen value."""

    @property
    def name(self) -> str:
        """A name of `TOOL_FORMATS`."""
        ...

    @property
    def knows_template(self) -> bool:
        """Whether the model's chat template describes tools, writes calls and their results.

        Where not, the template gets no tools but the messages that `messages` makes.
        """
        ...

    def constraint(
        self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool = True
    ) -> ConstraintSpec | None:
        """What an answer must satisfy; None where it may be any text.

        `parallel`: an answer may have several calls. The arguments of a call satisfy the tool's
        schema; of a tool that is not `strict` they are any object if the schema cannot be
        enforced. After its calls an answer ends.
        """
        ...

    def answer_format(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        *,
        new_call_id: NewCallId | None = None,
    ) -> AnswerFormat:
        """What reads such an answer. `new_call_id` replaces the format's own random ids."""
        ...

    def instructions(
        self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool = True
    ) -> str:
        """What a model whose template knows no tools is told; empty where it does."""
        ...

    def messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool],
        choice: ToolChoice,
        *,
        parallel: bool = True,
    ) -> Sequence[Mapping[str, Any]]:
        """The conversation as the template gets it: as it is, where the template knows tools.

        Otherwise `instructions` end the first system message, or are one of their own, and calls
        and results are text. `messages` are plain (`sapwood.runtime.chat.plain_messages`).
        """
        ...
