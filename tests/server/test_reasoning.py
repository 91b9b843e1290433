"""Reasoning on OpenAI's wire: what a request may say of it, and how an answer tells it."""

import json

import numpy as np
import pytest

from sapwood.runtime.answer_format import AnswerParts, ToolCallPiece
from sapwood.runtime.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from sapwood.server.outputs import ChatAnswer
from tests.server.fakes import ByteTokenizer
from tests.server.helpers import chat, error, user

pytestmark = pytest.mark.anyio
URL = "/v1/chat/completions"


def output(
    parts: AnswerParts | None, num_reasoning_tokens: int, reason: FinishReason | None = None
) -> RequestOutput:
    answer = CompletionOutput(
        index=0,
        text="as it was written",
        token_ids=(65,) * (num_reasoning_tokens + 1),
        logprobs=None,
        finish_reason=reason,
        stop_reason=None,
        parts=parts,
        num_reasoning_tokens=num_reasoning_tokens,
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


def test_a_whole_answer_tells_reasoning_beside_the_content(answer):
    whole = answer.whole(
        [output(AnswerParts(reasoning="why", content="So."), 3, FinishReason.STOP)]
    )
    [choice] = whole["choices"]
    assert choice["message"]["reasoning_content"] == "why"
    assert choice["message"]["content"] == "So."
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert whole["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("parts", [None, AnswerParts(content="as it was written")])
def test_an_answer_without_reasoning_has_no_such_field(answer, parts):
    whole = answer.whole([output(parts, 0, FinishReason.STOP)])
    assert "reasoning_content" not in whole["choices"][0]["message"]
    assert whole["choices"][0]["message"]["content"] == "as it was written"
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_stream_tells_reasoning_and_then_the_content_and_calls(answer):
    call = ToolCallPiece(index=0, id="c", name="f", arguments="{}")
    pieces = [
        output(AnswerParts(reasoning="wh"), 1),
        output(AnswerParts(reasoning="y", content="So"), 1),
        output(AnswerParts(tool_calls=(call,)), 0, FinishReason.STOP),
    ]
    data = b"".join(answer.pieces(0, piece) for piece in pieces).decode()
    events = [json.loads(event.removeprefix("data: ")) for event in data.split("\n\n") if event]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert [delta for delta in deltas[1:] if "tool_calls" not in delta] == [
        {"reasoning_content": "wh"},
        {"reasoning_content": "y"},
        {"content": "So"},
        {},
    ]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert answer.usage.as_dict()["completion_tokens_details"] == {"reasoning_tokens": 2}


@pytest.mark.parametrize("name", ["max_reasoning_tokens", "thinking_token_budget"])
async def test_a_cap_on_reasoning_has_two_names(client, engine, name):
    assert (await client.post(URL, json=chat(**{name: 7}))).status_code == 200
    assert engine.sampling[0].max_reasoning_tokens == 7
    told = error(await client.post(URL, json=chat(**{name: -1})))
    assert told["param"] == name
    assert told["message"].startswith(name)


async def test_two_different_caps_are_refused(client):
    told = error(await client.post(URL, json=chat(max_reasoning_tokens=7, thinking_token_budget=8)))
    assert told["param"] == "max_reasoning_tokens"


async def test_how_to_reason_reaches_the_conversation(client, engine):
    told = {**user("hi"), "role": "assistant", "reasoning_content": "why"}
    body = chat(separate_reasoning=False, reasoning_effort="none", messages=[told, user("x")])
    assert (await client.post(URL, json=body)).status_code == 200
    await client.post(URL, json=chat())
    asked, usual = (given.options for given in engine.inputs)
    assert (asked.separate_reasoning, asked.reasoning_effort) == (False, "none")
    assert (usual.separate_reasoning, usual.reasoning_effort) == (True, None)
    assert engine.inputs[0].messages[0]["reasoning_content"] == "why"


async def test_an_unknown_effort_is_refused(client):
    told = error(await client.post(URL, json=chat(reasoning_effort="much")))
    assert told["param"] == "reasoning_effort"
    assert "none, minimal" in told["message"]
