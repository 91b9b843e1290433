"""Constraints by xgrammar: a pushdown automaton over bytes with masks computed ahead (Dong et al.
2024).

It compiles without any limit of work, so it does so in a process that can be killed
(`bounded_process.py`); what comes back is read here. Opt-in: for grammars that the default refuses,
and for its structural tags. Of a JSON schema it does not enforce everything that it takes, so a
finished answer is checked (`Matcher.verdict`).
"""

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from sapwood.runtime.constraints.bounded_process import Answer, BoundedProcess, WorkError
from sapwood.runtime.constraints.choices import read_choices
from sapwood.runtime.constraints.compile_errors import grammar_error, kind_refused, require
from sapwood.runtime.constraints.interface import GrammarError, TokenMask, Vocabulary
from sapwood.runtime.constraints.mask_bits import has_token, mask_of, only_token
from sapwood.runtime.constraints.messages import pack
from sapwood.runtime.constraints.schema_check import SchemaChecker
from sapwood.runtime.constraints.schema_text import read_schema
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec
from sapwood.runtime.constraints.token_table import TokenTable
from sapwood.runtime.constraints.xgrammar_compile import tokenizer_info
from sapwood.runtime.constraints.xgrammar_documents import (
    choice_grammar,
    json_options,
    named_tokens,
    regex,
    structural_tag,
)

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher

Verdict = Callable[[bytes], str | None]

_KINDS = (
    ConstraintKind.JSON_SCHEMA,
    ConstraintKind.REGEX,
    ConstraintKind.CHOICE,
    ConstraintKind.EBNF,
    ConstraintKind.STRUCTURAL_TAG,
)
_CONTROLS = frozenset(range(0x20)) - {*b"\n\r"}
MAX_FORCED_TOKENS = 256  # a grammar can force tokens without end


class XgrammarBackend:
    """A `ConstraintBackend` (see interface.py). Thread-safe."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Starts two processes; takes seconds, as xgrammar imports torch and transformers.

        Raises ModuleNotFoundError where the package is missing.
        """
        require("xgrammar")
        require("jsonschema")
        self._table = TokenTable.of(vocabulary)
        self._turn = threading.Lock()
        self._process = BoundedProcess(
            "sapwood.runtime.constraints.xgrammar_compile:make_task", self._table.to_bytes()
        )
        self._process.start()
        self._checker = SchemaChecker()
        self._info = tokenizer_info(self._table)
        ordinary = dict(self._table.ordinary_tokens())
        of_json = [token_id for token_id in ordinary if _may_be_json(ordinary[token_id])]
        self._ordinary = mask_of(ordinary, vocabulary.mask_size)
        self._of_json = mask_of(of_json, vocabulary.mask_size)
        self._ends = mask_of(vocabulary.eos_token_ids, vocabulary.mask_size)
        try:
            self._process.wait_until_ready()
        except WorkError as error:
            self.close()
            raise grammar_error(error, self.name) from error

    def turn(self, spec: ConstraintSpec) -> AbstractContextManager[object]:
        return self._turn

    def compile(self, spec: ConstraintSpec, *, deadline: float) -> "XgrammarGrammar":
        """The deadline is for the work in the process; reading what comes back takes up to 0.4 s
        for the largest schemas on top."""
        from xgrammar import CompiledGrammar, GrammarMatcher

        request = self._request(spec)
        try:
            answer = self._process.run(request.message, deadline=deadline)
        except WorkError as error:
            raise grammar_error(error, self.name) from error
        if spec.kind is not ConstraintKind.JSON_SCHEMA:  # that is checked when it is finished
            _refuse_warnings(answer)
        compiled = CompiledGrammar.deserialize_json(answer.body.decode(), self._info)
        is_json = spec.kind is ConstraintKind.JSON_SCHEMA
        allowed = self._of_json if is_json else self._ordinary
        allowed = allowed | self._ends | mask_of(request.named_tokens, len(self._ends))
        masks = _Masks(allowed=allowed, ends=self._ends)
        first = XgrammarMatcher(GrammarMatcher(compiled), masks, request.verdict)
        first.fill_mask(np.empty_like(allowed))
        return XgrammarGrammar(compiled, first)

    @property
    def process_id(self) -> int | None:
        """Of the process that compiles, if it runs."""
        return self._process.pid

    def close(self) -> None:
        self._process.close()
        self._checker.close()

    def _request(self, spec: ConstraintSpec) -> "_Request":
        """What `xgrammar_compile.py` reads, and what is known of the constraint beside it."""
        match spec.kind:
            case ConstraintKind.JSON_SCHEMA:
                read_schema(spec.text)
                options = json_options(spec)
                verdict = partial(self._checker.verdict, spec.text)
                return _Request.of(spec.kind, spec.text, options, verdict=verdict)
            case ConstraintKind.REGEX:
                return _Request.of(spec.kind, regex(spec.text))
            case ConstraintKind.CHOICE:
                return _Request.of(spec.kind, choice_grammar(read_choices(spec.text)))
            case ConstraintKind.EBNF:
                return _Request.of(spec.kind, spec.text)
            case ConstraintKind.STRUCTURAL_TAG:
                return self._structural_tag_request(spec)
        raise kind_refused(spec.kind, self.name, _KINDS)

    def _structural_tag_request(self, spec: ConstraintSpec) -> "_Request":
        options = json_options(spec)
        document = structural_tag(spec.text)
        ids, spellings = named_tokens(document)
        named = [
            token_id
            for token_id in self._table.special_token_ids
            if token_id in ids or any(self._spelling(token_id) in text for text in spellings)
        ]
        return _Request.of(spec.kind, json.dumps(document), options, named_tokens=tuple(named))

    def _spelling(self, token_id: int) -> str:
        return self._table.token_bytes[token_id].decode(errors="replace")


def _may_be_json(spelled: bytes) -> bool:
    """Not with control characters but line breaks, which xgrammar has in strings with a bound."""
    return min(spelled) >= 0x20 or not set(spelled) & _CONTROLS


def _nothing_wrong(answer: bytes) -> None:
    """The masks enforce all of the constraint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    message: bytes
    named_tokens: tuple[int, ...]
    verdict: Verdict

    @classmethod
    def of(
        cls,
        kind: ConstraintKind,
        text: str,
        options: Mapping[str, Any] = MappingProxyType({}),
        *,
        named_tokens: tuple[int, ...] = (),
        verdict: Verdict = _nothing_wrong,
    ) -> Self:
        message = pack({"kind": kind, "json_options": dict(options)}, text.encode())
        return cls(message=message, named_tokens=named_tokens, verdict=verdict)


def _refuse_warnings(answer: Answer) -> None:
    """xgrammar says on stderr, and only there, which part of a constraint it goes without."""
    for line in answer.diagnostics.splitlines():
        if "Warning: " in line:
            what = line.split("Warning: ", 1)[1]
            raise GrammarError(
                f"xgrammar does not enforce all of it: {what}; change it or choose another backend"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Masks:
    """Tokens that any state may allow, and end tokens, as masks."""

    allowed: TokenMask
    ends: TokenMask


class XgrammarGrammar:
    """A `Grammar` (see interface.py)."""

    def __init__(self, compiled: "CompiledGrammar", first: "XgrammarMatcher") -> None:
        self._first = first  # at the start; never advanced
        self._num_bytes: int = compiled.memory_size_bytes
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def matcher(self) -> "XgrammarMatcher":
        with self._lock:
            return self._first.copy()


class XgrammarMatcher:
    """A `Matcher` (see interface.py). After an end token only end tokens are allowed.

    xgrammar's masks have any token that spells text, so they are cut down to ordinary tokens, ends
    and what the grammar names. Where its text is forced they still have every beginning of it: only
    a token that is alone in its mask is a forced one.
    """

    def __init__(self, matcher: "GrammarMatcher", masks: _Masks, verdict: Verdict) -> None:
        self._matcher = matcher
        self._masks = masks
        self._verdict = verdict
        self._num_ends = 0  # end tokens that were taken in; the library's matcher sees none
        self._mask: TokenMask | None = None  # of this state, once it was wanted; never changed

    @property
    def is_complete(self) -> bool:
        return self.is_accepting and not np.any(self._current_mask() & ~self._masks.ends)

    @property
    def is_accepting(self) -> bool:
        return self._num_ends > 0 or bool(self._matcher.is_completed())

    def fill_mask(self, mask: TokenMask) -> bool:
        np.copyto(mask, self._current_mask())
        return True

    def advance(self, token_id: int) -> bool:
        if has_token(self._masks.ends, token_id):
            accepted = self.is_accepting
            self._num_ends += accepted
        else:
            # What is out of the question is not even asked: xgrammar complains of it on stderr.
            possible = self._num_ends == 0 and has_token(self._masks.allowed, token_id)
            accepted = possible and bool(self._matcher.accept_token(token_id))
        if accepted:
            self._mask = None
        return accepted

    def forced_tokens(self) -> list[int]:
        """At most `MAX_FORCED_TOKENS`. One mask for each, and one more."""
        tokens: list[int] = []
        mask = self._current_mask()
        while len(tokens) < MAX_FORCED_TOKENS and (token := only_token(mask)) is not None:
            if has_token(self._masks.ends, token):
                break
            accepted = self._matcher.accept_token(token)
            assert accepted, "a token of its mask"
            tokens.append(token)
            mask = self._new_mask()
        self._matcher.rollback(len(tokens))
        return tokens

    def likely_tokens(self) -> tuple[int, ...]:
        """None: what is not forced is not known."""
        return ()

    def rollback(self, num_tokens: int) -> None:
        num_ends = min(num_tokens, self._num_ends)
        self._num_ends -= num_ends
        self._matcher.rollback(num_tokens - num_ends)
        self._mask = None

    def copy(self) -> Self:
        other = type(self)(self._matcher.fork(), self._masks, self._verdict)
        other._num_ends = self._num_ends
        other._mask = self._mask
        return other

    def verdict(self, text: bytes) -> str | None:
        """Some 10 ms for a JSON schema, in another process."""
        return self._verdict(text)

    def _current_mask(self) -> TokenMask:
        if self._mask is None:
            self._mask = self._masks.ends if self._num_ends else self._new_mask()
        return self._mask

    def _new_mask(self) -> TokenMask:
        """Raises GrammarError where no token may come, which ends the matcher."""
        mask = np.empty_like(self._masks.allowed)
        self._matcher.fill_next_token_bitmask(mask.reshape(1, -1))
        mask &= self._masks.allowed
        if not mask.any():
            raise GrammarError(
                "no token may come next: the constraint contradicts itself, or this model's "
                "vocabulary cannot spell what it wants; change it"
            )
        return mask
