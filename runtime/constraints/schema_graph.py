"""Checks of a schema as a whole, once it is written anew (`schema_reader`).

What refers to itself without end, what no finite answer satisfies, `oneOf` that can be said as
`anyOf`, and how large the grammar gets: none of it can be seen at one keyword.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from decimal import Decimal
from typing import Any

from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.schema_disjoint import Disjointness
from sapwood.runtime.constraints.schema_keywords import (
    INSTANCE_TYPES,
    MAX_MULTIPLE,
    children,
    type_of,
    without_tens,
)

MAX_ALTERNATIVES = 200  # of one place where combinations are multiplied out
MAX_EXPANDED = 50_000  # schemas in all
# Of one object: the time to compile grows with their square, and from 800 that may be left out on,
# a mask can take more than its limit of work.
MAX_PROPERTIES = 700
MAX_LEVELS = (
    400  # through references too; llguidance is recursive, and needs 5 kB of stack for each
)
_DEFINITIONS = "#/$defs/"


def name_of(reference: str) -> str:
    return reference.removeprefix(_DEFINITIONS)


def settled(root: Any, definitions: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The schema without `oneOf` and without what has no finite answer. Raises GrammarError.

    O(size), but for `oneOf`: there, each pair of options is compared.
    """
    _refuse_loops(definitions)
    _refuse_deep(root, definitions)
    productive = _productive(definitions)
    if not _has_answer(root, productive):
        raise GrammarError("no answer satisfies this schema; make it less strict")
    disjointness = Disjointness(definitions)
    root = _settled(root, productive, disjointness)
    kept = {k: _settled(v, productive, disjointness) for k, v in definitions.items()}
    kept = {k: v for k, v in kept.items() if k in productive}
    _Multiples(kept).check(root)
    _Expansion(kept).check(root)
    return root, kept


def in_place(schema: Any) -> Iterator[Any]:
    """The schemas that hold for the same value."""
    if isinstance(schema, dict):
        for keyword in ("allOf", "anyOf", "oneOf"):
            yield from schema.get(keyword, ())


def _refuse_loops(definitions: Mapping[str, Any]) -> None:
    """References that lead back to themselves for the same value."""
    edges = {name: set(_references_in_place(schema)) for name, schema in definitions.items()}
    done: set[str] = set()
    for start in edges:
        path = {start: None}  # in order, and found in O(1)
        open_edges = [iter(edges[start])]
        while open_edges:
            following = next(open_edges[-1], None)
            if following is None:
                open_edges.pop()
                done.add(path.popitem()[0])
            elif following in path:
                raise GrammarError(
                    "'$ref': a schema refers to itself for the same value, which never ends; "
                    "refer to it from a property or an item",
                    keyword="$ref",
                )
            elif following not in done:
                path[following] = None
                open_edges.append(iter(edges[following]))


def _references_in_place(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict) and "$ref" in schema:
        yield name_of(schema["$ref"])
    for member in in_place(schema):
        yield from _references_in_place(member)


def _refuse_deep(root: Any, definitions: Mapping[str, Any]) -> None:
    """What llguidance would meet too deep within: it follows a reference where it first sees it."""
    seen: set[str] = set()
    stack = [(root, 0)]
    while stack:
        schema, level = stack.pop()
        if level > MAX_LEVELS:
            raise GrammarError(
                f"the schema is deeper than {MAX_LEVELS} levels, through references as well; "
                "split the longest chain of references",
                keyword="$ref",
            )
        below = list(children(schema))
        if isinstance(schema, dict) and (name := name_of(schema.get("$ref", ""))) in definitions:
            below += [definitions[name]] if name not in seen else []
            seen.add(name)
        stack += [(child, level + 1) for child in reversed(below)]


def _productive(definitions: Mapping[str, Any]) -> frozenset[str]:
    """The definitions that a finite answer satisfies, as far as references decide it.

    A definition is looked at again only when one that it refers to has been found.
    """
    referring: dict[str, list[str]] = {}
    for name, schema in definitions.items():
        for reference in set(_references(schema)):
            referring.setdefault(reference, []).append(name)
    found: set[str] = set()
    waiting = dict.fromkeys(definitions)
    while waiting:
        looked_at, waiting = waiting, {}
        for name in looked_at:
            if name not in found and _has_answer(definitions[name], found):
                found.add(name)
                waiting |= dict.fromkeys(referring.get(name, ()))
    return frozenset(found)


def _references(schema: Any) -> Iterator[str]:
    """The names of all definitions that are referred to somewhere in a schema."""
    stack = [schema]
    while stack:
        schema = stack.pop()
        if isinstance(schema, dict) and "$ref" in schema:
            yield name_of(schema["$ref"])
        stack.extend(children(schema))


def _has_answer(schema: Any, productive: Set[str]) -> bool:
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and name_of(schema["$ref"]) not in productive:
        return False
    if not all(_has_answer(member, productive) for member in schema.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        options = schema.get(keyword)
        if options is not None and not any(_has_answer(o, productive) for o in options):
            return False
    types = set(schema.get("type", INSTANCE_TYPES))
    return (
        bool(types - {"object", "array"})
        or ("object" in types and _has_object(schema, productive))
        or ("array" in types and _has_array(schema, productive))
    )


def _has_object(schema: Mapping[str, Any], productive: Set[str]) -> bool:
    properties = schema.get("properties", {})
    rest = True if schema.get("patternProperties") else schema.get("additionalProperties", True)
    return all(
        _has_answer(properties.get(name, rest), productive) for name in schema.get("required", ())
    )


def _has_array(schema: Mapping[str, Any], productive: Set[str]) -> bool:
    prefix, low = schema.get("prefixItems", []), schema.get("minItems", 0)
    needed = list(prefix[:low])
    if low > len(prefix):
        needed.append(schema.get("items", True))
    return all(_has_answer(item, productive) for item in needed)


def _settled(schema: Any, productive: frozenset[str], disjointness: Disjointness) -> Any:
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and name_of(schema["$ref"]) not in productive:
        return False
    if "oneOf" in schema:
        disjointness.check(schema["oneOf"], schema["$at"])
        schema = {
            {"oneOf": "anyOf"}.get(k, k): v for k, v in _free_any_of(schema).items() if k != "$at"
        }

    def below(child: Any) -> Any:
        return _settled(child, productive, disjointness)

    result: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in ("allOf", "anyOf", "prefixItems"):
            result[keyword] = [below(child) for child in value]
        elif keyword in ("properties", "patternProperties"):
            result[keyword] = {name: below(child) for name, child in value.items()}
        elif keyword in ("items", "additionalProperties"):
            result[keyword] = below(value)
        else:
            result[keyword] = value
    return result


def _free_any_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """With its `anyOf` under `allOf`, so that another may take its name."""
    if "anyOf" not in schema:
        return schema
    moved = {"anyOf": schema["anyOf"]}
    rest = {k: v for k, v in schema.items() if k not in ("anyOf", "allOf")}
    return {**rest, "allOf": [*schema.get("allOf", ()), moved]}


class _Multiples:
    """How large `multipleOf` gets where several hold for one value, and their multiple counts."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._found: dict[str, int] = {}  # by definition

    def check(self, root: Any) -> None:
        """Raises GrammarError where it gets too large. O(size), times the depth of nesting."""
        stack = [root, *self._definitions.values()]
        while stack:
            schema = stack.pop()
            if self._of(schema) > MAX_MULTIPLE:
                raise GrammarError(
                    "'multipleOf': the least common multiple of those that are combined is more "
                    f"than {MAX_MULTIPLE} without its factors of ten; use rounder ones",
                    keyword="multipleOf",
                )
            stack.extend(children(schema))

    def _of(self, schema: Any) -> int:
        if isinstance(schema, bool):
            return 1
        found = _coefficient(schema["multipleOf"]) if "multipleOf" in schema else 1
        if "$ref" in schema:
            found = math.lcm(found, self._of_definition(name_of(schema["$ref"])))
        for member in in_place(schema):
            found = math.lcm(found, self._of(member))
        return min(without_tens(found), MAX_MULTIPLE + 1)

    def _of_definition(self, name: str) -> int:
        if name not in self._found:
            self._found[name] = self._of(self._definitions.get(name, True))
        return self._found[name]


def _coefficient(value: float) -> int:
    """The digits of a decimal number. Where the point stands only adds factors of ten."""
    return int("".join(map(str, Decimal(repr(value)).as_tuple().digits)))


class _Expansion:
    """How large a schema gets when its combinations are multiplied out, which llguidance does.

    The number of alternatives is kept for each type: those of different types drop out.
    """

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._alternatives: dict[str, Counter[str]] = {}  # by definition
        self._sizes: dict[str, int] = {}
        self._property_counts: dict[str, int] = {}

    def check(self, root: Any) -> None:
        """Raises GrammarError where it gets too large."""
        total = sum(self._size(schema) for schema in (root, *self._definitions.values()))
        if total > MAX_EXPANDED:
            raise GrammarError(
                f"the schema becomes {total} schemas where it is multiplied out, at most "
                f"{MAX_EXPANDED} are taken; use fewer alternatives (anyOf, oneOf) in what is "
                "combined (allOf, or keywords side by side)",
                keyword="anyOf",
            )

    def _size(self, schema: Any) -> int:
        """Schemas in it, once multiplied out. At most a little above the limit."""
        if isinstance(schema, bool):
            return 1
        if self._num_properties(schema) > MAX_PROPERTIES:
            raise GrammarError(
                f"an object has more than {MAX_PROPERTIES} properties; use a list of objects with "
                "a name and a value",
                keyword="properties",
            )
        own = 1 + sum(self._size(child) for child in children(schema)) + _num_values(schema)
        members = self._members(schema)
        if len(members) < 2:
            return min(own, MAX_EXPANDED + 1)
        num_each = [self._alternatives_of(member).total() for member in members]
        own += sum(self._referred_size(member) for member in members)
        joined = self._alternatives_of(schema).total()
        if joined > max(MAX_ALTERNATIVES, *num_each):
            raise GrammarError(
                f"a place in the schema has {joined} alternatives where its combinations are "
                f"multiplied out, at most {MAX_ALTERNATIVES} are taken; use fewer in anyOf, oneOf "
                "or enum that are combined",
                keyword="anyOf",
            )
        copies = min(math.prod(num_each) // max(num_each), joined)
        return min(own * max(1, copies), MAX_EXPANDED + 1)

    def _members(self, schema: Mapping[str, Any]) -> list[Any]:
        """What is intersected: each combining keyword, and the others together."""
        plain = {k: v for k, v in schema.items() if k not in _IN_PLACE}
        members: list[Any] = [plain] if plain else []
        members += ({k: schema[k]} for k in ("$ref", "anyOf", "enum") if k in schema)
        return members + list(schema.get("allOf", ()))

    def _referred_size(self, member: Any) -> int:
        """A reference that is combined is copied."""
        if not isinstance(member, dict) or "$ref" not in member:
            return 0
        name = name_of(member["$ref"])
        if name not in self._sizes:
            self._sizes[name] = 0  # for what is recursive
            self._sizes[name] = self._size(self._definitions.get(name, True))
        return self._sizes[name]

    def _num_properties(self, schema: Any) -> int:
        """Of an object that satisfies it, as far as they are listed."""
        if isinstance(schema, bool):
            return 0
        count = len({*schema.get("properties", ()), *schema.get("required", ())})
        count += sum(self._num_properties(member) for member in schema.get("allOf", ()))
        count += max(map(self._num_properties, schema.get("anyOf", ())), default=0)
        if "$ref" in schema and len(schema) > 1:
            count += self._num_properties_of(name_of(schema["$ref"]))
        return min(count, MAX_PROPERTIES + 1)

    def _num_properties_of(self, name: str) -> int:
        if name not in self._property_counts:
            self._property_counts[name] = 0  # for what is recursive
            schema = self._definitions.get(name, True)
            self._property_counts[name] = self._num_properties(schema)
        return self._property_counts[name]

    def _alternatives_of(self, schema: Any) -> Counter[str]:
        if isinstance(schema, bool):
            return Counter(INSTANCE_TYPES)
        found = Counter(INSTANCE_TYPES)
        if "type" in schema:
            found = Counter("number" if t == "integer" else t for t in schema["type"])
        if "$ref" in schema:
            found = _product(found, self._of_definition(name_of(schema["$ref"])))
        if "enum" in schema:
            found = _product(found, Counter(map(type_of, schema["enum"])))
        if "anyOf" in schema:
            options = (self._alternatives_of(option) for option in schema["anyOf"])
            found = _product(found, sum(options, Counter()))
        for member in schema.get("allOf", ()):
            found = _product(found, self._alternatives_of(member))
        return found

    def _of_definition(self, name: str) -> Counter[str]:
        if name not in self._alternatives:
            self._alternatives[name] = Counter(INSTANCE_TYPES)
            self._alternatives[name] = self._alternatives_of(self._definitions.get(name, True))
        return self._alternatives[name]


_IN_PLACE = frozenset({"$ref", "allOf", "anyOf", "enum", "const"})


def _num_values(schema: Mapping[str, Any]) -> int:
    return len(schema.get("enum", ()))


def _product(left: Counter[str], right: Counter[str]) -> Counter[str]:
    return Counter({t: min(left[t] * right[t], 10**9) for t in left.keys() & right.keys()})
