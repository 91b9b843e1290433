"""Masks are neither too wide nor too narrow.

Along random walks every token that is tried out of a mask has a completion, found by a greedy
search over bytes; and the tokens of a valid answer are all in its masks.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.llguidance_backend import (
    LlguidanceBackend,
    LlguidanceMatcher,
)
from sapwood.runtime.constraints.spec import ConstraintSpec, Whitespace
from tests.runtime.constraints.byte_backend import LONGER, allowed, vocabulary
from tests.runtime.constraints.test_json_schema_suite import FILES, groups_of, written

DATA = Path(__file__).parents[2] / "data"
VOCABULARY = vocabulary(*LONGER)
SIZE = VOCABULARY.logits_size
BACKEND = LlguidanceBackend(VOCABULARY)
NUM_TRIED = 3  # tokens of each mask
MAX_CLOSING_BYTES = 300
# What ends things in JSON comes first; a random byte where none of them helps.
CLOSING = tuple(b'"}]:,0123456789-' + b"aTZ@.+" + b"eulnrsf")
REGEXES = (
    r"[A-Z][a-z]+ [A-Z]\.",
    r"\d{3}-\d{4}( ext \d+)?",
    r"(foo|bar|baz)(, (foo|bar|baz)){2,5}",
    r"[^x]{3,20}x",
    r"(é|日本)+!",
    r"(?i)(yes|no), because .{5,40}\.",
    r"(([a-c]{2,4}){2}|d+)z",
    r"\{[^{}\"]*\}",
)


def completes(matcher: LlguidanceMatcher, words: list[bytes], rng: random.Random) -> bool:
    """Whether an end is found by closing what is open, after one of the constraint's own words
    where need be, and with a random byte now and then."""
    return any(
        closes(started, noise, rng)
        for noise in (0.0, 0.1, 0.3, 0.5)
        for word in (b"", b"}", *words)
        if (started := after(matcher, word)) is not None
    )


def after(matcher: LlguidanceMatcher, word: bytes) -> LlguidanceMatcher | None:
    """A copy that has taken in a word, after the rest of a character that is begun; None if it
    may not come here."""
    copy = matcher.copy()
    while (options := allowed(copy, SIZE)) and 0x80 <= options[0] < 0xC0:
        assert copy.advance(options[0])
    return copy if all(copy.advance(byte) for byte in word) else None


def closes(matcher: LlguidanceMatcher, noise: float, rng: random.Random) -> bool:
    for _ in range(MAX_CLOSING_BYTES):
        if matcher.is_accepting:
            return True
        options = [i for i in allowed(matcher, SIZE) if i not in VOCABULARY.special_token_ids]
        if not options:
            return False
        closing = [byte for byte in CLOSING if byte in options] or options
        assert matcher.advance(rng.choice(options) if rng.random() < noise else closing[0])
    return False


def walk(spec: ConstraintSpec, rng: random.Random, num_tokens: int) -> None:
    found = sorted(set(re.findall(r"\w{3,}", spec.text)))
    words = [f"{opening}a{word}".encode() for word in found for opening in ("", '"', '{"')]
    matcher = BACKEND.compile(spec, deadline=5).matcher()
    for _ in range(num_tokens):
        options = [i for i in allowed(matcher, SIZE) if i not in VOCABULARY.eos_token_ids]
        if not options:
            assert matcher.is_accepting
            return
        for token_id in rng.sample(options, min(NUM_TRIED, len(options))):
            tried = matcher.copy()
            assert tried.advance(token_id)
            assert completes(tried, words, rng), (spec.text, VOCABULARY.token_bytes[token_id])
        assert matcher.advance(rng.choice(options))


def suite_schemas() -> list[Any]:
    return [group["schema"] for file in FILES for group in groups_of(file)]


def function_schemas() -> list[Any]:
    lines = (DATA / "bfcl" / "functions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["parameters"] for line in lines]


def compilable(schemas: list[Any], count: int, rng: random.Random) -> list[ConstraintSpec]:
    specs: list[ConstraintSpec] = []
    for schema in rng.sample(schemas, len(schemas)):
        whitespace = rng.choice(list(Whitespace))
        spec = ConstraintSpec.json_schema(schema, whitespace=whitespace)
        try:
            BACKEND.compile(spec, deadline=5)
        except GrammarError:
            continue
        specs.append(spec)
        if len(specs) == count:
            break
    return specs


def check_walks(num_schemas: int, num_tokens: int) -> None:
    rng = random.Random(num_schemas)
    specs = compilable(suite_schemas(), num_schemas // 2, rng)
    specs += compilable(function_schemas(), num_schemas - num_schemas // 2, rng)
    assert len(specs) == num_schemas
    for spec in (*specs, *map(ConstraintSpec.regex, REGEXES)):
        walk(spec, rng, num_tokens)


def test_every_allowed_token_has_a_completion() -> None:
    check_walks(num_schemas=20, num_tokens=10)


@pytest.mark.slow
def test_every_allowed_token_of_two_hundred_schemas_has_a_completion() -> None:
    check_walks(num_schemas=200, num_tokens=40)


def check_instances(every: int) -> int:
    """Walk the canonical tokens of every n-th valid instance that is an answer."""
    num_walked = 0
    instances = [
        (group["schema"], test["data"])
        for file in FILES
        if "optional" not in file
        for group in groups_of(file)
        for test in group["tests"]
        if test["valid"]
    ]
    for schema, data in instances[::every]:
        try:
            grammar = BACKEND.compile(ConstraintSpec.json_schema(schema), deadline=5)
        except GrammarError:
            continue
        text = written(data, schema)
        bytewise = grammar.matcher()
        if not all(bytewise.advance(byte) for byte in text.encode()):
            continue  # an exception of the suite
        matcher = grammar.matcher()
        for token_id in VOCABULARY.encode(text):
            assert token_id in allowed(matcher, SIZE), (schema, text)
            assert matcher.advance(token_id)
        assert matcher.is_accepting
        num_walked += 1
    return num_walked


def test_the_tokens_of_valid_instances_are_in_their_masks() -> None:
    assert check_instances(every=5) > 80


@pytest.mark.slow
def test_the_tokens_of_all_valid_instances_are_in_their_masks() -> None:
    assert check_instances(every=1) > 400
