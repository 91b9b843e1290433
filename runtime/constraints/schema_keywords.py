"""The keywords of one schema, one after the other: kept, written anew, left out or refused.

Knows nothing of documents; schemas below and references are read by whoever is asked to.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from sapwood.runtime.constraints import json_formats, regex_text
from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.schema_places import Draft, Place

MAX_ENUM = 10_000
MAX_EXACT = 2**53 - 1  # whole numbers up to here are exact as doubles (RFC 8259, section 6)
MAX_DECIMALS = 20
MAX_COUNT = 2**31 - 1  # of characters, items and properties
MAX_COEFFICIENT = 2**32 - 1
MAX_MULTIPLE = 20_000  # without factors of ten; so many states take llguidance some 70 ms
MAX_PATTERN_PROPERTIES = 64  # of one object; llguidance's time grows with their cube

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
INSTANCE_TYPES = frozenset(TYPES) - {"integer"}  # what a value is of exactly one of
_NUMBER = frozenset({"integer", "number"})
# How a keyword that is refused could be replaced.
_WAYS_OUT: Mapping[str, str] = MappingProxyType(
    {
        "not": "say what is allowed instead, with type, enum or pattern",
        "if": "write the cases as anyOf, each with all of its properties",
        "contains": "describe all items with items or prefixItems",
        "uniqueItems": "leave it out, or list the properties of an object instead of an array",
        "propertyNames": "use patternProperties with additionalProperties: false",
        "dependentRequired": "write the cases as anyOf, each with its required properties",
        "dependentSchemas": "write the cases as anyOf",
        "dependencies": "write the cases as anyOf",
        "unevaluatedProperties": "use additionalProperties in each of the combined schemas",
        "unevaluatedItems": "use items in each of the combined schemas",
        "$dynamicRef": "use $ref",
        "$recursiveRef": "use $ref",
    }
)
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "$dynamicRef")
_NO_SHORT_ESCAPE = frozenset(map(chr, (*range(0x20), 0x7F))) - frozenset("\b\f\n\r\t")


@dataclass(frozen=True, slots=True)
class Node:
    """One schema: its keywords, where it is, and who reads what is below it and referred to."""

    keywords: Mapping[str, Any]
    place: Place
    schema: Callable[[Any, Place], Any]
    reference: Callable[[Any, Place], Any]

    def get(self, keyword: str) -> Any:
        return self.keywords.get(keyword)

    def has(self, keyword: str) -> bool:
        return keyword in self.keywords

    def error(self, keyword: str, problem: str) -> GrammarError:
        return self.place.error(keyword, problem)

    def refused(self, keyword: str) -> GrammarError:
        return self.error(keyword, f"cannot be enforced; {_WAYS_OUT[keyword]}")

    def below(self, keyword: str, *steps: object) -> Any:
        """The schema at `keyword`, or at the steps below it, written anew."""
        value = self.keywords[keyword]
        for step in steps:
            value = value[step]
        return self.schema(value, self.place.below(keyword, *steps))

    def count(self, keyword: str) -> int | None:
        """A whole number from 0 on; None where there is none."""
        value = self.get(keyword)
        if value is None:
            return None
        if not _is_number(value) or not (abs(value) == math.inf or value == int(value)):
            raise self.error(keyword, "must be a whole number")
        if value < 0:
            raise self.error(keyword, "must not be negative")
        if value > MAX_COUNT:
            raise self.error(keyword, f"is beyond {MAX_COUNT}; leave it out or make it smaller")
        return int(value)

    def schemas(self, keyword: str) -> list[Any]:
        value = self.get(keyword)
        if not isinstance(value, list):
            raise self.error(keyword, "must be a list of schemas")
        return [self.below(keyword, i) for i in range(len(value))]

    def named_schemas(self, keyword: str) -> dict[str, Any]:
        value = self.get(keyword)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(keyword, "must be an object whose values are schemas")
        return {name: self.below(keyword, name) for name in value}


def read_node(node: Node) -> Any:
    """The schema written anew; false where nothing satisfies it."""
    types = _types(node)
    _refuse_dynamic(node)
    plain: dict[str, Any] = {} if len(types) == len(TYPES) - 1 else {"type": list(types)}
    if _NUMBER.intersection(types):
        plain |= _number_keywords(node, types)
    if "string" in types:
        plain |= _string_keywords(node)
    if "array" in types:
        plain |= _array_keywords(node)
    if "object" in types:
        plain |= _object_keywords(node)
    before, after = _in_place(node)
    members = [*before, plain, *after]
    if "string" in types:
        members.append(_format(node))
    members += _complements(node, types)
    return _all_of(members)


def _all_of(members: list[Any]) -> Any:
    """Their conjunction, in one object where no keyword is in two."""
    members = [member for member in members if member is not True and member != {}]
    if any(member is False for member in members):
        return False
    merged: dict[str, Any] = {}
    for member in members:
        if merged.keys() & member.keys():
            return {"allOf": members}
        merged |= member
    return merged or True


def _types(node: Node) -> tuple[str, ...]:
    """The types that `type` allows, in its order; number stands for integer too."""
    value = node.get("type")
    if value is None:
        return tuple(name for name in TYPES if name != "integer")
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        raise node.error("type", "must be a name or a list of names")
    for name in names:
        if name not in TYPES:
            raise node.error("type", f"{name!r} is none; there are {', '.join(TYPES)}")
    found = dict.fromkeys(names)
    if "number" in found:
        found.pop("integer", None)
    return tuple(found)


def _refuse_dynamic(node: Node) -> None:
    for keyword in ("$dynamicRef", "$recursiveRef"):
        if node.has(keyword):
            raise node.refused(keyword)


# ---- in place: what holds for the same value


def _in_place(node: Node) -> tuple[list[Any], list[Any]]:
    """`$ref` and its like, those before `properties` and those after: order is an answer's."""
    names = list(node.keywords)
    middle = min((names.index(k) for k in ("properties", "required") if k in names), default=0)
    before: list[Any] = []
    after: list[Any] = []
    for i, keyword in enumerate(names):
        if (member := _combination(node, keyword)) is not None:
            (before if i < middle else after).append(member)
    return before, after


def _combination(node: Node, keyword: str) -> Any:
    """None for keywords of other kinds."""
    match keyword:
        case "$ref":
            return node.reference(node.get("$ref"), node.place)
        case "allOf":
            return _all_of_keyword(node)
        case "anyOf" | "oneOf":
            return _options(node, keyword)
        case "const":
            _check_value(node, "const", node.get("const"))
            return {"const": node.get("const")}
        case "enum":
            return _enum(node)
        case "if":
            return _conditional(node)
    return None


def _all_of_keyword(node: Node) -> Any:
    members = [member for member in node.schemas("allOf") if member is not True]
    if any(member is False for member in members):
        return False
    return {"allOf": members} if members else True


def _options(node: Node, keyword: str) -> Any:
    options = [option for option in node.schemas(keyword) if option is not False]
    if keyword == "anyOf" and any(option is True for option in options):
        return True
    if len(options) == 1:
        return options[0]
    if not options:
        return False
    return {keyword: options, **({"$at": node.place} if keyword == "oneOf" else {})}


def _enum(node: Node) -> Any:
    values = node.get("enum")
    if not isinstance(values, list):
        raise node.error("enum", "must be a list of values")
    if len(values) > MAX_ENUM:
        raise node.error(
            "enum", f"has {len(values)} values, at most {MAX_ENUM} are taken; use a pattern"
        )
    for value in values:
        _check_value(node, "enum", value)
    return {"enum": values} if values else False


def _check_value(node: Node, keyword: str, value: Any) -> None:
    """Numbers that a double holds, and texts that need no \\u escape."""
    if isinstance(value, dict):
        for name, child in value.items():
            _check_text(node, keyword, name)
            _check_value(node, keyword, child)
    elif isinstance(value, list):
        for child in value:
            _check_value(node, keyword, child)
    elif isinstance(value, str):
        _check_text(node, keyword, value)
    elif _is_number(value):
        _check_number(node, keyword, value)


def _check_text(node: Node, keyword: str, text: str) -> None:
    if not _NO_SHORT_ESCAPE.isdisjoint(text):
        raise node.error(keyword, f"{text!r} has a control character; leave it out")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise node.error(keyword, "has half of a surrogate pair, which is no text; leave it out")


def _check_number(node: Node, keyword: str, value: float) -> None:
    if isinstance(value, int) and abs(value) > MAX_EXACT:
        raise node.error(
            keyword, f"has a number beyond {MAX_EXACT}, from where doubles have gaps; make it text"
        )
    if not math.isfinite(value):
        raise node.error(keyword, "has a number that is not finite")
    if _num_decimals(value) > MAX_DECIMALS:
        raise node.error(keyword, f"{value} has more than {MAX_DECIMALS} decimals; round it")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    """Whether a double can be near it: a whole number of Python has no limit."""
    return abs(value) <= sys.float_info.max


def _num_decimals(value: float) -> int:
    exponent = Decimal(repr(value)).normalize().as_tuple().exponent
    return max(0, -int(exponent))


def _conditional(node: Node) -> Any:
    """Only a condition that is decided already."""
    condition = node.get("if")
    if condition in (True, {}) or condition is False:
        branch = "else" if condition is False else "then"
        return node.below(branch) if node.has(branch) else True
    if not node.has("then") and not node.has("else"):
        return True
    raise node.refused("if")


def _complements(node: Node, types: tuple[str, ...]) -> list[Any]:
    """`not` of types alone, as the other types."""
    if not node.has("not"):
        return []
    negated = node.get("not")
    if negated is False:
        return []
    if negated in (True, {}):
        return [False]
    if not isinstance(negated, dict) or set(negated) != {"type"}:
        raise node.refused("not")
    names = negated["type"] if isinstance(negated["type"], list) else [negated["type"]]
    if not set(map(str, names)).issubset(TYPES):
        raise node.error("not", f"names types that there are not; there are {', '.join(TYPES)}")
    if "integer" in names and "number" not in names and _NUMBER.intersection(types):
        raise node.refused("not")
    gone = {*names, "integer"} if "number" in names else set(names)
    left = [name for name in types if name not in gone]
    return [{"type": left}] if left else [False]


# ---- numbers


def _number_keywords(node: Node, types: tuple[str, ...]) -> dict[str, Any]:
    low, low_is_open = _bound(node, "minimum", "exclusiveMinimum", max)
    high, high_is_open = _bound(node, "maximum", "exclusiveMaximum", min)
    low, high = _exact_low(node, low), _exact_high(node, high)
    if "number" not in types:
        low, low_is_open = _whole_low(low, low_is_open), False
        high, high_is_open = _whole_high(high, high_is_open), False
    elif low is not None and high is not None and low_is_open:
        _refuse_open_integral_low(node, low, high)
    bounds = {
        "exclusiveMinimum" if low_is_open else "minimum": low,
        "exclusiveMaximum" if high_is_open else "maximum": high,
    }
    return {k: v for k, v in bounds.items() if v is not None} | _multiple_of(node)


def _bound(
    node: Node, closed: str, opened: str, stricter: Callable[..., float]
) -> tuple[float | None, bool]:
    """The bound that counts of the two, and whether it is excluded."""
    limit, open_limit = node.get(closed), node.get(opened)
    if isinstance(open_limit, bool):  # draft 4
        open_limit = limit if open_limit else None
    for keyword, value in ((closed, limit), (opened, open_limit)):
        if value is None:
            continue
        if not _is_number(value):
            raise node.error(keyword, "must be a number")
        if not _is_finite(value):
            raise node.error(keyword, "must be finite")
        if abs(value) <= MAX_EXACT and _num_decimals(value) > MAX_DECIMALS:
            raise node.error(keyword, f"has more than {MAX_DECIMALS} decimals; round it")
    if open_limit is None:
        return limit, False
    if limit is None or stricter(limit, open_limit) == open_limit:
        return open_limit, True
    return limit, False


def _exact_low(node: Node, low: float | None) -> float | None:
    """Bounds beyond what doubles hold exactly are moved inwards; that only refuses more."""
    if low is not None and low > MAX_EXACT:
        raise node.error("minimum", f"is beyond {MAX_EXACT}, from where doubles have gaps")
    return low if low is None else max(low, -MAX_EXACT)


def _exact_high(node: Node, high: float | None) -> float | None:
    if high is not None and high < -MAX_EXACT:
        raise node.error("maximum", f"is beyond -{MAX_EXACT}, from where doubles have gaps")
    return high if high is None else min(high, MAX_EXACT)


def _whole_low(low: float | None, is_open: bool) -> float | None:
    if low is None:
        return None
    return math.floor(low) + 1 if is_open else math.ceil(low)


def _whole_high(high: float | None, is_open: bool) -> float | None:
    if high is None:
        return None
    return math.ceil(high) - 1 if is_open else math.floor(high)


def _refuse_open_integral_low(node: Node, low: float, high: float) -> None:
    """llguidance lets 0 pass for 0 < x < 1: its fraction is optional there."""
    if low >= 0 and low == int(low) == int(high):
        raise node.error(
            "exclusiveMinimum",
            f"{low} cannot be left out of a range that ends before {int(low) + 1}; use minimum",
        )


def _multiple_of(node: Node) -> dict[str, Any]:
    """llguidance counts in 32 bits, and finds the decimals by multiplying a double."""
    value = node.get("multipleOf")
    if value is None:
        return {}
    if not _is_number(value) or not 0 < value or not _is_finite(value):
        raise node.error("multipleOf", "must be a finite number above 0")
    coefficient, exponent = float(value), 0
    while coefficient != int(coefficient) and coefficient < MAX_COEFFICIENT:
        coefficient, exponent = coefficient * 10, exponent + 1
    is_exact = Fraction(coefficient) == Fraction(repr(value)) * 10**exponent
    if not is_exact or coefficient > MAX_COEFFICIENT:
        raise node.error("multipleOf", f"{value} has too many digits; use a rounder one")
    if without_tens(int(coefficient)) > MAX_MULTIPLE:
        raise node.error(
            "multipleOf",
            f"{value} is more than {MAX_MULTIPLE} without its factors of ten; use a rounder one",
        )
    return {"multipleOf": value}


def without_tens(number: int) -> int:
    while number and number % 10 == 0:
        number //= 10
    return number


# ---- strings


def _string_keywords(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if low := node.count("minLength"):
        found["minLength"] = low
    if (high := node.count("maxLength")) is not None:
        found["maxLength"] = high
    if node.has("pattern"):
        found["pattern"] = _pattern(node, "pattern", node.get("pattern"))
    return found


def _format(node: Node) -> dict[str, Any]:
    """Formats that are not known here say something to people only (they are annotations)."""
    name = node.get("format")
    if not isinstance(name, str):
        return {}
    if name in json_formats.PATTERNS:
        size = {"maxLength": json_formats.MAX_HOSTNAME} if name == "hostname" else {}
        return {"pattern": json_formats.PATTERNS[name], **size}
    return {"format": name} if name in json_formats.OTHERS else {}


def _pattern(node: Node, keyword: str, pattern: Any) -> str:
    if not isinstance(pattern, str):
        raise node.error(keyword, "must be a regular expression")
    try:
        return regex_text.ecma_to_rust(pattern)
    except GrammarError as error:
        raise node.error(keyword, str(error)) from error


# ---- arrays


def _array_keywords(node: Node) -> dict[str, Any]:
    prefix, rest = _items(node)
    low, high = node.count("minItems") or 0, node.count("maxItems")
    if node.get("uniqueItems") and (high is None or high > 1):
        raise node.refused("uniqueItems")
    if node.has("contains") and (node.get("minContains") != 0 or node.has("maxContains")):
        raise node.refused("contains")
    unevaluated = _unevaluated(node, "unevaluatedItems", {"items", "additionalItems"})
    if unevaluated is not True:
        rest = unevaluated
    found: dict[str, Any] = {"prefixItems": prefix} if prefix else {}
    if rest is not True:
        found["items"] = rest
    if low:
        found["minItems"] = low
    if high is not None:
        found["maxItems"] = high
    return found


def _items(node: Node) -> tuple[list[Any], Any]:
    """The schemas of the first items, and that of the others."""
    items = node.get("items")
    if isinstance(items, list) and not node.has("prefixItems"):  # until draft 2019-09
        rest = node.below("additionalItems") if node.has("additionalItems") else True
        return node.schemas("items"), rest
    has_prefix = node.has("prefixItems") and node.place.draft > Draft.DRAFT_2019
    prefix = node.schemas("prefixItems") if has_prefix else []
    return prefix, node.below("items") if node.has("items") else True


def _unevaluated(node: Node, keyword: str, evaluating: set[str]) -> Any:
    """Where nothing else evaluates, it is the same as for additional ones."""
    if not node.has(keyword) or node.get(keyword) in (True, {}):
        return True
    if evaluating.intersection(node.keywords):
        if any(node.has(other) for other in _COMBINING) or node.has("contains"):
            raise node.refused(keyword)
        return True  # all are evaluated
    if any(node.has(other) for other in _COMBINING) or node.has("contains"):
        raise node.refused(keyword)
    return node.below(keyword)


# ---- objects


def _object_keywords(node: Node) -> dict[str, Any]:
    properties = node.named_schemas("properties")
    for name in properties:
        _check_text(node, "properties", name)
    patterns = _pattern_properties(node)
    rest = node.below("additionalProperties") if node.has("additionalProperties") else True
    unevaluated = _unevaluated(node, "unevaluatedProperties", {"additionalProperties"})
    if unevaluated is not True:
        rest = unevaluated
    required = _required(node)
    _refuse_dependencies(node, set(required))
    properties, patterns, rest = _named(node, properties, patterns, rest)
    found: dict[str, Any] = {"properties": properties} if properties else {}
    if patterns:
        found["patternProperties"] = patterns
    if rest is not True:
        found["additionalProperties"] = rest
    if required:
        found["required"] = required
    return found | _property_counts(node, found)


def _pattern_properties(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = {}
    named = node.named_schemas("patternProperties")
    if len(named) > MAX_PATTERN_PROPERTIES:
        raise node.error(
            "patternProperties",
            f"has {len(named)} patterns, at most {MAX_PATTERN_PROPERTIES} are taken; join some",
        )
    for pattern, schema in named.items():
        text = _pattern(node, "patternProperties", pattern)
        if text in found:
            raise node.error("patternProperties", f"{pattern!r} is there twice; join the two")
        found[text] = schema
    return found


def _required(node: Node) -> list[str]:
    """In draft 3 it was a boolean of the property itself, and some still write it."""
    names = node.get("required")
    if names is None:
        return []
    if not _are_texts(names):
        raise node.error("required", "must be a list of names")
    for name in names:
        _check_text(node, "required", name)
    return list(dict.fromkeys(names))


def _refuse_dependencies(node: Node, required: set[str]) -> None:
    """All but those that say nothing beside `required`."""
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        value = node.get(keyword)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise node.error(keyword, "must be an object")
        for needed in value.values():
            says_nothing = needed in (True, {}) or (
                isinstance(needed, list)
                and all(isinstance(name, str) and name in required for name in needed)
            )
            if not says_nothing:
                raise node.refused(keyword)


def _named(
    node: Node, properties: dict[str, Any], patterns: dict[str, Any], rest: Any
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """With `propertyNames` said by the others, where nothing else names properties."""
    names = node.get("propertyNames")
    if names in (None, True, {}):
        return properties, patterns, rest
    if properties or patterns or not isinstance(names, dict):
        raise node.refused("propertyNames")
    says = set(names) - {"type", "title", "description", "$comment"}
    if names.get("type", "string") != "string":
        raise node.refused("propertyNames")
    if not says:
        return properties, patterns, rest
    if says == {"enum"} and _are_texts(names["enum"]):
        for name in names["enum"]:
            _check_text(node, "propertyNames", name)
        return dict.fromkeys(names["enum"], rest), {}, False
    if says == {"pattern"}:
        return {}, {_pattern(node, "propertyNames", names["pattern"]): rest}, False
    raise node.refused("propertyNames")


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _property_counts(node: Node, found: Mapping[str, Any]) -> dict[str, Any]:
    """`minProperties` and `maxProperties` where they can be counted.

    Names that are not listed may come twice in an answer, and would be counted twice; so at most
    one of them can be asked for.
    """
    low, high = node.count("minProperties") or 0, node.count("maxProperties")
    names, required = set(found.get("properties", ())), set(found.get("required", ()))
    is_closed = found.get("additionalProperties") is False and "patternProperties" not in found
    if high is not None and is_closed and high >= len(names | required):
        high = None
    low = 0 if low <= len(required) else low
    more, at_most = low - len(required), None if high is None else high - len(required)
    has_optional = bool(names - required)
    if low and (more > 1 or (has_optional and not (is_closed and at_most in (None, 1)))):
        raise node.error(
            "minProperties",
            "can be enforced for one property more than the required ones, where all that are "
            "listed are required or no others are allowed; list the properties under required",
        )
    if high is not None and has_optional and not (is_closed and at_most == 1):
        raise node.error(
            "maxProperties",
            "can be enforced only where all listed properties are required; leave it out",
        )
    counts = {"minProperties": low, "maxProperties": -1 if high is None else high}
    return {k: v for k, v in counts.items() if v > 0 or (k == "maxProperties" and v == 0)}


def children(schema: Any) -> list[Any]:
    """The schemas right below one that is written anew."""
    found: list[Any] = []
    if not isinstance(schema, dict):
        return found
    for keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
        if keyword in schema:
            found += schema[keyword]
    for keyword in ("properties", "patternProperties"):
        if keyword in schema:
            found += schema[keyword].values()
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            found.append(schema[keyword])
    return found


def type_of(value: Any) -> str:
    """Which of INSTANCE_TYPES a value is of."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
