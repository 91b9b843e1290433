"""Arguments in elements of their own, strings as they are, read into JSON.

The schema decides what a text is: 12 is a string where a string is asked for.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from sapwood.runtime.constraints.argument_styles import MAX_NAME_CHARS, referred
from sapwood.runtime.constraints.argument_styles import XML_END as END
from sapwood.runtime.tools.text_source import Steps, TextSource

_NAME = re.compile(r"[^>\n]+")
_SPACE = re.compile(r"[ \t\r\n]+")
_Write = Callable[[str], None]


def read_xml_arguments(source: TextSource, schema: Mapping[str, Any], write: _Write) -> Steps[bool]:
    """Elements up to `</function>`, which is read. Each value is handed on when it is complete."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        properties = {}
    before = "{"
    while True:
        yield from source.take(_SPACE)
        if not (yield from source.take_word("<")):
            return False
        if (yield from source.peek()) == "/":
            complete = yield from source.take_word("/function>")
            write(("{}" if before == "{" else "}") if complete else "")
            return complete
        if not (yield from source.take_word("parameter=")):
            return False
        name = yield from source.take(_NAME, limit=MAX_NAME_CHARS)
        if not name or len(name) > MAX_NAME_CHARS or not (yield from source.take_word(">")):
            return False
        write(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
        before = ", "
        value = yield from _read_value(source)
        if value is None:
            return False
        write(json_value(value, properties.get(name, {}), schema))


def _read_value(source: TextSource) -> Steps[str | None]:
    """The text of an element, without the line breaks around it; None if it does not end."""
    parts: list[str] = []
    while True:
        part, is_end = source.take_before(END)
        parts.append(part)
        if is_end:
            source.take_through(END)
            return "".join(parts).removeprefix("\n").removesuffix("\n")
        if not (yield from source.more()):
            return None


def json_value(text: str, schema: Any, root: Any = None) -> str:
    """A text as JSON: as it is, if it is a value of a type that `schema` allows; else a string.

    `root` has the definitions that `schema` may refer to.
    """
    schema = _without_references(schema, root)
    types = types_of(schema)
    if text in _strings_of(schema):
        return json.dumps(text, ensure_ascii=False)
    if types != {"string"}:
        kind = _json_type(text)
        if kind in types or (kind == "integer" and "number" in types):
            return text
    return json.dumps(text, ensure_ascii=False)


def _without_references(schema: Any, root: Any) -> Any:
    """The schema, and those that it has for a choice, as they are defined."""
    schema = referred(schema, root)
    if not isinstance(schema, Mapping) or not isinstance(schema.get("anyOf"), list):
        return schema
    return {**schema, "anyOf": [referred(option, root) for option in schema["anyOf"]]}


def _strings_of(schema: Any) -> Collection[str]:
    """The strings among the values that a schema lists."""
    if not isinstance(schema, Mapping):
        return ()
    if isinstance(schema.get("anyOf"), list):
        return [text for option in schema["anyOf"] for text in _strings_of(option)]
    values = schema.get("enum", [schema.get("const")])
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else ()


def types_of(schema: Any) -> frozenset[str]:
    """The types that a schema allows, as far as it says so; all, if it does not."""
    if not isinstance(schema, Mapping):
        return _ALL
    types = schema.get("type")
    if isinstance(types, str):
        return frozenset((types,))
    if isinstance(types, list):
        return frozenset(map(str, types))
    if isinstance(schema.get("enum"), list):
        return frozenset(_type_of(value) for value in schema["enum"])
    if "const" in schema:
        return frozenset((_type_of(schema["const"]),))
    if isinstance(schema.get("anyOf"), list):
        return frozenset().union(*map(types_of, schema["anyOf"]))
    return _ALL


_ALL = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))


def _json_type(text: str) -> str | None:
    try:
        return _type_of(json.loads(text, parse_constant=_no_constant))
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")
