"""A JSON schema as it arrives: read, and checked for what no backend could be given."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sapwood.runtime.constraints.interface import GrammarError

MAX_TEXT_LEN = 2**18  # characters
MAX_DEPTH = 64
# Keywords that say nothing of what a value may be.
ANNOTATIONS = frozenset(
    "$schema $id $comment $defs definitions title description default examples deprecated readOnly "
    "writeOnly".split()
)


def read_schema(text: str) -> Mapping[str, Any] | bool:
    """The schema in a text. Raises GrammarError. O(text)."""
    if len(text) > MAX_TEXT_LEN:
        raise GrammarError(
            f"the JSON schema has {len(text)} characters, the limit is {MAX_TEXT_LEN}; shorten it"
        )
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema is not valid JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError("a JSON schema is an object, true or false")
    for node, depth in _nodes(schema):
        if depth > MAX_DEPTH:
            raise GrammarError(
                f"the JSON schema is nested deeper than {MAX_DEPTH}, which is the limit; put parts "
                "of it into $defs"
            )
        if isinstance(node, dict):
            _refuse_foreign_references(node)
    return schema


def _nodes(value: Any) -> Iterator[tuple[Any, int]]:
    """All objects and arrays in a JSON value, each with its depth."""
    waiting = [(value, 1)]
    while waiting:
        node, depth = waiting.pop()
        if isinstance(node, dict | list):
            yield node, depth
            children = node.values() if isinstance(node, dict) else node
            waiting.extend((child, depth + 1) for child in children)


def _refuse_foreign_references(node: Mapping[str, Any]) -> None:
    for keyword in ("$ref", "$dynamicRef"):
        target = node.get(keyword)
        if isinstance(target, str) and not target.startswith("#"):
            raise GrammarError(
                f"{keyword} {target!r} leads out of the JSON schema, and nothing is fetched; "
                "put what it means into $defs and refer to that with #/$defs/",
                keyword=keyword,
            )
