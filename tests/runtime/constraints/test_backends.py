"""What every constraint backend has to keep to, one suite for all of them.

Grammars are walked at random: at each state the mask, `advance`, `forced_tokens` and the rest must
tell the same story. No model is needed.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from random import Random
from types import MappingProxyType

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from sapwood.runtime.constraints import BACKENDS
from sapwood.runtime.constraints.interface import (
    ConstraintBackend,
    Grammar,
    GrammarError,
    Matcher,
    TokenMask,
    Vocabulary,
)
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec, Whitespace

DEADLINE = 30.0  # seconds; generous, as nothing here measures
NUM_WALKS = 3
MAX_STEPS = 40

PERSON = {
    "type": "object",
    "properties": {
        "name_of_the_person": {"type": "string", "maxLength": 8},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["tall", "short", None]}, "maxItems": 2},
    },
    "required": ["name_of_the_person", "age"],
    "additionalProperties": False,
}
TEXT = {"type": "string", "maxLength": 12}
UNION = {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"type": "string", "minLength": 2}]}
GBNF = 'root ::= "<" item* ">"\nitem ::= [a-c] | "(" item ")"'


def json_spec(schema: object, whitespace: Whitespace = Whitespace.COMPACT) -> ConstraintSpec:
    assert isinstance(schema, dict)
    return ConstraintSpec.json_schema(schema, whitespace=whitespace)


SPECS: Mapping[str, ConstraintSpec] = MappingProxyType(
    {
        "digits": ConstraintSpec.regex("[0-9]{2,4}"),
        "dotted": ConstraintSpec.regex(r"(the|a tree)\.{0,3}.{0,3}"),
        "forced": ConstraintSpec.regex("The quick (brown|red) fox jumps!"),
        "cjk": ConstraintSpec.regex("[一-龥]{1,4}"),
        "no_lower_case": ConstraintSpec.regex("[^a-z]{1}"),
        "anything": ConstraintSpec.regex(r"(.|\n){0,6}"),
        "choice": ConstraintSpec.choice(["blue", "blueberry", "日本", "😀", 'a"b\\c\n']),
        "person_compact": json_spec(PERSON),
        "person_bounded": json_spec(PERSON, Whitespace.BOUNDED),
        "person_spaced": json_spec(PERSON, Whitespace.SPACED),
        "text": json_spec(TEXT),
        "union": json_spec(UNION),
        "gbnf": ConstraintSpec(kind=ConstraintKind.EBNF, text=GBNF),
    }
)
PERSON_ANSWER = {"name_of_the_person": "Bo", "age": 7, "tags": ["tall", None]}
EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "digits": "123",
        "dotted": "a tree...the",
        "forced": "The quick red fox jumps!",
        "cjk": "日本語",
        "no_lower_case": "😀",
        "anything": "A\nb",
        "choice": "blueberry",
        "person_compact": json.dumps(PERSON_ANSWER, separators=(",", ":")),
        "person_bounded": json.dumps(PERSON_ANSWER),
        "person_spaced": json.dumps(PERSON_ANSWER),
        "text": '"the dog"',
        "union": '"日本"',
        "gbnf": "<(a)b>",
    }
)
# What a backend refuses, as its file says.
REFUSED = frozenset({("outlines_core", "person_spaced"), ("outlines_core", "gbnf")})


@pytest.fixture(scope="module", params=sorted(BACKENDS))
def backend(
    request: pytest.FixtureRequest, backend_named: Callable[[str], ConstraintBackend]
) -> ConstraintBackend:
    return backend_named(request.param)


@pytest.fixture(scope="module")
def compiled(backend: ConstraintBackend) -> "Compiled":
    return Compiled(backend)


class Compiled:
    """The grammars of one backend, each compiled when it is first wanted."""

    def __init__(self, backend: ConstraintBackend) -> None:
        self._backend = backend
        self._grammar = cache(lambda spec: backend.compile(spec, deadline=DEADLINE))

    @property
    def name(self) -> str:
        return self._backend.name

    def grammar(self, name: str) -> Grammar:
        if (self._backend.name, name) in REFUSED:
            pytest.skip("refused, as another test checks")
        grammar: Grammar = self._grammar(SPECS[name])
        return grammar

    def of(self, spec: ConstraintSpec) -> Grammar:
        grammar: Grammar = self._grammar(spec)
        return grammar


def mask_of(matcher: Matcher, vocabulary: Vocabulary) -> TokenMask:
    """Every word of it is written by the matcher, or it stands for all tokens."""
    mask = np.full(vocabulary.mask_size, 0x5A5A5A5A, dtype=np.int32)
    return mask if matcher.fill_mask(mask) else np.full_like(mask, -1)


def tokens_in(mask: TokenMask) -> NDArray[np.intp]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def allowed(matcher: Matcher, vocabulary: Vocabulary) -> set[int]:
    return set(tokens_in(mask_of(matcher, vocabulary)).tolist())


def states(
    grammar: Grammar, name: str, vocabulary: Vocabulary, *, seed: int
) -> Iterator[tuple[Matcher, list[int]]]:
    """The matcher at each state on the way to the example answer and of a few random walks, with
    the tokens that led there."""
    matcher, tokens = grammar.matcher(), list[int]()
    for token in vocabulary.encode(EXAMPLES[name]):
        yield matcher, tokens
        assert matcher.advance(token), f"the example of {name}"
        tokens.append(token)
    assert matcher.is_accepting, f"the example of {name}"
    yield matcher, tokens
    random = Random(seed)
    for _ in range(NUM_WALKS):
        yield from random_walk(grammar, vocabulary, random)


def random_walk(
    grammar: Grammar, vocabulary: Vocabulary, random: Random
) -> Iterator[tuple[Matcher, list[int]]]:
    matcher, tokens = grammar.matcher(), list[int]()
    yield matcher, tokens
    for _ in range(MAX_STEPS):
        choices = sorted(allowed(matcher, vocabulary) - set(vocabulary.eos_token_ids))
        if not choices:
            break
        tokens.append(random.choice(choices))
        assert matcher.advance(tokens[-1])
        yield matcher, tokens


def accepted_answers(
    grammar: Grammar, name: str, vocabulary: Vocabulary, *, seed: int
) -> Iterator[bytes]:
    """The text of answers where they may end."""
    for matcher, tokens in states(grammar, name, vocabulary, seed=seed):
        if matcher.is_accepting:
            yield b"".join(vocabulary.token_bytes[token] for token in tokens)


def takes(grammar: Grammar, vocabulary: Vocabulary, text: str) -> bool:
    """Whether an answer may be this text, in the tokenizer's own tokens."""
    matcher = grammar.matcher()
    for token in vocabulary.encode(text):
        in_mask, is_forced = token in allowed(matcher, vocabulary), bool(matcher.forced_tokens())
        is_taken = matcher.advance(token)
        assert in_mask or is_forced or not is_taken
        if not is_taken:
            return False
    return matcher.is_accepting


@pytest.mark.parametrize("name", SPECS)
def test_what_the_mask_allows_advances_and_nothing_else(
    compiled: Compiled, vocabulary: Vocabulary, name: str
) -> None:
    random = Random(1)
    for matcher, _ in states(compiled.grammar(name), name, vocabulary, seed=1):
        in_mask = allowed(matcher, vocabulary)
        for token in random.sample(sorted(in_mask), min(12, len(in_mask))):
            assert matcher.copy().advance(token), token
        if not matcher.forced_tokens():  # else a token that begins like the forced one may advance
            for token in random.sample(range(vocabulary.logits_size), 12):
                assert matcher.copy().advance(token) == (token in in_mask), token


@pytest.mark.parametrize("name", SPECS)
def test_ends_are_allowed_exactly_where_the_answer_is_accepted(
    compiled: Compiled, vocabulary: Vocabulary, name: str
) -> None:
    ends = set(vocabulary.eos_token_ids)
    accepting = 0
    for matcher, _ in states(compiled.grammar(name), name, vocabulary, seed=2):
        in_mask = allowed(matcher, vocabulary)
        assert in_mask, "a state without a token is a dead end"
        accepting += matcher.is_accepting
        assert in_mask & ends == (ends if matcher.is_accepting else set())
        assert matcher.is_complete == (in_mask == ends)
        for end in ends:
            assert matcher.copy().advance(end) == matcher.is_accepting
    assert accepting


@pytest.mark.parametrize("name", SPECS)
def test_each_forced_token_is_alone_in_its_mask(
    compiled: Compiled, vocabulary: Vocabulary, name: str
) -> None:
    for matcher, _ in states(compiled.grammar(name), name, vocabulary, seed=3):
        before = allowed(matcher, vocabulary)
        forced = matcher.forced_tokens()
        assert allowed(matcher, vocabulary) == before, "asking changes nothing"
        follower = matcher.copy()
        for token in forced:
            assert token not in vocabulary.eos_token_ids
            assert allowed(follower, vocabulary) == {token}
            assert follower.advance(token)
        if len(before) == 1 and not matcher.is_accepting:
            assert forced, "what is alone in the mask is forced"


def test_a_text_without_choices_is_forced_to_where_there_is_one(
    compiled: Compiled, vocabulary: Vocabulary
) -> None:
    matcher = compiled.of(ConstraintSpec.regex(r"\(\)\{\}(0|1)")).matcher()
    forced = matcher.forced_tokens()
    assert b"".join(vocabulary.token_bytes[token] for token in forced) == b"(){}"


@pytest.mark.parametrize("name", SPECS)
def test_taking_tokens_back_is_as_if_they_had_never_come(
    compiled: Compiled, vocabulary: Vocabulary, name: str
) -> None:
    random = Random(4)
    grammar = compiled.grammar(name)
    for matcher, tokens in states(grammar, name, vocabulary, seed=4):
        returning, replayed = matcher.copy(), grammar.matcher()
        num_kept = random.randint(0, len(tokens))
        returning.rollback(len(tokens) - num_kept)
        for token in tokens[:num_kept]:
            assert replayed.advance(token)
        assert allowed(returning, vocabulary) == allowed(replayed, vocabulary)
        assert returning.is_accepting == replayed.is_accepting
        for token in tokens[num_kept:]:
            assert returning.advance(token)
        assert allowed(returning, vocabulary) == allowed(matcher, vocabulary)


def test_an_end_token_can_be_taken_back(compiled: Compiled, vocabulary: Vocabulary) -> None:
    matcher = compiled.grammar("digits").matcher()
    for token in vocabulary.encode("12"):
        assert matcher.advance(token)
    before = allowed(matcher, vocabulary)
    assert matcher.advance(vocabulary.eos_token_ids[0])
    matcher.rollback(1)
    assert allowed(matcher, vocabulary) == before
    assert matcher.advance(vocabulary.encode("3")[0])


@pytest.mark.parametrize("name", ["person_compact", "choice", "dotted"])
def test_copies_go_their_own_ways(compiled: Compiled, vocabulary: Vocabulary, name: str) -> None:
    random = Random(5)
    for matcher, _ in states(compiled.grammar(name), name, vocabulary, seed=5):
        before = allowed(matcher, vocabulary)
        copy = matcher.copy()
        assert allowed(copy, vocabulary) == before
        choices = sorted(before - set(vocabulary.eos_token_ids))
        if choices:
            assert copy.advance(random.choice(choices))
            copy.forced_tokens()
        assert allowed(matcher, vocabulary) == before
        assert matcher.is_accepting == (not before.isdisjoint(vocabulary.eos_token_ids))


def test_matchers_of_one_grammar_are_apart(compiled: Compiled, vocabulary: Vocabulary) -> None:
    grammar = compiled.grammar("digits")
    first, second = grammar.matcher(), grammar.matcher()
    for token in vocabulary.encode("1234"):
        assert first.advance(token)
    assert first.is_complete and not second.is_accepting
    assert not grammar.matcher().is_accepting


@pytest.mark.parametrize("name", SPECS)
def test_special_tokens_and_ids_without_a_token_are_never_allowed(
    compiled: Compiled, vocabulary: Vocabulary, name: str
) -> None:
    spelled = {i for i, spelled in enumerate(vocabulary.token_bytes) if spelled}
    never = set(range(vocabulary.logits_size)) - spelled
    assert never, "the model has more rows than tokens"
    never |= set(vocabulary.special_token_ids) - set(vocabulary.eos_token_ids)
    for matcher, _ in states(compiled.grammar(name), name, vocabulary, seed=6):
        assert allowed(matcher, vocabulary).isdisjoint(never)
        for token in never:
            assert not matcher.copy().advance(token)


def test_bits_beyond_the_vocabulary_are_zero_and_a_row_keeps_to_itself(
    compiled: Compiled, vocabulary: Vocabulary
) -> None:
    for name in ("anything", "text"):
        matcher = compiled.grammar(name).matcher()
        rows = np.full((3, vocabulary.mask_size), 7, dtype=np.int32)
        assert matcher.fill_mask(rows[1])
        assert (rows[[0, 2]] == 7).all()
        assert tokens_in(rows[1]).max() < vocabulary.logits_size


def test_ids_outside_the_vocabulary_are_not_taken(
    compiled: Compiled, vocabulary: Vocabulary
) -> None:
    matcher = compiled.grammar("anything").matcher()
    assert not matcher.advance(vocabulary.logits_size)
    assert not matcher.advance(-1)
    assert allowed(matcher, vocabulary)


@pytest.mark.parametrize(
    "name", [name for name in SPECS if SPECS[name].kind is ConstraintKind.REGEX]
)
def test_accepted_answers_match_the_regular_expression(
    compiled: Compiled, vocabulary: Vocabulary, name: str
) -> None:
    answers = list(accepted_answers(compiled.grammar(name), name, vocabulary, seed=7))
    assert answers
    for answer in answers:
        assert re.fullmatch(SPECS[name].text, answer.decode()), answer


def test_accepted_answers_are_choices(compiled: Compiled, vocabulary: Vocabulary) -> None:
    choices = json.loads(SPECS["choice"].text)
    grammar = compiled.grammar("choice")
    assert {
        answer.decode() for answer in accepted_answers(grammar, "choice", vocabulary, seed=8)
    } <= {*choices}
    for choice in choices:
        assert takes(grammar, vocabulary, choice)
    assert not takes(grammar, vocabulary, "blueb")


@pytest.mark.parametrize(
    "name", [name for name in SPECS if SPECS[name].kind is ConstraintKind.JSON_SCHEMA]
)
def test_accepted_answers_satisfy_the_schema_or_the_verdict_says_what_is_wrong(
    compiled: Compiled, vocabulary: Vocabulary, name: str
) -> None:
    grammar = compiled.grammar(name)
    num_sound = 0
    for answer in accepted_answers(grammar, name, vocabulary, seed=9):
        is_sound = satisfies(answer, SPECS[name].text)
        assert (grammar.matcher().verdict(answer) is None) == is_sound, answer
        assert is_sound or compiled.name == "xgrammar", answer
        num_sound += is_sound
    assert num_sound


def satisfies(answer: bytes, schema: str) -> bool:
    try:
        jsonschema.validate(json.loads(answer.decode()), json.loads(schema))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.mark.parametrize(
    ("name", "separators"),
    [
        ("person_compact", (",", ":")),
        ("person_spaced", (", ", ": ")),
        ("person_bounded", (",", ":")),
    ],
)
def test_json_is_written_with_the_whitespace_asked_for(
    compiled: Compiled, vocabulary: Vocabulary, name: str, separators: tuple[str, str]
) -> None:
    grammar = compiled.grammar(name)
    person = PERSON_ANSWER
    assert takes(grammar, vocabulary, json.dumps(person, separators=separators))
    other = {",": (", ", ": "), ", ": (",", ":")}[separators[0]]
    is_bounded = SPECS[name].whitespace is Whitespace.BOUNDED
    assert takes(grammar, vocabulary, json.dumps(person, separators=other)) == is_bounded


def test_whitespace_in_json_has_an_end(compiled: Compiled, vocabulary: Vocabulary) -> None:
    matcher = compiled.grammar("person_bounded").matcher()
    assert matcher.advance(vocabulary.encode("{")[0])
    (space,) = vocabulary.encode(" ")
    num_spaces = 0
    while matcher.advance(space):
        num_spaces += 1
        assert num_spaces <= 64
    assert num_spaces


def test_an_expression_takes_the_tokenizers_own_tokens_of_other_scripts(
    compiled: Compiled, vocabulary: Vocabulary
) -> None:
    assert len(vocabulary.encode("日本")) > 2, "characters in several tokens are what is tried"
    assert takes(compiled.grammar("cjk"), vocabulary, "日本")
    assert not takes(compiled.grammar("cjk"), vocabulary, "日a")
    emoji = compiled.of(ConstraintSpec.regex("(😀|😃)"))
    assert takes(emoji, vocabulary, "😀") and takes(emoji, vocabulary, "😃")
    assert not takes(emoji, vocabulary, "😄")


def test_a_part_of_a_character_does_not_finish_a_match(
    compiled: Compiled, vocabulary: Vocabulary
) -> None:
    """Of outlines' own vocabulary, 264 parts of characters were finished matches."""
    matcher = compiled.grammar("no_lower_case").matcher()
    finishing = 0
    for token in allowed(matcher, vocabulary):
        other = matcher.copy()
        assert other.advance(token)
        if other.is_accepting:
            finishing += 1
            assert len(vocabulary.token_bytes[token].decode()) == 1
    assert finishing > 50


def test_an_accepted_answer_that_may_go_on_is_not_complete(
    compiled: Compiled, vocabulary: Vocabulary
) -> None:
    matcher = compiled.of(ConstraintSpec.regex(r"[0-9]{1,3}(\.[0-9]{1,3}){3}")).matcher()
    for token in vocabulary.encode("127.0.0.1"):
        assert matcher.advance(token)
    assert matcher.is_accepting and not matcher.is_complete
    for token in vocabulary.encode("99"):
        assert matcher.advance(token)
    assert matcher.is_complete


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("ab(cd)?", ["ab", "abcd"]),
        ("a|ab", ["a", "ab"]),
        ("(a|ab)(c|bcd)", ["ac", "abc", "abcd", "abbcd"]),
        (r"[0-9]+(\.[0-9]+)?", ["1", "1.5"]),
        ("é{1,2}", ["é", "éé"]),
        ("a*?", ["", "aa"]),
    ],
)
def test_where_an_answer_may_end_all_that_may_follow_is_allowed(
    compiled: Compiled, vocabulary: Vocabulary, pattern: str, texts: list[str]
) -> None:
    """outlines_core loses what follows where a match could end, or is second of alternatives."""
    grammar = compiled.of(ConstraintSpec.regex(pattern))
    for text in texts:
        assert takes(grammar, vocabulary, text), text


@pytest.mark.parametrize("pattern", ["^ab$", "ab", "^(a)b", "ab$"])
def test_anchors_at_the_ends_say_what_is_so_anyway(
    compiled: Compiled, vocabulary: Vocabulary, pattern: str
) -> None:
    grammar = compiled.of(ConstraintSpec.regex(pattern))
    assert takes(grammar, vocabulary, "ab")
    assert not takes(grammar, vocabulary, "abb")


@pytest.mark.parametrize(
    "pattern", ["(?=a)b", "(?<!a)b", r"(a)\1", r"\bab", "(a", "a{3,2}", "[b-a]"]
)
def test_an_expression_that_cannot_be_enforced_is_refused(
    backend: ConstraintBackend, pattern: str
) -> None:
    with pytest.raises(GrammarError):
        backend.compile(ConstraintSpec.regex(pattern), deadline=DEADLINE)


@pytest.mark.parametrize("text", ["[]", "{}", "[1]", "nonsense", '"a"'])
def test_choices_that_are_none_are_refused(backend: ConstraintBackend, text: str) -> None:
    spec = replace(SPECS["choice"], text=text)
    with pytest.raises(GrammarError):
        backend.compile(spec, deadline=DEADLINE)


@pytest.mark.parametrize(
    "schema",
    [
        '{"type": "nonsense"}',
        '{"type": "string", "minLength": -1}',
        '{"$ref": "https://example.org/schema.json"}',
        '{"$ref": "#/$defs/nowhere"}',
        "not json",
        "[]",
        "[" * 5000,
    ],
)
def test_a_schema_that_is_none_is_refused(backend: ConstraintBackend, schema: str) -> None:
    spec = ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, text=schema)
    with pytest.raises(GrammarError):
        backend.compile(spec, deadline=DEADLINE)


def test_what_is_refused_is_what_is_said(backend: ConstraintBackend) -> None:
    for name, spec in SPECS.items():
        if (backend.name, name) in REFUSED:
            with pytest.raises(GrammarError, match=backend.name):
                backend.compile(spec, deadline=DEADLINE)


def test_a_grammar_tells_what_it_takes(compiled: Compiled) -> None:
    assert compiled.grammar("person_compact").num_bytes > 0
