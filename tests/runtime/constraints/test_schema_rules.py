"""What is refused in a schema and how, and what is said in other words instead."""

import contextlib
import itertools
import json
import random
import tracemalloc
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.json_schema import json_grammar
from sapwood.runtime.constraints.llguidance_backend import LlguidanceBackend, LlguidanceGrammar
from sapwood.runtime.constraints.schema_places import MAX_SCHEMAS, SchemaPlaces
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec
from tests.runtime.constraints.byte_backend import accepts, vocabulary

BACKEND = LlguidanceBackend(vocabulary())


def compiled(schema: Any) -> LlguidanceGrammar:
    return BACKEND.compile(ConstraintSpec.json_schema(schema), deadline=5)


def refusal(schema: Any) -> GrammarError:
    with pytest.raises(GrammarError) as caught:
        compiled(schema)
    return caught.value


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("not", {"not": {"required": ["a"]}}),
        ("if", {"if": {"required": ["a"]}, "then": {"required": ["b"]}}),
        ("contains", {"contains": {"type": "string"}}),
        ("uniqueItems", {"type": "array", "uniqueItems": True}),
        ("dependentRequired", {"dependentRequired": {"a": ["b"]}}),
        ("dependentSchemas", {"dependentSchemas": {"a": {"required": ["b"]}}}),
        ("dependencies", {"dependencies": {"a": ["b"]}}),
        ("propertyNames", {"propertyNames": {"maxLength": 3}}),
        ("unevaluatedProperties", {"allOf": [{}], "unevaluatedProperties": False}),
        ("unevaluatedItems", {"anyOf": [{}], "unevaluatedItems": False}),
        ("$dynamicRef", {"$dynamicRef": "#a"}),
        ("$ref", {"$ref": "https://example.org/a.json"}),
        ("$ref", {"$ref": "#/$defs/none"}),
        ("$ref", {"$ref": 3}),
        ("oneOf", {"oneOf": [{"minimum": 1}, {"maximum": 5}]}),
        ("enum", {"enum": list(range(10_001))}),
        ("enum", {"enum": ["a\u0000b"]}),
        ("const", {"const": 2**53 + 1}),
        ("const", {"const": {"\ud800": 1}}),
        ("minProperties", {"minProperties": 2}),
        ("maxProperties", {"properties": {"a": {}}, "maxProperties": 1}),
        ("minLength", {"minLength": "3"}),
        ("maxItems", {"maxItems": -1}),
        ("minimum", {"minimum": 2.0**60}),
        ("multipleOf", {"multipleOf": 0}),
        ("multipleOf", {"multipleOf": 0.0123456789012}),
        ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}),
        ("pattern", {"pattern": "(?=a)b"}),
        ("patternProperties", {"patternProperties": {"a": {}, "b": {}}}),
        ("type", {"type": "text"}),
        ("required", {"required": "a"}),
        ("properties", {"properties": [1]}),
        ("allOf", {"allOf": {}}),
    ],
)
def test_a_refusal_names_the_keyword_and_its_place(keyword: str, schema: Any) -> None:
    error = refusal({"type": "object", "properties": {"a/b": schema}, "required": ["a/b"]})
    assert error.keyword == keyword
    assert f"'{keyword}'" in str(error)
    if keyword not in ("$ref", "patternProperties"):
        assert "/properties/a~1b" in str(error)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#"}}},
    ],
)
def test_a_schema_that_is_itself_is_refused(schema: Any) -> None:
    assert refusal(schema).keyword == "$ref"


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"enum": []},
        {"allOf": [True, False]},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "string", "minLength": 5, "maxLength": 3},
        {"type": "string", "const": 3},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    ],
)
def test_what_no_answer_satisfies_is_refused(schema: Any) -> None:
    assert "no answer satisfies" in str(refusal(schema))


@pytest.mark.parametrize(
    ("schema", "answers", "others"),
    [
        ({"not": {"type": "string"}}, ["1", "null"], ['"a"']),
        ({"type": ["string", "null"], "not": {"type": "null"}}, ['"a"'], ["null"]),
        ({"if": True, "then": {"type": "null"}}, ["null"], ["1"]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[]", "[1]"], ["[1,1]"]),
        ({"type": "string", "uniqueItems": True}, ['"a"'], ["[]"]),
        ({"type": "object", "required": ["b"], "dependencies": {"a": ["b"]}}, ['{"b":1}'], ["{}"]),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, ['{"a":1,"b":2}'], ['{"c":1}']),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, ['{"xy":1}'], ['{"a":1}']),
        (
            {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
            ['{"a":1}', "{}"],
            ['{"b":1}'],
        ),
        ({"type": "number", "maximum": 3, "exclusiveMaximum": True}, ["2"], ["3"]),
        ({"items": [{"type": "null"}], "additionalItems": False}, ["[null]", "1"], ["[1]"]),
        ({"type": "string", "format": "phone"}, ['"any"'], ["1"]),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"a"']),
        ({"pattern": "^a", "format": "date", "type": ["string", "null"]}, ["null"], ['"a"']),
        ({"minProperties": 1, "type": "object"}, ['{"a":1}'], ["{}"]),
        (
            {"$defs": {"a~b": {"$anchor": "here", "type": "null"}}, "$ref": "#/$defs/a~0b"},
            ["null"],
            ["1"],
        ),
        ({"$defs": {"a": {"$anchor": "here", "type": "null"}}, "$ref": "#here"}, ["null"], ["1"]),
        (
            {"type": "object", "properties": {"n": {"$ref": "#"}, "v": {"const": 1}}},
            ['{"n":{"n":{}},"v":1}'],
            ['{"n":1}'],
        ),
    ],
)
def test_what_can_be_said_in_other_words_is(
    schema: Any, answers: list[str], others: list[str]
) -> None:
    grammar = compiled(schema)
    assert all(accepts(grammar, answer) for answer in answers)
    assert not any(accepts(grammar, other) for other in others)


@pytest.mark.parametrize(
    "options",
    [
        [{"type": "string"}, {"type": ["number", "null"]}],
        [{"const": 1}, {"const": 2}, {"enum": ["a", None]}],
        [{"type": "number", "maximum": 1}, {"type": "integer", "minimum": 2}],
        [{"type": "string", "maxLength": 1}, {"type": "string", "minLength": 2}],
        [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        [{"$ref": "#/$defs/cat"}, {"anyOf": [{"$ref": "#/$defs/dog"}, {"type": "null"}]}],
        [{"$ref": "#/$defs/cat"}, {"allOf": [{"$ref": "#/$defs/dog"}, {"required": ["age"]}]}],
        [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/closed"}],
    ],
)
def test_one_of_what_is_disjoint_is_any_of(options: list[Any]) -> None:
    def pet(kind: str) -> Any:
        properties = {"kind": {"const": kind}}
        return {"type": "object", "properties": properties, "required": ["kind"]}

    closed = {"type": "object", "properties": {"b": {}}, "additionalProperties": False}
    definitions = {"cat": pet("cat"), "dog": pet("dog"), "closed": closed}
    spec = ConstraintSpec.json_schema(True)
    written = json_grammar({"oneOf": options, "$defs": definitions}, spec)
    assert len(written["anyOf"]) == len(options)


@pytest.mark.parametrize(
    "options",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"const": 1.0}],
        [{"required": ["a"]}, {"required": ["b"]}],
        [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}],
        [{"type": "array", "maxItems": 3}, {"type": "array", "minItems": 3}],
        [True, {"type": "null"}],
        [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}],
    ],
)
def test_one_of_what_may_overlap_is_refused(options: list[Any]) -> None:
    assert refusal({"oneOf": options}).keyword == "oneOf"


def test_a_sibling_of_a_reference_counts_from_draft_2019_on_only() -> None:
    schema = {"definitions": {"a": {"type": "integer"}}, "$ref": "#/definitions/a", "maximum": 3}
    assert not accepts(compiled(schema), "4")
    older = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    assert accepts(compiled(older), "4")


def test_a_name_cannot_be_spelled_in_another_way() -> None:
    """With \\u escapes the checks of "a" would be passed by."""
    grammar = compiled({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert accepts(grammar, '{"a":1}')
    assert accepts(grammar, '{"b":"x"}')
    assert not accepts(grammar, '{"\\u0061":"x"}')
    assert not accepts(grammar, '{"b":1,"a":"x"}')


def test_properties_come_in_the_order_of_the_schema() -> None:
    grammar = compiled({"type": "object", "properties": {"b": {}, "a": {}}})
    assert accepts(grammar, '{"b":1,"a":2,"c":3}')
    assert not accepts(grammar, '{"a":1,"b":2}')


def test_an_open_branch_that_never_ends_cannot_be_entered() -> None:
    endless = {"type": "object", "properties": {"n": {"$ref": "#/$defs/e"}}, "required": ["n"]}
    grammar = compiled(
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/e"}, "b": {"type": "null"}},
            "additionalProperties": False,
            "$defs": {"e": endless},
        }
    )
    assert accepts(grammar, '{"b":null}')
    assert not grammar_allows_prefix(grammar, '{"a')


def grammar_allows_prefix(grammar: LlguidanceGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(matcher.advance(byte) for byte in text.encode())


def chain(length: int) -> Any:
    links = {
        f"c{i}": {"type": "object", "properties": {"n": {"$ref": f"#/$defs/c{i + 1}"}}}
        for i in range(length)
    }
    return {"$ref": "#/$defs/c0", "$defs": {**links, f"c{length}": {"type": "null"}}}


def _chain(length: int, link: Callable[[str], Any]) -> Any:
    """Definitions of which each refers to the next as `link` has it."""
    definitions = {f"c{i}": link(f"#/$defs/c{i + 1}") for i in range(length)}
    return {"$ref": "#/$defs/c0", "$defs": {**definitions, f"c{length}": {"type": "string"}}}


@pytest.mark.parametrize(
    "schema",
    [
        _chain(1200, lambda next_one: {"properties": {"n": {"$ref": next_one}}, "required": ["n"]}),
        _chain(2400, lambda next_one: {"$ref": next_one}),
        _chain(390, lambda next_one: {"$ref": next_one, "minLength": 1}),
        _chain(100, lambda next_one: {"allOf": [{"$ref": next_one, "minLength": 1}] * 2}),
        _chain(100, lambda next_one: {"anyOf": [{"$ref": next_one, "minLength": 1}] * 2}),
    ],
    ids=["required", "alone", "with others", "allOf of two", "anyOf of two"],
)
def test_no_chain_of_references_takes_time_that_grows_faster_than_it(schema: Any) -> None:
    """Those of two have 2**100 ways through them: the test ends only where none is gone twice."""
    with pytest.raises(GrammarError, match="deep|multiplied out"):
        json_grammar(schema, ConstraintSpec.json_schema(True))


def _any_of_tree(leaf: str, *, width: int, depth: int) -> Any:
    if not depth:
        return {"const": leaf}
    options = [_any_of_tree(f"{leaf}{i}", width=width, depth=depth - 1) for i in range(width)]
    return {"anyOf": options}


@pytest.mark.parametrize(
    "options",
    [
        [_any_of_tree(side, width=5, depth=4) for side in "abc"],
        [{"enum": [f"{side}{i}" for i in range(9000)]} for side in "abcdef"],
    ],
    ids=["options in options", "values"],
)
def test_telling_options_apart_has_a_limit_of_work(options: list[Any]) -> None:
    schema = {"oneOf": options}
    with pytest.raises(GrammarError, match="too much work"):
        json_grammar(schema, ConstraintSpec.json_schema(True))


def test_places_below_a_long_name_do_not_keep_it() -> None:
    """2,400 times a name of 100,000 characters would be 240 MB."""
    schema = {"properties": {"k" * 100_000: {"prefixItems": [{"oneOf": [True]}] * 2400}}}
    schema = json.loads(json.dumps(schema))  # no schema is there twice
    tracemalloc.start()
    json_grammar(schema, ConstraintSpec.json_schema(True))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30_000_000


@pytest.mark.parametrize("identifier", ["http://x/" + "a/" * 2000, "http://["])
def test_an_id_that_is_no_short_uri_is_refused(identifier: str) -> None:
    schema = {"$id": "http://x/", "properties": {"a": {"$id": identifier}}}
    assert refusal(schema).keyword == "$id"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999_983},
        {"type": "number", "multipleOf": 4_294_967_291},
        {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7919, 7907, 7901)]},
        {"$ref": "#/$defs/a", "multipleOf": 7919, "$defs": {"a": {"multipleOf": 0.7907}}},
        {"patternProperties": {f"^p{i}_$": {} for i in range(100)}},
    ],
)
def test_what_the_engine_would_count_for_seconds_is_refused(schema: Any) -> None:
    assert refusal(schema).keyword in ("multipleOf", "patternProperties")


def test_a_document_of_too_many_schemas_is_refused_before_they_are_read() -> None:
    items = [{"type": "string"} for _ in range(MAX_SCHEMAS)]
    with pytest.raises(GrammarError, match=f"more than {MAX_SCHEMAS} schemas"):
        SchemaPlaces({"prefixItems": items})
    SchemaPlaces({"prefixItems": items[1:]})


@pytest.mark.parametrize("multiple", [1, 997, 1024, 10**9, 0.25, 0.01, 86_400, 12_000_000])
def test_a_round_multiple_is_taken(multiple: float) -> None:
    compiled({"type": "number", "multipleOf": multiple})


KEYWORDS = tuple(
    "$ref $id $schema $anchor $defs type enum const anyOf allOf oneOf not if then properties "
    "patternProperties additionalProperties propertyNames required minProperties maxProperties "
    "dependentRequired dependentSchemas dependencies unevaluatedProperties items prefixItems "
    "additionalItems contains minItems maxItems uniqueItems minLength maxLength pattern format "
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf x-guidance".split()
)
ODD_VALUES = (
    *("1e999", "-1e999", "1" + "0" * 400, "-0.0", "-1", "0.5", "5e-324", "1e308", "true", "null"),
    *('""', '"string"', '"\\ud800"', '"#"', '"#/$defs/a"', '"http://["', '"//[::"', '"(?=a)"'),
    *('"a{' + "9" * 5000 + '}"', "[]", "{}", "[[]]", "[{}]", "[null]", '["a"]', "[1]", '[["a"]]'),
    *('{"a":1}', '{"a":[["b"]]}', '{"a":[{}]}', '{"a":{"$ref":"#"}}', '{"":{}}', '{"enum":5}'),
    *('{"enum":[1]}', '{"pattern":5}', '{"type":[["a"]]}', '{"type":[{}]}', '{"type":5}'),
)


def test_a_keyword_of_any_value_is_taken_or_refused() -> None:
    for keyword, value in itertools.product(KEYWORDS, ODD_VALUES):
        text = f'{{"{keyword}":{value},"$defs":{{"a":{{}}}}}}'
        spec = ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, text=text)
        with contextlib.suppress(GrammarError):
            BACKEND.compile(spec, deadline=5)


def test_a_long_chain_of_references_is_refused_before_the_stack_ends() -> None:
    assert accepts(compiled(chain(100)), '{"n":{}}')
    assert "deeper than 400 levels" in str(refusal(chain(1200)))


def combined(factors: int, width: int) -> Any:
    options = [
        [{"properties": {f"p{i}_{j}": {"const": j}}} for j in range(width)] for i in range(factors)
    ]
    return {"type": "object", "allOf": [{"anyOf": factor} for factor in options]}


@pytest.mark.parametrize(
    ("schema", "limit"),
    [
        (combined(8, 8), "at most 200"),
        (combined(3, 20), "at most 200"),
        ({"properties": {f"p{i}": {} for i in range(1001)}}, "more than 700 properties"),
        (
            {"allOf": [{"properties": {f"{a}{i}": {} for i in range(600)}} for a in "ab"]},
            "more than 700 properties",
        ),
    ],
)
def test_what_grows_too_large_is_refused_before_it_does(schema: Any, limit: str) -> None:
    assert limit in str(refusal(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "enum": [f"w{i}" for i in range(2000)]},
        {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(300)}},
        combined(2, 6),
        {"allOf": [{"type": "object", "properties": {f"a{i}": {}}} for i in range(20)]},
    ],
)
def test_what_is_only_large_compiles(schema: Any) -> None:
    compiled(schema)


BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
VALUES = (0, 1, -1, 0.5, -0.5, 2.5, 10, 9.99, -10, 100, 0.05, -0.05, 0.1, 99.95, -99, 12.34, 1.25)


def satisfies(value: Fraction, schema: dict[str, Any]) -> bool:
    limits = {name: Fraction(repr(schema[name])) for name in BOUNDS if name in schema}
    step = schema.get("multipleOf")
    return (
        value >= limits.get("minimum", value)
        and value <= limits.get("maximum", value)
        and ("exclusiveMinimum" not in limits or value > limits["exclusiveMinimum"])
        and ("exclusiveMaximum" not in limits or value < limits["exclusiveMaximum"])
        and (step is None or (value / Fraction(repr(step))).denominator == 1)
    )


@pytest.mark.parametrize("seed", range(4))
def test_random_bounds_let_no_number_pass_that_breaks_them(seed: int) -> None:
    rng = random.Random(seed)
    num_accepted = 0
    for _ in range(60):
        schema: dict[str, Any] = {"type": rng.choice(["number", "integer"])}
        schema |= {name: rng.choice(VALUES) for name in BOUNDS if rng.random() < 0.4}
        if rng.random() < 0.25:
            schema["multipleOf"] = rng.choice([1, 2, 0.5, 0.25, 0.01, 3])
        try:
            grammar = compiled(schema)
        except GrammarError:
            continue
        near = [
            Fraction(repr(v)) for v in (*VALUES[::3], *(schema[n] for n in schema.keys() & BOUNDS))
        ]
        for value, delta in itertools.product(
            near, (-1, Fraction(-1, 100), 0, Fraction(1, 100), 1)
        ):
            text = f"{float(value + delta):.4f}".rstrip("0").rstrip(".")
            is_whole = "." not in text
            if accepts(grammar, text):
                assert satisfies(Fraction(text), schema), (schema, text)
                assert is_whole or schema["type"] == "number"
                num_accepted += 1
            elif is_whole:
                assert not satisfies(Fraction(text), schema), (schema, text)
    assert num_accepted > 100
