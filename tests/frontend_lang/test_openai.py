"""OpenAI's API: what is sent, what is read, and what is refused."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import pytest

from sapwood.frontend_lang.backends.interface import Answer, Call, Prompt
from sapwood.frontend_lang.backends.openai import LiteLLM, OpenAI
from sapwood.frontend_lang.options import Options
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec, Whitespace
from sapwood.runtime.errors import EngineBusyError, EngineError, RequestError
from sapwood.runtime.hints import NO_HINTS, Hints
from tests.frontend_lang.http_fakes import (
    FakeServer,
    Received,
    Reply,
    Script,
    in_turn,
    reply,
    stream,
    with_server,
)

T = TypeVar("T")
USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 3,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 8, "audio_tokens": 0},
}
TURNS = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wörld?"})
OPEN = {"role": "assistant", "content": ""}
PROMPT = Prompt(text="system: Be brief.\nuser: Wörld?\nassistant: ", messages=(*TURNS, OPEN))
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def chat_choice(text: str | None, index: int = 0, **fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    message |= fields.pop("message", {})
    return {
        "index": index,
        "message": message,
        "logprobs": None,
        "finish_reason": "stop",
    } | fields


def chat_body(*choices: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_790_000_000,
        "model": "m-2026",
        "choices": list(choices),
        "usage": USAGE,
        "service_tier": "default",
        "system_fingerprint": "fp_1",
    }


def text_body(*choices: dict[str, Any]) -> dict[str, Any]:
    common = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
    return common | {"choices": list(choices), "usage": USAGE}


def text_choice(text: str, index: int = 0, **fields: Any) -> dict[str, Any]:
    return {"text": text, "index": index, "logprobs": None, "finish_reason": "stop"} | fields


def chunk(delta: Mapping[str, Any], reason: str | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason} | fields
    common = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return common | {"choices": [choice]}


LAST_CHUNK = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [], "usage": USAGE}


@asynccontextmanager
async def backend_of(server: FakeServer, **options: Any) -> AsyncIterator[OpenAI]:
    given = {"api_key": "key", "dialect": "openai", "max_retries": 0} | options
    backend = OpenAI("m", base_url=f"{server.url}/v1", **given)
    try:
        yield backend
    finally:
        await backend.aclose()


def on_backend(
    script: Script, work: Callable[[OpenAI], Awaitable[T]], **options: Any
) -> tuple[T, list[Any]]:
    """What `work` returns, and the bodies that were posted."""

    async def main(server: FakeServer) -> tuple[T, list[Any]]:
        async with backend_of(server, **options) as backend:
            return await work(backend), server.bodies

    return with_server(script, main)


def generated(
    script: Script | Reply, call: Call | None = None, prompt: Prompt = PROMPT, **options: Any
) -> tuple[list[Answer], list[Any]]:
    script = in_turn(script) if isinstance(script, Reply) else script
    return on_backend(script, lambda b: b.generate(prompt, call or Call()), **options)


def constrained(spec: ConstraintSpec, text: str, **options: Any) -> tuple[str, Any]:
    """The text of a constrained answer, and the body that asked for it."""
    call = Call(constraint=spec)
    [answer], [body] = generated(reply(chat_body(chat_choice(text))), call, **options)
    return answer.text, body


def calling(**options: Any) -> Call:
    return Call(options=Options(**options))  # type: ignore[typeddict-item]


# -- what is sent and read -------------------------------------------------------------------------


def test_a_chat_is_sent_in_openais_fields_with_its_key() -> None:
    async def main(server: FakeServer) -> Received:
        async with backend_of(server, api_key=" key\n") as backend:
            options = calling(
                max_tokens=5, temperature=0.5, top_p=1.0, top_k=-1, stop="\n", seed=3, n=1,
                frequency_penalty=0.25, logit_bias={7: -100.0}, ignore_eos=False, stop_token_ids=[],
            )  # fmt: skip
            await backend.generate(PROMPT, options)
        return server.received[0]

    received = with_server(in_turn(reply(chat_body(chat_choice("hi")))), main)
    assert received.path == "/v1/chat/completions"
    assert received.headers["authorization"] == "Bearer key"
    assert received.body == {
        "model": "m",
        "messages": list(TURNS),
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "stop": ["\n"],
        "seed": 3,
        "frequency_penalty": 0.25,
        "logit_bias": {"7": -100.0},
    }


def test_a_chat_answer_is_read_with_its_usage() -> None:
    [answer], _ = generated(reply(chat_body(chat_choice("Hällo 🌍", finish_reason="length"))))
    assert answer == Answer(
        text="Hällo 🌍",
        finish_reason="length",
        meta={
            "finish_reason": {"type": "length", "matched": None},
            "prompt_tokens": 11,
            "cached_tokens": 8,
            "completion_tokens": 3,
        },
    )


def test_n_answers_come_in_their_order_and_without_a_number_of_tokens_each() -> None:
    body = chat_body(chat_choice("b", 1), chat_choice("a", 0))
    answers, [sent] = generated(reply(body), calling(n=2))
    assert [answer.text for answer in answers] == ["a", "b"]
    assert sent["n"] == 2
    assert "completion_tokens" not in answers[0].meta


def test_a_server_that_ignores_n_is_found_out() -> None:
    with pytest.raises(EngineError, match="n is 3"):
        generated(reply(chat_body(chat_choice("a"))), calling(n=3))


def test_log_probabilities_of_a_chat_have_sglangs_names() -> None:
    top = [{"token": "Hi", "logprob": -0.1, "bytes": [72, 105]}, {"token": "Yo", "logprob": -2.5}]
    entry = {"token": "Hi", "logprob": -0.1, "bytes": [72, 105], "top_logprobs": top}
    choice = chat_choice("Hi", logprobs={"content": [entry], "refusal": None})
    [answer], [sent] = generated(
        reply(chat_body(choice)), calling(return_logprob=True, top_logprobs_num=2)
    )
    assert (sent["logprobs"], sent["top_logprobs"]) == (True, 2)
    assert answer.meta["output_token_logprobs"] == [[-0.1, None, "Hi"]]
    assert answer.meta["output_top_logprobs"] == [[[-0.1, None, "Hi"], [-2.5, None, "Yo"]]]


def test_a_server_that_tells_no_log_probabilities_is_found_out() -> None:
    with pytest.raises(RequestError) as caught:
        generated(reply(chat_body(chat_choice("hi"))), calling(return_logprob=True))
    assert caught.value.param == "return_logprob"


def test_a_completion_sends_the_text_and_reads_its_log_probabilities() -> None:
    logprobs = {
        "tokens": [" a", " b"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{" a": -0.5, " x": -0.2}, {" b": -1.0}],
        "text_offset": [0, 2],
    }
    [answer], [sent] = generated(
        reply(text_body(text_choice(" a b", logprobs=logprobs))),
        calling(return_logprob=True, top_logprobs_num=1, max_tokens=2),
        is_chat_model=False,
    )
    assert sent == {"model": "m", "prompt": PROMPT.text, "max_tokens": 2, "logprobs": 1}
    assert answer.text == " a b"
    assert answer.meta["output_token_logprobs"] == [[-0.5, None, " a"], [-1.0, None, " b"]]
    assert answer.meta["output_top_logprobs"] == [[[-0.2, None, " x"]], [[-1.0, None, " b"]]]


def test_a_refusal_and_a_filtered_answer_are_errors() -> None:
    with pytest.raises(EngineError, match="refuses: I will not"):
        generated(reply(chat_body(chat_choice(None, message={"refusal": "I will not"}))))
    with pytest.raises(EngineError, match="content filter"):
        generated(reply(chat_body(chat_choice("a b", finish_reason="content_filter"))))


@pytest.mark.parametrize("body", [{}, {"choices": None}, {"choices": [{"index": 0}]}, [], 7])
def test_a_body_in_another_form_is_an_error(body: Any) -> None:
    with pytest.raises(EngineError):
        generated(reply(body))


def test_an_error_of_the_api_names_its_param() -> None:
    told = {"message": "Unsupported value", "type": "invalid_request_error", "param": "stop"}
    with pytest.raises(RequestError, match="Unsupported value") as caught:
        generated(reply({"error": told | {"code": "unsupported_value"}}, 400))
    assert (caught.value.param, caught.value.code) == ("stop", "unsupported_value")


def test_a_busy_api_is_asked_again_as_often_as_was_said() -> None:
    busy = reply({"error": {"message": "slow down"}}, 429, retry_after="0")
    with pytest.raises(EngineBusyError):
        generated(busy)
    answers, bodies = generated(in_turn(busy, reply(chat_body(chat_choice("ok")))), max_retries=1)
    assert (answers[0].text, len(bodies)) == ("ok", 2)


# -- streams ---------------------------------------------------------------------------------------


async def pieces_of(backend: OpenAI, call: Call) -> list[Answer]:
    return [piece async for piece in backend.stream(PROMPT, call)]


def test_a_stream_tells_text_as_it_comes_and_its_usage_last() -> None:
    script = in_turn(
        stream(
            chunk({"role": "assistant", "content": ""}),
            chunk({"content": "Hä"}),
            chunk({"reasoning_content": "hm"}),
            chunk({"content": "llo"}),
            chunk({}, "stop", matched_stop="\n"),
            LAST_CHUNK,
        )
    )
    pieces, [sent] = on_backend(script, lambda b: pieces_of(b, calling(max_tokens=9)))
    assert [piece.text for piece in pieces] == ["Hä", "", "llo", ""]
    assert [piece.reasoning for piece in pieces] == ["", "hm", "", ""]
    assert [piece.finish_reason for piece in pieces] == [None, None, None, "stop"]
    assert pieces[-1].meta["completion_tokens"] == 3
    assert pieces[-1].meta["finish_reason"] == {"type": "stop", "matched": "\n"}
    assert sent["stream"] is True
    assert sent["stream_options"] == {"include_usage": True}


def test_a_streamed_completion_gathers_its_log_probabilities() -> None:
    def piece(text: str, reason: str | None = None) -> dict[str, Any]:
        logprobs = {"tokens": [text], "token_logprobs": [-1.0], "top_logprobs": [None]}
        return text_body(text_choice(text, logprobs=logprobs, finish_reason=reason))

    pieces, _ = on_backend(
        in_turn(stream(piece("a"), piece("b", "length"))),
        lambda b: pieces_of(b, calling(return_logprob=True)),
        is_chat_model=False,
    )
    assert "".join(piece.text for piece in pieces) == "ab"
    assert pieces[-1].meta["output_token_logprobs"] == [[-1.0, None, "a"], [-1.0, None, "b"]]


def test_a_stream_that_ends_before_its_answer_is_an_error() -> None:
    with pytest.raises(EngineError, match="before its answer was done"):
        on_backend(in_turn(stream(chunk({"content": "a"}))), lambda b: pieces_of(b, Call()))


def test_a_stream_of_several_answers_is_refused() -> None:
    with pytest.raises(RequestError, match="one answer") as caught:
        on_backend(in_turn(reply(0)), lambda b: pieces_of(b, calling(n=2)))
    assert caught.value.param == "n"


def test_a_streamed_choice_comes_whole() -> None:
    script = in_turn(
        stream(chunk({"content": '{"answer"'}), chunk({"content": ': "yes"}'}), chunk({}, "stop"))
    )
    call = Call(constraint=ConstraintSpec.choice(["yes", "no"]))
    pieces, _ = on_backend(script, lambda b: pieces_of(b, call))
    assert [piece.text for piece in pieces] == ["yes"]


def test_cancelling_an_answer_closes_its_connection() -> None:
    async def main(server: FakeServer) -> None:
        async with backend_of(server) as backend:
            task = asyncio.ensure_future(backend.generate(PROMPT, Call()))
            while not server.received:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait_for(server.has_left.wait(), 5)
            with pytest.raises(asyncio.CancelledError):
                await task

    with_server(in_turn(Reply(delay=30.0)), main)


def test_closing_a_stream_closes_its_connection() -> None:
    async def main(server: FakeServer) -> None:
        async with backend_of(server) as backend:
            async with aclosing(backend.stream(PROMPT, Call())) as pieces:  # type: ignore[type-var]
                assert (await anext(pieces)).text == "a"
            await backend.generate(PROMPT, Call())
        assert server.num_connections == 2

    endless = stream(*(chunk({"content": "a"}) for _ in range(100)))
    with_server(in_turn(endless, reply(chat_body(chat_choice("b")))), main)


# -- constraints -----------------------------------------------------------------------------------


def test_a_json_schema_of_an_object_is_asked_for_as_it_is() -> None:
    text, sent = constrained(ConstraintSpec.json_schema(SCHEMA), '{"a": 1}')
    assert text == '{"a": 1}'
    described = {"name": "answer", "strict": True, "schema": SCHEMA}
    assert sent["response_format"] == {"type": "json_schema", "json_schema": described}


def test_a_json_schema_of_something_else_is_wrapped_and_taken_out_again() -> None:
    schema = {
        "type": "array",
        "items": {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/items"}, {"$ref": "#"}]},
        "$defs": {"x": {"type": "string"}},
    }
    text, sent = constrained(ConstraintSpec.json_schema(schema), '{"answer": ["ä", ["b"]]}')
    assert text == '["ä", ["b"]]'
    asked = sent["response_format"]["json_schema"]["schema"]
    assert asked["required"] == ["answer"]
    references = [branch["$ref"] for branch in asked["properties"]["answer"]["items"]["anyOf"]]
    assert references == ["#/$defs/x", "#/properties/answer/items", "#/properties/answer"]
    assert asked["$defs"] == {"x": {"type": "string"}}


def test_choices_are_an_enum_and_the_answer_is_one_of_them() -> None:
    spec = ConstraintSpec.choice(["Yes!", "Nö"])
    text, sent = constrained(spec, '{"answer": "Nö"}')
    assert text == "Nö"
    asked = sent["response_format"]["json_schema"]["schema"]["properties"]["answer"]
    assert asked == {"type": "string", "enum": ["Yes!", "Nö"]}


@pytest.mark.parametrize("text", ["Nö", '{"answer": "no"}', '{"other": 1}', "[1]", '{"answer": "N'])
def test_a_server_that_ignores_choices_is_found_out(text: str) -> None:
    with pytest.raises(EngineError, match="constraint"):
        constrained(ConstraintSpec.choice(["Yes!", "Nö"]), text, dialect="compatible")


def test_openai_keeps_to_a_regex_as_a_pattern_and_others_are_not_trusted_with_it() -> None:
    text, sent = constrained(ConstraintSpec.regex("[0-9]+"), '{"answer": "42"}')
    assert text == "42"
    asked = sent["response_format"]["json_schema"]["schema"]["properties"]["answer"]
    assert asked == {"type": "string", "pattern": "^(?:[0-9]+)$"}
    with pytest.raises(RequestError, match="regular expression.*RuntimeEndpoint"):
        constrained(ConstraintSpec.regex("[0-9]+"), "42", dialect="compatible")


@pytest.mark.parametrize("dialect", ["openai", "compatible"])
@pytest.mark.parametrize(
    "kind", [ConstraintKind.LARK, ConstraintKind.EBNF, ConstraintKind.STRUCTURAL_TAG]
)
def test_a_grammar_is_refused_with_the_way_out(dialect: str, kind: ConstraintKind) -> None:
    with pytest.raises(RequestError, match="grammar; give json_schema or choices, or") as caught:
        constrained(ConstraintSpec(kind=kind, text='start: "a"'), "a", dialect=dialect)
    assert caught.value.param == "constraint"


def test_completions_of_text_are_not_constrained_by_openai() -> None:
    with pytest.raises(RequestError, match="cannot constrain completions"):
        constrained(ConstraintSpec.json_schema(SCHEMA), "{}", is_chat_model=False)


@pytest.mark.parametrize(
    "spec, fields",
    [
        (ConstraintSpec.regex("a+"), {"regex": "a+"}),
        (ConstraintSpec.choice(["a", "b"]), {"choice": ["a", "b"]}),
        (ConstraintSpec(kind=ConstraintKind.LARK, text="start: A"), {"grammar": "start: A"}),
        (ConstraintSpec(kind=ConstraintKind.EBNF, text="root ::= x"), {"grammar": "root ::= x"}),
        (
            ConstraintSpec.json_schema({"type": "string"}, whitespace=Whitespace.COMPACT),
            {"json": '{"type": "string"}', "disable_any_whitespace": True},
        ),
    ],
)
@pytest.mark.parametrize("dialect", ["vllm", "sapwood"])
def test_vllm_and_our_server_take_every_constraint(
    dialect: str, spec: ConstraintSpec, fields: Mapping[str, Any]
) -> None:
    text, sent = constrained(spec, "the text", dialect=dialect)
    assert (text, sent["structured_outputs"]) == ("the text", fields)


@pytest.mark.parametrize(
    "spec, fields",
    [
        (ConstraintSpec.regex("a+"), {"regex": "a+"}),
        (ConstraintSpec.choice(["a.", "b"]), {"regex": r"(a\.|b)"}),
        (ConstraintSpec(kind=ConstraintKind.EBNF, text="root ::= x"), {"ebnf": "root ::= x"}),
    ],
)
def test_sglang_takes_its_own_fields(spec: ConstraintSpec, fields: Mapping[str, Any]) -> None:
    _, sent = constrained(spec, "the text", dialect="sglang")
    assert {name: sent[name] for name in fields} == fields
    with pytest.raises(RequestError, match="lark"):
        constrained(ConstraintSpec(kind=ConstraintKind.LARK, text="s: A"), "", dialect="sglang")


def test_whitespace_that_no_field_says_is_refused() -> None:
    spec = ConstraintSpec.json_schema(SCHEMA, whitespace=Whitespace.COMPACT)
    with pytest.raises(RequestError, match="whitespace"):
        constrained(spec, "{}", dialect="openai")


# -- kinds of servers ------------------------------------------------------------------------------


def asked_of(owner: Any, num_calls: int = 1) -> tuple[list[Any], list[str]]:
    """Bodies of calls at once to a server whose models have this owner, and the paths asked for."""

    def script(received: Received) -> Reply:
        if received.path == "/v1/models":
            return reply({"data": [{"id": "m", "owned_by": owner}]}) if owner else reply({}, 404)
        return reply(chat_body(chat_choice("hi")))

    async def main(server: FakeServer) -> tuple[list[Any], list[str]]:
        async with backend_of(server, dialect=None) as backend:
            calls = (backend.generate(PROMPT, calling(max_tokens=4)) for _ in range(num_calls))
            await asyncio.gather(*calls)
        return server.bodies, [received.path for received in server.received]

    return with_server(script, main)


@pytest.mark.parametrize("owner", ["vllm", "sglang", "sapwood", "openai", "llamacpp", 7, None])
def test_a_server_is_asked_once_what_it_is(owner: Any) -> None:
    bodies, paths = asked_of(owner, num_calls=5)
    assert paths.count("/v1/models") == 1
    assert all(body["max_tokens"] == 4 for body in bodies)
    tells_apart = owner in ("sglang", "sapwood")
    assert all(("separate_reasoning" in body) == tells_apart for body in bodies)


def test_an_option_that_a_server_has_not_is_refused_by_its_name() -> None:
    with pytest.raises(RequestError, match="has no top_k") as caught:
        generated(reply(0), calling(top_k=5))
    assert caught.value.param == "top_k"
    _, [sent] = generated(
        reply(chat_body(chat_choice("hi"))),
        calling(top_k=5, stop_token_ids=[2], stop_regex="a+", ignore_eos=True),
        dialect="sapwood",
    )
    assert sent["top_k"] == 5
    assert (sent["stop_token_ids"], sent["stop_regex"]) == ([2], ["a+"])
    assert sent["ignore_eos"] is True


def test_a_message_that_has_begun_is_continued_only_where_that_can_be() -> None:
    begun = Prompt(text="", messages=(*TURNS, {"role": "assistant", "content": "It is"}))
    with pytest.raises(RequestError, match="num_api_spec_tokens"):
        generated(reply(0), prompt=begun)
    _, [sent] = generated(reply(chat_body(chat_choice("x"))), prompt=begun, dialect="vllm")
    assert sent["messages"][-1] == {"role": "assistant", "content": "It is"}
    assert sent["continue_final_message"] is True
    assert sent["add_generation_prompt"] is False


@pytest.mark.parametrize("messages", [(), TURNS, (OPEN,)])
def test_a_chat_model_answers_an_open_assistants_message_only(messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        generated(reply(0), prompt=Prompt(text="x", messages=messages))
    assert caught.value.param == "messages"


def test_hints_go_to_our_own_server_alone() -> None:
    call = Call(hints=Hints(program_id="p", more_follows=True))
    for dialect in ("openai", "vllm"):
        _, [sent] = generated(reply(chat_body(chat_choice("x"))), call, dialect=dialect)
        assert "sapwood" not in sent
    _, [sent] = generated(reply(chat_body(chat_choice("x"))), call, dialect="sapwood")
    assert sent["sapwood"] == {"hints": {"program_id": "p", "more_follows": True}}


def test_reasoning_is_apart_where_a_program_asks_for_it() -> None:
    choice = chat_choice("4", message={"reasoning_content": "2 + 2"})
    call = Call(separate_reasoning=True)
    [answer], [sent] = generated(reply(chat_body(choice)), call, dialect="sglang")
    assert (answer.text, answer.reasoning) == ("4", "2 + 2")
    assert sent["separate_reasoning"] is True
    with pytest.raises(RequestError, match="model_type"):
        generated(reply(0), Call(separate_reasoning=True, reasoning_type="deepseek-r1"))
    with pytest.raises(RequestError, match="completions"):
        generated(reply(0), call, is_chat_model=False)


# -- select ----------------------------------------------------------------------------------------


def scored(
    script: Script, texts: list[str], prompt: Prompt = PROMPT, **options: Any
) -> tuple[list[tuple[float, ...]], list[Any]]:
    scores, bodies = on_backend(script, lambda b: b.score(prompt, texts, NO_HINTS), **options)
    return [score.logprobs for score in scores], bodies


def echo(*choices: list[tuple[str, float | None]]) -> Reply:
    """What a server echoes: tokens with their log-probabilities."""
    bodies = []
    for index, tokens in enumerate(choices):
        logprobs = {
            "tokens": [token for token, _ in tokens],
            "token_logprobs": [value for _, value in tokens],
            "top_logprobs": None,
            "text_offset": [0] * len(tokens),
        }
        text = "".join(token for token, _ in tokens)
        bodies.append(text_choice(text, index, logprobs=logprobs, finish_reason="length"))
    return reply(text_body(*reversed(bodies)))


def test_a_completion_model_scores_all_texts_in_one_request() -> None:
    prompt = Prompt(text="A b")
    script = in_turn(
        echo(
            [("A", None), (" b", -9.0), (" c", -1.0), (" d", -2.0)],
            [("A", None), (" b", -9.0), (" e", -3.0)],
        )
    )
    scores, [sent] = scored(script, [" c d", " e"], prompt, is_chat_model=False)
    assert scores == [(-1.0, -2.0), (-3.0,)]
    assert sent == {
        "model": "m",
        "prompt": ["A b c d", "A b e"],
        "echo": True,
        "max_tokens": 0,
        "logprobs": 1,
    }


def test_scores_begin_where_the_tokens_of_all_texts_are_the_same() -> None:
    """The last space of the prompt is part of the first token of one text, and not of another."""
    script = in_turn(
        echo(
            [("<s>", None), ("A", -5.0), (" bc", -1.0)],
            [("<s>", None), ("A", -5.0), (" ", -2.0), ("d", -3.0)],
        )
    )
    scores, _ = scored(script, ["bc", "d"], Prompt(text="A "), is_chat_model=False)
    assert scores == [(-1.0,), (-2.0, -3.0)]


def test_tokens_that_are_parts_of_characters_are_scored() -> None:
    script = in_turn(echo([("A", None), ("bytes:\\xc3", -1.0), ("bytes:\\xa4", -0.0)]))
    scores, _ = scored(script, ["ä"], Prompt(text="A"), is_chat_model=False)
    assert scores == [(-1.0, 0.0)]


def test_an_empty_prompt_scores_from_the_second_token_on() -> None:
    script = in_turn(echo([("ab", None), ("c", -1.0)], [("x", None)]))
    scores, _ = scored(script, ["abc", "x"], Prompt(text=""), is_chat_model=False)
    assert scores == [(-1.0,), ()]


def test_an_echo_that_does_not_spell_the_text_is_an_error() -> None:
    script = in_turn(echo([("A", None), ("\ufffd", -1.0)]))
    with pytest.raises(EngineError, match="do not spell"):
        scored(script, ["ä"], Prompt(text="A"), is_chat_model=False)


def test_a_chat_model_selects_by_a_constrained_answer() -> None:
    script = in_turn(reply(chat_body(chat_choice('{"answer": "no"}'))))
    scores, [sent] = scored(script, ["yes", "no"])
    assert scores == [(-math.inf,), (0.0,)]
    assert sent["temperature"] == 0.0
    enum = sent["response_format"]["json_schema"]["schema"]["properties"]["answer"]["enum"]
    assert enum == ["yes", "no"]


def test_a_model_that_takes_no_temperature_still_selects() -> None:
    told = {"message": "Unsupported", "param": "temperature", "code": "unsupported_value"}
    script = in_turn(reply({"error": told}, 400), reply(chat_body(chat_choice('{"answer": "no"}'))))
    scores, bodies = scored(script, ["yes", "no"])
    assert scores == [(-math.inf,), (0.0,)]
    assert "temperature" not in bodies[1]


def test_a_chat_model_has_no_unconditional_likelihoods() -> None:
    with pytest.raises(RequestError, match="unconditional_likelihood_normalized"):
        scored(in_turn(reply(0)), ["yes", "no"], Prompt(text=""))


def test_an_answer_that_is_none_of_the_texts_is_an_error() -> None:
    script = in_turn(reply(chat_body(chat_choice("maybe"))))
    with pytest.raises(EngineError, match="none of the choices"):
        scored(script, ["yes", "no"], dialect="vllm")


# -- making one ------------------------------------------------------------------------------------


def test_openai_itself_needs_a_key_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(RequestError, match="OPENAI_API_KEY") as caught:
        OpenAI("gpt-5")
    assert caught.value.param == "api_key"
    OpenAI("any", base_url="http://127.0.0.1:9/v1")


def test_openais_models_for_completions_are_known_by_their_names() -> None:
    assert not OpenAI("davinci-002", api_key="k").chat_only
    assert OpenAI("gpt-5", api_key="k").chat_only
    assert not OpenAI("gpt-5", api_key="k", is_chat_model=False).chat_only


def test_an_unknown_dialect_is_refused() -> None:
    with pytest.raises(RequestError, match="sglang"):
        OpenAI("m", api_key="k", dialect="klingon")


def test_a_cache_that_nobody_may_empty_is_not_said_to_be_empty() -> None:
    with pytest.raises(RequestError, match="no cache"):
        on_backend(in_turn(reply(0)), lambda b: b.flush_cache())


def test_the_servers_models_are_its_info() -> None:
    info, _ = on_backend(in_turn(reply({"data": []})), lambda b: b.server_info())
    assert info["models"] == {"data": []}
    json.dumps(info)


def test_litellm_needs_a_url_and_asks_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LITELLM_PROXY_API_BASE", raising=False)
    with pytest.raises(RequestError, match="base_url"):
        LiteLLM("openai/gpt-4o")

    async def main(server: FakeServer) -> list[str]:
        backend = LiteLLM("openai/gpt-4o", base_url=server.url, max_retries=0)
        try:
            [answer] = await backend.generate(PROMPT, calling(max_tokens=4))
        finally:
            await backend.aclose()
        assert answer.text == "hi"
        assert server.bodies[0]["max_tokens"] == 4
        return [received.path for received in server.received]

    paths = with_server(in_turn(reply(chat_body(chat_choice("hi")))), main)
    assert paths == ["/chat/completions"]
