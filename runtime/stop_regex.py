"""Stop regular expressions, searched for in bytes as they arrive.

A pattern becomes a position automaton (Glushkov 1961): one state for each character of the pattern,
counted repetitions written out. All states are followed at once (Thompson 1968), so that a byte
costs at most the automaton's size, whatever the pattern and the text. `regex_syntax.py` says what
patterns are taken. Knows nothing of tokens and tensors.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from sapwood.runtime.regex_syntax import (
    Alternation,
    Chars,
    Concat,
    Node,
    Ranges,
    RegexError,
    Repeat,
    parse,
)

MAX_REGEX_LENGTH = 512  # characters of a pattern
MAX_REGEX_SIZE = 512  # states and transitions


@dataclass(frozen=True, slots=True)
class StopRegex:
    """A compiled pattern.

    State i waits for a character out of `classes[i]` and then leads to the states `follow[i]`; a
    match begins in those of `first` and is complete with a character of one in `last`.
    """

    pattern: str
    classes: tuple["_CharClass", ...]
    follow: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    last: frozenset[int]

    @classmethod
    def compile(cls, pattern: str) -> "StopRegex":
        """Raises RegexError for a pattern that is too long, too large, not of the syntax taken, or
        that matches the empty text, which is everywhere. O(length + size)."""
        if len(pattern) > MAX_REGEX_LENGTH:
            raise RegexError(
                f"it has {len(pattern)} characters, at most {MAX_REGEX_LENGTH} are taken"
            )
        tree = parse(pattern)
        # Told before anything is written out: {1000}{1000} in groups is short to write.
        if _num_states(tree) > MAX_REGEX_SIZE:
            raise _too_large()
        builder = _Builder()
        whole = builder.build(tree)
        if whole.is_nullable:
            raise RegexError("it matches the empty text, which is everywhere")
        return cls(
            pattern=pattern,
            classes=tuple(builder.classes),
            follow=tuple(tuple(states) for states in builder.follow),
            first=whole.first,
            last=frozenset(whole.last),
        )

    @property
    def size(self) -> int:
        """States and transitions: the most steps that one byte can take."""
        return len(self.classes) + sum(map(len, self.follow))


class RegexScanner:
    """Searches for one pattern in the bytes fed so far.

    The match that ends first is found, and of several that end there the one that starts first.
    Bytes that are no UTF-8 match nothing. Mutated by `advance` only.
    """

    __slots__ = ("_character", "_num_bytes", "_regex", "_threads")

    def __init__(self, regex: StopRegex) -> None:
        self._regex = regex
        # State -> where the earliest beginning lies that leads to it. In the order of beginnings,
        # which dicts keep: the first is the earliest.
        self._threads: dict[int, int] = {}
        self._num_bytes = 0
        self._character = b""  # what has arrived of an unfinished one

    @property
    def reason(self) -> str:
        """The pattern."""
        return self._regex.pattern

    @property
    def num_held(self) -> int:
        """Bytes of the longest ending of what was fed that is the beginning of a matching text."""
        for start in self._threads.values():
            return self._num_bytes - start
        return 0

    def advance(self, byte: int) -> int:
        """Take in one byte; the length of the match that it completes, 0 if none.

        Not to be called after that. At most `regex.size` steps.
        """
        start = self._num_bytes
        self._num_bytes += 1
        span = self._span_with(byte)
        if len(self._character) == 1:
            for state in self._regex.first:
                self._threads.setdefault(state, start)
        if span is None:
            self._threads.clear()
            self._character = b""
            return 0
        self._keep_those_that_meet(span)
        if span[0] < span[1]:
            return 0  # the character is unfinished
        self._character = b""
        return self._move()

    def _span_with(self, byte: int) -> tuple[int, int] | None:
        """The characters that are possible with one byte more; None if it fits into none."""
        self._character += bytes((byte,))
        span = character_span(self._character)
        if span is None and len(self._character) > 1:
            # The last character broke off. This byte may be the beginning of another.
            self._threads.clear()
            self._character = bytes((byte,))
            span = character_span(self._character)
        return span

    def _keep_those_that_meet(self, span: tuple[int, int]) -> None:
        classes = self._regex.classes
        self._threads = {
            state: start for state, start in self._threads.items() if classes[state].meets(span)
        }

    def _move(self) -> int:
        """Go on from every state, or tell the length of the match that is complete."""
        regex = self._regex
        moved: dict[int, int] = {}
        for state, start in self._threads.items():
            if state in regex.last:
                return self._num_bytes - start
            for following in regex.follow[state]:
                moved.setdefault(following, start)
        self._threads = moved
        return 0


def character_span(data: bytes) -> tuple[int, int] | None:
    """First and last code point of the characters whose UTF-8 begins with `data`.

    They are the same once it is whole; None if no character begins so. `data` has 1 to 4 bytes.
    """
    lead = data[0]
    if lead < 0x80:
        return (lead, lead) if len(data) == 1 else None
    if not 0xC2 <= lead <= 0xF4:
        return None
    num_more = 1 if lead < 0xE0 else 2 if lead < 0xF0 else 3
    num_missing = num_more - len(data) + 1
    if num_missing < 0 or any(byte & 0xC0 != 0x80 for byte in data[1:]):
        return None
    value = lead & (0x3F >> num_more)
    for byte in data[1:]:
        value = value << 6 | byte & 0x3F
    # What is shorter written in fewer bytes, and surrogates, are no UTF-8.
    low = max(value << 6 * num_missing, (0x80, 0x800, 0x10000)[num_more - 1])
    high = min((value + 1 << 6 * num_missing) - 1, 0x10FFFF)
    if low < 0xD800 <= high < 0xE000:
        high = 0xD7FF
    if low > high or 0xD800 <= low < 0xE000:
        return None
    return low, high


class _CharClass:
    """A set of characters as sorted ranges."""

    __slots__ = ("_highs", "_lows")

    def __init__(self, ranges: Ranges) -> None:
        self._lows = tuple(low for low, _ in ranges)
        self._highs = tuple(high for _, high in ranges)

    def meets(self, span: tuple[int, int]) -> bool:
        """Whether one of the characters lies in `span`. O(log ranges)."""
        index = bisect_right(self._lows, span[1]) - 1
        return index >= 0 and self._highs[index] >= span[0]


@dataclass(frozen=True, slots=True)
class _Fragment:
    """Of a part of the pattern: the states it may begin and end with, and whether it may be
    empty."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    is_nullable: bool


_EMPTY = _Fragment((), (), True)


class _Builder:
    """Writes the states of a tree; a repeated part is written anew for each repetition."""

    def __init__(self) -> None:
        self.classes: list[_CharClass] = []
        self.follow: list[dict[int, None]] = []
        self._num_connected = 0

    def build(self, node: Node) -> _Fragment:
        match node:
            case Chars():
                return self._chars(node)
            case Concat():
                whole = _EMPTY
                for part in node.parts:
                    whole = self._joined(whole, self.build(part))
                return whole
            case Alternation():
                return _either([self.build(option) for option in node.options])
            case Repeat():
                return self._repeated(node)

    def _chars(self, node: Chars) -> _Fragment:
        state = len(self.classes)
        self.classes.append(_CharClass(node.ranges))
        self.follow.append({})
        return _Fragment((state,), (state,), False)

    def _joined(self, left: _Fragment, right: _Fragment) -> _Fragment:
        self._connect(left.last, right.first)
        return _Fragment(
            left.first + right.first if left.is_nullable else left.first,
            left.last + right.last if right.is_nullable else right.last,
            left.is_nullable and right.is_nullable,
        )

    def _repeated(self, node: Repeat) -> _Fragment:
        """x{2,4} as xx(x(x)?)?, from its end; x{2,} as xx+; x* as (x+)?."""
        if node.high == 0 or _num_states(node.part) == 0:
            return _EMPTY
        num_copies = node.high if node.high is not None else max(node.low, 1)
        whole = _EMPTY
        for index in reversed(range(num_copies)):
            copy = self.build(node.part)
            if node.high is None and index == num_copies - 1:
                self._connect(copy.last, copy.first)
            whole = self._joined(copy, whole)
            if index >= node.low:
                whole = _Fragment(whole.first, whole.last, True)
        return whole

    def _connect(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._num_connected += len(sources) * len(targets)
        if self._num_connected + len(self.classes) > MAX_REGEX_SIZE:
            raise _too_large()
        for source in sources:
            self.follow[source].update(dict.fromkeys(targets))


def _either(options: Sequence[_Fragment]) -> _Fragment:
    return _Fragment(
        tuple(state for option in options for state in option.first),
        tuple(state for option in options for state in option.last),
        any(option.is_nullable for option in options),
    )


def _num_states(node: Node) -> int:
    """How many states the tree takes. O(tree), however large the number."""
    match node:
        case Chars():
            return 1
        case Concat():
            return sum(map(_num_states, node.parts))
        case Alternation():
            return sum(map(_num_states, node.options))
        case Repeat():
            num_copies = node.high if node.high is not None else max(node.low, 1)
            return num_copies * _num_states(node.part)


def _too_large() -> RegexError:
    return RegexError(
        f"it takes more than {MAX_REGEX_SIZE} states and transitions once its counted repetitions "
        "are written out; use smaller counts, or * instead of one"
    )
