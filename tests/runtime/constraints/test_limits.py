"""What is wrong with a constraint can be said without a grammar engine."""

import json
from dataclasses import replace
from typing import Any

import pytest

from sapwood import ConstraintSpec, Whitespace
from sapwood.runtime.constraints.limits import (
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_JSON_DEPTH,
    MAX_SCHEMA_BYTES,
    MAX_WHITESPACE_PATTERN_LENGTH,
    fault_of,
)
from sapwood.runtime.constraints.spec import ConstraintKind

K = ConstraintKind


def spec(kind: Any = K.JSON_SCHEMA, text: Any = "{}", **options: Any) -> ConstraintSpec:
    return ConstraintSpec(kind=kind, text=text, **options)


def nested(levels: int) -> str:
    return '{"not":' * (levels - 1) + "{}" + "}" * (levels - 1)


def number(num_digits: int, sign: str = "") -> str:
    return '{"default": ' + sign + "9" * num_digits + "}"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (spec(K.JSON_SCHEMA, "{"), "not valid JSON"),
        (spec(K.JSON_SCHEMA, '{"const": NaN}'), "NaN is not JSON"),
        (spec(K.JSON_SCHEMA, number(4301)), "a number of 4301 digits, at most 4300 are taken"),
        (spec(K.JSON_SCHEMA, number(4301, "-")), "a number of 4301 digits"),
        (spec(K.STRUCTURAL_TAG, number(5000)), "a number of 5000 digits"),
        (spec(K.JSON_SCHEMA, "[]"), "not a JSON schema"),
        (spec(K.JSON_SCHEMA, "null"), "not a JSON schema"),
        (spec(K.JSON_SCHEMA, '"string"'), "not a JSON schema"),
        (spec(K.JSON_SCHEMA, "["), "not valid JSON"),
        (spec(K.JSON_SCHEMA, "[" * 100_000), "not valid JSON"),
        (spec(K.JSON_SCHEMA, nested(MAX_JSON_DEPTH + 1)), "nested deeper than 128"),
        (spec(K.JSON_SCHEMA, json.dumps({"title": "x" * MAX_SCHEMA_BYTES})), "at most 262144"),
        (spec(K.JSON_SCHEMA, '{"const": "\\ud800"}'), "not valid Unicode"),
        (spec(K.JSON_SCHEMA, '{"const": "\ud800"}'), "not valid Unicode"),
        (spec(K.JSON_SCHEMA, ""), "is empty"),
        (spec(K.REGEX, ""), "is empty"),
        (spec(K.REGEX, "\ud800"), "not valid Unicode"),
        (spec(K.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1)), "at most 65536"),
        (spec(K.REGEX, "é" * (MAX_GRAMMAR_BYTES // 2 + 1)), "at most 65536"),
        (spec(K.LARK, " \n"), "is empty"),
        (spec(K.EBNF, "x" * (MAX_GRAMMAR_BYTES + 1)), "at most 65536"),
        (spec(K.CHOICE, "[]"), "no choices"),
        (spec(K.CHOICE, '["a", ""]'), "empty choice"),
        (spec(K.CHOICE, '["a", 1]'), "not a list of strings"),
        (spec(K.CHOICE, '"a"'), "not a list of strings"),
        (spec(K.CHOICE, json.dumps(["a"] * (MAX_CHOICES + 1))), "at most 10000"),
        (spec(K.STRUCTURAL_TAG, "[]"), "not a JSON object"),
        (spec(K.STRUCTURAL_TAG, "x"), "not valid JSON"),
        (spec("regex", "a"), "wrong type"),
        (spec(K.REGEX, 5), "wrong type"),
        (spec(whitespace="a lot"), "unknown whitespace"),
        (spec(backend="guesswork"), "use one of llguidance"),
        (spec(whitespace_pattern=""), "not a regular expression"),
        (spec(whitespace_pattern=5), "not a regular expression"),
        (spec(whitespace_pattern="\ud800"), "not a regular expression"),
        (spec(whitespace_pattern=" " * (MAX_WHITESPACE_PATTERN_LENGTH + 1)), "257 characters"),
        *(
            (spec(whitespace_pattern=pattern), "not of JSON's whitespace alone")
            for pattern in (".*", " |a", "[^ ]", r"\S", r"[\t-\r]", r"\f", "\u00a0", "[*]", r"\x0b")
        ),
        (spec(K.REGEX, "a", whitespace_pattern=" "), "for JSON"),
        (spec(K.CHOICE, '["a"]', whitespace_pattern=" "), "for JSON"),
    ],
)
def test_a_fault_is_told_in_a_few_words(wrong: ConstraintSpec, said: str) -> None:
    fault = fault_of(wrong)
    assert fault is not None
    assert said in fault
    assert len(fault) < 300
    assert "sys." not in fault


@pytest.mark.parametrize(
    "sound",
    [
        ConstraintSpec.json_schema({"type": "object"}),
        ConstraintSpec.json_schema(True),
        ConstraintSpec.regex("a" * MAX_GRAMMAR_BYTES),
        ConstraintSpec.choice(["a"] * MAX_CHOICES),
        spec(text=nested(MAX_JSON_DEPTH)),
        spec(text='{"const": "\\ud83d\\ude00"}'),
        spec(text='{"const": "\\\\ud800"}'),
        spec(whitespace=Whitespace.COMPACT, whitespace_pattern="[ ]?", backend="xgrammar"),
        spec(text=number(4300)),
        spec(text=number(4300, "-")),
        spec(K.STRUCTURAL_TAG, "{}", whitespace_pattern=" "),
        *(
            spec(whitespace_pattern=pattern)
            for pattern in (
                r"[\n\t ]*",
                r"\s{0,2}",
                r"[\s]?",
                r"(?:\n| ){1,}",
                "\n?",
                r"(\r\n)+",
                r"^[\ ]?$",
                r"[\x20\x09\x0A\x0d]{1,8}",
            )
        ),
        spec(K.LARK, 'start: "a"'),
        spec(K.EBNF, 'root ::= "a"'),
    ],
)
def test_what_is_at_its_limit_has_no_fault(sound: ConstraintSpec) -> None:
    assert fault_of(sound) is None
    assert fault_of(ConstraintSpec.from_json(sound.as_json())) is None


def test_a_name_of_a_backend_is_checked_for_every_kind() -> None:
    assert fault_of(replace(ConstraintSpec.regex("a"), backend="outlines_core")) is None
    assert fault_of(replace(ConstraintSpec.regex("a"), backend="")) is not None
