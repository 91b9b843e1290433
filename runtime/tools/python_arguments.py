"""Keyword arguments with literal values, as in Python, read into JSON as they come.

Values are strings, numbers, True, False, None, lists, tuples and dictionaries with string keys.
Nothing is evaluated.
"""

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from sapwood.runtime.constraints.argument_styles import MAX_NAME_CHARS
from sapwood.runtime.tools.text_source import Steps, TextSource

MAX_DEPTH = 64  # lists and dictionaries within each other
MAX_NUMBER_CHARS = 4096

_NAME = re.compile(r"[^\s=,()\[\]{}\"']+")
_SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = MappingProxyType({'"': re.compile(r'[^"\\\n]+'), "'": re.compile(r"[^'\\\n]+")})
_NUMBER_CHARS = re.compile(r"[0-9A-Za-z_.+-]+")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(r"([+-]?)([0-9]*)(?:(\.)([0-9]*))?([eE][+-]?[0-9]+)?")
_WORDS = MappingProxyType({"True": "true", "False": "false", "None": "null"})
_ESCAPES = MappingProxyType(dict(zip("\\'\"abfnrtv\n", [*"\\'\"\a\b\f\n\r\t\v", ""], strict=True)))
_NUM_HEX_DIGITS = MappingProxyType({"x": 2, "u": 4, "U": 8})

_Write = Callable[[str], None]


def read_python_arguments(
    source: TextSource, schema: Mapping[str, Any], write: _Write
) -> Steps[bool]:
    """Arguments up to the parenthesis that closes them, which is read."""
    before = "{"
    while True:
        yield from source.take(_SPACE)
        if (yield from source.peek()) == ")":
            source.skip()
            write("{}" if before == "{" else "}")
            return True
        name = yield from source.take(_NAME, limit=MAX_NAME_CHARS)
        yield from source.take(_SPACE)
        if not name or len(name) > MAX_NAME_CHARS or (yield from source.peek()) != "=":
            return False
        source.skip()
        write(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
        if not (yield from _read_value(source, write, 0)):
            return False
        before = ", "
        if (yield from _after_item(source)) not in (",", ")"):
            return False


def _after_item(source: TextSource) -> Steps[str]:
    """What follows an item: a comma is read, anything else is not."""
    yield from source.take(_SPACE)
    char = yield from source.peek()
    if char == ",":
        source.skip()
    return char


def _read_value(source: TextSource, write: _Write, depth: int) -> Steps[bool]:
    yield from source.take(_SPACE)
    char = yield from source.peek()
    if depth == MAX_DEPTH or not char:
        return False
    if char in _PLAIN:
        return (yield from _read_string(source, write))
    if char in "[(":
        return (yield from _read_list(source, write, depth + 1))
    if char == "{":
        return (yield from _read_dict(source, write, depth + 1))
    word = yield from source.take(_NUMBER_CHARS, limit=MAX_NUMBER_CHARS)
    if not (yield from source.peek()):
        return False  # cut short: there may have been more of it
    text = _WORDS.get(word) or _json_number(word)
    write(text or "")
    return text is not None


def _read_list(source: TextSource, write: _Write, depth: int) -> Steps[bool]:
    """A list or a tuple; (1) is one here, too."""
    close = "]" if (yield from source.peek()) == "[" else ")"
    source.skip()
    before = "["
    while True:
        yield from source.take(_SPACE)
        if (yield from source.peek()) == close:
            source.skip()
            write("[]" if before == "[" else "]")
            return True
        write(before)
        before = ", "
        if not (yield from _read_value(source, write, depth)):
            return False
        if (yield from _after_item(source)) not in (",", close):
            return False


def _read_dict(source: TextSource, write: _Write, depth: int) -> Steps[bool]:
    source.skip()
    before = "{"
    while True:
        yield from source.take(_SPACE)
        char = yield from source.peek()
        if char == "}":
            source.skip()
            write("{}" if before == "{" else "}")
            return True
        if char not in _PLAIN:
            return False
        write(before)
        before = ", "
        if not (yield from _read_string(source, write)):
            return False
        yield from source.take(_SPACE)
        if (yield from source.peek()) != ":":
            return False
        source.skip()
        write(": ")
        if not (yield from _read_value(source, write, depth)):
            return False
        if (yield from _after_item(source)) not in (",", "}"):
            return False


def _read_string(source: TextSource, write: _Write) -> Steps[bool]:
    quote = yield from source.peek()
    source.skip()
    write('"')
    while True:
        plain = yield from source.take(_PLAIN[quote], limit=_CHUNK)
        write(json.dumps(plain, ensure_ascii=False)[1:-1])
        char = yield from source.peek()
        if char == quote:
            source.skip()
            write('"')
            return True
        if char == "\\":
            escaped = yield from _read_escape(source)
            if escaped is None:
                return False
            write(escaped)
        elif not char or char == "\n":
            return False


_CHUNK = 64  # characters of a string that are handed on at once


def _read_escape(source: TextSource) -> Steps[str | None]:
    """What an escape stands for, as it is in a JSON string; None if it is none."""
    source.skip()
    char = yield from source.peek()
    if not char or char in "N01234567":
        return None
    source.skip()
    if char in _NUM_HEX_DIGITS:
        return (yield from _read_code_point(source, _NUM_HEX_DIGITS[char]))
    return json.dumps(_ESCAPES.get(char, "\\" + char), ensure_ascii=False)[1:-1]


def _read_code_point(source: TextSource, num_digits: int) -> Steps[str | None]:
    digits = ""
    for _ in range(num_digits):
        char = yield from source.peek()
        if not char or char not in "0123456789abcdefABCDEF":
            return None
        digits += char
        source.skip()
    code_point = int(digits, 16)
    if code_point > 0x10FFFF:
        return None
    # Halves of surrogate pairs stay escaped: two of them are one character in JSON.
    return json.dumps(chr(code_point), ensure_ascii=0xD800 <= code_point < 0xE000)[1:-1]


def _json_number(text: str) -> str | None:
    """The number as JSON writes it: as it is, where it can be."""
    if _JSON_NUMBER.fullmatch(text):
        return text
    if len(text) > MAX_NUMBER_CHARS:
        return None
    if re.fullmatch(r"0[xX][0-9a-fA-F]+", text):
        return str(int(text, 16))
    match = _PYTHON_NUMBER.fullmatch(re.sub(r"(?<=[0-9])_(?=[0-9])", "", text))
    if match is None:
        return None
    sign, whole, point, fraction, exponent = match.groups(default="")
    if not whole and not fraction or (whole.startswith("0") and whole.strip("0") and not point):
        return None
    number = f"{'-' if sign == '-' else ''}{whole.lstrip('0') or '0'}"
    return f"{number}{'.' if point else ''}{fraction or '0' if point else ''}{exponent}"
