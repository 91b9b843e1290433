"""The value that an answer spells, by the type that its `gen` asked for.

The texts are those that `runtime/constraints/output_types.py` lets through: Python's spelling for
plain types (a `str` in double quotes, `True`, `None`, `[1, 2]`), JSON for types with fields.
"""

import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from enum import EnumMeta
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from sapwood.frontend_lang.constraint import dtype_name
from sapwood.frontend_lang.options import Options
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec
from sapwood.runtime.errors import SapwoodError


class AnswerError(SapwoodError, ValueError):
    """An answer does not spell a value of its type: it was cut, or the backend constrains less."""


def parse_value(options: Options, text: str, meta: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """The value of an answer: of `output_type`, of `dtype`, JSON of a `json_schema`, else the text.
    `meta` is what its backend told of it.

    Raises AnswerError. A type with fields imports pydantic, which checks it.
    """
    try:
        if (dtype := options.get("dtype")) is not None:
            return _of_dtype(dtype_name(dtype), text.strip())
        if options.get("json_schema") is not None:
            return json.loads(text)
        if (output_type := options.get("output_type")) is not None:
            return _of_type(output_type, text)
    except ValueError as error:
        if isinstance(error, AnswerError):
            raise
        why = f"({_first_line(error)})"
        raise AnswerError(
            f"the answer {_shortened(text)} was cut {_where_cut(meta)}, so it is no value of its "
            f"type {why}; raise max_tokens"
            if _is_cut(meta)
            else f"the answer {_shortened(text)} is no value of its type {why}; a larger "
            "max_tokens helps where it was cut"
        ) from error
    return text


def _is_cut(meta: Mapping[str, Any]) -> bool:
    reason = meta.get("finish_reason")
    return isinstance(reason, Mapping) and reason.get("type") == "length"


def _where_cut(meta: Mapping[str, Any]) -> str:
    num_tokens = meta.get("completion_tokens")
    return "short" if num_tokens is None else f"after {num_tokens} tokens"


def _of_dtype(name: str, text: str) -> int | float | bool | str:
    match name:
        case "int":
            return int(text)
        case "float":
            return float(text)
        case "bool":
            return _bool(text)
    if len(text) < 2 or not text.startswith('"') or not text.endswith('"'):
        raise ValueError("a str is a text in double quotes")
    return text[1:-1]


def _of_type(kind: Any, text: str) -> Any:
    if isinstance(kind, ConstraintSpec):
        return json.loads(text) if kind.kind is ConstraintKind.JSON_SCHEMA else text
    if type(kind).__module__ == "outlines.types.dsl":
        return json.loads(text) if hasattr(kind, "schema") else text
    for value, end in _readings(_plain(kind), text, 0, in_container=False):
        if end == len(text):
            return value
    raise ValueError(f"expected {getattr(kind, '__name__', kind)}")


# A value, and where the text goes on after it. A type may read a text in several ways
# (`Literal["a", "ab"]`), of which what follows picks one.
Readings = Iterator[tuple[Any, int]]


def _readings(kind: Any, text: str, at: int, *, in_container: bool) -> Readings:
    """What `text` may say from `at` on. In a container texts are in double quotes."""
    if kind in _PLAIN_TYPES:
        pattern, read = _PLAIN_TYPES[kind]
        if found := pattern.match(text, at):
            yield read(found[0]), found.end()
    elif isinstance(kind, EnumMeta):
        members: list[Any] = list(kind)
        for member in members:
            yield from _spelled(member, member.value, text, at, in_container)
    elif get_origin(kind) is Literal:
        for value in get_args(kind):
            yield from _spelled(value, value, text, at, in_container)
    elif get_origin(kind) in (Union, UnionType):
        for branch in get_args(kind):
            with suppress(ValueError):  # another branch may fit
                yield from _readings(_plain(branch), text, at, in_container=in_container)
    elif get_origin(kind) in (list, tuple, dict):
        yield from _containers(get_origin(kind), get_args(kind), text, at)
    else:
        yield from _structured(kind, text, at)


def _plain(kind: Any) -> Any:
    """A type without its annotations, and a NewType's own type."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    return _plain(kind.__supertype__) if hasattr(kind, "__supertype__") else kind


def _spelled(value: Any, spelling: Any, text: str, at: int, in_container: bool) -> Readings:
    is_quoted = in_container and isinstance(spelling, str)
    expected = f'"{spelling}"' if is_quoted else str(spelling)
    if text.startswith(expected, at):
        yield value, at + len(expected)


def _containers(container: Any, kinds: tuple[Any, ...], text: str, at: int) -> Readings:
    opening, closing = _BRACKETS[container]
    if not text.startswith(opening, at):
        return
    if container is dict:
        rows = _rows(lambda where: _pairs(kinds, text, where), text, at + 1)
    elif container is tuple and (len(kinds) != 2 or kinds[1] is not Ellipsis):
        rows = _fixed_row([_plain(kind) for kind in kinds], text, at + 1)
    else:
        item = _plain(kinds[0])
        rows = _rows(lambda where: _readings(item, text, where, in_container=True), text, at + 1)
    for items, end in rows:
        if text.startswith(closing, end):
            yield container(items), end + 1


def _pairs(kinds: tuple[Any, ...], text: str, at: int) -> Readings:
    """A key in quotes, a colon and its value."""
    for key, key_end in _keys(_plain(kinds[0]), text, at):
        if text.startswith(":", key_end):
            for value, end in _readings(_plain(kinds[1]), text, key_end + 1, in_container=True):
                yield (key, value), end


def _keys(kind: Any, text: str, at: int) -> Readings:
    for key, end in _readings(kind, text, at, in_container=True):
        if isinstance(key, str):
            yield key, end
    if text.startswith('"', at):
        for key, end in _readings(kind, text, at + 1, in_container=True):
            if not isinstance(key, str) and text.startswith('"', end):
                yield key, end + 1


def _rows(item: Callable[[int], Readings], text: str, at: int) -> Iterator[tuple[list[Any], int]]:
    """Any number of items, parted by a comma and a space; the longest rows first."""
    for value, end in item(at):
        if text.startswith(", ", end):
            for others, others_end in _rows(item, text, end + 2):
                yield [value, *others], others_end
        yield [value], end
    yield [], at


def _fixed_row(kinds: list[Any], text: str, at: int) -> Iterator[tuple[list[Any], int]]:
    if not kinds:
        yield [], at
        return
    for value, end in _readings(kinds[0], text, at, in_container=True):
        if len(kinds) == 1:
            yield [value], end
        elif text.startswith(", ", end):
            for others, others_end in _fixed_row(kinds[1:], text, end + 2):
                yield [value, *others], others_end


def _structured(kind: Any, text: str, at: int) -> Readings:
    """JSON: of a type with fields its value, else (any object, a function's arguments, a genson
    builder) what the JSON says."""
    start = len(text) - len(text[at:].lstrip())
    value, end = json.JSONDecoder().raw_decode(text, start)
    yield (_checked(kind, text[start:end]) if _has_fields(kind) else value), _skipped(text, end)


def _has_fields(kind: Any) -> bool:
    is_typed_dict = hasattr(kind, "__required_keys__")  # that of typing_extensions too
    return is_dataclass(kind) or is_typed_dict or hasattr(kind, "model_json_schema")


def _checked(kind: Any, text: str) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind).validate_json(text)


def _skipped(text: str, at: int) -> int:
    """Behind whitespace up to the end of the text; inside of it nothing is skipped."""
    return len(text) if not text[at:].strip() else at


def _bool(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError("a bool is True or False")
    return text == "True"


def _datetime(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(f"{text[:10]}T{text[11:]}")


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


_BRACKETS: Mapping[Any, tuple[str, str]] = MappingProxyType(
    {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}")}
)
_DATE, _TIME = r"\d{4}-\d\d-\d\d", r"\d\d:\d\d:\d\d"
_PLAIN_TYPES: Mapping[Any, tuple[re.Pattern[str], Callable[[str], Any]]] = MappingProxyType(
    {
        int: (re.compile(r"[+-]?\d+"), int),
        float: (re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?"), float),
        bool: (re.compile("True|False"), _bool),
        str: (re.compile('"[^"]*"'), lambda text: text[1:-1]),
        NoneType: (re.compile("None"), lambda text: None),
        datetime.date: (re.compile(_DATE), datetime.date.fromisoformat),
        datetime.time: (re.compile(_TIME), datetime.time.fromisoformat),
        datetime.datetime: (re.compile(rf"{_DATE}\s{_TIME}"), _datetime),
    }
)
