"""The text of an answer as it comes, read by generators that wait where there is no more of it."""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

_T = TypeVar("_T")
# A part of a reader: it yields where it needs more text, and returns what it found.
Steps = Generator[None, None, _T]


class TextSource:
    """A cursor over a text that grows.

    What lies before the cursor is forgotten when text is added, but for what is held, so that a
    character is copied a bounded number of times where little is held.
    """

    def __init__(self) -> None:
        self._text = ""
        self._cursor = 0
        self._hold: int | None = None
        self._finished = False

    def add(self, text: str, *, finished: bool) -> None:
        """More of the text, of which with `finished` there is no more after."""
        kept = self._cursor if self._hold is None else self._hold
        self._text = self._text[kept:] + text
        self._cursor -= kept
        self._hold = None if self._hold is None else 0
        self._finished = finished

    def hold(self) -> None:
        """Remember this place, for `go_back`. One at a time."""
        assert self._hold is None
        self._hold = self._cursor

    def release(self) -> None:
        """Forget the place that is held."""
        self._hold = None

    def go_back(self) -> None:
        """Return to the place that is held, and forget it."""
        assert self._hold is not None
        self._cursor = self._hold
        self._hold = None

    def more(self) -> Steps[bool]:
        """Wait for more text. False if there is none."""
        if self._finished:
            return False
        yield
        return True

    def peek(self) -> Steps[str]:
        """The next character, which stays unread; empty at the end."""
        while self._cursor == len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self._cursor]

    def skip(self) -> None:
        """Read the character that was peeked at."""
        self._cursor += 1

    def take(self, pattern: re.Pattern[str], *, limit: int | None = None) -> Steps[str]:
        """Read what `pattern` matches, which is any number of one kind of characters.

        With `limit`, a character more than that may be read, which says that there are too many.
        """
        taken: list[str] = []
        room = limit
        while (yield from self.peek()) and (match := pattern.match(self._text, self._cursor)):
            end = match.end() if room is None else min(match.end(), self._cursor + room + 1)
            taken.append(self._text[self._cursor : end])
            if room is not None:
                room -= end - self._cursor
            self._cursor = end
            if room is not None and room < 0:
                break
        return "".join(taken)

    def take_word(self, word: str) -> Steps[bool]:
        """Read `word`. If False, its beginning, which is all that is there of it, has been read."""
        for char in word:
            if (yield from self.peek()) != char:
                return False
            self.skip()
        return True

    def take_up_to(self, end: Callable[[str, int], int]) -> str:
        """Read what has come up to where `end` says, given a text and the place of this one."""
        start, self._cursor = self._cursor, end(self._text, self._cursor)
        return self._text[start : self._cursor]

    def take_before(self, word: str, lead: str = "") -> tuple[str, bool]:
        """Read what has come up to `word`, and whether it is there; at its place, it is not read.

        What may be the beginning of `word` stays unread. `lead`, a character or nothing, does so
        as well if it stands right before.
        """
        at = self._text.find(word, self._cursor)
        is_there = at >= 0
        if not is_there:
            at = len(self._text) - self._overlap(word)
        if lead and at > self._cursor and self._text[at - 1] == lead and not self._ends(at):
            at -= 1
        start, self._cursor = self._cursor, at
        return self._text[start:at], is_there

    def take_through(self, word: str) -> str:
        """Read up to the end of `word`, which is there."""
        start, self._cursor = self._cursor, self._text.index(word, self._cursor) + len(word)
        return self._text[start : self._cursor]

    def take_rest(self) -> str:
        """Read all that has come."""
        start, self._cursor = self._cursor, len(self._text)
        return self._text[start:]

    def _ends(self, at: int) -> bool:
        return self._finished and at == len(self._text)

    def _overlap(self, word: str) -> int:
        """Characters at the end of what has come that `word` may begin with."""
        if self._finished:
            return 0
        longest = min(len(word) - 1, len(self._text) - self._cursor)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if self._text.endswith(word[:n])), 0)
