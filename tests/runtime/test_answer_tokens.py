"""Tokens that spell an answer: exactly its text, and as generated but where a stop cuts one."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.runtime.answer_tokens import answer_token_ids, tokens_between
from sapwood.runtime.detokenizer import IncrementalDetokenizer
from sapwood.runtime.outputs import CompletionOutput, FinishReason
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.stop import StopMatcher
from sapwood.runtime.tokenizer import Tokenizer
from tests.runtime.test_controlled_encoder import TOKENIZERS

BYTE_LEVEL = TOKENIZERS["byte level"]


def spelled(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bytes:
    return b"".join(tokenizer.token_bytes[token_id] for token_id in token_ids)


def answered(
    tokenizer: Tokenizer, token_ids: Sequence[int], sampling: SamplingParams
) -> CompletionOutput:
    """The answer that an engine would give if a model drew these tokens."""
    matcher = StopMatcher.of(sampling)
    drawn, stop = [], None
    for token_id in token_ids:
        drawn.append(token_id)
        match = matcher and matcher.feed(tokenizer.token_bytes[token_id])
        if match:
            stop = match.reason
            break
    detokenizer = IncrementalDetokenizer(tokenizer.token_bytes, StopMatcher.of(sampling))
    return CompletionOutput(
        index=0,
        text=detokenizer.add(drawn, finished=True),
        token_ids=tuple(drawn),
        logprobs=None,
        finish_reason=FinishReason.LENGTH if stop is None else FinishReason.STOP,
        stop_reason=stop,
    )


def id_of(tokenizer: Tokenizer, data: bytes) -> int:
    return tokenizer.token_bytes.index(data)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_tokens_spell_the_text_and_begin_as_generated(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    some = [b"a", b" ", b" the", b"he", b" t", b"ab", b" ab", b"\xc3", b"\xa9", b"b", b"\n"]
    known = [token for token in some if token in tokenizer.token_bytes]
    drawn = data.draw(st.lists(st.sampled_from(known), max_size=10))
    stops = data.draw(st.lists(st.sampled_from(["e", "b", "th", " a", "é"]), max_size=2))
    sampling = SamplingParams(stop=tuple(stops))
    answer = answered(tokenizer, [id_of(tokenizer, token) for token in drawn], sampling)
    token_ids = answer_token_ids(answer, sampling, tokenizer)
    assert spelled(tokenizer, token_ids).decode(errors="replace") == answer.text
    if answer.stop_reason is None:
        assert token_ids == answer.token_ids


def test_only_the_token_in_which_a_stop_begins_is_replaced() -> None:
    ids = [id_of(BYTE_LEVEL, token) for token in (b"a", b" the", b"a")]
    sampling = SamplingParams(stop="he")
    answer = answered(BYTE_LEVEL, ids, sampling)
    assert answer.text == "a t"
    assert answer_token_ids(answer, sampling, BYTE_LEVEL) == (ids[0], id_of(BYTE_LEVEL, b" t"))


def test_the_end_token_is_left_out() -> None:
    answer = CompletionOutput(
        index=0,
        text="a",
        token_ids=(id_of(BYTE_LEVEL, b"a"), 7),
        logprobs=None,
        finish_reason=FinishReason.STOP,
        stop_reason=None,
        ended_by_token=True,
    )
    assert answer_token_ids(answer, SamplingParams(), BYTE_LEVEL) == (id_of(BYTE_LEVEL, b"a"),)


def test_a_stop_token_id_is_left_out_like_an_end_token() -> None:
    ids = (id_of(BYTE_LEVEL, b"a"), id_of(BYTE_LEVEL, b"b"))
    answer = CompletionOutput(
        index=0,
        text="a",
        token_ids=ids,
        logprobs=None,
        finish_reason=FinishReason.STOP,
        stop_reason=ids[1],
        ended_by_token=True,
    )
    sampling = SamplingParams(stop_token_ids=(ids[1],))
    assert answer_token_ids(answer, sampling, BYTE_LEVEL) == ids[:1]


def test_a_character_that_the_end_cuts_in_two_stays_as_generated() -> None:
    ids = [id_of(BYTE_LEVEL, b"a"), id_of(BYTE_LEVEL, b"\xc3")]
    answer = answered(BYTE_LEVEL, ids, SamplingParams())
    assert answer.text == "a\ufffd"
    assert answer_token_ids(answer, SamplingParams(), BYTE_LEVEL) == tuple(ids)


def test_min_tokens_holds_a_stop_off_here_too() -> None:
    ids = [id_of(BYTE_LEVEL, token) for token in (b"b", b"a", b"b")]
    sampling = SamplingParams(stop="b", min_tokens=1)
    answer = answered(BYTE_LEVEL, ids, sampling)
    assert answer_token_ids(answer, sampling, BYTE_LEVEL) == tuple(ids[:2])


def test_a_character_whose_last_byte_is_in_the_cut_token_is_written_anew() -> None:
    pieces = [b"x", b"\xe2\x82", b"\xacSTOP"]
    ids = (id_of(BYTE_LEVEL, b"x"), 1_000_001, 1_000_002)
    kept = tokens_between(BYTE_LEVEL, ids, pieces, 0, 4)
    assert kept[0] == ids[0]
    assert spelled(BYTE_LEVEL, kept).decode() == "x€"


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.sampled_from([b"a", b" the", b"he", b"b", b"ab"]), max_size=6),
    bounds=st.tuples(st.integers(0, 14), st.integers(0, 14)),
)
def test_what_is_between_two_bytes_is_spelled_exactly(
    pieces: list[bytes], bounds: tuple[int, int]
) -> None:
    data = b"".join(pieces)
    start, end = sorted(min(bound, len(data)) for bound in bounds)
    ids = list(range(len(pieces)))
    kept = tokens_between(BYTE_LEVEL, [1_000_000 + i for i in ids], pieces, start, end)
    told = [pieces[i - 1_000_000] if i >= 1_000_000 else BYTE_LEVEL.token_bytes[i] for i in kept]
    assert b"".join(told) == data[start:end]
    assert sum(i >= 1_000_000 for i in kept) >= len(pieces) - 2 - _num_outside(pieces, start, end)


def _num_outside(pieces: Sequence[bytes], start: int, end: int) -> int:
    """Pieces that have nothing between the bounds."""
    place, count = 0, 0
    for piece in pieces:
        count += place + len(piece) <= start or place >= end
        place += len(piece)
    return count
