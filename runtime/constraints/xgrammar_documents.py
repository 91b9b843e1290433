"""Constraints in the words of xgrammar, without what it drops in silence.

A regular expression is written anew with explicit characters: xgrammar takes anchors and escapes
that it does not know for nothing or for letters, and its dot is a line feed as well. JSON schemas
within a structural tag are checked here for keywords that it compiles and does not enforce, as the
JSON there is not looked at again once an answer is finished.
"""

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from sapwood.runtime.constraints.explicit_regex import read, written
from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.schema_text import ANNOTATIONS, read_schema
from sapwood.runtime.constraints.spec import ConstraintSpec, Whitespace
from sapwood.runtime.regex_syntax import RegexError

MAX_WHITESPACE = 8  # characters between two tokens of JSON: a line break and its indentation

_WHITESPACE_OPTIONS: Mapping[Whitespace, Mapping[str, Any]] = MappingProxyType(
    {
        Whitespace.BOUNDED: {"any_whitespace": True, "max_whitespace_cnt": MAX_WHITESPACE},
        Whitespace.COMPACT: {"any_whitespace": False, "separators": (",", ":")},
        Whitespace.SPACED: {"any_whitespace": False, "separators": (", ", ": ")},
    }
)
_NOT_ENFORCED = frozenset(
    "not if then else contains minContains maxContains uniqueItems dependentRequired "
    "dependentSchemas dependencies unevaluatedItems unevaluatedProperties $dynamicRef "
    "minLength maxLength".split()  # with a bound, strings may have control characters
)
# Beside one of these, other keywords are dropped.
_EXCLUSIVE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_TAGS = frozenset({"tags", "at_least_one", "stop_after_first"})
_FIELDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "structural_tag": frozenset({"format"}),
        "const_string": frozenset({"value"}),
        "json_schema": frozenset({"json_schema", "style", "strict"}),
        "regex": frozenset({"pattern"}),
        "grammar": frozenset({"grammar", "syntax"}),
        "any_text": frozenset({"excludes"}),
        "sequence": frozenset({"elements"}),
        "or": frozenset({"elements"}),
        "optional": frozenset({"content"}),
        "star": frozenset({"content"}),
        "plus": frozenset({"content"}),
        "repeat": frozenset({"content", "min", "max"}),
        "tag": frozenset({"begin", "content", "end"}),
        "triggered_tags": _TAGS | {"triggers", "excludes"},
        "tags_with_separator": _TAGS | {"separator"},
        "token": frozenset({"token"}),
        "token_triggered_tags": _TAGS | {"trigger_tokens", "exclude_tokens"},
    }
)
_SCHEMA_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalItems", "additionalProperties", "propertyNames")


def json_options(spec: ConstraintSpec) -> Mapping[str, Any]:
    """How xgrammar is to write JSON. `strict_mode` closes objects that a schema leaves open."""
    if spec.whitespace_pattern is not None:
        raise GrammarError(
            "xgrammar takes no whitespace pattern; ask for compact, spaced or bounded whitespace, "
            "or choose another backend"
        )
    return {**_WHITESPACE_OPTIONS[spec.whitespace], "strict_mode": False}


def regex(pattern: str) -> str:
    """A regular expression that xgrammar reads as it is meant. Raises GrammarError."""
    try:
        tree = read(pattern)
    except RegexError as error:
        raise GrammarError(
            f"the regular expression is not taken for xgrammar: {error}; change it or choose "
            "another backend"
        ) from error
    return written(tree, lambda code_point: f"\\u{{{code_point:X}}}")


def choice_grammar(choices: list[str]) -> str:
    """A grammar in EBNF that has these strings."""
    literals = ("".join(f"\\U{ord(character):08X}" for character in choice) for choice in choices)
    return "root ::= " + " | ".join(f'"{literal}"' for literal in literals)


def structural_tag(text: str) -> dict[str, Any]:
    """The document, checked, in the newer of xgrammar's two forms. Raises GrammarError."""
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the structural tag is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise GrammarError("a structural tag is a JSON object with a format")
    checked = _from_structures(document) if "structures" in document else document
    for part in _objects(checked):
        _check_element(part)
    return checked


def _check_element(part: dict[str, Any]) -> None:
    """Refuses what xgrammar would drop, and puts the rest into its words, in place."""
    known = _FIELDS.get(part.get("type", ""))
    if known is None:
        raise GrammarError(
            f"xgrammar takes no {part.get('type')!r} in a structural tag, only {', '.join(_FIELDS)}"
        )
    for field in part.keys() - known - {"type"}:
        raise GrammarError(
            f"xgrammar takes no {field!r} in a {part['type']} of a structural tag; leave it out or "
            "choose another backend"
        )
    match part:
        case {"type": "json_schema", "json_schema": schema}:
            refuse_what_is_not_enforced(read_schema(json.dumps(schema)))
            part.pop("strict", None)  # it is, always
            if part.get("style", "json") == "json":
                part.pop("style", None)
            else:
                part["max_whitespace_cnt"] = MAX_WHITESPACE
        case {"type": "regex", "pattern": str(pattern)}:
            part["pattern"] = regex(pattern)


def named_tokens(document: Mapping[str, Any]) -> tuple[set[int], set[str]]:
    """Ids and spellings of what a structural tag names: its tags, triggers and tokens."""
    names: list[Any] = []
    for part in _objects(document):
        for field in ("begin", "end", "token", "triggers", "trigger_tokens"):
            value = part.get(field)
            names += value if isinstance(value, list) else [value]
    ids = {name for name in names if isinstance(name, int) and not isinstance(name, bool)}
    return ids, {name for name in names if isinstance(name, str)}


def _from_structures(document: Mapping[str, Any]) -> dict[str, Any]:
    """`{"structures": [{"begin", "schema", "end"}], "triggers"}`, as older programs write it."""
    try:
        tags = [
            {
                "type": "tag",
                "begin": structure["begin"],
                "content": {"type": "json_schema", "json_schema": structure["schema"]},
                "end": structure["end"],
            }
            for structure in document["structures"]
        ]
        triggers = document["triggers"]
    except (KeyError, TypeError) as error:
        raise GrammarError(
            f"the structural tag lacks {error}; each of its structures has a begin, a schema and "
            "an end, and beside them are triggers"
        ) from error
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags},
    }


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects of a document but those in its JSON schemas."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting.extend(child for key, child in node.items() if key != "json_schema")
        elif isinstance(node, list):
            waiting.extend(node)


def refuse_what_is_not_enforced(schema: Mapping[str, Any] | bool) -> None:
    """Raises GrammarError with the keyword."""
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        for keyword in node:
            if keyword in _NOT_ENFORCED:
                raise _not_enforced(keyword)
        _refuse_siblings(node)
        waiting.extend(node[keyword] for keyword in _SCHEMAS if keyword in node)
        for keyword in _SCHEMA_LISTS:
            waiting.extend(node.get(keyword) or ())
        for keyword in _SCHEMA_BY_NAME:
            waiting.extend((node.get(keyword) or {}).values())


def _refuse_siblings(node: Mapping[str, Any]) -> None:
    for exclusive in _EXCLUSIVE:
        if exclusive in node:
            others = node.keys() - ANNOTATIONS - {exclusive}
            for other in sorted(others):
                raise _not_enforced(f"{other} beside {exclusive}", keyword=other)


def _not_enforced(what: str, *, keyword: str | None = None) -> GrammarError:
    return GrammarError(
        f"xgrammar does not enforce {what} within a structural tag; leave it out or choose another "
        "backend",
        keyword=keyword or what,
    )
