"""Which spellings of control tokens in a rendered conversation are real.

A chat template writes control tokens as text (`<|im_end|>`), and a message may spell the same text.
The two look alike once rendered. So every place where a message's text spells a control token, or
begins or ends with a part of one, gets a mark in front before it is rendered: a character that
occurs nowhere in the input. After rendering, a control token is real where it is whole and has no
mark in front, and the marks are taken out again.

A mark is no white space and stands in front of a spelling, so that trimming, splitting at other
words and comparing with other words work in the template as without it. Where a template writes a
list or an object as Python does, the mark comes out escaped and is restored. What is not covered: a
template that makes a control token out of a message by its own doing (it lower-cases the text, cuts
pieces out of its middle, or writes brackets around a whole name to make `<|name|>`), and one that
cuts a spelled token off and leaves its mark in front of a control token of its own, which is then
plain text.

Works on text; knows no tokenizer and no templates.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sapwood.runtime.errors import RequestError

# Unicode sets these aside for use within a program (U+FDD0 to U+FDEF): texts have no use for them.
NONCHARACTERS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
REAL = b"\xff"  # no UTF-8 text has this byte


@dataclass(frozen=True, slots=True)
class ControlledText:
    """A text and the half-open spans `[start, end)` in it that are real control tokens, in order.

    `has_quoted`: something else in it is spelled like one, and is plain text.
    """

    text: str
    controls: tuple[tuple[int, int], ...]
    has_quoted: bool

    def after(self, text: str) -> "ControlledText":
        """This behind a text that spells no control token."""
        controls = tuple((start + len(text), end + len(text)) for start, end in self.controls)
        return ControlledText(text + self.text, controls, has_quoted=self.has_quoted)

    def keyed(self) -> tuple[bytes, list[int]]:
        """The text as UTF-8 with the byte 0xFF in front of each real control token, and where
        these bytes are.

        Two texts have the same bytes exactly if they are the same text with the same tokens real.
        """
        parts: list[bytes] = []
        places: list[int] = []
        size = last = 0
        for start, _ in self.controls:
            part = self.text[last:start].encode()
            size += len(part)
            places.append(size)
            parts += (part, REAL)
            size += 1
            last = start
        parts.append(self.text[last:].encode())
        return b"".join(parts), places


class ControlTokens:
    """The spellings of a tokenizer's control tokens, and of its other added tokens.

    The others matter where one overlaps a control token: the tokenizer takes what begins first,
    and of these the longest.
    """

    def __init__(self, control: Iterable[str], other: Iterable[str] = ()) -> None:
        self._control = frozenset(filter(None, control))
        self._other = frozenset(filter(None, other)) - self._control
        # What may grow into a control token across the edge of a message's text.
        tails = {token[:i] for token in self._control for i in range(1, len(token))}
        heads = {token[i:] for token in self._control for i in range(1, len(token))}
        self._tails = frozenset(tail for tail in tails if not tail.isspace())
        self._heads = frozenset(head for head in heads if not head.isspace())
        self._last_of_tails = frozenset(tail[-1] for tail in self._tails)
        self._first_of_heads = frozenset(head[0] for head in self._heads)
        self._max_len = max(map(len, self._control), default=0)

    def touch(self, text: str) -> bool:
        """Whether `text` needs marks: it spells a control token or a part of one at an edge."""
        return bool(
            self._control and text and (self._any_control.search(text) or self._edge_places(text))
        )

    def marked(self, text: str, mark: str) -> str:
        """`text` with marks in front of what is spelled like a control token."""
        if not self.touch(text):
            return text
        places = {match.start() for match in self._every_start.finditer(text)}
        parts: list[str] = []
        last = 0
        for place in sorted(places.union(self._edge_places(text))):
            parts += (text[last:place], mark)
            last = place
        return "".join((*parts, text[last:]))

    def joined(self, pieces: Sequence[tuple[str, bool]]) -> ControlledText:
        """Texts one after the other, each with whether what it spells of control tokens is real."""
        texts = [text for text, is_real in pieces if not is_real]
        if not any(map(self.touch, texts)):
            return self.read("".join(text for text, _ in pieces), None)
        mark = unused_characters([text for text, _ in pieces], 1)
        marked = (text if is_real else self.marked(text, mark) for text, is_real in pieces)
        return self.read("".join(marked), mark)

    def read(self, rendered: str, mark: str | None) -> ControlledText:
        """The text without its marks, and which control tokens in it are real."""
        if not self._control:
            return ControlledText(rendered, (), has_quoted=False)
        if mark is None:
            return ControlledText(rendered, tuple(self._spans(rendered)), has_quoted=False)
        real, num_marks, last = [], 0, 0
        for start, end in self._spans(rendered, unless_after=mark):
            num_marks += rendered.count(mark, last, start)
            last = start
            real.append((start - num_marks, end - num_marks))
        text = rendered.replace(mark, "")
        return ControlledText(text, tuple(real), has_quoted=real != list(self._spans(text)))

    def _edge_places(self, text: str) -> list[int]:
        """Where marks are due for what begins or ends `text`."""
        lengths = range(1, min(self._max_len - 1, len(text)) + 1)
        places: list[int] = []
        if text[-1:] in self._last_of_tails:
            places += (len(text) - n for n in lengths if text[-n:] in self._tails)
        if text[:1] in self._first_of_heads and any(text[:n] in self._heads for n in lengths):
            places.append(0)
        return places

    def _spans(self, text: str, *, unless_after: str = "") -> Iterator[tuple[int, int]]:
        """Spans of control tokens, as the tokenizer would find them."""
        rule = f"(?<!{unless_after})" if unless_after else ""
        for match in re.finditer(rule + self._any_added, text):  # `re` keeps what it compiled
            if match.group() in self._control:
                yield match.span()

    @cached_property
    def _any_control(self) -> re.Pattern[str]:
        return re.compile(_any_of(self._control))

    @cached_property
    def _every_start(self) -> re.Pattern[str]:
        """Matches, with no width, wherever a control token begins, also within another one."""
        return re.compile(f"(?={_any_of(self._control)})")

    @cached_property
    def _any_added(self) -> str:
        return _any_of(self._control | self._other)


def unused_characters(texts: Sequence[str], count: int) -> str:
    """`count` noncharacters that no text has, nor spells as an escape.

    Raises RequestError where they have them all. O(characters of the texts).
    """
    used: set[str] = set().union(*texts)
    free = [
        character
        for character in NONCHARACTERS
        if character not in used and not any(_escape_of(character) in text for text in texts)
    ]
    if len(free) < count:
        raise RequestError(
            "the messages use Unicode's noncharacters U+FDD0 to U+FDEF beside the spelling of a "
            "control token or an open last message; leave these characters out",
            param="messages",
        )
    return "".join(free[:count])


def unescaped(text: str, character: str) -> str:
    """`text` with the escapes of one noncharacter, as in `repr` of a list, replaced by itself."""
    return text.replace(_escape_of(character), character)


def _escape_of(character: str) -> str:
    return f"\\u{ord(character):04x}"


def strings_in(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys of objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)


def _any_of(words: Iterable[str]) -> str:
    """A pattern for the longest of `words` at a place, in the form of a tree of their letters, so
    that thousands of words take no longer than one."""
    words = sorted(words)
    return f"(?:{_branch(words, 0)})" if words else r"(?!)"


def _branch(words: Sequence[str], depth: int) -> str:
    """What may follow the first `depth` letters, which sorted `words` have in common."""
    ends = len(words[0]) == depth
    rest = words[1:] if ends else words
    by_letter: dict[str, list[str]] = {}
    for word in rest:
        by_letter.setdefault(word[depth], []).append(word)
    ways = []
    for group in by_letter.values():
        common = _common_length(group[0], group[-1])
        ways.append(re.escape(group[0][depth:common]) + _branch(group, common))
    if not ways:
        return ""
    tree = ways[0] if len(ways) == 1 and not ends else f"(?:{'|'.join(ways)})"
    return tree + "?" if ends else tree


def _common_length(first: str, last: str) -> int:
    """Letters that the first and the last of sorted words, and so all of them, begin with."""
    pairs = zip(first, last, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))
