"""The regular expressions that may be asked for as stops: their syntax, read into a tree.

    x|y    xy    x*  x+  x?  x{m}  x{m,}  x{m,n}    (x)  (?:x)    .    [a-z]  [^a-z]
    \\d \\w \\s and \\D \\W \\S          of ASCII, and whatever is not of them
    \\n \\r \\t \\f \\v \\xHH \\uHHHH \\UHHHHHHHH   and a backslash before any punctuation

As in Python's `re` without flags, with two differences: the classes above are ASCII's, and a lazy
quantifier (`x*?`) means what the greedy one does, since the first end decides. The dot is any
character but a line feed. Anchors, look-around, back-references, flags, named and atomic groups and
possessive quantifiers are refused. Knows nothing of matching.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType

MAX_DEPTH = 50  # groups within groups; far below where the reader's recursion would end
MAX_COUNT_DIGITS = 6
MAX_CODE_POINT = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]  # of code points, both ends included

_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACES: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_SURROGATES = (0xD800, 0xDFFF)
_CONTROLS = MappingProxyType({"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"})
_NUM_HEX_DIGITS = MappingProxyType({"x": 2, "u": 4, "U": 8})


class RegexError(ValueError):
    """A pattern that is not taken. The message says where and why."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of `ranges`, which are sorted, apart and without surrogates."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Concat:
    """One after the other; nothing at all if there are no parts."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    options: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`part`, `low` to `high` times; any number of times from `low` on if `high` is None."""

    part: "Node"
    low: int
    high: int | None


Node = Chars | Concat | Alternation | Repeat


def parse(pattern: str) -> Node:
    """The tree of a pattern. Raises RegexError; O(length * log length)."""
    reader = _Reader(pattern)
    tree = reader.alternation()
    if reader.peek() == ")":
        raise reader.error("a ) without its (")
    return tree


class _Reader:
    """Recursive descent; its only state is the place in the pattern and the depth of groups."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def error(self, what: str) -> RegexError:
        return RegexError(f"{what}, at character {self._at}")

    def peek(self) -> str:
        """The next character; empty at the end."""
        return self._pattern[self._at : self._at + 1]

    def _next(self) -> str:
        character = self.peek()
        self._at += len(character)
        return character

    def _take(self, text: str) -> bool:
        """Step over `text` if it comes next."""
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def alternation(self) -> Node:
        options = [self._concat()]
        while self._take("|"):
            options.append(self._concat())
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def _concat(self) -> Node:
        parts = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self._quantified(self._atom()))
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    # -- quantifiers ---------------------------------------------------------------------------

    def _quantified(self, atom: Node) -> Node:
        bounds = self._quantifier()
        if bounds is None:
            return atom
        low, high = bounds
        if high is not None and low > high:
            raise self.error(f"a repetition from {low} to {high}")
        self._take("?")
        if self.peek() == "+":
            raise self.error("a possessive quantifier, which is not taken")
        if self._quantifier() is not None:
            raise self.error("a quantifier after a quantifier; put the first in a group")
        return Repeat(atom, low, high)

    def _quantifier(self) -> tuple[int, int | None] | None:
        """Bounds of the quantifier that comes next; None, and nothing read, if none does."""
        for sign, low, high in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._take(sign):
                return low, high
        if self.peek() != "{":
            return None
        start = self._at
        self._at += 1
        first = self._digits()
        has_comma = self._take(",")
        second = self._digits() if has_comma else first
        if not self._take("}") or not (first or has_comma):
            self._at = start  # as in `re`, a brace that counts nothing is a character
            return None
        return self._count(first or "0"), self._count(second) if second else None

    def _digits(self) -> str:
        start = self._at
        while self.peek() in tuple("0123456789"):
            self._at += 1
        return self._pattern[start : self._at]

    def _count(self, digits: str) -> int:
        if len(digits) > MAX_COUNT_DIGITS:
            raise self.error(f"a repetition counted with more than {MAX_COUNT_DIGITS} digits")
        return int(digits)

    # -- atoms ---------------------------------------------------------------------------------

    def _atom(self) -> Node:
        if self._quantifier() is not None:
            raise self.error("a quantifier with nothing before it")
        character = self._next()
        match character:
            case "^" | "$":
                raise self.error(
                    f"an anchor {character}, which is not taken; the character is \\{character}, "
                    "a line feed \\n"
                )
            case "(":
                return self._group()
            case "[":
                return self._char_class()
            case "\\":
                return Chars(self._escape())
            case ".":
                return Chars(_complement(((0x0A, 0x0A),)))
        return Chars(self._literal(character))

    def _group(self) -> Node:
        if self._take("?") and not self._take(":"):
            raise self.error(
                "(? is followed by something else than a colon; look-around, flags and named or "
                "atomic groups are not taken"
            )
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self.error(f"groups nested deeper than {MAX_DEPTH}")
        inner = self.alternation()
        self._depth -= 1
        if not self._take(")"):
            raise self.error("a ( without its )")
        return inner

    def _char_class(self) -> Chars:
        is_negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        is_first = True
        while is_first or self.peek() != "]":
            ranges.extend(self._class_item())
            is_first = False
        self._next()
        chosen = _complement(ranges) if is_negated else _normalised(ranges)
        if not chosen:
            raise self.error("a class [...] without a character in it")
        return Chars(chosen)

    def _class_item(self) -> Ranges:
        """A character, a class such as \\d, or a range."""
        low = self._class_atom()
        follows = self._pattern[self._at : self._at + 2]
        if not follows.startswith("-") or follows in ("-", "-]"):
            return low
        self._next()
        high = self._class_atom()
        # Only a single character has both ends in one.
        if low[0][0] != low[-1][1] or high[0][0] != high[-1][1] or low[0][0] > high[0][0]:
            raise self.error("a range in [...] that does not go from a character up to a later one")
        return ((low[0][0], high[0][0]),)

    def _class_atom(self) -> Ranges:
        character = self._next()
        if not character:
            raise self.error("a [ without its ]")
        return self._escape() if character == "\\" else self._literal(character)

    def _literal(self, character: str) -> Ranges:
        return self._code_point(ord(character))

    def _code_point(self, value: int) -> Ranges:
        if value > MAX_CODE_POINT or _SURROGATES[0] <= value <= _SURROGATES[1]:
            raise self.error(f"U+{value:04X}, which is no character of a text")
        return ((value, value),)

    def _escape(self) -> Ranges:
        """What stands for a backslash and what comes after it."""
        character = self._next()
        if character in _CONTROLS:
            return self._literal(_CONTROLS[character])
        if character in _NUM_HEX_DIGITS:
            return self._code_point(self._hex(_NUM_HEX_DIGITS[character]))
        match character:
            case "d" | "D":
                return _DIGITS if character == "d" else _complement(_DIGITS)
            case "w" | "W":
                return _WORD if character == "w" else _complement(_WORD)
            case "s" | "S":
                return _SPACES if character == "s" else _complement(_SPACES)
            case "":
                raise self.error("a backslash with nothing after it")
            case "b" | "B" | "A" | "Z" | "z":
                raise self.error(f"an anchor \\{character}, which is not taken")
        if character.isdecimal():
            raise self.error(f"\\{character}, a back-reference or octal number, which is not taken")
        if character.isalnum():
            raise self.error(f"an unknown escape \\{character}")
        return self._literal(character)

    def _hex(self, num_digits: int) -> int:
        digits = self._pattern[self._at : self._at + num_digits]
        if len(digits) < num_digits or not set(digits) <= set("0123456789abcdefABCDEF"):
            raise self.error(f"an escape that needs {num_digits} hexadecimal digits")
        self._at += num_digits
        return int(digits, 16)


def _normalised(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted, apart, and without the surrogates, which no text holds."""
    return _complement(_complement(ranges))


def _complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Every character of a text that is not in `ranges`."""
    gaps = []
    start = 0
    for low, high in sorted((*ranges, _SURROGATES)):
        if low > start:
            gaps.append((start, low - 1))
        start = max(start, high + 1)
    if start <= MAX_CODE_POINT:
        gaps.append((start, MAX_CODE_POINT))
    return tuple(gaps)
