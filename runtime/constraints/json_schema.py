"""JSON schemas as llguidance is given them: checked, rewritten, with the whitespace asked for."""

from collections.abc import Mapping
from typing import Any

from sapwood.runtime.constraints.spec import ConstraintSpec, Whitespace

# At most eight characters between two tokens: enough for a line break and its indentation, and no
# model can write whitespace until its tokens are used up.
_BOUNDED = r"[ \n\t]{1,8}"


def json_grammar(schema: Any, spec: ConstraintSpec) -> dict[str, Any]:
    """The schema for llguidance, as a grammar of its own or after `%json` in Lark text.

    `spec` tells the whitespace. Raises GrammarError for what cannot be enforced.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return {**schema, "x-guidance": _whitespace_options(spec)}


def _whitespace_options(spec: ConstraintSpec) -> Mapping[str, Any]:
    """In llguidance's words: a pattern is for each place where JSON may have whitespace."""
    if spec.whitespace_pattern is not None:
        return {"whitespace_pattern": spec.whitespace_pattern}
    match spec.whitespace:
        case Whitespace.BOUNDED:
            return {"whitespace_pattern": _BOUNDED}
        case Whitespace.COMPACT:
            return {"whitespace_flexible": False}
        case Whitespace.SPACED:
            separators = {"item_separator": ", ", "key_separator": ": "}
            return {"whitespace_flexible": False, **separators}
