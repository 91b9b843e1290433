"""Translating in a process: what comes back is what a thread would give, and what takes too long
or fails there harms nothing else."""

import json
import os
import signal
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from sapwood.runtime.constraints.bounded_process import BoundedProcess, WorkError
from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.llguidance_backend import LlguidanceBackend, make_backend
from sapwood.runtime.constraints.llguidance_grammar import LlguidanceText, SpecialTokens
from sapwood.runtime.constraints.llguidance_translator import (
    MAX_SHORT_CHARS,
    ProcessTranslator,
    ThreadTranslator,
    make_translator,
)
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec, Whitespace
from sapwood.runtime.errors import EngineClosedError
from tests.runtime.constraints.byte_backend import accepts, vocabulary

K = ConstraintKind
VOCABULARY = vocabulary()
SPECIAL = SpecialTokens.of(VOCABULARY)
PADDING = "é" * MAX_SHORT_CHARS
PATIENCE = 30.0  # seconds


def of_json(kind: ConstraintKind, value: Any, **options: Any) -> ConstraintSpec:
    return ConstraintSpec(kind=kind, text=json.dumps(value, ensure_ascii=False), **options)


def of_schema(schema: Mapping[str, Any], **options: Any) -> ConstraintSpec:
    """With an annotation that makes it long."""
    return of_json(K.JSON_SCHEMA, {**schema, "description": PADDING}, **options)


def of_text(kind: ConstraintKind, text: str) -> ConstraintSpec:
    return ConstraintSpec(kind=kind, text=text)


def tag(content: Mapping[str, Any], begin: str = "<|call|>") -> ConstraintSpec:
    element = {"type": "tag", "begin": begin, "content": content, "end": ["."]}
    return of_json(K.STRUCTURAL_TAG, {"type": "structural_tag", "format": element})


ANY_OF = {"anyOf": [{"type": "string", "pattern": "^é+$"}, {"$ref": "#/$defs/a"}]}
TAKEN: Mapping[str, ConstraintSpec] = MappingProxyType(
    {
        "schema": of_schema({**ANY_OF, "$defs": {"a": {"type": "integer", "minimum": 3}}}),
        "compact": of_schema({"type": "object"}, whitespace=Whitespace.COMPACT),
        "pattern": of_schema({"type": "object"}, whitespace_pattern=" ?"),
        "oneOf": of_json(K.JSON_SCHEMA, {"oneOf": [{"type": "null"}, {"type": "string"}]}),
        "regex": of_text(K.REGEX, f"(?i){PADDING}|\\w"),
        "oneOf with an escape": of_text(
            K.JSON_SCHEMA, r'{"\u006fneOf": [{"type": "null"}, {"type": "string"}]}'
        ),
        "choice": of_json(K.CHOICE, [PADDING, "b", 'c"\\', "b"]),
        "lark": of_text(K.LARK, f'start: "{PADDING}" <|call|> %json {{"type": "null"}}'),
        "token range": of_text(K.LARK, f'start: "{PADDING}" <[257-258]>'),
        "ebnf": of_text(K.EBNF, f'root ::= "{PADDING}" | [a-z]+'),
        "tag": tag({"type": "const_string", "value": PADDING}),
        "surrogate": of_text(K.REGEX, PADDING + "\ud800"),
    }
)
REFUSED: Mapping[str, tuple[ConstraintSpec, str | None]] = MappingProxyType(
    {
        "uniqueItems": (of_schema({"uniqueItems": True}), "uniqueItems"),
        "overlap": (of_schema({"oneOf": [{"minimum": 1}, {"minimum": 2}]}), "oneOf"),
        "remote": (of_schema({"$ref": "https://example.org/s"}), "$ref"),
        "not JSON": (of_text(K.JSON_SCHEMA, "{" + PADDING), None),
        "look-ahead": (of_text(K.REGEX, f"(?=a){PADDING}"), None),
        "ends": (of_text(K.LARK, f'start: "{PADDING}" <eos>'), None),
        "broken": (of_text(K.EBNF, f'root ::= "{PADDING}'), None),
        "tag": (tag({"type": "unheard of", "value": PADDING}), None),
    }
)
SMALL = ConstraintSpec.regex("[0-9]{2}")
LARGE = TAKEN["schema"]
# Some 90 ms of work.
SLOW = of_json(K.JSON_SCHEMA, {"anyOf": [{"properties": {"a": {"const": i}}} for i in range(1200)]})


@pytest.fixture(scope="module")
def translator() -> Iterator[ProcessTranslator]:
    translator = ProcessTranslator(SPECIAL)
    translator.wait_until_ready()
    yield translator
    translator.close()


def in_thread(spec: ConstraintSpec) -> LlguidanceText:
    return ThreadTranslator(SPECIAL).translate(spec, deadline=PATIENCE)


def must_not_run(self: BoundedProcess, request: bytes, *, deadline: float) -> None:
    raise AssertionError("the process was asked")


@pytest.mark.parametrize("name", TAKEN)
def test_a_process_gives_what_a_thread_gives(translator: ProcessTranslator, name: str) -> None:
    assert translator.translate(TAKEN[name], deadline=PATIENCE) == in_thread(TAKEN[name])


@pytest.mark.parametrize("name", TAKEN)
def test_what_may_take_long_is_left_to_the_process(
    translator: ProcessTranslator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(BoundedProcess, "run", must_not_run)
    with pytest.raises(AssertionError, match="the process was asked"):
        translator.translate(TAKEN[name], deadline=PATIENCE)


def test_what_is_short_is_not_sent_to_the_process(
    translator: ProcessTranslator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProcess, "run", must_not_run)
    assert translator.translate(SMALL, deadline=PATIENCE) == in_thread(SMALL)


@pytest.mark.parametrize("name", REFUSED)
def test_a_process_refuses_what_a_thread_refuses_in_the_same_words(
    translator: ProcessTranslator, name: str
) -> None:
    spec, keyword = REFUSED[name]
    with pytest.raises(GrammarError) as by_thread:
        in_thread(spec)
    with pytest.raises(GrammarError) as by_process:
        translator.translate(spec, deadline=PATIENCE)
    assert str(by_process.value) == str(by_thread.value)
    assert by_process.value.keyword == by_thread.value.keyword == keyword


def test_what_comes_before_the_process_is_ready_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    translator = ProcessTranslator(SPECIAL)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(BoundedProcess, "run", must_not_run)
            patched.setattr(BoundedProcess, "is_ready", lambda self: False)
            assert translator.translate(LARGE, deadline=0.0) == in_thread(LARGE)
        translator.wait_until_ready()
        monkeypatch.setattr(BoundedProcess, "run", must_not_run)
        with pytest.raises(AssertionError, match="the process was asked"):
            translator.translate(LARGE, deadline=0.0)
    finally:
        translator.close()


def test_what_takes_too_long_is_refused_and_the_next_is_translated(
    translator: ProcessTranslator,
) -> None:
    translator.translate(LARGE, deadline=PATIENCE)
    pid = translator.process_id
    with pytest.raises(GrammarError, match=r"longer than 0\.01 s; make it smaller"):
        translator.translate(SLOW, deadline=0.01)
    assert translator.translate(LARGE, deadline=PATIENCE) == in_thread(LARGE)
    assert translator.process_id == pid, "only the fork was killed"


def test_a_process_that_was_killed_is_not_the_constraints_fault_and_another_follows() -> None:
    translator = ProcessTranslator(SPECIAL)
    try:
        translator.wait_until_ready()
        pid = translator.process_id
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkError, match="ended from outside"):
            translator.translate(LARGE, deadline=PATIENCE)
        assert translator.translate(LARGE, deadline=PATIENCE) == in_thread(LARGE)
        translator.wait_until_ready()
        assert translator.process_id != pid
    finally:
        translator.close()


def test_a_closed_translator_has_no_process_and_says_that_the_engine_is_closed() -> None:
    translator = ProcessTranslator(SPECIAL)
    pid = translator.process_id
    assert pid is not None
    translator.close()
    translator.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(EngineClosedError, match="make a new one"):
        translator.translate(LARGE, deadline=PATIENCE)


def test_where_no_process_can_be_all_is_translated_on_the_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: BoundedProcess) -> None:
        raise OSError("no more processes")

    with monkeypatch.context() as patched:
        patched.delattr(os, "fork")
        assert isinstance(make_translator(SPECIAL), ThreadTranslator)
    monkeypatch.setattr(BoundedProcess, "start", refuse)
    assert isinstance(make_translator(SPECIAL), ThreadTranslator)
    assert "no more processes" in caplog.text


def test_a_backend_that_cannot_be_made_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Translator(ThreadTranslator):
        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(
        "sapwood.runtime.constraints.llguidance_backend.make_translator", Translator
    )
    monkeypatch.setattr(
        "sapwood.runtime.constraints.llguidance_backend._tokenizer_of",
        lambda *arguments: 1 / 0,
    )
    with pytest.raises(ZeroDivisionError):
        make_backend(VOCABULARY)
    assert closed


def test_the_backend_of_an_engine_enforces_large_constraints_as_one_without_a_process() -> None:
    backend = make_backend(VOCABULARY)
    assert isinstance(backend._translator, ProcessTranslator)
    backend._translator.wait_until_ready()
    try:
        for backend_of in (backend, LlguidanceBackend(VOCABULARY)):
            grammar = backend_of.compile(LARGE, deadline=PATIENCE)
            assert accepts(grammar, '"éé"') and accepts(grammar, "3")
            assert not accepts(grammar, "2") and not accepts(grammar, '""')
    finally:
        backend.close()
