"""What a reasoning block is: an automaton over the bytes of an answer.

    answer  = block content | content
    block   = newlines open reasoning close newlines

`open` and `close` are the model's tags, `newlines` are at most `MAX_NEWLINES`. An answer without a
block begins with anything else. Qwen3, DeepSeek-R1 and their like are trained on two newlines
between the closing tag and the answer, others write one or none, and some begin with one in front
of the opening tag. These newlines are neither reasoning nor content: whoever wants content that
matches a pattern does not want them in it. Any further newline, and any other white space, is
content.

The matcher, the reader and the count of tokens all go by this, so that they cannot disagree. Knows
no tokens.
"""

from dataclasses import dataclass
from enum import StrEnum, auto
from functools import cached_property

MAX_NEWLINES = 2
_NEWLINE = ord("\n")
_MAX_TAG_BYTES = 100  # states are numbered within a byte


@dataclass(frozen=True)
class ReasoningTags:
    """How one family of models marks its reasoning. Raises ValueError for tags that cannot."""

    open: str
    close: str

    def __post_init__(self) -> None:
        for tag in (self.open, self.close):
            if not tag.strip() or tag.startswith("\n") or len(tag.encode()) > _MAX_TAG_BYTES:
                raise ValueError(
                    f"{tag[:_MAX_TAG_BYTES]!r} is no tag; it must have a visible character, at "
                    f"most {_MAX_TAG_BYTES} bytes, and no newline in front"
                )

    @cached_property
    def automaton(self) -> "BlockAutomaton":
        return BlockAutomaton(self.open.encode(), self.close.encode())


class ReasoningStart(StrEnum):
    """How a prompt leaves its answer."""

    OPEN = "open"  # within a block that the prompt began
    CLOSED = "closed"  # after the prompt's block: what follows is content
    EITHER = "either"  # the model may begin a block, or answer at once


class Phase(StrEnum):
    """Where in an answer one is."""

    OPENING = auto()  # all so far may be the beginning of a block
    REASONING = auto()
    CLOSED = auto()  # after the closing tag: newlines may follow
    CONTENT = auto()  # whatever follows is content
    PLAIN = auto()  # of an answer without one


class BlockAutomaton:
    """Deterministic, over bytes; a state is a small number. Immutable.

    A byte of text takes one look-up.
    """

    def __init__(self, opening: bytes, closing: bytes) -> None:
        self.opening, self.closing = opening, closing
        num_opening = MAX_NEWLINES + len(opening)
        # OPENING: newlines so far, then bytes of the tag so far. REASONING: bytes of the closing
        # tag that the text ends with. CLOSED: newlines so far; after the last there is content.
        phases = [Phase.OPENING] * num_opening
        phases += [Phase.REASONING] * len(closing)
        phases += [Phase.CLOSED] * MAX_NEWLINES
        self._phases = (*phases, Phase.CONTENT, Phase.CONTENT, Phase.PLAIN)
        self._reasoning = num_opening
        self._closed = num_opening + len(closing)
        self._content = self._closed + MAX_NEWLINES + 1
        self._plain = self._content + 1
        self._rows = (
            *self._opening_rows(opening),
            *self._reasoning_rows(closing),
            *self._closed_rows(),
            _row({}, self._content),
            _row({}, self._plain),
        )

    def start(self, start: ReasoningStart) -> int:
        """The state at the beginning of an answer."""
        match start:
            case ReasoningStart.OPEN:
                return self._reasoning
            case ReasoningStart.CLOSED:
                return self._content
            case ReasoningStart.EITHER:
                return 0

    def phase(self, state: int) -> Phase:
        return self._phases[state]

    def has_content(self, state: int) -> bool:
        """Whether some content has been written."""
        return state >= self._content

    def content(self, state: int) -> int:
        """The state in which an answer that is in `state` has content."""
        return self._plain if self._phases[state] in (Phase.OPENING, Phase.PLAIN) else self._content

    def num_closing_bytes(self, state: int) -> int:
        """How much of the closing tag has been written, in REASONING."""
        return state - self._reasoning

    def run(self, state: int, data: bytes) -> int:
        """The state after some bytes."""
        rows = self._rows
        for byte in data:
            state = rows[state][byte]
        return state

    def content_of(self, state: int, data: bytes) -> bytes | None:
        """The content of a whole answer; None where it ended in its reasoning."""
        for place, byte in enumerate(data):
            state = self._rows[state][byte]
            if self.has_content(state):
                return data if state == self._plain else data[place:]
        match self._phases[state]:
            case Phase.REASONING:
                return None
            case Phase.OPENING:
                return data
            case _:
                return b""

    def _opening_rows(self, tag: bytes) -> list[bytes]:
        rows = []
        for num_newlines in range(MAX_NEWLINES + 1):
            row = {tag[0]: self._opened(tag, 1)}
            if num_newlines < MAX_NEWLINES:
                row[_NEWLINE] = num_newlines + 1
            rows.append(_row(row, self._plain))
        for num_bytes in range(1, len(tag)):
            rows.append(_row({tag[num_bytes]: self._opened(tag, num_bytes + 1)}, self._plain))
        return rows

    def _opened(self, tag: bytes, num_bytes: int) -> int:
        """The state with that much of the opening tag."""
        return self._reasoning if num_bytes == len(tag) else MAX_NEWLINES + num_bytes

    def _reasoning_rows(self, tag: bytes) -> list[bytes]:
        """Knuth, Morris and Pratt 1977, as a table; tags are short."""
        rows = []
        for num_bytes in range(len(tag)):
            row = {}
            for byte in set(tag):
                written = tag[:num_bytes] + bytes([byte])
                row[byte] = self._reasoning + next(
                    length for length in range(len(written), -1, -1)
                    if written.endswith(tag[:length])
                )  # fmt: skip
            rows.append(_row(row, self._reasoning))
        return rows

    def _closed_rows(self) -> list[bytes]:
        last = self._closed + MAX_NEWLINES
        rows = [_row({_NEWLINE: state + 1}, self._content) for state in range(self._closed, last)]
        return [*rows, _row({}, self._content)]


def _row(next_state: dict[int, int], otherwise: int) -> bytes:
    """The states after each of the 256 bytes."""
    row = bytearray([otherwise]) * 256
    for byte, state in next_state.items():
        row[byte] = state
    return bytes(row)
