"""Token ids that spell exactly an answer's text, for whoever goes on from it.

What was generated is kept as it is: tokens that are made of text again may be others, and then
nothing that was computed of them is found again. Left out are the end token and a stop; only where
a stop begins inside a token, that token gives way to the tokens of its part that stays.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from sapwood.runtime.outputs import CompletionOutput
from sapwood.runtime.request import TokenIds
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.stop import StopMatcher

_MAX_TOKENS_OF_CHARACTER = 4  # UTF-8 has as many bytes


class Speller(Protocol):
    """What is needed of a `Tokenizer`."""

    @property
    def token_bytes(self) -> Sequence[bytes]: ...
    def encode_pieces(self, pieces: Sequence[tuple[str, bool]], *, at_start: bool) -> TokenIds: ...


def answer_token_ids(
    answer: CompletionOutput, sampling: SamplingParams, tokenizer: Speller
) -> tuple[int, ...]:
    """The tokens of a whole answer to a plain prompt that spell its text.

    A character that the answer's end cuts in two stays cut: the text has U+FFFD there, and what
    follows may complete it. Special tokens in the middle stay too, though they add no text. O(bytes
    of the answer) where a stop ended it.
    """
    token_ids = answer.token_ids[:-1] if answer.ended_by_token else answer.token_ids
    if not isinstance(answer.stop_reason, str):
        return token_ids
    matcher = StopMatcher.of(sampling)
    assert matcher is not None, "an answer that a stop ended was asked for with stops"
    pieces = [_bytes_of(tokenizer, token_id) for token_id in token_ids]
    matches = (match for piece in pieces if (match := matcher.feed(piece)) is not None)
    return tokens_between(tokenizer, token_ids, pieces, 0, next(matches).text_len)


def tokens_between(
    tokenizer: Speller,
    token_ids: Sequence[int],
    pieces: Sequence[bytes],
    start: int,
    end: int,
) -> tuple[int, ...]:
    """Tokens that spell bytes `[start, end)` of what `token_ids` spell, each one of `pieces`.

    All that lie within are kept. One that lies across a bound gives way to the tokens of its part
    within, with its neighbours where it holds a part of a character only.
    """
    data = b"".join(pieces)
    bounds = [0, *accumulate(map(len, pieces))]  # token i spells data[bounds[i] : bounds[i + 1]]
    first, last = bisect_left(bounds, start), bisect_right(bounds, end) - 1
    if first > last:
        return _encoded(tokenizer, data[start:end])
    for _ in range(_MAX_TOKENS_OF_CHARACTER):
        if first < last and not _is_text(data[start : bounds[first]]):
            first += 1
        if first < last and not _is_text(data[bounds[last] : end]):
            last -= 1
    head, tail = data[start : bounds[first]], data[bounds[last] : end]
    return (*_encoded(tokenizer, head), *token_ids[first:last], *_encoded(tokenizer, tail))


def _encoded(tokenizer: Speller, data: bytes) -> tuple[int, ...]:
    """Tokens of a text that stands after others."""
    if not data:
        return ()
    piece = (data.decode(errors="replace"), False)
    return tuple(tokenizer.encode_pieces([piece], at_start=False).tolist())


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _bytes_of(tokenizer: Speller, token_id: int) -> bytes:
    """What a token adds to a text; a model may have more rows than its tokenizer has tokens."""
    table = tokenizer.token_bytes
    return table[token_id] if 0 <= token_id < len(table) else b""
