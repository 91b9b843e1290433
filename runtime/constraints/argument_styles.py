"""Arguments of calls by a JSON schema, in a notation that is not JSON.

A schema becomes an expression of llguidance's Lark. What both notations write alike is left to the
engine's own JSON schemas; of the rest this knows the keywords that function signatures use, and
raises GrammarError for any more.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.schema_keywords import type_of

MAX_DEPTH = 32  # schemas within each other
MAX_VALUES = 4096  # schemas in all, those that are referred to counted each time
MAX_NAME_CHARS = 256  # of an argument; readers take no longer ones
_ANNOTATIONS = frozenset(
    "title description default examples $schema $comment $defs definitions deprecated".split()
)
# Escapes that mean the same in JSON and in Python, where \u may be half of a character.
_PYTHON_OPTIONS: Mapping[str, Any] = MappingProxyType({"json_allowed_escapes": 'nrbtf\\"'})
_SCALARS: Mapping[str, str] = MappingProxyType({"boolean": '("True" | "False")', "null": '"None"'})
_ALL_TYPES = ("string", "number", "boolean", "null", "array", "object")


class WriteValue(Protocol):
    """Writes JSON by a schema and gives the name of its rule. Raises GrammarError.

    Of a schema that is not `strict` it is tried whether it compiles.
    """

    def __call__(
        self, schema: Any, strict: bool, options: Mapping[str, Any] | None = None
    ) -> str: ...


SELF = "\0"  # in a rule's body: its own name


class WriteRule(Protocol):
    """Gives an expression a name."""

    def __call__(self, name: str, body: str) -> str: ...


def python_arguments(
    schema: Any, strict: bool, write_value: WriteValue, write_rule: WriteRule
) -> str:
    """Keyword arguments with literal values: city="Rome", days=3.

    Where a value's schema cannot be enforced and is not `strict`, it is any; where that of the
    whole cannot, so are the names.
    """
    return _written(_PythonWriter(schema, strict, write_value, write_rule), schema, strict)


def qwen_xml_arguments(
    schema: Any, strict: bool, write_value: WriteValue, write_rule: WriteRule
) -> str:
    """An element for each argument, with strings as they are.

    Where a value's schema cannot be enforced and is not `strict`, it is any text; where that of the
    whole cannot, so are the names.
    """
    return _written(_XmlWriter(schema, strict, write_value, write_rule), schema, strict)


class _ArgumentsWriter(Protocol):
    def arguments(self, schema: Any) -> str:
        """By the schema. Raises GrammarError where it cannot be enforced."""
        ...

    def any_arguments(self) -> str: ...


def _written(writer: _ArgumentsWriter, schema: Any, strict: bool) -> str:
    try:
        return writer.arguments(schema)
    except GrammarError:
        if strict:
            raise
        return writer.any_arguments()


class _PythonWriter:
    def __init__(
        self, root: Any, strict: bool, write_value: WriteValue, write_rule: WriteRule
    ) -> None:
        self._root = root
        self._definitions = _definitions_of(root)
        self._strict = strict
        self._write_value = write_value
        self._write_rule = write_rule
        self._num_values = 0

    def arguments(self, schema: Any) -> str:
        members = []
        for name, value, is_required in _members_of(schema):
            if not name.isidentifier():
                raise GrammarError(f"{name!r} is no name of an argument in Python; rename it")
            members.append((f"{name}=", self._argument(value), is_required))
        return self._joined(members)

    def any_arguments(self) -> str:
        name = self._write_rule("name", "/[A-Za-z_][A-Za-z0-9_]{0,63}/")
        return _listed(f'{name} "=" {self._any()}')

    def _argument(self, schema: Any) -> str:
        try:
            return self._value(schema, 1)
        except GrammarError:
            if self._strict:
                raise
            return self._any()

    def _value(self, schema: Any, depth: int) -> str:
        """A literal by a schema."""
        self._num_values += 1
        if depth > MAX_DEPTH or self._num_values > MAX_VALUES:
            raise GrammarError(
                f"the schema is nested deeper than {MAX_DEPTH} levels or has more than "
                f"{MAX_VALUES} values, with what it refers to; flatten it"
            )
        schema = referred(schema, self._root)
        if schema is True or (isinstance(schema, Mapping) and not _keywords_of(schema)):
            return self._any()
        if not isinstance(schema, Mapping):
            raise GrammarError("a schema that nothing satisfies cannot be enforced")
        if _writes_alike(schema):
            return self._json(schema)
        if "enum" in schema or "const" in schema:
            return self._literals(schema)
        if "anyOf" in schema:
            _check_keywords(schema, ("anyOf",))
            options = [self._value(option, depth + 1) for option in _list_at(schema, "anyOf")]
            return f"({' | '.join(options)})"
        return self._by_type(schema, depth)

    def _by_type(self, schema: Mapping[str, Any], depth: int) -> str:
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds:
            options = [self._value({**schema, "type": kind}, depth + 1) for kind in kinds]
            return f"({' | '.join(options)})"
        if isinstance(kinds, str) and kinds in _SCALARS:
            _check_keywords(schema, ("type",))
            return _SCALARS[kinds]
        if kinds == "array":
            _check_keywords(schema, ("type", "items", "minItems", "maxItems"))
            item = self._value(schema.get("items", True), depth + 1)
            low, high = _count_at(schema, "minItems") or 0, _count_at(schema, "maxItems")
            if high is not None and high < low:
                raise GrammarError(f"'maxItems' is {high} and 'minItems' {low}; no list has both")
            return f'"[" {_listed(item, low, high)} "]"'
        if kinds == "object":
            return f'"{{" {self._object(schema, depth)} "}}"'
        raise GrammarError(
            "a schema that is not of one type cannot be enforced in Python's notation; give it a "
            "type"
        )

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        if "properties" not in schema:
            _check_keywords(schema, ("type", "additionalProperties"))
            key = self._json({"type": "string"})
            value = self._value(schema.get("additionalProperties", True), depth + 1)
            return _listed(f'{key} ": " {value}')
        members = [
            (f"{_string(name)}: ", self._value(value, depth + 1), is_required)
            for name, value, is_required in _members_of(schema)
        ]
        return self._joined(members)

    def _literals(self, schema: Mapping[str, Any]) -> str:
        _check_keywords(schema, ("enum", "const", "type"))
        literals = map(_python_literal, _values_of(schema))
        return f"({' | '.join(map(_quoted, literals))})"

    def _any(self) -> str:
        """Any literal."""
        text, number = self._json({"type": "string"}), self._json({"type": "number"})
        scalar = f'{text} | {number} | "True" | "False" | "None"'
        member = f'{text} ": " {SELF}'
        body = f'{scalar} | "[" {_listed(SELF)} "]" | "{{" {_listed(member)} "}}"'
        return self._write_rule("literal", body)

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self._write_value({**schema, **self._definitions}, self._strict, _PYTHON_OPTIONS)

    def _joined(self, members: Sequence[tuple[str, str, bool]]) -> str:
        """Members with commas between those that are there."""
        first, more = '""', '""'
        for label, value, is_required in reversed(members):
            item = f"{_quoted(label)} {value}"
            then = self._write_rule("more", more)
            if is_required:
                first, more = f"{item} {then}", f'", " {item} {then}'
            else:
                rest = self._write_rule("first", first)
                first, more = f"{item} {then} | {rest}", f'(", " {item})? {then}'
        return f"({first})"


class _XmlWriter:
    def __init__(
        self, root: Any, strict: bool, write_value: WriteValue, write_rule: WriteRule
    ) -> None:
        self._root = root
        self._definitions = _definitions_of(root)
        self._strict = strict
        self._write_value = write_value
        self._write_rule = write_rule

    def arguments(self, schema: Any) -> str:
        elements = []
        for name, value, is_required in _members_of(schema):
            if re.search(r"[>\n]", name):
                raise GrammarError(f"{name!r} cannot be the name of an element; rename it")
            element = f"{_quoted(f'<parameter={name}>' + chr(10))} {self._element(value)}"
            elements.append(element if is_required else f"({element})?")
        return " ".join(elements) or '""'

    def any_arguments(self) -> str:
        name = self._write_rule("name", r"/[A-Za-z_][A-Za-z0-9_.-]{0,63}/")
        return f'("<parameter=" {name} ">\\n" {self._text()})*'

    def _element(self, schema: Any) -> str:
        try:
            return self._value(schema)
        except GrammarError:
            if self._strict:
                raise
            return self._text()

    def _value(self, schema: Any) -> str:
        """A value and the end of its element."""
        end = _quoted(f"\n{XML_END}\n")
        schema = referred(schema, self._root)
        keywords = _keywords_of(schema)
        types = _types_of(schema)
        if schema is True:
            return self._text()
        if not isinstance(schema, Mapping):
            raise GrammarError("a schema that nothing satisfies cannot be enforced")
        if "string" not in types:
            return f"{self._write_value({**schema, **self._definitions}, self._strict)} {end}"
        if "enum" in keywords or "const" in keywords:
            _check_keywords(schema, ("enum", "const", "type"))
            values = _values_of(schema)
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            if any(XML_END in text for text in texts):
                raise GrammarError(f"a value with {XML_END} in it would end there; leave it out")
            return f"({' | '.join(map(_quoted, texts))}) {end}"
        if "anyOf" in keywords:
            _check_keywords(schema, ("anyOf",))
            return self._any_of([referred(o, self._root) for o in _list_at(schema, "anyOf")])
        _check_keywords(schema, ("type",))
        return self._text()

    def _any_of(self, options: Sequence[Any]) -> str:
        if not all(isinstance(option, Mapping) for option in options):
            raise GrammarError("'anyOf' has what is no schema", keyword="anyOf")
        if all({"enum", "const"} & option.keys() or not _may_be_text(option) for option in options):
            return f"({' | '.join(map(self._value, options))})"
        for option in options:
            _check_keywords(option, ("type",))
        return self._text()

    def _text(self) -> str:
        """Any text up to the end of its element."""
        text = r"(/(?s:.*)/ & ~/(?s:.*)<\/parameter>(?s:.*)/)"
        end = f"\n{XML_END}"
        return f'{self._write_rule("element[lazy]", f"{text} {_quoted(end)}")} "\\n"'


XML_END = "</parameter>"


def _members_of(schema: Any) -> list[tuple[str, Any, bool]]:
    """Name, schema and whether it has to be there, of each property of an object."""
    if not isinstance(schema, Mapping):
        raise GrammarError("arguments must be an object with properties")
    _check_keywords(schema, ("type", "properties", "required", "additionalProperties"))
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not _are_names(required, properties):
        raise GrammarError("arguments must be an object whose properties are all listed")
    if schema.get("additionalProperties", False) not in (False, True):
        raise GrammarError("'additionalProperties' cannot be enforced here; set it to false")
    for name in properties:
        if len(name) > MAX_NAME_CHARS:
            raise GrammarError(
                f"the name of an argument has {len(name)} characters, the limit is "
                f"{MAX_NAME_CHARS}; shorten it"
            )
    return [
        (name, value, name in required)
        for name, value in properties.items()
        if value is not False or name in required
    ]


def _are_names(names: Any, known: Mapping[str, Any]) -> bool:
    return isinstance(names, list) and all(isinstance(n, str) and n in known for n in names)


def _list_at(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema[keyword]
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{keyword!r} must be a list with something in it", keyword=keyword)
    return value


def _count_at(schema: Mapping[str, Any], keyword: str) -> int | None:
    value = schema.get(keyword)
    if value is not None and (type(value) is not int or value < 0):
        raise GrammarError(f"{keyword!r} must be a whole number", keyword=keyword)
    return value


def _values_of(schema: Mapping[str, Any]) -> list[Any]:
    """The values of `enum` or `const` that are of the schema's type."""
    values = _list_at(schema, "enum") if "enum" in schema else [schema["const"]]
    if "type" in schema:
        types = _types_of(schema)
        values = [value for value in values if _is_of(value, types)]
    if not values:
        raise GrammarError("no value of 'enum' is of the type; make one of them fit")
    return values


def _definitions_of(root: Any) -> Mapping[str, Any]:
    if not isinstance(root, Mapping):
        return {}
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def referred(schema: Any, root: Any) -> Any:
    """What a schema that only refers to one of the root's definitions refers to; else itself."""
    for _ in range(MAX_DEPTH):
        reference = schema.get("$ref") if _keywords_of(schema) == {"$ref"} else None
        match = _REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
        definitions = _definitions_of(root).get(match[1]) if match is not None else None
        if match is None or not isinstance(definitions, Mapping) or match[2] not in definitions:
            return schema
        schema = definitions[match[2]]
    return schema


_REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")


def _may_be_text(schema: Any) -> bool:
    return "string" in _types_of(schema)


def _keywords_of(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    return frozenset(schema.keys()) - _ANNOTATIONS


def _check_keywords(schema: Any, known: Sequence[str]) -> None:
    for keyword in sorted(_keywords_of(schema) - set(known)):
        raise GrammarError(
            f"the schema's keyword {keyword!r} cannot be enforced in this model's notation of "
            "arguments; leave it out, or leave strict out",
            keyword=keyword,
        )


def _types_of(schema: Any) -> frozenset[str]:
    """The types that a schema may allow; all, where it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset(_ALL_TYPES)
    if "type" in schema:
        kinds = schema["type"]
        names = kinds if isinstance(kinds, list) else [kinds]
        return frozenset(name for name in names if isinstance(name, str))
    if isinstance(schema.get("anyOf"), list):
        return frozenset[str]().union(*map(_types_of, schema["anyOf"]))
    if not {"enum", "const"} & schema.keys():
        return frozenset(_ALL_TYPES)
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if not isinstance(values, list):
        return frozenset()
    return frozenset("string" if isinstance(value, str) else "other" for value in values)


def _is_of(value: Any, types: Collection[str]) -> bool:
    kind = type_of(value)
    return kind in types or (kind == "number" and "integer" in types and value % 1 == 0)


def _writes_alike(schema: Any) -> bool:
    """Whether every value that a schema allows is the same text in JSON and in Python."""
    types = _types_of(schema)
    if types <= {"string", "integer", "number"}:
        return not {"enum", "const"} & _keywords_of(schema) or "type" in schema
    if types == {"array"} and isinstance(schema.get("items"), Mapping):
        return "prefixItems" not in schema and _writes_alike(schema["items"])
    return False


def _listed(item: str, low: int = 0, high: int | None = None) -> str:
    """Items with commas between them, `low` to `high` of them."""
    if high == 0:
        return '""'
    more = f"{{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
    items = f'({item} (", " {item}){more})'
    return items if low else f"{items}?"


def _python_literal(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_python_literal, value))}]"
    if isinstance(value, Mapping):
        members = (f"{_string(key)}: {_python_literal(item)}" for key, item in value.items())
        return f"{{{', '.join(members)}}}"
    return json.dumps(value)


def _string(text: str) -> str:
    """A string that Python and JSON read alike."""
    return json.dumps(text, ensure_ascii=False)


def _quoted(text: str) -> str:
    """A literal of Lark."""
    return json.dumps(text, ensure_ascii=False)
