"""The text of a state as it grows, for those who read along.

Written on the loop; read on any thread and any event loop.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sapwood.frontend_lang.errors import Failure
from sapwood.frontend_lang.variables import Latch, Names, Variable


class Chunk(NamedTuple):
    """A piece of text; of a variable where a statement with a name gave it. The last of an answer
    may have no text, and tell only how it ended."""

    text: str
    variable: Variable | None = None
    meta: Mapping[str, Any] | None = None


class Feed:
    """All chunks so far. Grows until it is closed."""

    __slots__ = ("_more", "chunks", "failure", "is_closed", "is_read")

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.failure: Failure | None = None
        self.is_closed = False
        self.is_read = False  # somebody reads along, so answers are worth streaming
        self._more = Latch()

    @property
    def more(self) -> Latch:
        """Opens at the next change. Take it before looking."""
        return self._more

    def append(self, chunk: Chunk) -> None:
        if chunk.text or chunk.meta:
            self.chunks.append(chunk)
            self.stir()

    def close(self, failure: Failure | None = None) -> None:
        """Nothing follows; a failure is raised to those who have read all that came before it."""
        if not self.is_closed:
            self.failure = failure
            self.is_closed = True
            self.stir()

    def stir(self) -> None:
        """Let the readers look again."""
        if not self.is_read:
            return
        latch, self._more = self._more, Latch()
        latch.open()


@dataclass(slots=True)
class TextReader:
    """Reads a feed to its end, or until `until` opens."""

    feed: Feed
    until: Latch | None = None
    _index: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.feed.is_read = True
        if self.until is not None:
            self.until.when_open(self.feed.stir)

    def step(self) -> Chunk | Latch | None:
        """The next chunk, what to wait for, or None at the end. Raises ProgramError."""
        feed, more = self.feed, self.feed.more
        is_over = feed.is_closed or (self.until is not None and self.until.is_open)
        if self._index < len(feed.chunks):
            self._index += 1
            return feed.chunks[self._index - 1]
        if not is_over:
            return more
        if feed.failure is not None:
            raise feed.failure.error()
        return None


@dataclass(slots=True)
class VariableReader:
    """Reads the chunks of the variable `name`, which may have still to be named.

    `may_wait`: a statement that sets it may come yet; else its absence is an error.
    """

    feed: Feed
    names: Names
    name: str
    may_wait: bool
    _variable: Variable | None = field(default=None, init=False)
    _index: int = field(default=0, init=False)
    _is_told: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.feed.is_read = True

    def step(self) -> Chunk | Latch | None:
        """The next chunk, what to wait for, or None at the end.

        Raises ProgramError, and UnknownVariableError.
        """
        if self._variable is None:
            change = self.names.change()
            if self.name not in self.names and self.may_wait and change is not None:
                return change
            self._variable = self.names[self.name]
            self._variable.latch.when_open(self.feed.stir)
        return self._step(self._variable)

    def _step(self, variable: Variable) -> Chunk | Latch | None:
        more, is_over = self.feed.more, variable.latch.is_open
        while self._index < len(self.feed.chunks):
            chunk = self.feed.chunks[self._index]
            self._index += 1
            if chunk.variable is variable:
                self._is_told = True
                return chunk
        if not is_over:
            return more
        value = variable.value()
        if self._is_told or not isinstance(value, str):
            return None
        self._is_told = True  # set by other means than by text of this state
        meta = variable.meta()
        return Chunk(value, variable, meta if isinstance(meta, Mapping) else None)
