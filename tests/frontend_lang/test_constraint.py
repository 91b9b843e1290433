"""What the options of a `gen` ask of its answer."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from sapwood.frontend_lang.constraint import constraint_of_options, with_number_stops
from sapwood.frontend_lang.options import Options
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec
from sapwood.runtime.errors import RequestError

ROOT = Path(__file__).resolve().parents[2]


def spec_of(**options: Any) -> ConstraintSpec:
    spec = constraint_of_options(Options(**options))
    assert spec is not None
    return spec


def test_options_that_leave_the_answer_free_are_no_constraint() -> None:
    assert constraint_of_options({"max_tokens": 3, "stop": "x"}) is None


@pytest.mark.parametrize(
    ("dtype", "right", "wrong"),
    [
        (int, ["4", "-12", "+7\n"], ["", "4.5", " 4", "four"]),
        ("float", ["4", "-0.5", ".25 "], ["", "4.", "1e3"]),
        (bool, ["True", "False"], ["true", "False "]),
        ("str", ['""', '"a text, of 2 words"'], ["text", '"a" b"', '"a\nb"']),
    ],
)
def test_a_dtype_lets_its_own_texts_through_only(
    dtype: Any, right: list[str], wrong: list[str]
) -> None:
    spec = spec_of(dtype=dtype)
    assert spec.kind is ConstraintKind.REGEX
    assert all(re.fullmatch(spec.text, text) for text in right)
    assert not any(re.fullmatch(spec.text, text) for text in wrong)


def test_a_dtype_by_its_type_and_by_its_name_is_the_same() -> None:
    for kind in (int, float, bool, str):
        assert spec_of(dtype=kind) == spec_of(dtype=kind.__name__)


def test_a_number_ends_at_whitespace_beside_its_own_stops() -> None:
    assert with_number_stops({"dtype": int, "stop": "."})["stop"] == (".", " ", "\n")
    assert with_number_stops({"dtype": "float", "stop": ["\n"]})["stop"] == ("\n", " ")
    for free in ({"dtype": str}, {"dtype": "bool"}, {"regex": "[0-9]+"}):
        assert "stop" not in with_number_stops(Options(**free))  # type: ignore[typeddict-item]


def test_regexes_and_grammars_become_their_specs() -> None:
    assert spec_of(regex="[ab]+") == ConstraintSpec.regex("[ab]+")
    assert spec_of(grammar='start: "a"+').kind is ConstraintKind.LARK
    assert spec_of(grammar='root ::= "a"+').kind is ConstraintKind.EBNF


def test_a_schema_may_be_a_mapping_or_its_json() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    for given in (schema, json.dumps(schema)):
        spec = spec_of(json_schema=given)
        assert spec.kind is ConstraintKind.JSON_SCHEMA
        assert list(json.loads(spec.text)["properties"]) == ["b", "a"]


def test_an_output_type_is_what_outlines_understands() -> None:
    assert spec_of(output_type=Literal["a", "b"]) == ConstraintSpec.choice(["a", "b"])
    assert spec_of(output_type=ConstraintSpec.regex("x")) == ConstraintSpec.regex("x")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dtype", "complex"),
        ("dtype", list),
        ("regex", 3),
        ("json_schema", "{"),
        ("json_schema", 7),
        ("json_schema", {"const": {1, 2}}),
        ("grammar", "no rule at all"),
        ("grammar", ["a"]),
        ("output_type", object()),
    ],
)
def test_a_refusal_names_the_option(option: str, value: Any) -> None:
    with pytest.raises(RequestError, match=option) as caught:
        constraint_of_options(Options(**{option: value}))  # type: ignore[typeddict-item]
    assert caught.value.param == option


def test_constraints_load_neither_outlines_nor_pydantic_until_a_type_needs_them() -> None:
    code = (
        "import sys; from sapwood.frontend_lang.values import parse_value;"
        "from sapwood.frontend_lang.constraint import constraint_of_options as c;"
        "c({'dtype': int}); c({'grammar': 'start: \"a\"'}); parse_value({'output_type': int}, '1');"
        "sys.exit(any(name in sys.modules for name in ('outlines', 'pydantic', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
