"""Answers with tool calls, read as they come."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from sapwood.runtime.answer_format import AnswerParts, AnswerReader, ToolCallPiece
from sapwood.runtime.tools.arguments import READERS
from sapwood.runtime.tools.call_ids import NewCallId
from sapwood.runtime.tools.call_syntax import MAX_SPACE, SPACE, ArgumentStyle, CallSyntax, words_of
from sapwood.runtime.tools.text_source import Steps, TextSource
from sapwood.runtime.tools.tool import MAX_NAME_CHARS, Tool

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_SPACE = re.compile(f"[{SPACE}]+")


@dataclass(frozen=True, slots=True)
class ToolAnswerFormat:
    """Answers in which `tools` may be called; any text, where there are none."""

    syntax: CallSyntax
    tools: Sequence[Tool]
    new_call_id: NewCallId

    @property
    def markers(self) -> tuple[str, ...]:
        return self.syntax.markers if self.tools else ()

    def reader(self) -> AnswerReader:
        if not self.tools:
            return PlainReader()
        parameters = {tool.name: tool.parameters or {} for tool in self.tools}
        return CallReader(self.syntax, parameters, self.new_call_id)


class PlainReader:
    """Reads answers that are content alone."""

    def feed(self, text: str, *, finished: bool) -> AnswerParts:
        return AnswerParts(content=text)


class _Call(Enum):
    """What came of trying to read a call."""

    NONE = auto()  # nothing has been read
    WHOLE = auto()
    BROKEN = auto()  # its arguments broke off


class CallReader:
    """Reads answers in one syntax; `parameters` has the schema of each tool that may be called.

    A call begins where a tool is named and its arguments begin. What comes before that is content
    if that never happens, and so is what follows arguments that break off: a call is not taken
    back, so that a whole answer and one in pieces are read alike.
    """

    def __init__(
        self,
        syntax: CallSyntax,
        parameters: Mapping[str, Mapping[str, Any]],
        new_call_id: NewCallId,
    ) -> None:
        self._syntax = syntax
        self._opening = words_of(syntax.opening)
        # JSON ends by itself; other arguments are read with what follows them.
        is_json = syntax.style is ArgumentStyle.JSON
        self._after_arguments = words_of(syntax.after_arguments) if is_json else ()
        self._parameters = parameters
        self._source = TextSource()
        self._new = _NewParts(new_call_id)
        self._steps = self._answer()

    def feed(self, text: str, *, finished: bool) -> AnswerParts:
        self._source.add(text, finished=finished)
        next(self._steps, None)
        return self._new.take()

    def _answer(self) -> Steps[None]:
        trigger = self._syntax.trigger
        if self._syntax.bare:
            yield from self._calls(self._opening)
        while trigger and (yield from self._content_before(trigger)):
            if not (yield from self._calls((trigger, *self._opening))):
                self._new.add_content(self._source.take_through(trigger))
        while not trigger:
            self._new.add_content(self._source.take_rest())
            if not (yield from self._source.more()):
                return

    def _content_before(self, trigger: str) -> Steps[bool]:
        """Read what comes before `trigger`; False if that is all."""
        while True:
            text, is_there = self._source.take_before(trigger, self._syntax.lead)
            self._new.add_content(text)
            if is_there or not (yield from self._source.more()):
                return is_there

    def _calls(self, before: Sequence[str]) -> Steps[bool]:
        """Read calls, of which the first begins with the words `before`; False if there are none,
        and nothing has been read."""
        call = yield from self._call(before)
        if call is _Call.NONE:
            return False
        if self._syntax.separator is not None:
            separator = words_of(self._syntax.separator)
            while call is _Call.WHOLE:
                call = yield from self._call(separator)
        if call is not _Call.BROKEN:
            yield from self._end(words_of(self._syntax.closing))
            self._new.add_space((yield from self._source.take(_SPACE)))
        return True

    def _call(self, before: Sequence[str]) -> Steps[_Call]:
        """Read a call that begins with the words `before`."""
        self._source.hold()
        name = yield from self._head(before)
        if name is None:
            self._source.go_back()
            return _Call.NONE
        num_calls = self._new.num_calls

        def write(json_text: str) -> None:
            if json_text and self._new.num_calls == num_calls:
                self._source.release()
                self._new.begin_call(name)
            self._new.add_arguments(json_text)

        read = READERS[self._syntax.style]
        is_whole = yield from read(self._source, self._parameters[name], write)
        if self._new.num_calls == num_calls:
            self._source.go_back()
            return _Call.NONE
        if not is_whole:
            return _Call.BROKEN
        if self._after_arguments:
            yield from self._skip_id()
        yield from self._end(self._after_arguments)
        return _Call.WHOLE

    def _head(self, before: Sequence[str]) -> Steps[str | None]:
        """Read up to where arguments begin; the name of the tool, or None if none is called."""
        syntax = self._syntax
        if not (yield from self._words((*before, *words_of(syntax.before_name)))):
            return None
        if not syntax.before_name:
            yield from self._space()
        name = yield from self._source.take(_NAME, limit=MAX_NAME_CHARS)
        if name not in self._parameters:
            return None
        if (yield from self._source.peek()) != syntax.before_arguments[0]:
            return None
        if not (yield from self._words(words_of(syntax.before_arguments))):
            return None
        return name if (yield from self._space()) else None

    def _skip_id(self) -> Steps[None]:
        """Read the id that a model may write behind arguments: too late to be the call's."""
        self._source.hold()
        if (yield from self._words((",", '"id"', ":", '"'))):
            identifier = yield from self._source.take(_NAME, limit=MAX_NAME_CHARS)
            if len(identifier) <= MAX_NAME_CHARS and (yield from self._source.take_word('"')):
                self._source.release()
                return
        self._source.go_back()

    def _end(self, words: Sequence[str]) -> Steps[None]:
        """Read `words` if they follow, or as many of them as a text that is cut short has."""
        self._source.hold()
        if (yield from self._words(words)) or not (yield from self._source.peek()):
            self._source.release()
        else:
            self._source.go_back()

    def _words(self, words: Sequence[str]) -> Steps[bool]:
        """Read `words`, with space before each of them. False at something else."""
        for word in words:
            if not (yield from self._space()) or not (yield from self._source.take_word(word)):
                return False
        return True

    def _space(self) -> Steps[bool]:
        """Read space; False if there is too much of it."""
        space = yield from self._source.take(_SPACE, limit=MAX_SPACE)
        return len(space) <= MAX_SPACE


class _NewParts:
    """What has been read and not been handed on."""

    def __init__(self, new_call_id: NewCallId) -> None:
        self.num_calls = 0
        self._new_call_id = new_call_id
        self._content: list[str] = []
        self._space = ""
        self._pieces: list[ToolCallPiece] = []
        self._arguments: list[str] = []

    def add_content(self, text: str) -> None:
        if text:
            self._content += [self._space, text]
            self._space = ""

    def add_space(self, text: str) -> None:
        """Space behind a call, which is content if content follows."""
        self._space += text

    def begin_call(self, name: str) -> None:
        self._complete_piece()
        self._space = ""
        piece = ToolCallPiece(index=self.num_calls, id=self._new_call_id(), name=name)
        self._pieces.append(piece)
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Of the call that was begun last."""
        if text:
            self._arguments.append(text)

    def take(self) -> AnswerParts:
        self._complete_piece()
        parts = AnswerParts(content="".join(self._content), tool_calls=tuple(self._pieces))
        self._content, self._pieces = [], []
        return parts

    def _complete_piece(self) -> None:
        """Give the last call the arguments that have come for it."""
        if not self._arguments:
            return
        text = "".join(self._arguments)
        self._arguments = []
        index = self.num_calls - 1
        if self._pieces:
            self._pieces[-1] = replace(self._pieces[-1], arguments=text)
        else:
            self._pieces.append(ToolCallPiece(index=index, arguments=text))
