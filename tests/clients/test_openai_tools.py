"""Tool calls through OpenAI's Python library, unmodified, against our server."""

import json
from enum import StrEnum
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Unit(StrEnum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


class GetWeather(pydantic.BaseModel):
    """The weather in a city."""

    city: str = pydantic.Field(pattern="[A-Z][a-z]{2,12}")
    unit: Unit


WEATHER: Any = openai.pydantic_function_tool(GetWeather, name="get_weather")
TIME: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "pattern": "[A-Z][a-z]{2,12}"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [WEATHER, TIME]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Bern?"}]
GREEDY: Any = {"temperature": 0, "max_tokens": 120, "parallel_tool_calls": False}


@pytest.fixture
def client(base_url: str) -> Any:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def model(client: Any) -> str:
    return client.models.list().data[0].id


def the_call(message: Any) -> Any:
    [call] = message.tool_calls
    assert call.type == "function" and call.id
    return call


@pytest.mark.parametrize(
    ("tool_choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=("any", "named")
)
def test_a_call_that_is_required_has_arguments_of_the_schema(client, model, tool_choice, reason):
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, tools=TOOLS, tool_choice=tool_choice, **GREEDY
    )
    [choice] = answer.choices
    assert choice.finish_reason == reason
    assert choice.message.content is None
    call = the_call(choice.message)
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        GetWeather.model_validate(arguments)
    else:
        assert tool_choice == "required" and set(arguments) == {"city"}


def test_a_greeting_calls_no_tool_that_may_be_called(client, model):
    messages: Any = [{"role": "user", "content": "Just say hi."}]
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="auto", temperature=0
    )
    [choice] = answer.choices
    assert choice.message.tool_calls is None
    assert choice.message.content
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("tool_choice", ["required", NAMED, "auto"])
def test_a_streamed_call_adds_up_to_the_whole_one(client, model, tool_choice):
    fields = {"model": model, "messages": MESSAGES, "tools": TOOLS, "tool_choice": tool_choice}
    whole = client.chat.completions.create(**fields, **GREEDY).choices[0]
    content, reason, calls = "", None, []
    for chunk in client.chat.completions.create(**fields, **GREEDY, stream=True):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for piece in choice.delta.tool_calls or ():
            if piece.index == len(calls):
                calls.append([piece.function.name, ""])
            calls[piece.index][1] += piece.function.arguments
    assert content == (whole.message.content or "")
    assert reason == whole.finish_reason
    assert calls == [
        [call.function.name, call.function.arguments] for call in whole.message.tool_calls or ()
    ]


def test_the_stream_helper_builds_the_calls(client, model):
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, tools=TOOLS, tool_choice=NAMED, **GREEDY
    ) as stream:
        told = list(stream)
        final = stream.get_final_completion().choices[0].message
    deltas = [e.arguments_delta for e in told if e.type == "tool_calls.function.arguments.delta"]
    [done] = [e for e in told if e.type == "tool_calls.function.arguments.done"]
    assert "".join(deltas) == done.arguments == the_call(final).function.arguments
    assert done.name == "get_weather"
    assert isinstance(the_call(final).function.parsed_arguments, GetWeather)
    assert final.content is None


def test_arguments_are_parsed_into_the_callers_types(client, model):
    answer = client.chat.completions.parse(
        model=model, messages=MESSAGES, tools=[WEATHER], tool_choice="required", **GREEDY
    )
    parsed = the_call(answer.choices[0].message).function.parsed_arguments
    assert isinstance(parsed, GetWeather)


def test_what_a_tool_returned_is_answered(client, model):
    called = client.chat.completions.create(
        model=model, messages=MESSAGES, tools=[WEATHER], tool_choice=NAMED, **GREEDY
    ).choices[0]
    result = {
        "role": "tool",
        "tool_call_id": the_call(called.message).id,
        "content": json.dumps({"sky": "blue", "degrees": 21}),
    }
    for message in (called.message, called.message.model_dump(exclude_none=True)):
        answer = client.chat.completions.create(
            model=model,
            messages=[*MESSAGES, message, result],
            tools=[WEATHER],
            tool_choice="none",
            temperature=0,
            max_tokens=60,
        )
        assert answer.choices[0].message.content
        assert answer.choices[0].message.tool_calls is None


def test_errors_about_tools_are_the_librarys_own(client, model):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=model, messages=MESSAGES, tools=[TIME], tool_choice=NAMED
        )
    assert refused.value.param == "tool_choice.function.name"
    assert "get_time" in refused.value.message
