"""How an answer's text divides into reasoning, content and tool calls.

A format is found for a conversation before it is submitted; it says what constrains the answer
(`ConstraintSpec`) and reads it (`AnswerReader`), so that both know the same syntax.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallPiece:
    """What is new of one tool call; `index` counts the calls of an answer from 0.

    The first piece of a call has its id and name. `arguments` add up to a JSON object.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParts:
    """What is new of an answer, or all of it: in a whole answer each call is one piece."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallPiece, ...] = ()


def joined(pieces: Iterable[AnswerParts]) -> AnswerParts:
    """The parts of a whole answer, each call one piece."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: dict[int, list[ToolCallPiece]] = {}
    for piece in pieces:
        reasoning.append(piece.reasoning)
        content.append(piece.content)
        for call in piece.tool_calls:
            calls.setdefault(call.index, []).append(call)
    return AnswerParts(
        reasoning="".join(reasoning),
        content="".join(content),
        tool_calls=tuple(map(_joined_call, calls.values())),
    )


def _joined_call(pieces: list[ToolCallPiece]) -> ToolCallPiece:
    return ToolCallPiece(
        index=pieces[0].index,
        id=next((piece.id for piece in pieces if piece.id is not None), None),
        name=next((piece.name for piece in pieces if piece.name is not None), None),
        arguments="".join(piece.arguments for piece in pieces),
    )


class AnswerReader(Protocol):
    """Reads one answer as it comes."""

    def feed(self, text: str, *, finished: bool) -> AnswerParts:
        """What is new with `text`, which may end anywhere; with `finished`, nothing is held back.

        O(text). Raises nothing: what is no tool call after all is content.
        """
        ...


class AnswerFormat(Protocol):
    """One way of writing answers. A frozen value."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that the reader has to see in the text, where they are special."""
        ...

    def reader(self) -> AnswerReader:
        """For one answer, from its beginning."""
        ...
