"""JSON schemas for outlines_core: what is taken is enforced, the rest is refused by its name."""

import json
import re
from typing import Any

import jsonschema
import outlines_core
import pytest

from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.outlines_core_schema import enforceable


def expression(schema: Any) -> re.Pattern[str]:
    """What outlines_core makes of it, for Python: all of these are of the common notation."""
    text = outlines_core.json_schema.build_regex_from_schema(json.dumps(enforceable(schema)), "")
    return re.compile(re.sub(r"\\x\{([0-9A-F]+)\}", lambda m: f"\\U{int(m[1], 16):08X}", text))


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("uniqueItems", {"type": "array", "uniqueItems": True}),
        ("minimum", {"type": "integer", "minimum": 3}),
        ("multipleOf", {"type": "number", "multipleOf": 2}),
        ("minProperties", {"type": "object", "minProperties": 1}),
        ("patternProperties", {"type": "object", "patternProperties": {"a": True}}),
        ("propertyNames", {"type": "object", "propertyNames": {"pattern": "a"}}),
        ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
        ("not", {"not": {"type": "string"}}),
        ("if", {"if": {"type": "string"}, "then": {"maxLength": 1}}),
        ("allOf", {"allOf": [{"type": "string"}, {"maxLength": 1}]}),
        ("oneOf", {"oneOf": [{"type": "string"}, {"type": "null"}]}),
        ("contains", {"type": "array", "contains": {"type": "null"}}),
        ("maxLength", {"type": "string", "pattern": "^a+$", "maxLength": 3}),
        ("minLength", {"anyOf": [{"type": "string"}, {"type": "null"}], "minLength": 3}),
        ("required", {"type": "object", "required": ["a"]}),
        ("required", {"type": "object", "properties": {"b": True}, "required": ["a"]}),
        ("minLength", {"type": "string", "minLength": 4, "maxLength": 3}),
        ("minItems", {"type": "array", "minItems": "4"}),
        ("maxItems", {"prefixItems": [{"type": "null"}], "maxItems": 0}),
        ("properties", {"type": "object", "properties": {'a"b': True}}),
        ("pattern", {"type": "string", "pattern": "(?=a)a"}),
        ("pattern", {"type": "string", "pattern": '"'}),
        ("format", {"type": "string", "format": "email"}),
        ("$ref", {"type": "array", "items": {"$ref": "#"}}),
        ("$ref", {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}),
        ("$ref", {"$ref": "#/$defs/nowhere"}),
        ("maxItems", {"$ref": "#/$defs/a", "maxItems": 1, "$defs": {"a": {"type": "array"}}}),
        ("enum", {"type": "string", "enum": [1, 2]}),
        ("enum", {"enum": [{"a": 1}]}),
        ("const", {"const": [1]}),
        ("type", {"type": "text"}),
        ("minDigits", {"type": "integer", "minDigits": 2}),
    ],
)
def test_what_is_not_enforced_is_refused_by_its_name(keyword: str, schema: Any) -> None:
    with pytest.raises(GrammarError) as caught:
        enforceable(schema)
    assert caught.value.keyword == keyword


@pytest.mark.parametrize(
    ("schema", "accepted", "rejected"),
    [
        ({"const": 'a"b\\'}, ['"a\\"b\\\\"'], ['"a"b\\"']),
        ({"type": "string", "enum": ["a", 1, None]}, ['"a"'], ["1", "null"]),
        ({"type": ["string", "null"], "maxLength": 1}, ['"a"', "null"], ['"ab"', "1"]),
        ({"type": "string", "pattern": "^a|b$"}, ['"a"', '"b"'], ['"a', 'b"', '"ab"']),
        ({"type": "string", "pattern": "^.{2}$"}, ['"ab"', '"日本"'], ['"a""', '"\\n"', '"a\n"']),
        ({"type": "string", "pattern": "[^a]"}, ['"b"'], ['"a"', '"""', '"\n"']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024-13-01"', '"٢٠٢٤-01-01"']),
        ({"type": "string", "format": "date-time"}, ['"2024-02-29T10:00:00Z"'], ['"2024-02-29"']),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        ({"items": {"type": "null"}, "minItems": 2, "maxItems": 3}, ["[null,null]"], ["[null]"]),
        (
            {"prefixItems": [True, {"type": "null"}]},
            ["[1,null]", '["a",null]'],
            ["[null]", "[1,2]"],
        ),
        ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a":1}']),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            ["{}", '{"a":1,"b":2}'],
            ['{"a":"b"}'],
        ),
        (
            {"properties": {"a": True, "b": {"type": "null"}}, "required": ["b"]},
            ['{"a":1,"b":null}', '{"a":{"x":[1]},"b":null}', '{"b":null}'],
            ['{"a":1}', '{"a":1', "null"],
        ),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b~1c"}, "b/c": {"const": 1}}},
            ["1"],
            ["2"],
        ),
        ({"title": "anything", "description": "at all"}, ["1", '"a"', '{"a":[1]}'], ["[1", '"a']),
    ],
)
def test_what_is_taken_is_enforced(schema: Any, accepted: list[str], rejected: list[str]) -> None:
    pattern = expression(schema)
    for text in accepted:
        assert pattern.fullmatch(text), text
        jsonschema.validate(json.loads(text), schema)
    for text in rejected:
        assert not pattern.fullmatch(text), text


def test_required_properties_deep_down_stay_required() -> None:
    """outlines_core drops what is more than three references deep, even if it is required."""
    definitions = {
        f"level{i}": {
            "type": "object",
            "properties": {"next": {"$ref": f"#/$defs/level{i + 1}"}},
            "required": ["next"],
        }
        for i in range(6)
    }
    schema = {"$ref": "#/$defs/level0", "$defs": {**definitions, "level6": {"type": "null"}}}
    assert expression(schema).fullmatch('{"next":' * 6 + "null" + "}" * 6)
    assert not expression(schema).fullmatch('{"next":' * 4 + "{}" + "}" * 4)


def test_references_that_multiply_are_refused() -> None:
    definitions = {
        f"level{i}": {"anyOf": [{"$ref": f"#/$defs/level{i + 1}"}] * 4} for i in range(10)
    }
    schema = {"$ref": "#/$defs/level0", "$defs": {**definitions, "level10": {"type": "null"}}}
    with pytest.raises(GrammarError, match="5000 parts"):
        enforceable(schema)
