"""The schema that a call's arguments are written by."""

from collections.abc import Iterator, Mapping
from typing import Any

from sapwood.runtime.constraints.schema_places import ALONE, IN_LISTS, IN_MAPS
from sapwood.runtime.tools.tool import Tool

# Keywords by which one value has to satisfy several schemas, or no more than one.
_JOINS = frozenset(
    "allOf oneOf not if dependentSchemas $dynamicRef unevaluatedProperties propertyNames".split()
)
_BESIDE_PROPERTIES = frozenset(("anyOf", "$ref", "patternProperties", "minProperties"))
_OF_SCHEMAS = ("anyOf", "prefixItems")
_OF_NAMED_SCHEMAS = ("properties", "$defs", "definitions")
# Keywords that are for readers. They are most of what tools say, and constrain nothing.
_NOTES = frozenset("title description default examples deprecated $comment".split())


def argument_schema(tool: Tool) -> dict[str, Any]:
    """An object of the tool's parameters and, where it names some and says no more, no others.

    A function takes the arguments that it names. Whatever satisfies this satisfies
    `tool.parameters`. Descriptions are left out.
    """
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = {"type": "object", **_without_notes(tool.parameters)}
    return schema if any(map(_joins, _objects_in(schema))) else _closed(schema)


def _without_notes(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: _without_notes_within(key, value) for key, value in schema.items() if key not in _NOTES
    }


def _without_notes_within(key: str, value: Any) -> Any:
    if key in IN_MAPS and isinstance(value, Mapping):
        return {name: _without_notes(item) for name, item in value.items()}
    if (key in IN_LISTS or key == "items") and isinstance(value, list):
        return [_without_notes(item) for item in value]
    return _without_notes(value) if key in ALONE or key == "items" else value


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with objects that have no properties but the ones that they name."""
    copy = {key: _closed_keyword(key, value) for key, value in schema.items()}
    if _names_all(schema) and "additionalProperties" not in schema:
        copy["additionalProperties"] = False
    return copy


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Whether all that an object must have is among the properties that the schema names.

    What is no schema names nothing; whoever compiles it says what is wrong.
    """
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _closed_keyword(key: str, value: Any) -> Any:
    if key == "items":
        return _closed_if_schema(value)
    if key in _OF_SCHEMAS and isinstance(value, list):
        return [_closed_if_schema(item) for item in value]
    if key in _OF_NAMED_SCHEMAS and isinstance(value, Mapping):
        return {name: _closed_if_schema(item) for name, item in value.items()}
    return value


def _closed_if_schema(value: Any) -> Any:
    return _closed(value) if isinstance(value, Mapping) else value


def _joins(schema: Mapping[str, Any]) -> bool:
    """Whether closing what is in a schema could make another one beside it unsatisfiable."""
    return bool(_JOINS & schema.keys()) or (
        "properties" in schema and bool(_BESIDE_PROPERTIES & schema.keys())
    )


def _objects_in(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
    if isinstance(value, (Mapping, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _objects_in(item)
