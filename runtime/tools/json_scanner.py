"""Where a JSON object ends, in text that comes in pieces of any size.

Every character is judged as it comes, so that what has been scanned is the beginning of valid JSON
(RFC 8259). Values are not built.
"""

import re
from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType

MAX_DEPTH = 128  # objects and lists within each other


class _Expect(Enum):
    """What may come next."""

    START = auto()
    VALUE = auto()
    FIRST_ITEM = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    COMMA = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    WORD = auto()
    NUMBER = auto()
    NOTHING = auto()


_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = re.compile(r"[ \t\r\n]*")
_WORDS = MappingProxyType({"t": "true", "f": "false", "n": "null"})
_DIGITS = "0123456789"


def _table(**states: Mapping[str, str]) -> Mapping[str, Mapping[str, str]]:
    """By state and character the next state of a number."""
    return MappingProxyType(
        {
            state: MappingProxyType({c: then for chars, then in moves.items() for c in chars})
            for state, moves in states.items()
        }
    )


_NUMBER = _table(
    minus={"0": "zero", "123456789": "whole"},
    zero={".": "point", "eE": "e"},
    whole={_DIGITS: "whole", ".": "point", "eE": "e"},
    point={_DIGITS: "fraction"},
    fraction={_DIGITS: "fraction", "eE": "e"},
    e={"+-": "sign", _DIGITS: "exponent"},
    sign={_DIGITS: "exponent"},
    exponent={_DIGITS: "exponent"},
)
_NUMBER_START = MappingProxyType(
    {"-": "minus", "0": "zero", **{digit: "whole" for digit in "123456789"}}
)
_NUMBER_ENDS = frozenset(("zero", "whole", "fraction", "exponent"))


class JsonObjectScanner:
    """Scans one object. `is_complete` behind its last brace, `is_broken` at what is no JSON."""

    def __init__(self) -> None:
        self.is_complete = False
        self.is_broken = False
        self._expect = _Expect.START
        self._open: list[str] = []  # { and [ that are not closed
        self._is_key = False  # the string that is being read
        self._rest = ""  # of true, false, null
        self._num_hex = 0
        self._number = ""  # state of the number that is being read

    def __call__(self, text: str, start: int) -> int:
        """Scan `text` from `start`; returns where the object ends, or breaks, or the text does."""
        at = start
        while at < len(text) and not self.is_complete and not self.is_broken:
            at = self._step(text, at)
        return at

    def _step(self, text: str, at: int) -> int:
        """Read at least a character, unless it is wrong or ends a number."""
        expect, char = self._expect, text[at]
        if expect is _Expect.STRING:
            return self._string(text, at)
        if expect is _Expect.NUMBER:
            return self._digit(char, at)
        if expect in (_Expect.ESCAPE, _Expect.HEX, _Expect.WORD):
            return self._inside(char, at)
        if char in " \t\r\n" and expect is not _Expect.START:
            match = _SPACE.match(text, at)
            assert match is not None
            return match.end()
        return at + 1 if self._between(char) else self._break(at)

    def _string(self, text: str, at: int) -> int:
        match = _PLAIN.match(text, at)
        assert match is not None
        at = match.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._expect = _Expect.ESCAPE
        elif text[at] == '"':
            self._expect = _Expect.COLON if self._is_key else _Expect.COMMA
        else:
            return self._break(at)
        return at + 1

    def _digit(self, char: str, at: int) -> int:
        following = _NUMBER[self._number].get(char)
        if following is not None:
            self._number = following
            return at + 1
        if self._number not in _NUMBER_ENDS:
            return self._break(at)
        self._expect = _Expect.COMMA
        return at

    def _inside(self, char: str, at: int) -> int:
        """Within an escape or a word."""
        if self._expect is _Expect.WORD:
            if char != self._rest[0]:
                return self._break(at)
            self._rest = self._rest[1:]
            self._expect = _Expect.WORD if self._rest else _Expect.COMMA
        elif self._expect is _Expect.HEX:
            if char not in "0123456789abcdefABCDEF":
                return self._break(at)
            self._num_hex -= 1
            self._expect = _Expect.HEX if self._num_hex else _Expect.STRING
        elif char == "u":
            self._expect, self._num_hex = _Expect.HEX, 4
        elif char in '"\\/bfnrt':
            self._expect = _Expect.STRING
        else:
            return self._break(at)
        return at + 1

    def _between(self, char: str) -> bool:
        """A character between values; whether it may be there."""
        expect = self._expect
        if expect is _Expect.START:
            return char == "{" and self._value(char)
        if expect is _Expect.COLON and char == ":":
            self._expect = _Expect.VALUE
            return True
        if expect in (_Expect.KEY, _Expect.FIRST_KEY) and char == '"':
            self._is_key, self._expect = True, _Expect.STRING
            return True
        if char in "}]" and expect in (_Expect.COMMA, _Expect.FIRST_KEY, _Expect.FIRST_ITEM):
            return self._close(char)
        if expect is _Expect.COMMA and char == ",":
            self._expect = _Expect.KEY if self._open[-1] == "{" else _Expect.VALUE
            return True
        return expect in (_Expect.VALUE, _Expect.FIRST_ITEM) and self._value(char)

    def _value(self, char: str) -> bool:
        """The first character of a value."""
        if char in "{[":
            self._open.append(char)
            self._expect = _Expect.FIRST_KEY if char == "{" else _Expect.FIRST_ITEM
            return len(self._open) <= MAX_DEPTH
        if char == '"':
            self._is_key, self._expect = False, _Expect.STRING
        elif char in _WORDS:
            self._expect, self._rest = _Expect.WORD, _WORDS[char][1:]
        elif char in _NUMBER_START:
            self._expect, self._number = _Expect.NUMBER, _NUMBER_START[char]
        else:
            return False
        return True

    def _close(self, char: str) -> bool:
        if self._open.pop() + char not in ("{}", "[]"):
            return False
        self._expect = _Expect.COMMA
        if not self._open:
            self.is_complete, self._expect = True, _Expect.NOTHING
        return True

    def _break(self, at: int) -> int:
        self.is_broken = True
        return at
