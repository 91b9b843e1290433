"""Tools on OpenAI's wire: what is asked, what is refused, and how calls are told."""

import json
from typing import Any

import pytest

from sapwood.runtime.errors import RequestError
from tests.server.fakes import FakeEngine, call
from tests.server.helpers import chat, error, events, user

pytestmark = pytest.mark.anyio
URL = "/v1/chat/completions"


def tool(name: str = "weather") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather"), tool("time")]
NAMED = {"type": "function", "function": {"name": "weather"}}
BERN, ROME = '{"city":"Bern"}', '{"city": "R\\u00f3ma {}\\" "}'
ANSWERS = {
    "no call": "Just content, wörld.",
    "one call": call("weather", BERN),
    "two calls": call("weather", BERN) + call("time", ROME),
    "content first": "Let me see. " + call("weather", BERN),
    "content around": "a" + call("weather", BERN) + "b" + call("time", "{}") + "c",
    "cut off": call("weather", BERN) + call("time", ROME)[:-6],
}


async def whole(connect, answer: str, **fields: Any) -> dict[str, Any]:
    response = await connect(FakeEngine(answer=answer)).post(URL, json=chat(**fields))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def chunks(connect, answer: str, **fields: Any) -> list[dict[str, Any]]:
    body = chat(**fields, stream=True)
    told = events(await connect(FakeEngine(answer=answer)).post(URL, json=body))
    return [chunk["choices"][0] for chunk in told]


def added_up(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from deltas."""
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for choice in choices:
        delta = dict(choice["delta"])
        for piece in delta.pop("tool_calls", ()):
            known = calls.get(piece["index"])
            if known is None:
                assert piece["type"] == "function" and piece["function"]["arguments"] == ""
                calls[piece["index"]] = piece
            else:
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
                known["function"]["arguments"] += piece["function"]["arguments"]
        for key, value in delta.items():
            message[key] = value if message.get(key) is None else message[key] + value
    assert list(calls) == list(range(len(calls)))
    if calls:
        message["tool_calls"] = [
            {key: value for key, value in piece.items() if key != "index"}
            for piece in calls.values()
        ]
    return message


async def test_a_call_is_told_as_openai_does(connect):
    choice = await whole(connect, call("weather", BERN), tools=TOOLS)
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "weather", "arguments": BERN},
            }
        ],
    }
    assert choice["finish_reason"] == "tool_calls"


async def test_an_answer_without_calls_is_one_as_ever(connect):
    choice = await whole(connect, "Hi", tools=TOOLS)
    assert choice["message"] == {"role": "assistant", "content": "Hi", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert (await whole(connect, "", tools=TOOLS))["message"]["content"] == ""


async def test_content_stands_beside_calls(connect):
    choice = await whole(connect, ANSWERS["content around"], tools=TOOLS)
    assert choice["message"]["content"] == "abc"
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["weather", "time"]


@pytest.mark.parametrize(
    ("tool_choice", "reason"),
    [("auto", "tool_calls"), ("required", "tool_calls"), (NAMED, "stop"), (None, "tool_calls")],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_finish_reason_is_openais(connect, tool_choice, reason, stream):
    fields = {"tools": TOOLS, "tool_choice": tool_choice}
    if stream:
        choice = (await chunks(connect, call("weather", BERN), **fields))[-1]
    else:
        choice = await whole(connect, call("weather", BERN), **fields)
    assert choice["finish_reason"] == reason


@pytest.mark.parametrize("fields", [{"max_tokens": 14}, {"stop": "Bern"}, {"stop": "\x03"}])
@pytest.mark.parametrize("tool_choice", ["auto", "required", NAMED])
async def test_a_call_that_was_cut_off_never_ends_as_a_whole_one(connect, fields, tool_choice):
    fields = {"tools": TOOLS, "tool_choice": tool_choice, **fields}
    is_whole = fields.get("stop") == "\x03"  # the stop comes when the arguments are complete
    finished = await whole(connect, call("weather", BERN), **fields)
    streamed = await chunks(connect, call("weather", BERN), **fields)
    assert (finished["finish_reason"] == "length") == (not is_whole)
    assert streamed[-1]["finish_reason"] == finished["finish_reason"]
    arguments = finished["message"]["tool_calls"][0]["function"]["arguments"]
    assert BERN.startswith(arguments) and (arguments == BERN) == is_whole


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("fields", [{}, {"max_tokens": 12}, {"max_tokens": 30}, {"stop": "c"}])
async def test_a_stream_adds_up_to_the_whole_answer(connect, answer, fields):
    finished = await whole(connect, answer, tools=TOOLS, **fields)
    streamed = await chunks(connect, answer, tools=TOOLS, **fields)
    message = {k: v for k, v in finished["message"].items() if k != "refusal"}
    assert added_up(streamed) == message
    assert streamed[-1]["finish_reason"] == finished["finish_reason"]
    assert all(choice["delta"].get("content") != "" for choice in streamed)
    assert [choice["finish_reason"] for choice in streamed[:-1]] == [None] * (len(streamed) - 1)


async def test_each_of_several_choices_has_calls_of_its_own(connect):
    answer = ANSWERS["content first"] + call("time", "{}")
    told = events(
        await connect(FakeEngine(answer=answer)).post(URL, json=chat(tools=TOOLS, n=3, stream=True))
    )
    one = added_up(await chunks(connect, answer, tools=TOOLS))
    for index in range(3):
        mine = [c["choices"][0] for c in told if c["choices"][0]["index"] == index]
        assert added_up(mine) == one
        assert mine[-1]["finish_reason"] == "tool_calls"


async def test_logprobs_of_a_call_are_told_once_whole_and_streamed(connect):
    fields = {"tools": TOOLS, "logprobs": True}
    finished = await whole(connect, ANSWERS["two calls"], **fields)
    streamed = await chunks(connect, ANSWERS["two calls"], **fields)
    entries = [entry for c in streamed if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert entries == finished["logprobs"]["content"]


async def test_tools_and_how_to_choose_reach_the_engine(connect):
    engine = FakeEngine()
    client = connect(engine)
    for fields in (
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {},
    ):
        assert (await client.post(URL, json=chat(**fields))).status_code == 200
    auto, none, required, without = [given.options for given in engine.inputs]
    assert list(auto.tools) == TOOLS and auto.parallel_tool_calls
    assert [o.choice.mode for o in (auto, none, required, without)] == [
        "auto",
        "none",
        "required",
        "none",
    ]
    assert not required.parallel_tool_calls


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [tool(), tool("a b")]}, "tools[1].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tools": [tool("time")], "tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
async def test_what_is_wrong_about_tools_is_refused_by_name(connect, fields, param):
    told = error(await connect(FakeEngine()).post(URL, json=chat(**fields)))
    assert told["param"] == param


def allowed(*names: str, mode: str = "required") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_of_allowed_tools_the_others_are_not_told(connect):
    engine = FakeEngine()
    body = chat(tools=TOOLS, tool_choice=allowed("time", mode="auto"))
    assert (await connect(engine).post(URL, json=body)).status_code == 200
    [given] = engine.inputs
    assert list(given.options.tools) == [tool("time")]
    assert given.options.choice.mode == "auto"


@pytest.mark.parametrize(
    ("tool_choice", "param"),
    [
        (allowed("time", "date"), "tool_choice.allowed_tools.tools[1].function.name"),
        (allowed(), "tool_choice.allowed_tools.tools"),
        (allowed("time", mode="none"), "tool_choice.allowed_tools.mode"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
    ],
)
async def test_wrong_allowed_tools_are_refused_by_place(connect, tool_choice, param):
    body = chat(tools=TOOLS, tool_choice=tool_choice)
    assert error(await connect(FakeEngine()).post(URL, json=body))["param"] == param


async def test_the_older_fields_are_refused_with_those_to_use(connect):
    client = connect(FakeEngine())
    told = error(await client.post(URL, json=chat(functions=[{"name": "f"}])))
    assert "send tools" in told["message"]
    told = error(await client.post(URL, json=chat(function_call={"name": "f"})))
    assert "send tool_choice" in told["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_says_of_a_constraint_is_said_of_who_made_it(connect, stream):
    fault = RequestError("constraint has too many words", param="constraint")
    client = connect(FakeEngine(fail=fault))
    told = await client.post(URL, json=chat(tools=TOOLS, stream=stream))
    message = {"message": "tools has too many words", "param": "tools"}
    assert message.items() <= _error_of(told, stream).items()
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    body = chat(tools=TOOLS, response_format=schema, stream=stream)
    told = _error_of(await client.post(URL, json=body), stream)
    assert told["param"].startswith("response_format")


def _error_of(response: Any, stream: bool) -> dict[str, Any]:
    if not stream:
        return error(response)
    [event] = [line for line in response.text.split("\n\n") if '"error"' in line]
    return json.loads(event.removeprefix("data: "))["error"]


def asked(**call: Any) -> dict[str, Any]:
    whole = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, **call}
    return {"role": "assistant", "content": None, "tool_calls": [whole]}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (asked(id=5), "tool_calls[0].id"),
        (asked(type="custom"), "tool_calls[0].type"),
        (asked(function={"arguments": "{}"}), "tool_calls[0].function.name"),
        (asked(function={"name": "f", "arguments": {}}), "tool_calls[0].function.arguments"),
        ({"role": "tool", "content": "42"}, "tool_call_id"),
        ({**user("x"), "tool_calls": asked()["tool_calls"]}, "tool_calls"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "function_call.arguments"),
    ],
)
async def test_a_history_of_calls_has_openais_shapes(connect, message, param):
    messages = [user("hi"), message]
    told = error(await connect(FakeEngine()).post(URL, json={"messages": messages}))
    assert told["param"] == f"messages[1].{param}"


async def test_an_older_function_call_in_a_history_is_a_tool_call(connect):
    engine = FakeEngine()
    function = {"name": "f", "arguments": "{}"}
    messages = [user("hi"), {"role": "assistant", "content": None, "function_call": function}]
    assert (await connect(engine).post(URL, json={"messages": messages})).status_code == 200
    called = engine.inputs[0].messages[1]["tool_calls"]
    assert called == [{"type": "function", "function": function}]


async def test_an_answer_with_calls_is_taken_back_as_a_message(connect):
    engine = FakeEngine(answer=call("weather", BERN))
    client = connect(engine)
    first = (await client.post(URL, json=chat(tools=TOOLS))).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": "call_0", "content": json.dumps({"sky": "blue"})}
    messages = [user("hi"), first, result]
    response = await client.post(URL, json={"messages": messages, "tools": TOOLS})
    assert response.status_code == 200, response.text
    assert engine.inputs[1].messages[1]["tool_calls"] == first["tool_calls"]
