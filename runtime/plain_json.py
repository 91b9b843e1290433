"""JSON that comes from a caller: copied into plain values, and checked on the way."""

from collections.abc import Mapping, Sequence
from typing import Any

from sapwood.runtime.errors import RequestError

MAX_DEPTH = 64  # of lists and objects within each other
MAX_INTEGER_BITS = 4096  # Python writes no number of many thousand digits


def plain_json(value: Any, where: str, *, param: str, depth: int = 0) -> Any:
    """A copy of a JSON value in plain dicts and lists. Raises RequestError for any other value."""
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise RequestError(
            f"{where} has a whole number of more than {MAX_INTEGER_BITS} bits; send it as a string",
            param=param,
        )
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        check_unicode(value, where, param)
        return str(value)
    if depth == MAX_DEPTH:
        raise RequestError(
            f"{where} is nested deeper than {MAX_DEPTH} levels; flatten it", param=param
        )
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise RequestError(f"{where} has a key that is no string", param=param)
        for key in value:
            check_unicode(key, where, param)
        return {
            str(key): plain_json(item, where, param=param, depth=depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain_json(item, where, param=param, depth=depth + 1) for item in value]
    raise RequestError(f"{where} has a {type(value).__name__}, which is no JSON", param=param)


def check_unicode(text: str, where: str, param: str) -> None:
    """Raises RequestError for half of a surrogate pair: JSON can escape it, and no text has it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} is not valid Unicode: a lone surrogate at character {error.start}",
            param=param,
        ) from error
