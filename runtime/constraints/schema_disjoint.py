"""Whether no value satisfies two schemas: then `oneOf` of them is `anyOf`.

Sound and not complete: what cannot be shown counts as overlapping. Works on schemas that are
written anew (`schema_reader`), looks through references, and takes of each schema less than it
says: the values of one part of a conjunction include those of the whole.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import combinations
from types import MappingProxyType
from typing import Any

from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.schema_keywords import INSTANCE_TYPES, type_of
from sapwood.runtime.constraints.schema_places import Place

MAX_OPTIONS = 200
MAX_DEPTH = 12  # of properties within properties
MAX_WORK = 100_000  # in the parts of schemas that are compared; at most some 300 ms
_VALUE_WORK = 0.5  # of an enum's value


class Disjointness:
    """Compares schemas of one document.

    The comparisons of options within options multiply, so there is a limit of work for all.
    """

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._work = 0.0

    def check(self, options: list[Any], place: Place) -> None:
        """Raises GrammarError where one value may satisfy two of the options."""
        where = place.pointer or "the root"
        if len(options) > MAX_OPTIONS:
            raise GrammarError(
                f"'oneOf' at {where} has {len(options)} options, at most {MAX_OPTIONS} are "
                "compared; use anyOf",
                keyword="oneOf",
            )
        for (i, one), (j, other) in combinations(enumerate(options), 2):
            if not self._are_disjoint(one, other, MAX_DEPTH):
                raise GrammarError(
                    f"'oneOf' at {where}: options {i} and {j} may hold for the same value; use "
                    "anyOf, or give both a required property with different const values",
                    keyword="oneOf",
                )

    def _are_disjoint(self, one: Any, other: Any, depth: int) -> bool:
        if one is False or other is False:
            return True
        if not depth or one is True or other is True:
            return False
        parts, other_parts = list(self._parts(one, depth)), list(self._parts(other, depth))
        self._count_work(*parts, *other_parts)
        return (
            any(self._options_are_disjoint(part, other, depth) for part in parts if "anyOf" in part)
            or any(
                self._options_are_disjoint(part, one, depth)
                for part in other_parts
                if "anyOf" in part
            )
            or self._conjunctions_are_disjoint(parts, other_parts, depth)
        )

    def _count_work(self, *parts: Mapping[str, Any]) -> None:
        self._work += sum(1 + _VALUE_WORK * len(part.get("enum", ())) for part in parts)
        if self._work > MAX_WORK:
            raise GrammarError(
                "'oneOf': to tell its options apart is too much work; use anyOf, or fewer and "
                "simpler options",
                keyword="oneOf",
            )

    def _options_are_disjoint(self, part: Mapping[str, Any], other: Any, depth: int) -> bool:
        return all(self._are_disjoint(option, other, depth - 1) for option in part["anyOf"])

    def _parts(self, schema: Any, depth: int) -> Iterator[Mapping[str, Any]]:
        """What a schema is the conjunction of. Those of `oneOf` are as those of `anyOf` here."""
        if isinstance(schema, bool) or not depth:
            return
        plain = {k: v for k, v in schema.items() if k not in ("$ref", "allOf", "anyOf", "oneOf")}
        yield plain
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                yield {"anyOf": schema[keyword]}
        if "$ref" in schema:
            name = schema["$ref"].removeprefix("#/$defs/")
            yield from self._parts(self._definitions.get(name, True), depth - 1)
        for member in schema.get("allOf", ()):
            yield from self._parts(member, depth - 1)

    def _conjunctions_are_disjoint(
        self, parts: list[Mapping[str, Any]], other_parts: list[Mapping[str, Any]], depth: int
    ) -> bool:
        shared = _types_of(parts) & _types_of(other_parts)
        values, other_values = _values_of(parts), _values_of(other_parts)
        if values is not None and other_values is not None and not values & other_values:
            return True
        return all(
            (kind == "object" and self._objects_are_disjoint(parts, other_parts, depth))
            or (kind in _RANGES and _ranges_are_disjoint(kind, parts, other_parts))
            for kind in shared
        )

    def _objects_are_disjoint(
        self, parts: list[Mapping[str, Any]], other_parts: list[Mapping[str, Any]], depth: int
    ) -> bool:
        """A property that any value of both has, with values that have nothing in common."""
        required = {n for part in (*parts, *other_parts) for n in part.get("required", ())}
        return any(
            self._are_disjoint(mine, theirs, depth - 1)
            for name in required
            for mine in _property_schemas(parts, name)
            for theirs in _property_schemas(other_parts, name)
        )


def _property_schemas(parts: list[Mapping[str, Any]], name: str) -> Iterator[Any]:
    for part in parts:
        if name in part.get("properties", ()):
            yield part["properties"][name]
        elif part.get("additionalProperties") is False and "patternProperties" not in part:
            yield False
        for values in _listed(part):
            found = [v[name] for v in values if isinstance(v, dict) and name in v]
            yield {"enum": found} if found else False


def _types_of(parts: list[Mapping[str, Any]]) -> frozenset[str]:
    types = INSTANCE_TYPES
    for part in parts:
        if "type" in part:
            types &= {"number" if name == "integer" else name for name in part["type"]}
        for values in _listed(part):
            types &= set(map(type_of, values))
    return types


def _listed(part: Mapping[str, Any]) -> Iterator[list[Any]]:
    """The values that `const` and `enum` allow."""
    if "const" in part:
        yield [part["const"]]
    if "enum" in part:
        yield part["enum"]


def _values_of(parts: list[Mapping[str, Any]]) -> frozenset[str] | None:
    """The only values there may be, as canonical text; None where they are not listed."""
    found: frozenset[str] | None = None
    for part in parts:
        for values in _listed(part):
            texts = frozenset(map(_canonical, values))
            found = texts if found is None else found & texts
    return found


def _canonical(value: Any) -> str:
    """Equal for equal values: 1 and 1.0 are the same number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(map(_canonical, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{_canonical(v)}" for k, v in sorted(value.items()))
    return json.dumps(value)


# For each type that has a size: the keywords of its least and of its greatest.
_RANGES = MappingProxyType(
    {
        "number": ("minimum", "maximum"),
        "string": ("minLength", "maxLength"),
        "array": ("minItems", "maxItems"),
    }
)


def _ranges_are_disjoint(
    kind: str, parts: list[Mapping[str, Any]], other_parts: list[Mapping[str, Any]]
) -> bool:
    least, greatest = _RANGES[kind]

    def ends_before(left: list[Mapping[str, Any]], right: list[Mapping[str, Any]]) -> bool:
        highs = [part[greatest] for part in left if greatest in part]
        lows = [part[least] for part in right if least in part]
        return bool(highs and lows) and min(highs) < max(lows)

    return ends_before(parts, other_parts) or ends_before(other_parts, parts)
