"""Where the schemas in a JSON schema document are, and what `$ref` refers to.

Nothing is fetched: what is not in the document is refused.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from sapwood.runtime.constraints.interface import GrammarError

IN_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
ALONE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contentSchema",
)


# To read one takes some 25 us, and llguidance as much again: a call is answered within 0.25 s.
MAX_SCHEMAS = 2500
MAX_URI_LENGTH = 2048  # characters, of what a schema is called by


class Draft(IntEnum):
    """Which edition of JSON Schema. Without a `$schema` it is the last."""

    DRAFT_4 = 4
    DRAFT_6 = 6
    DRAFT_7 = 7
    DRAFT_2019 = 2019
    DRAFT_2020 = 2020


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a schema stands: `steps` lead to it from `above`, None at the root; `base` is the URI
    that its references are relative to."""

    base: str
    draft: Draft
    above: "Place | None" = None
    steps: tuple[object, ...] = ()

    @property
    def pointer(self) -> str:
        """A JSON pointer from the root, for messages. Made when it is asked for: a document with
        a long name and many schemas below it would take its length for each of them."""
        if self.above is None:
            return ""
        escaped = (str(step).replace("~", "~0").replace("/", "~1") for step in self.steps)
        return "/".join((self.above.pointer, *escaped))

    def below(self, *steps: object) -> "Place":
        return Place(base=self.base, draft=self.draft, above=self, steps=steps)

    def error(self, keyword: str, problem: str) -> GrammarError:
        """`problem` has the fact and the way out."""
        where = self.pointer or "the root"
        return GrammarError(f"{keyword!r} at {where}: {problem}", keyword=keyword)


class SchemaPlaces:
    """An index of one document. O(its size) to make."""

    def __init__(self, root: Any) -> None:
        """Raises GrammarError for a document of too many schemas."""
        self._places: dict[int, Place] = {}  # by the identity of the schema's dict
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[str, Any] = {}
        self.root = Place(base="", draft=Draft.DRAFT_2020)
        self._index(root, self.root)
        self.root = self.place_of(root, self.root)

    def place_of(self, schema: Any, otherwise: Place) -> Place:
        """Where a schema of the document stands; `otherwise` for true and false."""
        return self._places.get(id(schema), otherwise)

    def target(self, reference: Any, place: Place) -> tuple[Any, Place]:
        """What a `$ref` at `place` refers to. Raises GrammarError."""
        if not isinstance(reference, str):
            raise place.error("$ref", "must be a string")
        uri, fragment = _joined(place, "$ref", reference)
        if uri not in self._resources:
            raise place.error(
                "$ref",
                f"{reference} is not in this schema, and nothing is fetched; put the schema that "
                "it means under $defs and refer to it with #/$defs/NAME",
            )
        target = self._resources[uri]
        if fragment[:1] == "/":
            for step in unquote(fragment)[1:].split("/"):
                target = _child(target, step.replace("~1", "/").replace("~0", "~"))
        elif fragment:
            target = self._anchors.get(f"{uri}#{fragment}")
        if isinstance(target, bool):
            return target, place
        if id(target) not in self._places:
            raise place.error("$ref", f"{reference} leads to no schema; correct it")
        return target, self._places[id(target)]

    def _index(self, schema: Any, place: Place) -> None:
        if not isinstance(schema, dict):
            return
        if len(self._places) == MAX_SCHEMAS:
            raise GrammarError(
                f"there are more than {MAX_SCHEMAS} schemas within the schema, the most that are "
                "taken; make it smaller, and use enum or a pattern for what is only values"
            )
        place = self._named(schema, place)
        self._places[id(schema)] = place
        for steps, child in children_of(schema):
            self._index(child, place.below(*steps))

    def _named(self, schema: Mapping[str, Any], place: Place) -> Place:
        """Take in the schema's own names; its place with the base and draft that they give."""
        if (draft := _draft_of(schema.get("$schema"))) is not None:
            place = replace(place, draft=draft)
        is_reference = place.draft <= Draft.DRAFT_7 and "$ref" in schema
        identifier = schema.get("id" if place.draft <= Draft.DRAFT_4 else "$id")
        if isinstance(identifier, str) and not is_reference:
            uri, fragment = _joined(place, "$id", identifier)
            if len(uri) > MAX_URI_LENGTH:
                raise place.error("$id", f"is longer than {MAX_URI_LENGTH} characters; shorten it")
            if uri != place.base and uri:
                place = replace(place, base=uri)
                self._resources[uri] = schema
            if fragment and place.draft <= Draft.DRAFT_7:
                self._anchors[f"{place.base}#{fragment}"] = schema
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(keyword), str):
                self._anchors[f"{place.base}#{anchor}"] = schema
        return place


def children_of(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[object, ...], Any]]:
    """The schemas right below one, each with the steps to it."""
    for keyword, value in schema.items():
        if keyword in IN_MAPS or keyword == "dependencies":
            if isinstance(value, dict):
                yield from (((keyword, name), child) for name, child in value.items())
        elif keyword in IN_LISTS or keyword == "items":
            if isinstance(value, list):
                yield from (((keyword, i), child) for i, child in enumerate(value))
            elif keyword == "items":
                yield (keyword,), value
        elif keyword in ALONE:
            yield (keyword,), value


def _joined(place: Place, keyword: str, reference: str) -> tuple[str, str]:
    """The URI that a reference means, and its fragment. Raises GrammarError for what is none."""
    if reference[:1] == "#":
        return place.base, reference[1:]
    try:
        uri, fragment = urldefrag(urljoin(place.base, reference))
    except ValueError as error:
        raise place.error(keyword, f"is not a URI ({error}); correct it") from error
    return uri, fragment


def _child(value: Any, step: str) -> Any:
    if isinstance(value, dict):
        return value.get(step)
    if isinstance(value, list) and _INDEX.fullmatch(step) and int(step) < len(value):
        return value[int(step)]
    return None


_INDEX = re.compile("[0-9]{1,9}")
_DRAFT = re.compile(r"https?://json-schema\.org/(?:draft/(\d{4})-\d\d|draft-0(\d))/schema#?")


def _draft_of(value: Any) -> Draft | None:
    match = _DRAFT.fullmatch(value) if isinstance(value, str) else None
    number = int(match[1] or match[2]) if match else 0
    return Draft(number) if number in Draft.__members__.values() else None
