"""Regular expressions of Python and of JSON Schema (ECMA-262), in the notation of Rust's crate.

The three differ in small things that would silently change what matches: nested classes, octal
escapes, what \\d and \\s are. So a pattern is read character by character and written anew, with
every literal character that could mean something spelled as a code point. What is not regular
(look-around, back-references) or hangs on its surroundings (\\b) is refused by name.
"""

import re
from enum import StrEnum
from types import MappingProxyType

from sapwood.runtime.constraints.interface import GrammarError

MAX_LENGTH = 65_536  # characters
MAX_DEPTH = 64  # groups within groups
MAX_WEIGHT = 65_536  # characters of the pattern once its repetitions are written out

_CONTROLS = MappingProxyType({"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"})
_NUM_HEX_DIGITS = MappingProxyType({"x": 2, "u": 4, "U": 8})
_ECMA_CLASSES = MappingProxyType(
    {
        "d": "0-9",
        "w": "0-9A-Za-z_",
        "s": r"\t\n\v\f\r\x{20}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}"
        r"\x{3000}\x{feff}",
    }
)
# Python's letters of words are letters and numbers, and its white space has four control characters
# more than Unicode's; Rust's words have marks and connecting punctuation as well. Digits are
# ASCII's: what reads an answer as a number or a date knows no others.
_PYTHON_CLASSES = MappingProxyType({"d": "0-9", "w": r"\p{L}\p{N}_", "s": r"\s\x{1c}-\x{1f}"})
# What their negations leave out: all that anybody's class has, so that no answer is in dispute.
_PYTHON_NEGATED = MappingProxyType({"d": r"\d", "w": r"\w\p{N}", "s": r"\s\x{1c}-\x{1f}"})
_QUANTIFIER = re.compile(r"[*+?]|\{([0-9]+)(?:(,)([0-9]*))?\}")
_PYTHON_UP_TO = re.compile(r"\{,([0-9]+)\}")
_GROUP_NAME = re.compile(r"\?P?<[^\W\d]\w*>")
_FLAGS = re.compile(r"\?([a-zA-Z]*)(?:-([a-zA-Z]*))?([:)])")
_PROPERTY = re.compile(r"\{[A-Za-z0-9_=]+\}|[A-Z]")
_COMMENT = re.compile(r"\?#[^)]*\)")
_REFUSED_GROUPS = (
    ("?=", "look-ahead (?=...)"),
    ("?!", "look-ahead (?!...)"),
    ("?<=", "look-behind (?<=...)"),
    ("?<!", "look-behind (?<!...)"),
    ("?P=", "a back-reference (?P=...)"),
    ("?>", "an atomic group (?>...)"),
    ("?(", "a conditional group (?(...)...)"),
)


class Dialect(StrEnum):
    """Whose notation a pattern is in."""

    PYTHON = "python"
    ECMA = "ecma"


def python_to_rust(pattern: str) -> str:
    """A pattern of Python's `re` on str, of the whole text. Raises GrammarError; O(length).

    \\d is [0-9], and \\w the letters and numbers of all scripts.
    """
    return _Translator(pattern, Dialect.PYTHON).translate()


def ecma_to_rust(pattern: str) -> str:
    """A pattern of JSON Schema. Raises GrammarError; O(length)."""
    return _Translator(pattern, Dialect.ECMA).translate()


class _Translator:
    """Reads a pattern once from left to right; `_at` is the place in it.

    `_weights` has, for the pattern and each group that is open, how many characters it has with
    its repetitions written out; `_last_weight` is that of what may be repeated next.
    """

    def __init__(self, pattern: str, dialect: Dialect) -> None:
        self._pattern = pattern
        self._dialect = dialect
        self._at = 0
        self._weights = [0]
        self._last_weight = 0
        self._out: list[str] = []
        self._is_repeatable = False  # whether what was written last may be repeated
        self._is_negated = False  # whether the class [...] that is being read begins with ^

    def translate(self) -> str:
        if len(self._pattern) > MAX_LENGTH:
            raise GrammarError(
                f"the regular expression has {len(self._pattern)} characters, at most {MAX_LENGTH} "
                "are taken; shorten it"
            )
        while self._at < len(self._pattern):
            self._step()
        if len(self._weights) > 1:
            raise self._error("a ( without its )", self._at, "close it, or write \\( for itself")
        return "".join(self._out)

    def _step(self) -> None:
        start, char = self._at, self._pattern[self._at]
        if self._quantifier():
            return
        self._at += 1
        if char == "(":
            self._open_group()
        elif char == ")":
            if len(self._weights) == 1:
                raise self._error("a ) without its (", start, "open it, or write \\) for itself")
            self._write(")", weight=self._weights.pop())
        elif char == "[":
            self._write(self._char_class())
        elif char == "\\":
            self._write(self._escape(in_class=False))
        elif char in "^|$":
            self._write(char, is_repeatable=False, weight=0)
        elif char == ".":
            self._write("." if self._is_python else r"[^\n\r\x{2028}\x{2029}]")
        else:
            self._write(_literal(char))

    @property
    def _is_python(self) -> bool:
        return self._dialect is Dialect.PYTHON

    def _write(self, text: str, *, is_repeatable: bool = True, weight: int = 1) -> None:
        self._out.append(text)
        self._is_repeatable = is_repeatable
        self._last_weight = weight
        self._add_weight(weight)

    def _add_weight(self, weight: int) -> None:
        self._weights[-1] += weight
        if self._weights[-1] > MAX_WEIGHT:
            raise GrammarError(
                f"the regular expression has more than {MAX_WEIGHT} characters once its "
                "repetitions are written out; repeat less often, or without a bound"
            )

    def _quantifier(self) -> bool:
        """Take one in. A lazy one means the same here: all of the text matches, or none."""
        start = self._at
        match = _QUANTIFIER.match(self._pattern, self._at)
        if match is None and self._is_python:
            match = _PYTHON_UP_TO.match(self._pattern, self._at)
            text = f"{{0,{match[1]}}}" if match else ""
        else:
            text = match[0] if match else ""
        if match is None:
            return False
        if not self._is_repeatable:
            raise self._error(f"nothing to repeat before {match[0]}", start)
        self._at = match.end()
        if self._pattern.startswith("+", self._at) and self._is_python:
            raise self._error(f"the possessive quantifier {match[0]}+", start)
        if self._pattern.startswith("?", self._at):
            self._at += 1
        most = max(map(_count, re.findall("[0-9]+", text)), default=1)
        self._add_weight(max(self._last_weight * (most - 1), 0))
        self._out.append(text)
        self._is_repeatable = False
        return True

    def _open_group(self) -> None:
        start, pattern = self._at - 1, self._pattern
        for opening, what in _REFUSED_GROUPS:
            if pattern.startswith(opening, self._at):
                raise self._error(f"{what}, which is not regular", start)
        if (comment := _COMMENT.match(pattern, self._at)) and self._is_python:
            self._at = comment.end()
            return
        text = "(?:"
        if name := _GROUP_NAME.match(pattern, self._at):
            self._at = name.end()
        elif pattern.startswith("?", self._at):
            text = self._flags(start)
        self._write(text, is_repeatable=False, weight=0)
        if not text.endswith(":"):
            return  # flags for the whole pattern
        if len(self._weights) > MAX_DEPTH:
            raise self._error(f"groups nested deeper than {MAX_DEPTH}", start)
        self._weights.append(0)

    def _flags(self, start: int) -> str:
        """(?i) and (?s), for a group or at the beginning for the whole pattern."""
        match = _FLAGS.match(self._pattern, self._at)
        if match is None:
            raise self._error("an unknown kind of group", start)
        unknown = set((match[1] or "") + (match[2] or "")) - set("isu")
        if unknown:
            raise self._error(f"the flag {min(unknown)}", start)
        if match[3] == ")" and start:
            raise self._error("flags for the whole pattern that are not at its beginning", start)
        self._at = match.end()
        on, off = (match[1] or "").replace("u", ""), (match[2] or "").replace("u", "")
        if match[3] == ")":
            return f"(?{on})" if on else ""
        return f"(?{on}{'-' + off if off else ''}:"

    def _char_class(self) -> str:
        """What follows a [, to its ]."""
        start = self._at - 1
        negated = self._is_negated = self._pattern.startswith("^", self._at)
        self._at += negated
        items: list[str] = []
        while True:
            if self._at >= len(self._pattern):
                raise self._error("a [ without its ]", start, "close it, or write \\[ for itself")
            if self._pattern[self._at] == "]" and (items or not self._is_python):
                self._at += 1
                break
            items.append(self._class_item(start))
        if not items:
            return r"[\x{0}-\x{10FFFF}]" if negated else r"[^\x{0}-\x{10FFFF}]"
        return f"[{'^' if negated else ''}{''.join(items)}]"

    def _class_item(self, start: int) -> str:
        """A character, a range of them, or a class with a name."""
        low = self._class_char()
        is_range = self._pattern.startswith("-", self._at) and self._at + 1 < len(self._pattern)
        if not is_range or self._pattern[self._at + 1] == "]":
            return low
        self._at += 1
        high = self._class_char()
        if not (_is_one_char(low) and _is_one_char(high)):
            raise self._error("a range between what are not single characters", start)
        if _code_of(low) > _code_of(high):
            raise self._error("a range whose end comes before its start", start)
        return f"{low}-{high}"

    def _class_char(self) -> str:
        char = self._pattern[self._at]
        self._at += 1
        return self._escape(in_class=True) if char == "\\" else _literal(char)

    def _escape(self, *, in_class: bool) -> str:
        """What follows a backslash."""
        start = self._at - 1
        if self._at >= len(self._pattern):
            raise self._error("a backslash at the end", start)
        char = self._pattern[self._at]
        self._at += 1
        if char in "dwsDWS":
            return self._named_class(char, in_class=in_class)
        if char in _CONTROLS:
            return _literal(_CONTROLS[char])
        if char in _NUM_HEX_DIGITS and (char != "U" or self._is_python):
            return _literal(self._code_point(char, start))
        if char in "pP":
            return self._property(char, start)
        if char.isascii() and char.isdigit():
            return self._octal(start, in_class=in_class)
        if char == "b" and in_class:
            return _literal("\b")
        if char in "bB":
            raise self._error(f"\\{char}, a word boundary, which hangs on its surroundings", start)
        if char.isascii() and char.isalpha():
            return self._letter_escape(char, start, in_class=in_class)
        return _literal(char)

    def _letter_escape(self, char: str, start: int, *, in_class: bool) -> str:
        if self._is_python:
            if char == "a":
                return _literal("\a")
            if char in "AZ" and not in_class:
                return "^" if char == "A" else "$"
        elif char == "c" and self._pattern[self._at : self._at + 1].isalpha():
            self._at += 1
            return _literal(chr(ord(self._pattern[self._at - 1]) % 32))
        elif char == "k":
            raise self._error("a back-reference \\k, which is not regular", start)
        raise self._error(f"the unknown escape \\{char}", start)

    def _named_class(self, char: str, *, in_class: bool) -> str:
        """\\d, \\w, \\s and their negations; what a [^...] leaves out, they leave out."""
        is_left_out = char.isupper() != (in_class and self._is_negated)
        if not self._is_python:
            content = _ECMA_CLASSES[char.lower()]
        else:
            content = (_PYTHON_NEGATED if is_left_out else _PYTHON_CLASSES)[char.lower()]
        if char.islower():
            return content if in_class else f"[{content}]"
        return f"[^{content}]"

    def _property(self, char: str, start: int) -> str:
        match = _PROPERTY.match(self._pattern, self._at)
        if match is None:
            raise self._error(f"\\{char} without the name of a property", start)
        self._at = match.end()
        return f"\\{char}{match[0]}"

    def _octal(self, start: int, *, in_class: bool) -> str:
        """\\0 and, in Python, up to three octal digits. Other digits refer back."""
        digits = re.compile(r"0[0-7]{0,2}|[0-3][0-7]{2}" if self._is_python else r"0(?![0-9])")
        match = digits.match(self._pattern, start + 1)
        if match is None and in_class and self._is_python:
            match = re.compile(r"[0-7]{1,3}").match(self._pattern, start + 1)
        if match is None:
            raise self._error(
                f"a back-reference \\{self._pattern[start + 1]}, which is not regular", start
            )
        self._at = match.end()
        return _literal(chr(int(match[0], 8)))

    def _code_point(self, char: str, start: int) -> str:
        """The character that \\xHH, \\uHHHH, \\UHHHHHHHH or \\u{H...} stands for."""
        if char == "u" and not self._is_python:
            if braced := re.compile(r"\{([0-9A-Fa-f]{1,6})\}").match(self._pattern, self._at):
                self._at = braced.end()
                return self._character(int(braced[1], 16), start)
            pair = re.compile(r"([dD][89abAB]..)\\u([dD][c-fC-F]..)").match(self._pattern, self._at)
            if pair:
                self._at = pair.end()
                high, low = int(pair[1], 16), int(pair[2], 16)
                return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))
        size = _NUM_HEX_DIGITS[char]
        digits = self._pattern[self._at : self._at + size]
        if not re.fullmatch(f"[0-9A-Fa-f]{{{size}}}", digits):
            raise self._error(f"\\{char} without its {size} hexadecimal digits", start)
        self._at += size
        return self._character(int(digits, 16), start)

    def _character(self, code: int, start: int) -> str:
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self._error("an escape for what is no character", start)
        return chr(code)

    def _error(self, what: str, at: int, way_out: str = "write it without") -> GrammarError:
        return GrammarError(f"the regular expression has {what} (character {at}); {way_out}")


def _count(digits: str) -> int:
    """A count of repetitions; one beyond all limits where Python does not read the number."""
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) < 10 else 10**9


def _literal(char: str) -> str:
    """A character as itself, whatever stands around it."""
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


def _is_one_char(text: str) -> bool:
    return len(text) == 1 or bool(re.fullmatch(r"\\x\{[0-9a-f]+\}", text))


def _code_of(text: str) -> int:
    return ord(text) if len(text) == 1 else int(text[3:-1], 16)
