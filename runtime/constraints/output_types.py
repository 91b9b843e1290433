"""The constraint of a Python type: what outlines' types say, as a `ConstraintSpec`.

The meaning is outlines' own, also where it surprises:

- `str` is a text in double quotes, `bool` is `True` or `False` and `None` is `None`: Python's
  spelling, not JSON's. For JSON give a schema: `JsonSchema({"type": "boolean"})`.
- `int` and `float` may have any number of digits.
- items of `list[...]`, `tuple[...]` and `dict[...]` are parted by a comma and one space; a tuple
  has round brackets.
- objects of a type with fields (a pydantic model, a dataclass, a function's arguments) have these
  fields only, unless the type says otherwise; a `JsonSchema` means what JSON Schema says, where
  objects are open.
- a string stands for itself: JSON schemas and regular expressions as text are `JsonSchema(text)`
  and `Regex(text)`.

It differs in four places, where outlines' own would answer something else than was asked:

- `dict` alone is a JSON object, as outlines itself asks OpenAI for; elsewhere it means any JSON
  value, with whitespace without end.
- alternatives that are all plain strings are compared as strings, and never become a regex.
- alternatives that are all JSON schemas stay one; as a regex recursion is cut, and keywords get
  lost.
- dates have the digits 0 to 9; outlines' `\\d` is any digit of Unicode, which `date` cannot read.
"""

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, is_typeddict

from sapwood.runtime.constraints.limits import WHITESPACE_KINDS
from sapwood.runtime.constraints.notation import grammar_spec
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec, Whitespace
from sapwood.runtime.errors import RequestError

if TYPE_CHECKING:
    from outlines.types.dsl import Term

_WAY_OUT = "give a JsonSchema, Regex, CFG or Choice of outlines.types, or a ConstraintSpec"
# What outlines adds to its refusals; its authors cannot help here.
_OUTLINES_ADVICE = ". Please open an issue: https://github.com/dottxt-ai/outlines/issues"


def constraint_of(
    output_type: Any,
    *,
    whitespace: Whitespace | None = None,
    whitespace_pattern: str | None = None,
    backend: str | None = None,
) -> ConstraintSpec:
    """What an answer of `output_type` must satisfy.

    Takes what outlines takes: `Regex`, `CFG` (in Lark or EBNF), `JsonSchema`, `Choice` and the
    other terms of `outlines.types`, pydantic models, dataclasses, TypedDicts, genson builders,
    enums, `Literal`, `Union`, typed containers, int, float, bool, str, dates and times, functions
    (for their arguments), and a `ConstraintSpec`, of which the options that are given replace its
    own.

    `whitespace` (None: bounded) and `whitespace_pattern`, a regular expression that replaces it,
    say where the JSON in it may have whitespace; an empty pattern is compact. `whitespace` has no
    effect on what is not JSON.

    Raises RequestError, with `param` "constraint", for what it does not understand. The first call
    imports outlines, which takes over a second.
    """
    spec = output_type if isinstance(output_type, ConstraintSpec) else _spec_of_type(output_type)
    if whitespace_pattern == "":
        whitespace, whitespace_pattern = Whitespace.COMPACT, None
    if whitespace is not None and spec.kind in WHITESPACE_KINDS:
        spec = replace(spec, whitespace=whitespace, whitespace_pattern=None)
    if whitespace_pattern is not None:
        spec = replace(spec, whitespace_pattern=whitespace_pattern)
    return spec if backend is None else replace(spec, backend=backend)


def _spec_of_type(output_type: Any) -> ConstraintSpec:
    from outlines.types.dsl import Term, python_types_to_terms

    if output_type is dict:
        return ConstraintSpec.json_schema({"type": "object"})
    # outlines, pydantic, jsonschema and outlines_core each refuse with errors of their own.
    try:
        spec = _spec_of_term(python_types_to_terms(output_type))
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(
            f"no constraint can be made of {_few_words(repr(output_type))}: "
            f"{_few_words(str(error).replace(_OUTLINES_ADVICE, ''))}; {_way_out_of(output_type)}",
            param="constraint",
        ) from error
    if spec.kind is not ConstraintKind.JSON_SCHEMA or isinstance(output_type, Term):
        return spec
    return ConstraintSpec.json_schema(_closed(json.loads(spec.text)))


def _way_out_of(output_type: Any) -> str:
    if isinstance(output_type, dict):
        return f"give a schema as JsonSchema(...); or {_WAY_OUT}"
    if isinstance(output_type, list):
        return f"give choices as Choice([...]); or {_WAY_OUT}"
    if output_type in (list, tuple):
        return f"name the type of the items, as in list[int]; or {_WAY_OUT}"
    if is_typeddict(output_type):
        return f"take TypedDict from typing_extensions before Python 3.12; or {_WAY_OUT}"
    return _WAY_OUT


def _closed(node: Any) -> Any:
    """A type's schema whose objects have the properties it names, and no others."""
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    closed = {key: _closed(value) for key, value in node.items()}
    if closed.get("type") == "object" and "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def _spec_of_term(term: "Term") -> ConstraintSpec:
    from outlines.types.dsl import CFG, JsonSchema, to_regex

    if isinstance(term, CFG):
        return grammar_spec(term.definition)
    if isinstance(term, JsonSchema):
        return ConstraintSpec(
            kind=ConstraintKind.JSON_SCHEMA,
            text=term.schema,
            whitespace=_whitespace_of(term.whitespace_pattern),
            whitespace_pattern=term.whitespace_pattern or None,
        )
    leaves = _leaves(term)
    if not leaves:
        raise RequestError(
            "the output type has no choices; give it at least one", param="constraint"
        )
    if (texts := _texts(leaves)) is not None:
        return ConstraintSpec.choice(texts)
    if (schemas := _schemas(leaves)) is not None:
        return ConstraintSpec.json_schema(_any_of(schemas))
    return ConstraintSpec.regex(_with_ascii_dates(to_regex(term)))


def _with_ascii_dates(pattern: str) -> str:
    from outlines.types import date

    return pattern.replace(date.pattern, date.pattern.replace(r"\d", "[0-9]"))


def _whitespace_of(pattern: str | None) -> Whitespace:
    return Whitespace.COMPACT if pattern == "" else Whitespace.BOUNDED


def _leaves(term: "Term") -> "list[Term]":
    """The alternatives of a term, those in alternatives too; a term without any is its own."""
    from outlines.types.dsl import Alternatives, Choice, python_types_to_terms

    if isinstance(term, Choice):
        branches = [python_types_to_terms(item) for item in term.items]
    elif isinstance(term, Alternatives):
        branches = term.terms
    else:
        return [term]
    return [leaf for branch in branches for leaf in _leaves(branch)]


def _texts(leaves: "list[Term]") -> list[str] | None:
    """The strings that they are, each once, None if they are not all."""
    from outlines.types.dsl import String

    texts = [leaf.value for leaf in leaves if isinstance(leaf, String)]
    return list(dict.fromkeys(texts)) if len(texts) == len(leaves) else None


def _schemas(leaves: "list[Term]") -> list[Any] | None:
    """The schemas that they are, None if they are not all, or one has a whitespace of its own."""
    from outlines.types.dsl import JsonSchema

    schemas = [
        json.loads(leaf.schema)
        for leaf in leaves
        if isinstance(leaf, JsonSchema) and leaf.whitespace_pattern is None
    ]
    return schemas if len(schemas) == len(leaves) else None


def _any_of(schemas: list[Any]) -> dict[str, Any]:
    return {"anyOf": [_moved(schema, f"#/anyOf/{i}") for i, schema in enumerate(schemas)]}


def _moved(node: Any, root: str) -> Any:
    """A schema whose references into itself begin at `root`."""
    if isinstance(node, list):
        return [_moved(item, root) for item in node]
    # What has a name of its own is referred to by that name.
    if not isinstance(node, dict) or isinstance(node.get("$id"), str):
        return node
    return {
        key: root + value[1:] if _is_own_reference(key, value) else _moved(value, root)
        for key, value in node.items()
    }


def _is_own_reference(key: str, value: Any) -> bool:
    return key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))


def _few_words(value: object) -> str:
    return " ".join(str(value).split())[:150]
