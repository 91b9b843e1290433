"""The constraint that the options of a `gen` ask for."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from sapwood.frontend_lang.options import Options
from sapwood.runtime.constraints.notation import grammar_spec
from sapwood.runtime.constraints.output_types import constraint_of
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec
from sapwood.runtime.errors import RequestError

# Whitespace may follow a number, so that a model can end it as it would in running text.
_REGEX_BY_DTYPE: Mapping[str, str] = MappingProxyType(
    {
        "int": r"[-+]?[0-9]+[ \n]*",
        "float": r"[-+]?[0-9]*\.?[0-9]+[ \n]*",
        "bool": r"(True|False)",
        "str": r'"[^"\\\x00-\x1f]*"',
    }
)
_NUMBER_STOPS = (" ", "\n")


def dtype_name(dtype: object) -> str:
    """`int`, `float`, `bool` or `str`, of a type or its name. Raises RequestError."""
    name = dtype.__name__ if isinstance(dtype, type) else dtype
    if name not in _REGEX_BY_DTYPE:
        raise RequestError(
            f"dtype is int, float, bool or str, not {_few_words(dtype)}; other types go into "
            "output_type",
            param="dtype",
        )
    return cast(str, name)


def constraint_of_options(options: Options) -> ConstraintSpec | None:
    """What an answer must satisfy; None where the options leave it free.

    Raises RequestError whose `param` is the option. An `output_type` imports outlines, which takes
    over a second the first time.
    """
    if (dtype := options.get("dtype")) is not None:
        return ConstraintSpec.regex(_REGEX_BY_DTYPE[dtype_name(dtype)])
    if (pattern := options.get("regex")) is not None:
        return ConstraintSpec.regex(_text("regex", pattern))
    if (schema := options.get("json_schema")) is not None:
        return _of_schema(schema)
    if (grammar := options.get("grammar")) is not None:
        return _renamed("grammar", lambda: grammar_spec(_text("grammar", grammar)))
    if (output_type := options.get("output_type")) is not None:
        return _renamed("output_type", lambda: constraint_of(output_type))
    return None


def with_number_stops(options: Options) -> Options:
    """The options of a `gen` whose dtype is a number: it ends at the first space or new line."""
    dtype = options.get("dtype")
    if dtype is None or dtype_name(dtype) not in ("int", "float"):
        return options
    stop = options.get("stop")
    own = (stop,) if isinstance(stop, str) else tuple(stop or ())
    return {**options, "stop": (*own, *(text for text in _NUMBER_STOPS if text not in own))}


def _of_schema(schema: object) -> ConstraintSpec:
    if isinstance(schema, Mapping):
        try:
            return ConstraintSpec.json_schema(dict(schema))
        except (TypeError, ValueError) as error:
            raise _wrong("json_schema", f"cannot be written as JSON ({error})") from error
    text = _text("json_schema", schema)
    try:
        json.loads(text)
    except ValueError as error:
        raise _wrong("json_schema", f"is not JSON ({error})") from error
    return ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, text=text)


def _text(option: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(option, f"is a text, not {type(value).__name__}")
    return value


def _renamed(option: str, make: Any) -> ConstraintSpec:
    """What `make` makes; its refusal names the option instead of the constraint."""
    try:
        return cast(ConstraintSpec, make())
    except RequestError as error:
        raise RequestError(f"{option}: {error}", param=option) from error


def _wrong(option: str, what: str) -> RequestError:
    return RequestError(f"{option} {what}", param=option)


def _few_words(value: object) -> str:
    return " ".join(repr(value).split())[:80]
