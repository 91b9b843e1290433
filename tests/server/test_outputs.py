"""The builders alone, for what an engine seldom tells."""

import json

import numpy as np
import pytest

from sapwood.runtime.outputs import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from sapwood.server.errors import ApiError
from sapwood.server.outputs import ChatAnswer, NativeAnswer
from tests.server.fakes import ByteTokenizer


def piece(
    text: str,
    *,
    reason: FinishReason | None = None,
    logprobs: tuple[TokenLogprobs, ...] | None = None,
    token_ids: tuple[int, ...] = (65,),
) -> RequestOutput:
    answer = CompletionOutput(
        index=0,
        text=text,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=reason,
        stop_reason=None,
    )
    return RequestOutput(
        request_id="r",
        prompt_token_ids=np.array([1, 2], np.int32),
        outputs=(answer,),
        num_cached_tokens=1,
        metrics=RequestMetrics(arrival_time=0.0),
    )


@pytest.fixture
def answer() -> ChatAnswer:
    return ChatAnswer(id="chatcmpl-r", model="m", fingerprint="fp", tokenizer=ByteTokenizer())


def deltas(data: bytes) -> list[dict[str, object]]:
    events = [event for event in data.decode().split("\n\n") if event]
    return [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]


def test_a_piece_whose_text_is_held_back_is_not_sent(answer):
    assert deltas(answer.pieces(0, piece(""))) == [{"role": "assistant", "content": ""}]
    assert answer.pieces(0, piece("")) == b""
    assert deltas(answer.pieces(0, piece("ab"))) == [{"content": "ab"}]


def test_a_piece_whose_text_is_held_back_still_has_its_logprobs(answer):
    logprobs = (TokenLogprobs(token_id=65, logprob=-1.0),)
    data = answer.pieces(0, piece("", logprobs=logprobs)).decode()
    assert data.count('"token":"A"') == 1


def test_the_last_piece_is_sent_before_the_finish_chunk(answer):
    sent = deltas(answer.pieces(0, piece("a", reason=FinishReason.LENGTH)))
    assert sent == [{"role": "assistant", "content": ""}, {"content": "a"}, {}]


def test_several_tokens_of_one_step_are_one_event(answer):
    answer.pieces(0, piece("a"))
    assert deltas(answer.pieces(0, piece("bcd", token_ids=(66, 67, 68)))) == [{"content": "bcd"}]
    assert answer.usage.completion_tokens == 4


def test_an_answer_that_was_aborted_elsewhere_is_an_error_not_an_answer(answer):
    with pytest.raises(ApiError, match="aborted"):
        answer.pieces(0, piece("a", reason=FinishReason.ABORT))
    with pytest.raises(ApiError, match="aborted"):
        answer.whole([piece("a", reason=FinishReason.ABORT)])
    aborted = piece("a", reason=FinishReason.ABORT)
    native = NativeAnswer(tokenizer=ByteTokenizer()).add(aborted, aborted.outputs[0])
    assert native["meta_info"]["finish_reason"]["type"] == "abort"
