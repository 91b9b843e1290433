"""Fields of a checkpoint's JSON files, checked by type: the files come from anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from sapwood.runtime.errors import ModelError, UnsupportedModelError

T = TypeVar("T")

_KINDS: Mapping[type, str] = MappingProxyType(
    {
        bool: "true or false",
        int: "a whole number",
        float: "a finite number",
        str: "a string",
        dict: "an object",
    }
)


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file. Raises ModelError where there is no such file or it holds another."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}: it is not a model's folder") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} holds {type(parsed).__name__}, a JSON object was expected")
    return parsed


def field_of(
    source: Mapping[str, Any], name: str, kind: type[T], default: T | None = None, *, where: str
) -> T:
    """The value of a field; null means left out. `where` is the file, for messages.

    A whole number is taken where a float is asked for. Raises ModelError where there is neither a
    value nor a default, UnsupportedModelError for a value of another kind.
    """
    value = source.get(name)
    if value is None:
        if default is None:
            raise ModelError(f"{where} lacks {name!r}")
        return default
    if kind is float and type(value) is int and abs(value) < 2**63:
        value = float(value)
    if (isinstance(value, float) and not math.isfinite(value)) or type(value) is not kind:
        raise wrong_field(where, name, value, _KINDS[kind])
    return value


def token_ids_of(source: Mapping[str, Any], name: str, *, where: str) -> list[int]:
    """The token id or the list of token ids in a field; none where it is left out or null.

    Raises UnsupportedModelError for anything else.
    """
    value = source.get(name)
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise wrong_field(where, name, value, "a token id or a list of them")
    return ids


def wrong_field(where: str, name: str, value: Any, wanted: str) -> UnsupportedModelError:
    """The error for a field that holds something else than `wanted`."""
    return UnsupportedModelError(f"{where}: {name} is {value!r:.80}; it must be {wanted}")
