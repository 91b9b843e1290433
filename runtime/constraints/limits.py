"""What a constraint may be before anybody compiles it: the checks that need no grammar engine.

At the edge a fault is a RequestError, in a backend a GrammarError; it is found here, once.
"""

import json
from typing import Any

from sapwood.runtime.constraints import BACKENDS
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec, Whitespace
from sapwood.runtime.constraints.whitespace_pattern import is_of_whitespace

MAX_SCHEMA_BYTES = 256 * 1024  # of a JSON schema, a list of choices or a structural tag
MAX_GRAMMAR_BYTES = 64 * 1024  # of a regular expression or a grammar
MAX_CHOICES = 10_000
MAX_JSON_DEPTH = 128  # levels of brackets; an object in an object takes two of a schema's
MAX_NUMBER_DIGITS = 4300  # of an integer in JSON; Python reads no longer ones
MAX_WHITESPACE_PATTERN_LENGTH = 256  # characters

JSON_KINDS = frozenset(
    {ConstraintKind.JSON_SCHEMA, ConstraintKind.CHOICE, ConstraintKind.STRUCTURAL_TAG}
)
# Those in whose answers whitespace can be told apart from text.
WHITESPACE_KINDS = frozenset({ConstraintKind.JSON_SCHEMA, ConstraintKind.STRUCTURAL_TAG})


class LongNumberError(ValueError):
    """A number in JSON with more digits than are taken: the fact, the limit and the way out."""


def json_integer(text: str) -> int:
    """An integer as a JSON parser's `parse_int` reads it. Raises LongNumberError."""
    num_digits = len(text.removeprefix("-"))
    if num_digits > MAX_NUMBER_DIGITS:
        raise LongNumberError(
            f"a number of {num_digits} digits, at most {MAX_NUMBER_DIGITS} are taken; write it "
            "with fewer, or leave it out"
        )
    return int(text)


def fault_of(spec: ConstraintSpec) -> str | None:
    """What is wrong with a constraint, in words that do not name it; None if nothing is.

    Says the limit and the way out, and never more than a few words of the constraint's text.
    Costs one parse of its JSON.
    """
    return _fault_of_fields(spec) or _fault_of_size(spec) or _fault_of_text(spec)


def _fault_of_fields(spec: ConstraintSpec) -> str | None:
    """Python does not check what a dataclass is made of."""
    if not isinstance(spec.kind, ConstraintKind) or not isinstance(spec.text, str):
        return "has a kind or a text of the wrong type; use the methods of ConstraintSpec"
    if not isinstance(spec.whitespace, Whitespace):
        return f"has an unknown whitespace; use one of {', '.join(Whitespace)}"
    if spec.backend is not None and spec.backend not in BACKENDS:
        return f"names an unknown backend; use one of {', '.join(BACKENDS)}"
    return _fault_of_whitespace_pattern(spec)


def _fault_of_whitespace_pattern(spec: ConstraintSpec) -> str | None:
    pattern = spec.whitespace_pattern
    if pattern is None:
        return None
    if spec.kind not in WHITESPACE_KINDS:
        return f"is a {spec.kind}, and whitespace_pattern is for JSON; leave the pattern out"
    if not isinstance(pattern, str) or not pattern or _utf8_len(pattern) is None:
        return (
            "has a whitespace_pattern that is not a regular expression; leave it out, or use "
            f"whitespace {Whitespace.COMPACT!s} for none"
        )
    if len(pattern) > MAX_WHITESPACE_PATTERN_LENGTH:
        return (
            f"has a whitespace_pattern of {len(pattern)} characters; at most "
            f"{MAX_WHITESPACE_PATTERN_LENGTH} are taken"
        )
    if not is_of_whitespace(pattern):
        return (
            "has a whitespace_pattern that is not of JSON's whitespace alone; write it with "
            "spaces, \\t, \\n and \\r (\\s is any of them), such as [ \\n]{0,8}"
        )
    return None


def _fault_of_size(spec: ConstraintSpec) -> str | None:
    if not spec.text.strip():
        return "is empty; leave it out for a free answer"
    limit = MAX_SCHEMA_BYTES if spec.kind in JSON_KINDS else MAX_GRAMMAR_BYTES
    num_bytes = _utf8_len(spec.text)
    if num_bytes is None:
        return "is not valid Unicode"
    if num_bytes > limit:
        return f"has {num_bytes} bytes, at most {limit} are taken; say it in fewer"
    return None


def _fault_of_text(spec: ConstraintSpec) -> str | None:
    if spec.kind not in JSON_KINDS:
        return None
    try:
        value = json.loads(spec.text, parse_constant=_refuse_constant, parse_int=json_integer)
    except LongNumberError as error:
        return f"has {error}"
    except (ValueError, RecursionError) as error:
        return f"is not valid JSON: {str(error)[:100]}"
    if "\\u" in spec.text and _utf8_len(json.dumps(value, ensure_ascii=False)) is None:
        return "is not valid Unicode"
    if _depth(value) > MAX_JSON_DEPTH:
        return f"is nested deeper than {MAX_JSON_DEPTH} levels; use $defs and $ref"
    match spec.kind:
        case ConstraintKind.CHOICE:
            return _fault_of_choices(value)
        case ConstraintKind.STRUCTURAL_TAG:
            return None if isinstance(value, dict) else "is not a JSON object"
    if not isinstance(value, dict | bool):
        return 'is not a JSON schema; that is an object such as {"type": "object"}'
    return None


def _fault_of_choices(value: Any) -> str | None:
    if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
        return "is not a list of strings"
    if not value:
        return "has no choices; give at least one"
    if len(value) > MAX_CHOICES:
        return f"has {len(value)} choices, at most {MAX_CHOICES} are taken; use a regex"
    if not all(value):
        return "has an empty choice; leave it out"
    return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _utf8_len(text: str) -> int | None:
    """Bytes of a text; None for one with lone surrogates, which has none."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None


def _depth(value: Any) -> int:
    """Levels of arrays and objects in what a JSON parser made: no other types are looked into."""
    level, depth = [value], 0
    while level := [item for item in level if type(item) is dict or type(item) is list]:
        depth += 1
        below: list[Any] = []
        for item in level:
            below += item.values() if type(item) is dict else item
        level = below
    return depth
