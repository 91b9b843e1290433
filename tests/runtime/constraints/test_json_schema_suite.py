"""The JSON Schema Test Suite: nothing invalid is ever accepted, and little that is valid refused.

Every schema that compiles is held against its instances, byte by byte through masks. Instances are
written compactly, with the keys of objects in the order in which the schema first names them:
property order is part of a constraint. Whole numbers are written without a decimal point.

Draft 7's schemas do not say so themselves, and get their `$schema`. Of optional/format there is
what Sapwood enforces; formats and contents that it takes as annotations (as JSON Schema lets it)
are not asserted.
"""

import json
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.llguidance_backend import LlguidanceBackend, LlguidanceGrammar
from sapwood.runtime.constraints.spec import ConstraintSpec
from tests.runtime.constraints.byte_backend import accepts, vocabulary

SUITE = Path(__file__).parents[2] / "data" / "json-schema-test-suite"
FILES = sorted(str(path.relative_to(SUITE)) for path in SUITE.rglob("*.json"))
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
ANNOTATIONS_ONLY = ("draft7/optional/content.json",)


class Refused(NamedTuple):
    """Valid instances that are refused on purpose: patterns of their file, group and test."""

    file: str
    group: str
    test: str
    reason: str


EXCEPTIONS = (
    Refused("*/format.json", "*", "*only an annotation*", "known formats are enforced"),
    Refused("*/date-time.json", "*", "*leap second*", "whether there is one hangs on the zone"),
    Refused("*/time.json", "*", "*leap second*", "whether there is one hangs on the zone"),
    Refused("*/date-time.json", "*", "*fifteen nines*", "fractions have at most nine digits"),
    Refused("*/hostname.json", "*punycode*", "*", "no label is in punycode"),
    Refused("*/email.json", "*", "*quoted string*", "the local part is not quoted"),
    Refused("*/email.json", "*", "*IPv6*", "the domain is a name or an IPv4 address"),
    Refused("*/ipv6.json", "*", "*mixed format*", "all groups are hexadecimal"),
    Refused("*/ipv6.json", "*", "a long valid ipv6", "all groups are hexadecimal"),
    Refused("*/bignum.json", "integer", "*bignum*", "numbers end after 40 digits"),
    Refused("*/bignum.json", "number", "*bignum*", "numbers end after 40 digits"),
    Refused("*/bignum.json", "*comparison", "*", "bounds beyond doubles are moved inwards"),
    Refused("*/float-overflow.json", "*", "*", "numbers end after 40 digits"),
    Refused("*/ecmascript-regex.json", "*", "Line tabulation matches", "needs a \\u escape"),
    Refused("*/ecmascript-regex.json", "*", "Non-whitespace control*", "needs a \\u escape"),
    Refused("*/vocabulary.json", "*no validation*", "*", "metaschemas are not read"),
)
# Schemas of each draft that compile and that are refused. A change belongs here, on purpose.
COUNTS = {
    "draft2020-12": {"compiled": 285, "refused": 159},
    "draft7": {"compiled": 233, "refused": 71},
}


@pytest.fixture(scope="module")
def backend() -> LlguidanceBackend:
    return LlguidanceBackend(vocabulary())


def groups_of(file: str) -> Iterator[dict[str, Any]]:
    for group in json.loads((SUITE / file).read_text(encoding="utf-8")):
        if file.startswith("draft7") and isinstance(group["schema"], dict):
            group["schema"] = {"$schema": DRAFT_7, **group["schema"]}
        yield group


def compile_schema(backend: LlguidanceBackend, schema: Any) -> LlguidanceGrammar | GrammarError:
    try:
        return backend.compile(ConstraintSpec.json_schema(schema), deadline=5)
    except GrammarError as error:
        return error


def written(instance: Any, schema: Any) -> str:
    order = {name: i for i, name in enumerate(dict.fromkeys(names_in(schema)))}

    def ordered(value: Any) -> Any:
        if isinstance(value, dict):
            names = sorted(value, key=lambda name: order.get(name, len(order)))
            return {name: ordered(value[name]) for name in names}
        if isinstance(value, list):
            return [ordered(item) for item in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(ordered(instance), ensure_ascii=False, separators=(",", ":"))


def names_in(schema: Any) -> Iterator[str]:
    """Of properties, as they come; of `required` where it stands."""
    if isinstance(schema, list):
        for item in schema:
            yield from names_in(item)
    if isinstance(schema, dict):
        for keyword, value in schema.items():
            if keyword in ("properties", "const"):
                yield from value if isinstance(value, dict) else ()
            if keyword == "required" and isinstance(value, list):
                yield from value
            if keyword == "enum":
                yield from (name for item in value if isinstance(item, dict) for name in item)
            yield from names_in(value)


def exception_for(file: str, group: str, test: str) -> Refused | None:
    for exception in EXCEPTIONS:
        if all(map(fnmatch, (file, group, test), exception[:3])):
            return exception
    return None


@pytest.mark.parametrize("file", FILES)
def test_what_is_invalid_is_never_accepted_and_what_is_valid_is_but_for_the_exceptions(
    backend: LlguidanceBackend, file: str
) -> None:
    for group in groups_of(file):
        grammar = compile_schema(backend, group["schema"])
        if isinstance(grammar, GrammarError):
            continue
        for test in group["tests"]:
            text = written(test["data"], group["schema"])
            where = f"{group['description']}: {test['description']}: {text}"
            if accepts(grammar, text):
                assert test["valid"] or file in ANNOTATIONS_ONLY, where
            elif test["valid"]:
                assert exception_for(file, group["description"], test["description"]), where


@pytest.mark.parametrize("file", FILES)
def test_a_refusal_names_a_keyword_of_the_schema_or_no_answer_satisfies_it(
    backend: LlguidanceBackend, file: str
) -> None:
    for group in groups_of(file):
        refusal = compile_schema(backend, group["schema"])
        if isinstance(refusal, LlguidanceGrammar):
            continue
        if refusal.keyword is None:
            assert "no answer satisfies" in str(refusal), group["description"]
            assert not any(test["valid"] for test in group["tests"]) or is_about_controls(group)
        else:
            assert f'"{refusal.keyword}"' in json.dumps(group["schema"]), group["description"]


def is_about_controls(group: dict[str, Any]) -> bool:
    """Strings of control characters alone, which no answer can have."""
    return "control codes" in group["description"]


def test_every_exception_is_needed(backend: LlguidanceBackend) -> None:
    needed = set()
    for file in FILES:
        for group in groups_of(file):
            grammar = compile_schema(backend, group["schema"])
            if isinstance(grammar, GrammarError):
                continue
            for test in group["tests"]:
                found = exception_for(file, group["description"], test["description"])
                if found and test["valid"]:
                    if not accepts(grammar, written(test["data"], group["schema"])):
                        needed.add(found)
    assert needed == set(EXCEPTIONS)


@pytest.mark.parametrize("draft", COUNTS)
def test_as_many_schemas_compile_as_did(backend: LlguidanceBackend, draft: str) -> None:
    counts = Counter(
        "refused"
        if isinstance(compile_schema(backend, group["schema"]), GrammarError)
        else "compiled"
        for file in FILES
        if file.startswith(draft)
        for group in groups_of(file)
    )
    assert counts == COUNTS[draft]
