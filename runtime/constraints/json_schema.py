"""JSON schemas as llguidance is given them: checked, written anew, with the whitespace asked for.

The order of `properties` is the order in an answer. A string in an answer is written without
\\u escapes: with them a name could be written in two ways, and the second would go unchecked.
"""

import json
from collections.abc import Mapping
from typing import Any

from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.schema_graph import settled
from sapwood.runtime.constraints.schema_reader import SchemaReader
from sapwood.runtime.constraints.spec import ConstraintSpec, Whitespace
from sapwood.runtime.constraints.whitespace_pattern import json_whitespace

MAX_BYTES = 256 * 1024
MAX_DEPTH = 64  # objects and lists within each other

# At most eight characters between two tokens: enough for a line break and its indentation, and no
# model can write whitespace until its tokens are used up.
_BOUNDED = r"[ \n\t]{1,8}"
_ESCAPES = 'nrbtf\\"'  # after a backslash


def parsed_json(text: str) -> Any:
    """A JSON document within the limits. Raises GrammarError."""
    num_bytes = len(text.encode(errors="replace"))
    if num_bytes > MAX_BYTES:
        raise GrammarError(
            f"the schema has {num_bytes} bytes, at most {MAX_BYTES} are taken; shorten it"
        )
    try:
        value = json.loads(text, parse_constant=_no_json_number)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is not JSON: {error}") from error
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raises GrammarError for what is nested too deeply. O(size)."""
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise GrammarError(
                f"the schema is nested deeper than {MAX_DEPTH}; put inner schemas under $defs"
            )
        below = [c for v in level if isinstance(v, dict) for c in v.values()]
        level = below + [c for v in level if isinstance(v, list) for c in v]
        depth += 1


def json_grammar(schema: Any, spec: ConstraintSpec) -> dict[str, Any]:
    """The schema for llguidance, as a grammar of its own or after `%json` in Lark text.

    `spec` tells the whitespace. Raises GrammarError for what cannot be enforced.
    """
    check_depth(schema)
    try:
        root, definitions = settled(*SchemaReader(schema).read())
    except RecursionError as error:
        raise GrammarError(
            "the schema's references lead too deep; split the longest chain of references",
            keyword="$ref",
        ) from error
    if root is False:
        raise GrammarError("no answer satisfies this schema; make it less strict")
    root = {} if root is True else root
    options = {**_whitespace_options(spec), "json_allowed_escapes": _ESCAPES}
    return {**root, **({"$defs": definitions} if definitions else {}), "x-guidance": options}


def _no_json_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _whitespace_options(spec: ConstraintSpec) -> Mapping[str, Any]:
    """In llguidance's words: a pattern is for each place where JSON may have whitespace."""
    if spec.whitespace_pattern is not None:
        return {"whitespace_pattern": json_whitespace(spec.whitespace_pattern)}
    match spec.whitespace:
        case Whitespace.BOUNDED:
            return {"whitespace_pattern": _BOUNDED}
        case Whitespace.COMPACT:
            return {"whitespace_flexible": False}
        case Whitespace.SPACED:
            separators = {"item_separator": ", ", "key_separator": ": "}
            return {"whitespace_flexible": False, **separators}
