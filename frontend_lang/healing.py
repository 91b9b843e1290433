"""Constrained answers whose first token grows together with the text before it.

A prompt that ends in "Name: " has a token for the last space, and a model has hardly ever seen a
name after that token: in running text the space is the first character of the name's own token. A
free answer cannot help it, but a constrained one can be made to begin with the space. So the last
tokens of the prompt that would be others with an answer behind them are taken off, and their text
is put in front of the constraint ("token healing").
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from sapwood.frontend_lang.backends.interface import Answer, Call, Encoder, Piece, TokenIds
from sapwood.frontend_lang.options import Options
from sapwood.runtime.constraints.explicit_regex import read, without_anchors
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec
from sapwood.runtime.regex_syntax import Alternation, Chars, Concat, Node, RegexError, Repeat

MAX_TAIL_CHARS = 32  # the longest text that is taken off a prompt
MAX_BEGINNINGS = 24  # of answers that are tried
MAX_BEGINNING_CHARS = 12

# The beginnings of JSON values, by their type.
_JSON_BEGINNINGS = (
    ("object", ('{"a', "{}", "{\n", '{ "')),
    ("array", ('["a', "[1", "[{", "[]", "[\n", "[[")),
    ("string", ('"a', '"A', '""')),
    ("number", ("1", "-1")),
    ("integer", ("1", "-1")),
    ("boolean", ("true", "false")),
    ("null", ("null",)),
)
_LIKELY_CHARACTERS = 'aAtT1 \n"{[-.('  # tried of a class that has them
_REGEX_SPECIAL = frozenset(".^$*+?{}[]\\|()")


@dataclass(frozen=True, slots=True, kw_only=True)
class Healed:
    """A call, and the tokens of the pending pieces that its prompt has.

    `tail` is the text of the pieces that the prompt lacks, empty where all of it stays; the answer
    to `call` begins with it.
    """

    token_ids: TokenIds
    call: Call
    tail: str = ""
    tail_token_ids: TokenIds = ()

    def answer(self, answer: Answer) -> Answer:
        """What was answered, without the tail in its text.

        Its tokens follow `token_ids`, and spell the tail and the text. Log-probabilities are those
        of these tokens.
        """
        if not self.tail:
            return answer
        if answer.text.startswith(self.tail):
            text = answer.text[len(self.tail) :]
            return replace(answer, text=text, meta=self._meta(answer.meta))
        return self._cut_short(answer, "")

    async def pieces(self, answers: AsyncIterator[Answer]) -> AsyncGenerator[Answer, None]:
        """The same of an answer that is streamed."""
        text = ""
        async for piece in answers:
            if not self.tail:
                yield piece
                continue
            start = max(len(text), len(self.tail))
            text += piece.text
            told = replace(piece, text=text[start:])
            ends_early = piece.finish_reason is not None and not text.startswith(self.tail)
            yield (
                self._cut_short(told, "")
                if ends_early
                else replace(told, meta=self._meta(piece.meta))
            )

    def _cut_short(self, answer: Answer, text: str) -> Answer:
        """An answer that ended within the tail: the prompt is as if nothing had been taken off."""
        ids = None if answer.token_ids is None else self.tail_token_ids
        return replace(answer, text=text, token_ids=ids, meta=self._meta(answer.meta))

    def _meta(self, meta: Mapping[str, Any]) -> Mapping[str, Any]:
        """What was told of the answer, without the tail in its counts."""
        told = dict(meta)
        if (num_tokens := told.get("completion_tokens")) is not None:
            told["completion_tokens"] = self._less_tail(num_tokens)
        reason = told.get("finish_reason")
        if isinstance(reason, Mapping) and "length" in reason:
            told["finish_reason"] = {**reason, "length": self._less_tail(reason["length"])}
        return told

    def _less_tail(self, num_tokens: int) -> int:
        return max(0, num_tokens - len(self.tail_token_ids))


async def heal(
    encoder: Encoder,
    settled: TokenIds,
    pending: Sequence[Piece],
    call: Call,
    *,
    takes_structural_tags: bool = True,
) -> Healed:
    """The tokens of the pending pieces and the call, healed where that is needed and can be said.

    Only the program's own text is taken off, never generated tokens or what a chat template wrote.
    Left as they are: calls without a constraint, grammars, JSON where a backend takes no structural
    tags, and calls whose stops could match within the tail. Of `max_tokens` the tail's tokens are
    not counted. Cost of a constraint: up to `MAX_BEGINNINGS` encodings of the pending pieces.
    """
    encoded = await encoder.encode(pending, at_start=not settled)
    unhealed = Healed(token_ids=encoded, call=call)
    own_text = _own_text_at_end(pending)
    if call.constraint is None or call.separate_reasoning or not own_text:
        return unhealed
    texts = await asyncio.to_thread(_beginnings, call.constraint)
    num_stable = await _num_stable(encoder, settled, pending, encoded, texts)
    if num_stable == len(encoded):
        return unhealed
    for tail_len in range(1, min(len(own_text), MAX_TAIL_CHARS) + 1):
        kept = await encoder.encode(_without_end(pending, tail_len), at_start=not settled)
        if len(kept) <= num_stable and kept == encoded[: len(kept)] and (settled or kept):
            tail = own_text[-tail_len:]
            constraint = _prefixed(
                call.constraint, tail, takes_structural_tags=takes_structural_tags
            )
            if constraint is None or _may_stop_within(tail, call.options):
                return unhealed
            options = _longer(call.options, len(encoded) - len(kept))
            return Healed(
                token_ids=kept,
                call=replace(call, constraint=constraint, options=options),
                tail=tail,
                tail_token_ids=encoded[len(kept) :],
            )
    return unhealed


def _own_text_at_end(pending: Sequence[Piece]) -> str:
    """What the program wrote after the last that a template wrote."""
    own = takewhile(lambda piece: not piece.is_control, reversed(pending))
    return "".join(reversed([piece.text for piece in own]))


def _without_end(pending: Sequence[Piece], num_chars: int) -> list[Piece]:
    """The pieces without the last characters, which are the program's own."""
    kept = list(pending)
    while num_chars >= len(kept[-1].text):
        num_chars -= len(kept.pop().text)
        if not num_chars:
            return kept
    kept[-1] = Piece(kept[-1].text[:-num_chars])
    return kept


async def _num_stable(
    encoder: Encoder,
    settled: TokenIds,
    pending: Sequence[Piece],
    encoded: TokenIds,
    texts: Iterable[str],
) -> int:
    """How many of the pending pieces' tokens stay the same whichever of `texts` follows."""
    num_stable = len(encoded)
    for text in texts:
        joint = await encoder.encode([*pending, Piece(text)], at_start=not settled)
        pairs = zip(encoded[:num_stable], joint, strict=False)
        num_stable = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return num_stable


def _beginnings(constraint: ConstraintSpec) -> list[str]:
    """How answers may begin: a few of each kind, none where that is not known."""
    match constraint.kind:
        case ConstraintKind.CHOICE:
            texts = [text for text in _parsed(constraint.text, []) if isinstance(text, str)]
        case ConstraintKind.JSON_SCHEMA:
            texts = _json_beginnings(_parsed(constraint.text, {}))
        case ConstraintKind.REGEX:
            try:
                texts = _matching(read(constraint.text))
            except RegexError:
                return []
        case _:
            return []
    return list(dict.fromkeys(text[:MAX_BEGINNING_CHARS] for text in texts if text))[
        :MAX_BEGINNINGS
    ]


def _json_beginnings(schema: Any) -> list[str]:
    if not isinstance(schema, dict):
        schema = {}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return [json.dumps(value, ensure_ascii=False) for value in values]
    types = schema.get("type")
    names = [types] if isinstance(types, str) else types
    return [
        text
        for name, texts in _JSON_BEGINNINGS
        for text in texts
        if not isinstance(names, list) or name in names
    ]


def _matching(node: Node) -> list[str]:
    """Beginnings of texts that a pattern matches: all kinds of first characters, and of what
    follows them the first that fits."""
    match node:
        case Chars(ranges):
            likely = [c for c in _LIKELY_CHARACTERS if any(a <= ord(c) <= b for a, b in ranges)]
            return likely or [chr(low) for low, _ in ranges[:4]]
        case Alternation(options):
            return [text for option in options for text in _matching(option)][:MAX_BEGINNINGS]
        case Repeat(part, low, high):
            once = [] if high == 0 else _matching(part)
            return once if low else ["", *once]
        case Concat(parts):
            texts = [""]
            for part in parts:
                further = _matching(part) or [""]
                # What may be empty lets the first character be one of the next part, too.
                texts = [
                    text + more for text in texts for more in (further[:1] if text else further)
                ][: 4 * MAX_BEGINNINGS]
                if all(len(text) >= MAX_BEGINNING_CHARS for text in texts):
                    break
            return texts


def _prefixed(
    spec: ConstraintSpec, tail: str, *, takes_structural_tags: bool
) -> ConstraintSpec | None:
    """A constraint of the same answers with `tail` in front; None where that cannot be said."""
    match spec.kind:
        case ConstraintKind.CHOICE:
            texts = [tail + text for text in _parsed(spec.text, [])]
            return replace(spec, text=json.dumps(texts, ensure_ascii=False))
        case ConstraintKind.REGEX:
            return replace(spec, text=f"{_escaped(tail)}(?:{without_anchors(spec.text)})")
        case ConstraintKind.JSON_SCHEMA:
            if not takes_structural_tags or spec.backend == "outlines_core":
                return None
            elements = (
                f'{{"type": "const_string", "value": {json.dumps(tail)}}}, '
                f'{{"type": "json_schema", "json_schema": {spec.text}}}'
            )
            form = f'{{"type": "sequence", "elements": [{elements}]}}'
            text = f'{{"type": "structural_tag", "format": {form}}}'
            return replace(spec, kind=ConstraintKind.STRUCTURAL_TAG, text=text)
    return None


def _escaped(text: str) -> str:
    """A pattern that matches this text only."""
    return "".join(f"\\{c}" if c in _REGEX_SPECIAL else c for c in text)


def _may_stop_within(tail: str, options: Options) -> bool:
    """Whether a stop could match in the tail, or begin in it."""
    if options.get("stop_regex"):
        return True
    stop = options.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else stop
    return any(
        text in tail or any(tail.endswith(text[:n]) for n in range(1, len(text))) for text in stops
    )


def _longer(options: Options, num_tokens: int) -> Options:
    limit = options.get("max_tokens")
    return options if limit is None else {**options, "max_tokens": limit + num_tokens}


def _parsed(text: str, otherwise: Any) -> Any:
    """The JSON value of a text. What is wrong in it is told by who compiles it."""
    try:
        return json.loads(text)
    except ValueError:
        return otherwise
