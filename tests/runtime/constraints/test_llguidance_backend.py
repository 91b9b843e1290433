"""The default backend: what masks have in them, what is forced, what is refused."""

import json
import random
import threading

import numpy as np
import pytest

from sapwood.runtime.constraints import likely_cuts, llguidance_backend, rehearsal
from sapwood.runtime.constraints.interface import GrammarError, Matcher, Vocabulary
from sapwood.runtime.constraints.likely_cuts import LikelyCuts
from sapwood.runtime.constraints.llguidance_backend import LlguidanceBackend
from sapwood.runtime.constraints.number_limit import MAX_NUMBER_BYTES
from sapwood.runtime.constraints.rehearsal import Rehearsal
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec, Whitespace
from tests.runtime.automata import Automaton, AutomatonMatcher
from tests.runtime.constraints.byte_backend import (
    LONGER,
    accepts,
    allowed,
    compiled,
    vocabulary,
)

VOCABULARY = vocabulary(*LONGER)
SIZE = VOCABULARY.logits_size
EOS, CALL, USER = VOCABULARY.special_token_ids
BACKEND = LlguidanceBackend(VOCABULARY)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def token(text: bytes) -> int:
    return VOCABULARY.token_bytes.index(text)


def schema(value: object, **options: object) -> ConstraintSpec:
    return ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, text=json.dumps(value), **options)


# ---- masks


def test_special_tokens_are_in_no_mask_but_the_end_where_the_answer_is_complete() -> None:
    matcher = compiled(BACKEND, "(?s).*").matcher()
    assert set(allowed(matcher, SIZE)) & {EOS, CALL, USER} == {EOS}
    matcher = compiled(BACKEND, "(?s).+").matcher()
    assert not set(allowed(matcher, SIZE)) & {EOS, CALL, USER}


def test_rows_beyond_the_vocabulary_are_in_no_mask() -> None:
    matcher = compiled(BACKEND, "(?s).*").matcher()
    assert max(allowed(matcher, 32 * VOCABULARY.mask_size)) == EOS


def test_a_special_token_is_allowed_where_the_grammar_names_it() -> None:
    text = 'start: "a" <|call|> "b"'
    matcher = compiled(BACKEND, text, ConstraintKind.LARK).matcher()
    assert allowed(matcher, SIZE) == [token(b"a")]
    assert matcher.advance(token(b"a"))
    assert allowed(matcher, SIZE) == [CALL]
    assert not matcher.advance(USER)
    assert matcher.advance(CALL)


def test_a_special_token_may_be_named_by_its_id() -> None:
    matcher = compiled(BACKEND, f"start: <[{CALL}]>", ConstraintKind.LARK).matcher()
    assert allowed(matcher, SIZE) == [CALL]


def test_a_wildcard_names_no_special_token() -> None:
    matcher = compiled(BACKEND, "start: <[*]>", ConstraintKind.LARK).matcher()
    assert not set(allowed(matcher, SIZE)) & {CALL, USER, EOS}


@pytest.mark.parametrize("text", ['"<|call|>"', "/<\\|call\\|>/"])
def test_a_spelling_within_a_string_names_no_special_token(text: str) -> None:
    matcher = compiled(BACKEND, f"start: {text} // <|user|>", ConstraintKind.LARK).matcher()
    assert not set(allowed(matcher, SIZE)) & {CALL, USER}
    for byte in b"<|call|>":
        assert matcher.advance(byte)
    assert matcher.is_complete


def test_a_grammar_that_names_an_end_token_is_refused() -> None:
    with pytest.raises(GrammarError, match="names <eos>"):
        compiled(BACKEND, 'start: "a" <eos> "b"', ConstraintKind.LARK)


def test_all_end_tokens_end_an_answer() -> None:
    several = Vocabulary(
        token_bytes=(b"a", b"b", b"<end>", b"<turn>"),
        special_token_ids=(2,),  # the other is not flagged as special
        eos_token_ids=(2, 3),
        logits_size=4,
        encode=lambda text: ["ab".index(char) for char in text],
    )
    matcher = compiled(LlguidanceBackend(several), "ab?").matcher()
    assert allowed(matcher, 4) == [0]
    assert matcher.advance(0)
    assert allowed(matcher, 4) == [1, 2, 3]
    assert matcher.copy().advance(2)
    assert matcher.copy().advance(3)


def test_a_model_without_an_end_token_gets_no_constraint() -> None:
    endless = Vocabulary(
        token_bytes=(b"a",),
        special_token_ids=(),
        eos_token_ids=(),
        logits_size=1,
        encode=lambda text: [0] * len(text),
    )
    with pytest.raises(GrammarError, match="names no end token"):
        compiled(LlguidanceBackend(endless), "a")


# ---- an answer's way


def test_an_answer_is_accepting_complete_and_ended() -> None:
    matcher = compiled(BACKEND, "a|ab").matcher()
    assert not matcher.is_accepting
    assert matcher.advance(token(b"a"))
    assert matcher.is_accepting
    assert not matcher.is_complete
    assert matcher.advance(token(b"b"))
    assert matcher.is_complete
    assert allowed(matcher, SIZE) == [EOS]
    assert matcher.advance(EOS)
    assert matcher.is_complete
    assert allowed(matcher, SIZE) == [EOS]
    assert not matcher.advance(token(b"a"))
    assert matcher.verdict(b"ab") is None


def test_an_end_too_early_is_not_allowed() -> None:
    assert not compiled(BACKEND, "ab").matcher().advance(EOS)


def test_a_token_that_is_not_allowed_changes_nothing() -> None:
    matcher = compiled(BACKEND, "ab").matcher()
    assert not matcher.advance(token(b"b"))
    assert not matcher.advance(SIZE + 1000)
    assert matcher.advance(token(b"a"))


def test_rollback_goes_back_over_the_end() -> None:
    matcher = compiled(BACKEND, "a{0,3}").matcher()
    start = allowed(matcher, SIZE)
    for token_id in (token(b"a"), token(b"a"), EOS):
        assert matcher.advance(token_id)
    matcher.rollback(2)
    assert matcher.is_accepting
    assert not matcher.is_complete
    assert token(b"a") in allowed(matcher, SIZE)
    matcher.rollback(1)
    assert allowed(matcher, SIZE) == start


def test_copies_go_their_own_ways() -> None:
    matcher = compiled(BACKEND, "a(b|c)").matcher()
    assert matcher.advance(token(b"a"))
    other = matcher.copy()
    assert matcher.advance(token(b"b"))
    assert not other.is_complete
    assert other.advance(token(b"c"))


def test_a_grammar_makes_matchers_for_several_threads() -> None:
    grammar = BACKEND.compile(schema(PERSON), deadline=5)
    results: list[bool] = []

    def answer() -> None:
        results.extend(accepts(grammar, '{"name":"a","age":1}') for _ in range(20))

    vocabulary_of_bytes = LlguidanceBackend(vocabulary())
    grammar = vocabulary_of_bytes.compile(schema(PERSON), deadline=5)
    threads = [threading.Thread(target=answer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 80


# ---- what is forced


def test_each_forced_token_is_alone_in_its_mask_and_asking_changes_nothing() -> None:
    spec = schema(PERSON, whitespace=Whitespace.COMPACT)
    matcher = BACKEND.compile(spec, deadline=5).matcher()
    forced = matcher.forced_tokens()
    assert b"".join(VOCABULARY.token_bytes[i] for i in forced).startswith(b'{"name')
    assert list(matcher.forced_tokens()) == list(forced)
    for token_id in forced:
        assert allowed(matcher, SIZE) == [token_id]
        assert matcher.advance(token_id)


def test_the_end_is_never_forced() -> None:
    matcher = compiled(BACKEND, "ab").matcher()
    for token_id in matcher.forced_tokens():
        assert matcher.advance(token_id)
    assert allowed(matcher, SIZE) == [EOS]
    assert not matcher.forced_tokens()


def test_forced_text_that_the_tokenizer_writes_with_a_space_in_front_is_forced_all_the_same() -> (
    None
):
    """As tokenizers in the manner of sentencepiece do at the beginning of a text."""
    spaced = Vocabulary(
        token_bytes=tuple(bytes([i]) for i in range(256)) + (b"abc", b" abc", b"<eos>"),
        special_token_ids=(258,),
        eos_token_ids=(258,),
        logits_size=259,
        encode=lambda text: (
            [257] if text == "abc" else [32, *text.encode()] if text[:1] != "\n" else [32, 10, 256]
        ),
    )
    matcher = compiled(LlguidanceBackend(spaced), "abc(d|e)").matcher()
    for token_id in matcher.forced_tokens():
        assert allowed(matcher, 259) == [token_id]
        assert matcher.advance(token_id)


def test_a_tokenizer_that_fails_does_not_end_the_process() -> None:
    def encode(text: str) -> list[int]:
        raise ValueError("no")

    broken = Vocabulary(
        token_bytes=tuple(bytes([i]) for i in range(256)) + (b"<eos>",),
        special_token_ids=(256,),
        eos_token_ids=(256,),
        logits_size=257,
        encode=encode,
    )
    assert accepts(compiled(LlguidanceBackend(broken), "abcdef"), "abcdef")


# ---- kinds


@pytest.mark.parametrize(
    ("kind", "text", "answers", "others"),
    [
        (ConstraintKind.REGEX, "[ab]{2}", ["ab"], ["a", "abc"]),
        (
            ConstraintKind.CHOICE,
            '["yes", "no", "n\\"o\\n", "é"]',
            ["yes", "no", 'n"o\n', "é"],
            ["y"],
        ),
        (ConstraintKind.LARK, 'start: "a" rest\nrest: "b" | "c"', ["ab", "ac"], ["a", "b"]),
        (ConstraintKind.EBNF, 'root ::= "a" other*\nother ::= [b-c]', ["a", "abc"], ["b"]),
        (ConstraintKind.EBNF, 'root ::= "\\u00e9" [\\u0041-\\u0043]', ["éA", "éC"], ["é", "éD"]),
        (ConstraintKind.JSON_SCHEMA, "true", ["1", '{"a":[null]}'], ["a", "{"]),
        (ConstraintKind.JSON_SCHEMA, '{"const": {"a": 1}}', ['{"a":1}'], ['{"a":2}', "{}"]),
    ],
)
def test_every_kind_accepts_its_answers(
    kind: ConstraintKind, text: str, answers: list[str], others: list[str]
) -> None:
    grammar = compiled(LlguidanceBackend(vocabulary()), text, kind)
    assert all(accepts(grammar, answer) for answer in answers)
    assert not any(accepts(grammar, other) for other in others)


def test_json_in_a_lark_grammar_is_checked_like_any_other() -> None:
    grammar = compiled(
        LlguidanceBackend(vocabulary()),
        'start: "<" %json {"oneOf": [{"type": "null"}, {"const": 1}], "title": "(((("} ">"',
        ConstraintKind.LARK,
    )
    assert accepts(grammar, "<1>")
    with pytest.raises(GrammarError, match="'not' at the root"):
        compiled(BACKEND, 'start: %json {"not": {"const": 1}}', ConstraintKind.LARK)


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        (ConstraintKind.CHOICE, "[]", "at least one"),
        (ConstraintKind.CHOICE, '{"a": 1}', "at least one"),
        (ConstraintKind.CHOICE, "[1]", "at least one string"),
        (ConstraintKind.CHOICE, json.dumps([str(i) for i in range(10_001)]), "limit is 10000"),
        (ConstraintKind.LARK, "start: nothing", 'unknown name: "nothing"'),
        (ConstraintKind.LARK, 'answer: "a"', "name it start"),
        (ConstraintKind.LARK, "start: " + "(" * 100 + '"a"' + ")" * 100, "deeper than 64"),
        (ConstraintKind.LARK, "start: a" + "\na: a | b" * 3000, "2000 rules"),
        (ConstraintKind.LARK, "start: %json {", "JSON in the grammar"),
        (ConstraintKind.LARK, "start: %json " + "9" * 4301, "number of 4301 digits, at most 4300"),
        (ConstraintKind.LARK, 'start: "a" start', "never ends"),
        (ConstraintKind.LARK, 'start: %json {"const": 1} start', "never ends"),
        (ConstraintKind.EBNF, 'root ::= "a" root', "never ends"),
        (ConstraintKind.EBNF, 'root ::= "a', "is not GBNF"),
        (ConstraintKind.EBNF, 'other ::= "a"', "is not GBNF"),
        (ConstraintKind.REGEX, "a" * 70_000, "at most 65536"),
        (ConstraintKind.JSON_SCHEMA, "{", "is not JSON"),
        (ConstraintKind.JSON_SCHEMA, '{"minimum": NaN}', "is not JSON"),
        (ConstraintKind.JSON_SCHEMA, '"' + "a" * 300_000 + '"', "at most 262144"),
        (ConstraintKind.JSON_SCHEMA, "[" * 100_000, "is not JSON"),
        (ConstraintKind.JSON_SCHEMA, "[" * 100 + "]" * 100, "deeper than 64"),
        (ConstraintKind.JSON_SCHEMA, "3", "a schema is an object"),
        (ConstraintKind.JSON_SCHEMA, "false", "no answer satisfies"),
    ],
)
def test_what_is_wrong_is_refused_with_the_limit(
    kind: ConstraintKind, text: str, named: str
) -> None:
    with pytest.raises(GrammarError, match=named):
        compiled(BACKEND, text, kind)


# ---- whitespace


def language(**options: object) -> LlguidanceBackend:
    return LlguidanceBackend(vocabulary()).compile(schema(PERSON, **options), deadline=5)


def test_whitespace_is_bounded_by_default() -> None:
    grammar = language()
    assert accepts(grammar, '{"name":"a","age":1}')
    assert accepts(grammar, '{\n  "name": "a",\n  "age": 1\n}')
    assert accepts(grammar, '{"name":' + " " * 8 + '"a","age":1}')
    assert not accepts(grammar, '{"name":' + " " * 9 + '"a","age":1}')
    assert not accepts(grammar, ' {"name":"a","age":1}')
    assert not accepts(grammar, '{"name":"a","age":1} ')


def test_compact_json_has_no_whitespace() -> None:
    grammar = language(whitespace=Whitespace.COMPACT)
    assert accepts(grammar, '{"name":"a b","age":1}')
    assert not accepts(grammar, '{"name": "a","age":1}')


def test_spaced_json_is_that_of_json_dumps() -> None:
    grammar = language(whitespace=Whitespace.SPACED)
    assert accepts(grammar, json.dumps({"name": "a", "age": 1}))
    assert not accepts(grammar, '{"name":"a","age":1}')


def test_a_whitespace_pattern_replaces_the_rule() -> None:
    grammar = language(whitespace=Whitespace.COMPACT, whitespace_pattern=" ?")
    assert accepts(grammar, '{"name": "a","age": 1}')
    assert not accepts(grammar, '{"name":  "a","age":1}')


def test_a_whitespace_patterns_class_of_spaces_has_those_of_json() -> None:
    grammar = language(whitespace_pattern=r"\s")
    for char in " \t\n\r":
        assert accepts(grammar, '{_"name"_:_"a"_,_"age"_:_1_}'.replace("_", char))
    for char in "\f\v\u00a0\u2028":
        assert not accepts(grammar, '{_"name"_:_"a"_,_"age"_:_1_}'.replace("_", char))


# ---- bounds


def digits_until_refused(spec: ConstraintSpec, start: str = "1") -> int:
    matcher = BACKEND.compile(spec, deadline=5).matcher()
    for byte in start.encode():
        assert matcher.advance(byte)
    for count in range(1000):
        if not matcher.copy().advance(token(b"3")):
            return count
        assert token(b"3") in allowed(matcher, SIZE)
        assert matcher.advance(token(b"3"))
    return 1000


@pytest.mark.parametrize("start", ["1", "-1", "0.", "1e", "1.5E+"])
def test_no_number_goes_on_for_ever(start: str) -> None:
    count = digits_until_refused(schema({"type": "number"}), start)
    assert count + len(start) == MAX_NUMBER_BYTES


def test_a_number_within_an_object_ends_too() -> None:
    spec = schema({"type": "array", "items": {"type": "integer"}})
    assert digits_until_refused(spec, "[1,") == MAX_NUMBER_BYTES


def test_digits_in_a_string_are_not_counted() -> None:
    spec = schema({"type": "string", "pattern": "^[0-9]+$"})
    assert digits_until_refused(spec, '"') == 1000


def test_a_number_that_has_to_be_long_may_be() -> None:
    spec = schema({"const": 1e60})
    assert accepts(LlguidanceBackend(vocabulary()).compile(spec, deadline=5), "1" + "0" * 60)


def test_after_a_rollback_a_number_may_go_on() -> None:
    matcher = BACKEND.compile(schema({"type": "integer"}), deadline=5).matcher()
    for _ in range(MAX_NUMBER_BYTES):
        assert matcher.advance(token(b"1"))
    assert not matcher.advance(token(b"1"))
    matcher.rollback(1)
    assert matcher.copy().advance(token(b"1"))
    assert matcher.advance(token(b"1"))
    assert not matcher.advance(token(b"1"))


def test_a_state_that_is_too_much_work_is_an_error_and_stays_one() -> None:
    options = " | ".join(f'("y"{{0,400}} /{i}/)' for i in range(600))
    grammar = compiled(BACKEND, f'start: "x" b\nb: {options}', ConstraintKind.LARK)
    matcher = grammar.matcher()
    assert allowed(matcher, SIZE) == [token(b"x")]
    with pytest.raises(GrammarError, match="too much work"):
        matcher.advance(token(b"x"))
    with pytest.raises(GrammarError, match="too much work"):
        matcher.fill_mask(np.zeros(VOCABULARY.mask_size, np.int32))
    with pytest.raises(GrammarError):
        matcher.forced_tokens()
    with pytest.raises(GrammarError):
        _ = matcher.is_complete
    assert allowed(grammar.matcher(), SIZE) == [token(b"x")]  # others are as before


@pytest.mark.parametrize(
    "spec", [ConstraintSpec.regex("(?:a){0}"), ConstraintSpec.regex(""), ConstraintSpec.regex("^$")]
)
def test_the_empty_answer_is_complete_where_there_is_no_other(spec: ConstraintSpec) -> None:
    assert BACKEND.compile(spec, deadline=1).matcher().is_complete


def test_a_number_that_may_not_go_on_is_complete() -> None:
    matcher = BACKEND.compile(schema({"type": "integer"}), deadline=1).matcher()
    for _ in range(MAX_NUMBER_BYTES):
        assert not matcher.is_complete
        assert matcher.advance(token(b"7"))
    assert matcher.is_complete
    assert matcher.copy().is_complete
    matcher.rollback(1)
    assert not matcher.is_complete


def test_a_number_that_its_bounds_let_not_go_on_is_complete() -> None:
    value = {"type": "number", "minimum": 100, "exclusiveMaximum": 538, "multipleOf": 2}
    matcher = BACKEND.compile(schema(value), deadline=1).matcher()
    for byte in (b"5", b"3", b"6"):
        assert not matcher.is_complete
        assert matcher.advance(token(byte))
    assert matcher.is_complete


# ---- the lexer that answers share


def test_answers_go_on_when_the_states_of_their_lexer_are_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llguidance_backend, "MAX_LEXER_STATES", 400)
    grammar = compiled(LlguidanceBackend(VOCABULARY), "(a|b)*a(a|b){20}")
    rng, waiting = random.Random(1), grammar.matcher()
    origin = grammar._origin
    for _ in range(50):
        matcher = grammar.matcher()
        for _ in range(40):
            assert {token(b"a"), token(b"b")} <= set(allowed(matcher, SIZE))
            assert matcher.advance(token(rng.choice((b"a", b"b"))))
    assert grammar._origin is not origin
    for text in (b"a", b"b") * 20:
        assert waiting.advance(token(text))
    waiting.rollback(30)
    assert waiting.copy().advance(token(b"a"))


def test_an_answer_that_is_too_much_work_for_the_lexer_harms_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llguidance_backend, "MAX_MASK_FUEL", 10_000)
    grammar = compiled(LlguidanceBackend(VOCABULARY), "x[a-m]+[0-9]{3}|y(?s:.*[a-y].{4000}z.*)")
    waiting, under_way = grammar.matcher(), grammar.matcher()
    advance_by_masks(under_way, b"xab")
    for _ in range(2):
        with pytest.raises(GrammarError, match="too much work"):
            advance_by_masks(grammar.matcher(), b"y" + b"ab!" * 100)
        advance_by_masks(waiting.copy(), b"xabc123")
        advance_by_masks(grammar.matcher(), b"xabc123")
    advance_by_masks(under_way, b"c123")
    assert under_way.is_complete


def test_a_long_answer_goes_on_with_a_new_lexer_however_much_work_it_was_in_all() -> None:
    grammar = compiled(BACKEND, "(a|b)*a(a|b){60}")
    origin, rng, matcher = grammar.origin(), random.Random(1), grammar.matcher()
    for _ in range(8000):
        assert matcher.advance(token(rng.choice((b"a", b"b"))))
    assert grammar.origin() is not origin
    assert {token(b"a"), token(b"b")} <= set(allowed(matcher, SIZE))


def advance_by_masks(matcher: Matcher, text: bytes) -> None:
    for byte in text:
        assert byte in allowed(matcher, SIZE)
        assert matcher.advance(byte)


# ---- drafts


def test_a_likely_text_is_cut_as_the_model_cut_it_the_last_time() -> None:
    backend = LlguidanceBackend(VOCABULARY)
    grammar = backend.compile(schema(PERSON, whitespace=Whitespace.COMPACT), deadline=5.0)
    cuts = []
    for _ in range(2):
        matcher = grammar.matcher()
        for token_id in matcher.forced_tokens():
            assert matcher.advance(token_id)
        cuts.append([VOCABULARY.token_bytes[i] for i in matcher.likely_tokens()])
        assert matcher.advance(token(b'":'))
    assert cuts == [[b'":"'], [b'":', b'"']]


def test_cuts_are_learned_of_texts_that_begin_with_the_token_and_some_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(likely_cuts, "MAX_TEXTS", 2)
    cuts = LikelyCuts(VOCABULARY.encode, VOCABULARY.token_bytes)
    cuts.learn(b"foo", token(b"ba"))
    assert cuts.of(b"foo") == [token(b"foo")]
    for text in (b"foo", b"bar", b"name"):
        cuts.learn(text, token(text[:1]))
    assert cuts.of(b"foo") == [token(b"foo")]
    assert cuts.of(b"bar") == [token(b"b"), token(b"a"), token(b"r")]
    cuts.learn(b"bar", token(b"bar"))
    assert cuts.of(b"bar") == [token(b"bar")]


# ---- the rehearsal


@pytest.mark.parametrize(
    "text", ["[^\\x00-\\xff]{3}", "a{3}b?", "[0-9]+", "(foo|bar){2,}", "(?s).*", "日本|é"]
)
def test_a_rehearsal_takes_only_what_is_allowed_and_ends(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "MAX_SECONDS", 60)  # its tokens end it
    matcher = compiled(BACKEND, text).matcher()
    advance, taken = matcher.advance, []
    matcher.advance = lambda token_id: taken.append((token_id, advance(token_id))) or taken[-1][1]
    Rehearsal(VOCABULARY).run(matcher)
    assert 0 < len(taken) <= rehearsal.MAX_TOKENS
    assert all(allowed for _, allowed in taken)


@pytest.mark.parametrize("method", ["is_complete", "forced_tokens", "fill_mask", "advance"])
def test_a_grammar_that_breaks_in_its_rehearsal_breaks_nothing_else(method: str) -> None:
    matcher = AutomatonMatcher(Automaton({0: {1: 1, 2: 1}}, frozenset({1})), fails_at=method)
    Rehearsal(VOCABULARY).run(matcher)
    assert matcher.tokens == []
