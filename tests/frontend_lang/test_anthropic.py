"""Anthropic's messages API: what is sent, what is read, and what is refused."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from sapwood.frontend_lang.backends.anthropic import Anthropic
from sapwood.frontend_lang.backends.interface import Answer, Call, Prompt
from sapwood.frontend_lang.options import Options
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec
from sapwood.runtime.errors import EngineBusyError, EngineError, RequestError
from sapwood.runtime.hints import NO_HINTS
from tests.frontend_lang.http_fakes import (
    FakeServer,
    Reply,
    Script,
    in_turn,
    reply,
    stream,
    with_server,
)

T = TypeVar("T")
USAGE = {
    "input_tokens": 5,
    "cache_creation_input_tokens": 2,
    "cache_read_input_tokens": 30,
    "output_tokens": 3,
    "service_tier": "standard",
}
TURNS = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wörld?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Sure?"},
)


def prompt(*turns: Any, begun: str = "") -> Prompt:
    return Prompt(text="", messages=(*(turns or TURNS), {"role": "assistant", "content": begun}))


def message(*blocks: Any, reason: str = "end_turn", sequence: str | None = None) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "text", "text": block} if isinstance(block, str) else block for block in blocks
        ],
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": USAGE,
    }


def events(*texts: str, reason: str = "end_turn") -> list[Any]:
    """Those of a streamed message, as the API has them."""
    opened = message() | {"stop_reason": None, "usage": {**USAGE, "output_tokens": 1}}
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        for text in texts
    ]
    block = {"type": "text", "text": ""}
    last = {"stop_reason": reason, "stop_sequence": None}
    plain = [
        {"type": "message_start", "message": opened},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "ping"},
        *deltas,
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": last, "usage": {"output_tokens": 3}},
        {"type": "message_stop"},
    ]
    return [(event["type"], event) for event in plain]


@asynccontextmanager
async def backend_of(server: FakeServer, **options: Any) -> AsyncIterator[Anthropic]:
    given = {"api_key": "key", "max_retries": 0} | options
    backend = Anthropic("m", base_url=server.url, **given)
    try:
        yield backend
    finally:
        await backend.aclose()


def on_backend(
    script: Script, work: Callable[[Anthropic], Awaitable[T]], **options: Any
) -> tuple[T, FakeServer]:
    async def main(server: FakeServer) -> tuple[T, FakeServer]:
        async with backend_of(server, **options) as backend:
            return await work(backend), server

    return with_server(script, main)


def generated(
    answer: Reply, call: Call | None = None, given: Prompt | None = None
) -> tuple[list[Answer], FakeServer]:
    asked = prompt() if given is None else given
    return on_backend(in_turn(answer), lambda b: b.generate(asked, call or Call()))


def calling(**options: Any) -> Call:
    return Call(options=Options(**options))  # type: ignore[typeddict-item]


def test_system_messages_are_apart_and_the_key_is_in_its_header() -> None:
    options = calling(max_tokens=9, temperature=0.5, top_p=1.0, top_k=-1, stop=["\n", "Q:"], n=1)
    _, server = generated(reply(message("Hi")), options)
    [received] = server.received
    assert received.path == "/v1/messages"
    assert received.headers["x-api-key"] == "key"
    assert received.headers["anthropic-version"] == "2023-06-01"
    assert received.body == {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": list(TURNS[1:]),
        "temperature": 0.5,
        "stop_sequences": ["\n", "Q:"],
    }


def test_an_answer_is_read_with_its_reasoning_and_all_tokens_of_its_prompt() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    body = message(thought, "Hä", "llo", reason="stop_sequence", sequence="\n")
    [answer], _ = generated(reply(body))
    assert answer == Answer(
        text="Hällo",
        reasoning="hm",
        finish_reason="stop",
        meta={
            "finish_reason": {"type": "stop", "matched": "\n"},
            "prompt_tokens": 37,
            "cached_tokens": 30,
            "completion_tokens": 3,
        },
    )


@pytest.mark.parametrize(
    "told, reason", [("max_tokens", "length"), ("end_turn", "stop"), ("stop_sequence", "stop")]
)
def test_why_an_answer_ended_has_our_names(told: str, reason: str) -> None:
    [answer], _ = generated(reply(message("a", reason=told)))
    assert answer.finish_reason == reason


def test_a_refusal_is_an_error() -> None:
    with pytest.raises(EngineError, match="refuses"):
        generated(reply(message(reason="refusal")))


def test_n_answers_are_n_requests() -> None:
    answers, server = generated(reply(message("a")), calling(n=3))
    assert [answer.text for answer in answers] == ["a", "a", "a"]
    assert len(server.received) == 3


def test_no_answer_at_all_is_refused() -> None:
    with pytest.raises(RequestError, match="at least 1"):
        generated(reply(0), calling(n=0))


def test_the_first_of_n_answers_that_fails_ends_the_others() -> None:
    failed = reply(
        {"type": "error", "error": {"type": "invalid_request_error", "message": "x"}}, 400
    )

    async def work(backend: Anthropic) -> None:
        with pytest.raises(RequestError):
            await backend.generate(prompt(), calling(n=2))

    _, server = on_backend(in_turn(failed, Reply(delay=30.0)), work)
    assert len(server.received) <= 2


def test_a_message_that_has_begun_is_sent_last() -> None:
    _, server = generated(reply(message(" fine")), given=prompt(begun="It is"))
    assert server.bodies[0]["messages"][-1] == {"role": "assistant", "content": "It is"}


def test_a_stream_tells_text_as_it_comes_and_its_usage_last() -> None:
    async def work(backend: Anthropic) -> list[Answer]:
        return [piece async for piece in backend.stream(prompt(), Call())]

    pieces, server = on_backend(in_turn(stream(*events("Hä", "llo"), is_done=False)), work)
    assert [piece.text for piece in pieces] == ["Hä", "llo", ""]
    assert pieces[-1].finish_reason == "stop"
    assert pieces[-1].meta["completion_tokens"] == 3
    assert pieces[-1].meta["prompt_tokens"] == 37
    assert server.bodies[0]["stream"] is True


@pytest.mark.parametrize("num_events", [1, 4, 6])
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_stream_that_ends_early_is_an_error(num_events: int, is_cut: bool) -> None:
    async def work(backend: Anthropic) -> None:
        async for _ in backend.stream(prompt(), Call()):
            pass

    script = in_turn(stream(*events("Hä", "llo")[:num_events], is_cut=is_cut, is_done=False))
    with pytest.raises(EngineError):
        on_backend(script, work)


def test_an_error_event_ends_a_stream() -> None:
    async def work(backend: Anthropic) -> None:
        async for _ in backend.stream(prompt(), Call()):
            pass

    told = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    with pytest.raises(EngineBusyError, match="Overloaded"):
        on_backend(in_turn(stream(*events("Hä")[:4], ("error", told))), work)


def test_an_overloaded_api_is_asked_again() -> None:
    told = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    script = in_turn(reply(told, 529, retry_after="0"), reply(message("ok")))
    answers, server = on_backend(script, lambda b: b.generate(prompt(), Call()), max_retries=1)
    assert (answers[0].text, len(server.received)) == ("ok", 2)


@pytest.mark.parametrize(
    "name, value",
    [("seed", 1), ("return_logprob", True), ("stop_token_ids", [2]), ("min_tokens", 3)],
)
def test_what_the_api_has_not_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"has no {name}") as caught:
        generated(reply(0), calling(**{name: value}))
    assert caught.value.param == name


@pytest.mark.parametrize(
    "turns, words",
    [
        (({"role": "system", "content": "x"},), "user's message"),
        ((*TURNS, {"role": "system", "content": "x"}), "at the beginning only"),
    ],
)
def test_a_conversation_that_the_api_cannot_take_is_refused(turns: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        generated(reply(0), given=prompt(*turns))
    assert caught.value.param == "messages"


def test_schemas_and_choices_are_an_output_format() -> None:
    call = Call(constraint=ConstraintSpec.choice(["yes", "no"]))
    [answer], server = generated(reply(message('{"answer": "no"}')), call)
    assert answer.text == "no"
    asked = server.bodies[0]["output_config"]["format"]
    assert asked["type"] == "json_schema"
    assert asked["schema"]["properties"]["answer"]["enum"] == ["yes", "no"]
    with pytest.raises(RequestError, match="grammar"):
        generated(reply(0), Call(constraint=ConstraintSpec(kind=ConstraintKind.LARK, text="s: A")))


def test_select_is_a_constrained_answer() -> None:
    script = in_turn(reply(message('{"answer": "no"}')))
    scores, _ = on_backend(script, lambda b: b.score(prompt(), ["yes", "no"], NO_HINTS))
    assert [score.logprobs for score in scores] == [(-math.inf,), (0.0,)]


@pytest.mark.parametrize("body", [{}, {"content": None}, [], {"content": [{}]}])
def test_a_body_in_another_form_is_an_error(body: Any) -> None:
    with pytest.raises(EngineError):
        generated(reply(body))


def test_anthropic_itself_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.delenv("ANTHROPIC_BASE_URL", raising=False)
    with pytest.raises(RequestError, match="ANTHROPIC_API_KEY"):
        Anthropic("claude")
