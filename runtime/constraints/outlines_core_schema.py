"""JSON schemas in the words that outlines_core enforces.

Its conversion to a regular expression looks at the first keyword it knows in a schema and drops the
others without a word, lets patterns and formats write quotes into strings, and cuts recursion off
at a depth, where it drops even required properties. So a schema is written anew here: what is left
has only forms whose conversion is right, and everything else is refused by its name. The language
is never wider than the schema's. It may be narrower: objects have no properties but those declared,
patterns match whole strings, and values of any kind nest twice.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sapwood.runtime.constraints.explicit_regex import read, restricted, written
from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.schema_text import ANNOTATIONS
from sapwood.runtime.regex_syntax import RegexError

MAX_NODES = 5000  # after references are replaced by what they mean

Schema = dict[str, Any]

_KEYWORDS_OF_TYPE = MappingProxyType(
    {
        "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
        "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
        "object": frozenset({"properties", "required", "additionalProperties"}),
        "number": frozenset[str](),
        "integer": frozenset[str](),
        "boolean": frozenset[str](),
        "null": frozenset[str](),
    }
)
_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_HOUR = "([01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOUR}:[0-5][0-9])"
_FORMATS = MappingProxyType(
    {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_TIME}",
        "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    }
)
# What stands for itself in a JSON string.
_IN_STRINGS = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF))


def enforceable(schema: Mapping[str, Any] | bool) -> Schema:
    """The schema in forms that are enforced. Raises GrammarError with the keyword at fault.

    O(nodes, references replaced), at most `MAX_NODES`.
    """
    return _Writer(schema if isinstance(schema, dict) else {}).write(schema, ())


class _Writer:
    """Recursive descent over a schema. `references` are those that are being followed."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_nodes = 0

    def write(self, schema: Any, references: tuple[str, ...]) -> Schema:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise GrammarError(
                f"the JSON schema has more than {MAX_NODES} parts once its references are replaced "
                "by what they mean, which is the limit of outlines_core; take another backend",
                keyword="$ref",
            )
        if schema is False:
            raise GrammarError("a JSON schema that is false allows nothing; leave it out")
        if schema is not True and not isinstance(schema, dict):
            raise GrammarError(f"a JSON schema is an object, true or false, and not {schema!r}")
        keywords = {} if schema is True else _assertions(schema)
        if "$ref" in keywords:
            return self._reference(_alone(keywords, "$ref"), references)
        if "anyOf" in keywords:
            options = _alone(keywords, "anyOf")
            return {"anyOf": [self.write(option, references) for option in _list(options)]}
        if "enum" in keywords or "const" in keywords:
            return _values(keywords)
        return self._typed(keywords, references)

    def _reference(self, target: Any, references: tuple[str, ...]) -> Schema:
        if target in references:
            raise GrammarError(
                f"$ref {target!r} is recursive, and outlines_core only has regular languages; "
                "take another backend",
                keyword="$ref",
            )
        return self.write(self._resolve(target), (*references, target))

    def _resolve(self, target: Any) -> Any:
        node: Any = self._root
        if target != "#":
            for part in str(target).removeprefix("#/").split("/"):
                name = part.replace("~1", "/").replace("~0", "~")
                if not isinstance(node, dict) or name not in node:
                    raise GrammarError(
                        f"$ref {target!r} leads nowhere in the JSON schema; refer to a part of it, "
                        "as in #/$defs/name",
                        keyword="$ref",
                    )
                node = node[name]
        return node

    def _typed(self, keywords: Mapping[str, Any], references: tuple[str, ...]) -> Schema:
        types = keywords.get("type", _implied_types(keywords))
        names = _list(types) if isinstance(types, list) else [types]
        known: set[str] = {"type"}
        for name in names:
            if name not in _KEYWORDS_OF_TYPE:
                raise GrammarError(f"there is no JSON type {name!r}", keyword="type")
            known |= _KEYWORDS_OF_TYPE[name]
        for keyword in keywords:
            if keyword not in known:
                raise _not_enforced(keyword)
        options = [self._of_type(name, keywords, references) for name in names]
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _of_type(
        self, name: str, keywords: Mapping[str, Any], references: tuple[str, ...]
    ) -> Schema:
        own = {key: keywords[key] for key in keywords if key in _KEYWORDS_OF_TYPE[name]}
        match name:
            case "string":
                return _string(own)
            case "array":
                return self._array(own, references)
            case "object":
                return self._object(own, references)
        return {"type": name}

    def _array(self, keywords: Mapping[str, Any], references: tuple[str, ...]) -> Schema:
        if "prefixItems" in keywords:
            parts = _list(_alone(keywords, "prefixItems"))
            return {"prefixItems": [self.write(part, references) for part in parts]}
        array = {"type": "array", **_counts(keywords, "minItems", "maxItems")}
        items = keywords.get("items", True)
        if _is_any(items) or array.get("maxItems") == 0:
            return array
        return {**array, "items": self.write(items, references)}

    def _object(self, keywords: Mapping[str, Any], references: tuple[str, ...]) -> Schema:
        properties = keywords.get("properties", {})
        required = keywords.get("required", [])
        if not isinstance(properties, dict):
            raise GrammarError("properties is an object of JSON schemas", keyword="properties")
        for name in _list(required):
            if name not in properties:
                raise GrammarError(
                    f"required names {name!r}, which outlines_core cannot enforce for what is not "
                    "in properties; declare it there",
                    keyword="required",
                )
        additional = keywords.get("additionalProperties", True)
        if not properties and _is_any(additional):
            return {"type": "object"}
        if not properties and additional is not False:
            return {"type": "object", "additionalProperties": self.write(additional, references)}
        return {
            "type": "object",
            "properties": {
                _property_name(name): self.write(value, references)
                for name, value in properties.items()
            },
            "required": required,
        }


def _is_any(schema: Any) -> bool:
    """Whether it allows every value. The conversion knows how to write those, to a depth."""
    return schema is True or (isinstance(schema, dict) and not _assertions(schema))


def _assertions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in ANNOTATIONS}


def _implied_types(keywords: Mapping[str, Any]) -> list[str]:
    """Without a type, that of the keywords that are there; any where there are none."""
    implied = [name for name, own in _KEYWORDS_OF_TYPE.items() if own & keywords.keys()]
    return implied or list(_KEYWORDS_OF_TYPE)


def _alone(keywords: Mapping[str, Any], keyword: str) -> Any:
    for other in keywords:
        if other != keyword and not (other == "type" and keyword == "prefixItems"):
            raise GrammarError(
                f"{other} beside {keyword} is dropped by outlines_core; put it inside, or take "
                "another backend",
                keyword=other,
            )
    return keywords[keyword]


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise GrammarError(f"a list is wanted in the JSON schema, and not {value!r}")
    return value


def _not_enforced(keyword: str) -> GrammarError:
    return GrammarError(
        f"outlines_core does not enforce {keyword} here; leave it out or take another backend",
        keyword=keyword,
    )


def _counts(keywords: Mapping[str, Any], low: str, high: str) -> dict[str, int]:
    """The bounds that are there. Checked, as outlines_core drops what it cannot read."""
    counts = {key: keywords[key] for key in (low, high) if key in keywords}
    for key, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise GrammarError(f"{key} is {count!r}; it counts from 0", keyword=key)
    if counts.get(low, 0) > counts.get(high, counts.get(low, 0)):
        raise GrammarError(f"{low} is more than {high}; nothing satisfies that", keyword=low)
    return counts


def _property_name(name: str) -> str:
    if any(character in '"\\' or ord(character) < 0x20 for character in name):
        raise GrammarError(
            f"the property {name!r} has a character that JSON escapes, which outlines_core writes "
            "as it is; rename it or take another backend",
            keyword="properties",
        )
    return name


def _values(keywords: Mapping[str, Any]) -> Schema:
    """`enum` or `const`, with the type that may stand beside it."""
    rest = {key: value for key, value in keywords.items() if key not in ("type", "enum", "const")}
    for keyword in rest:
        _alone({keyword: None, "enum": None}, "enum")
    values = _list(keywords.get("enum", [keywords.get("const")]))
    if "enum" in keywords and "const" in keywords:
        raise _not_enforced("const")
    for value in values:
        if isinstance(value, dict | list):
            raise GrammarError(
                "outlines_core has strings, numbers, true, false and null in enum and const only; "
                "take another backend",
                keyword="enum" if "enum" in keywords else "const",
            )
    types = keywords.get("type")
    if types is not None:
        names = types if isinstance(types, list) else [types]
        values = [value for value in values if any(_is_of_type(value, name) for name in names)]
    if not values:
        raise GrammarError("no value of enum is of the type beside it", keyword="enum")
    return {"enum": values}


def _is_of_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    match name:
        case "string":
            return isinstance(value, str)
        case "null":
            return value is None
        case "number":
            return isinstance(value, int | float)
        case "integer":
            return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return False


def _string(keywords: Mapping[str, Any]) -> Schema:
    for keyword in ("pattern", "format"):
        if keyword in keywords:
            return {"type": "string", "pattern": _pattern(keyword, _alone(keywords, keyword))}
    return {"type": "string", **_counts(keywords, "minLength", "maxLength")}


def _pattern(keyword: str, value: Any) -> str:
    """A pattern that only writes characters that stand for themselves in a JSON string."""
    if keyword == "format" and value not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise GrammarError(
            f"outlines_core does not enforce the format {value!r}, only {known}; write it as a "
            "pattern, or leave it out",
            keyword="format",
        )
    try:
        tree = read(_FORMATS[value] if keyword == "format" else str(value))
    except RegexError as error:
        raise GrammarError(
            f"the pattern {value!r} is not taken for outlines_core: {error}", keyword="pattern"
        ) from error
    safe = restricted(tree, _IN_STRINGS)
    if safe is None:
        raise GrammarError(
            f"the pattern {value!r} needs quotes, backslashes or control characters, which "
            "outlines_core does not escape; take another backend",
            keyword="pattern",
        )
    return f"^(?:{written(safe, _rust_escape)})$"


def _rust_escape(code_point: int) -> str:
    return f"\\x{{{code_point:X}}}"
