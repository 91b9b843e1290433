"""JSON schemas in the few keywords that are enforced exactly.

A schema is written anew: references that are resolved, one spelling of what drafts spell
differently, no annotations, and no keyword but those below. What cannot be said in them is refused
by name, with where it is and the way out; what says nothing in its place (`uniqueItems: false`,
`minProperties: 0`) is left out. Property order is kept: it is the order in an answer.

    $ref  allOf  anyOf  oneOf  const  enum  type  format
    properties  patternProperties  additionalProperties  required  minProperties  maxProperties
    prefixItems  items  minItems  maxItems  minLength  maxLength  pattern
    minimum  maximum  exclusiveMinimum  exclusiveMaximum  multipleOf
"""

from typing import Any

from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.schema_keywords import Node, read_node
from sapwood.runtime.constraints.schema_places import Draft, Place, SchemaPlaces


class SchemaReader:
    """Reads one document; `read` is called once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._places = SchemaPlaces(root)
        self._names: dict[int, str] = {}  # of schemas that are referred to, by identity
        self._pending: list[tuple[str, Any, Place]] = []

    def read(self) -> tuple[Any, dict[str, Any]]:
        """The root, and what is referred to as `#/$defs/NAME`. Raises GrammarError.

        O(size of the document): each schema is read once, wherever it is referred to.
        """
        root = self._schema(self._root, self._places.root)
        definitions: dict[str, Any] = {}
        while self._pending:
            name, schema, place = self._pending.pop()
            definitions[name] = self._schema(schema, place)
        return root, definitions

    def _schema(self, schema: Any, place: Place) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarError(
                f"a schema is an object, true or false; at {place.pointer or 'the root'} there is "
                f"{type(schema).__name__}"
            )
        place = self._places.place_of(schema, place)
        if place.draft <= Draft.DRAFT_7 and "$ref" in schema:
            return self._reference(schema["$ref"], place)
        return read_node(Node(schema, place, self._schema, self._reference))

    def _reference(self, reference: Any, place: Place) -> Any:
        target, where = self._places.target(reference, place)
        if isinstance(target, bool):
            return target
        if id(target) not in self._names:
            name = self._names[id(target)] = f"d{len(self._names)}"
            self._pending.append((name, target, where))
        return {"$ref": f"#/$defs/{self._names[id(target)]}"}
