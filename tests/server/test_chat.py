import pytest

from sapwood.runtime.chat import ChatOptions
from tests.server.fakes import ANSWER, FakeEngine
from tests.server.helpers import chat, error, events, user

pytestmark = pytest.mark.anyio
URL = "/v1/chat/completions"


async def test_a_whole_answer_has_all_that_clients_read(client):
    answer = (await client.post(URL, json=chat())).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "fake/model"
    assert answer["system_fingerprint"].startswith("fp_")
    assert isinstance(answer["created"], int)
    [choice] = answer["choices"]
    assert choice["index"] == 0
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == ANSWER
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None


async def test_usage_says_what_was_cached_also_when_nothing_was(client):
    first = (await client.post(URL, json=chat())).json()["usage"]
    second = (await client.post(URL, json=chat())).json()["usage"]
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"] == {"cached_tokens": first["prompt_tokens"] - 1}
    assert first["total_tokens"] == first["prompt_tokens"] + first["completion_tokens"]


async def test_the_model_may_be_left_out_and_is_then_the_served_one(client):
    body = chat()
    del body["model"]
    assert (await client.post(URL, json=body)).json()["model"] == "fake/model"


async def test_fields_reach_the_engine_as_sampling_params(client, engine):
    fields = {
        "max_completion_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1,
        "min_tokens": 2, "seed": 11, "stop": "x", "stop_token_ids": [3], "ignore_eos": True,
        "logprobs": True, "top_logprobs": 4,
    }  # fmt: skip
    assert (await client.post(URL, json=chat(**fields))).status_code == 200
    [params] = engine.sampling
    assert params.max_tokens == 5
    assert params.stop == ("x",)
    assert params.stop_token_ids == (3,)
    for name in ("temperature", "top_p", "top_k", "min_p", "min_tokens", "seed", "ignore_eos"):
        assert getattr(params, name) == fields[name]
    assert (params.logprobs, params.top_logprobs) == (True, 4)


async def test_without_a_limit_an_answer_may_fill_the_context_at_temperature_one(client, engine):
    await client.post(URL, json={"messages": [user("hi")]})
    assert engine.sampling[0].max_tokens is None
    assert engine.sampling[0].temperature == 1.0


async def test_null_means_that_a_field_was_not_given(client, engine):
    from sapwood.server.schemas_openai import ChatRequest

    nulls = dict.fromkeys(set(ChatRequest.model_fields) - {"messages"})
    response = await client.post(URL, json=nulls | {"messages": [user("hi")]})
    assert response.status_code == 200, response.text
    await client.post(URL, json={"messages": [user("hi")]})
    assert engine.sampling[0] == engine.sampling[1]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "be brief"}, user("hi")],
        [user("hi"), {"role": "developer", "content": "answer in French"}],
        [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}],
        [user("hi"), {"role": "assistant", "content": None, "refusal": None, "audio": None}],
        [user("hi"), {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
        [
            user("hi"),
            {"role": "assistant", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ],
        [{"role": "user", "content": [
            {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}
        ]}],
    ],
)  # fmt: skip
async def test_messages_of_every_shape_are_taken(client, messages):
    response = await client.post(URL, json={"messages": messages})
    assert response.status_code == 200, response.text


async def test_messages_reach_the_engine_in_one_shape(client, engine):
    messages = [
        {"role": "function", "name": "f", "content": "42"},
        {"role": "assistant", "content": None, "annotations": []},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ]
    await client.post(URL, json={"messages": messages})
    [given] = engine.inputs
    assert given.options == ChatOptions()
    assert given.messages == [
        {"role": "tool", "name": "f", "content": [{"type": "text", "text": "42"}]},
        {"role": "assistant", "content": []},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ]


async def test_options_of_the_template_reach_the_engine(client, engine):
    fields = {"chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True}
    await client.post(URL, json=chat(**fields))
    await client.post(URL, json=chat(add_generation_prompt=False))
    assert [given.options for given in engine.inputs] == [
        ChatOptions(**fields),
        ChatOptions(add_generation_prompt=False),
    ]


async def test_why_a_conversation_is_not_continued_is_told_without_an_answer(client, engine):
    response = await client.post(f"{URL}/explain", json=chat("hi"))
    assert response.json() == {
        "num_tokens": len("user:hi\n"),
        "num_remembered_tokens": 2,
        "divergence": {
            "position": 3, "expected_text": "a", "found_text": "b", "reason": "it differs"
        },
    }  # fmt: skip
    assert not engine.started
    told = error(await client.post(f"{URL}/explain", json=chat(model="other")), 404)
    assert told["code"] == "model_not_found"


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"prompt_cache_key": "k", "prompt_cache_options": {"mode": "explicit", "ttl": "30m"}},
        {"safety_identifier": "s", "parallel_tool_calls": False, "prompt_cache_retention": "24h"},
        {"n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"tool_choice": "auto", "modalities": ["text"], "repetition_penalty": 1.0},
    ],
)
async def test_fields_that_change_nothing_are_taken(client, engine, fields):
    assert (await client.post(URL, json=chat(**fields))).status_code == 200
    assert (await client.post(URL, json=chat())).status_code == 200
    assert engine.sampling[0] == engine.sampling[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("use_beam_search", True),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("web_search_options", {}),
        ("documents", [{"text": "x"}]),
        ("chat_template", "{{ messages }}"),
    ],
)
async def test_what_is_not_served_is_refused_by_name_with_a_way_out(client, field, value):
    told = error(await client.post(URL, json=chat(**{field: value})))
    assert told["param"] == field
    assert told["code"] == "unsupported_parameter"
    assert told["message"].startswith(f"{field}: ")


async def test_an_unknown_field_is_refused_with_its_near_matches(client):
    told = error(await client.post(URL, json=chat(temprature=1)))
    assert told["param"] == "temprature"
    assert told["code"] == "unknown_parameter"
    assert "did you mean temperature?" in told["message"]


async def test_nobody_is_pointed_to_a_field_that_is_not_served(client):
    told = error(await client.post(URL, json=chat(modalitis=1)))
    assert "did you mean" not in told["message"]


@pytest.mark.parametrize("temperature", [-0.1, 2.1, 9])
async def test_the_temperature_has_openais_limits(client, temperature):
    told = error(await client.post(URL, json=chat(temperature=temperature)))
    assert told["param"] == "temperature"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [user("a"), {"role": "user", "content": None}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": [[[]]]}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": -5}, "max_completion_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 40}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"foo": 1}}, "stream_options.foo"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"add_generation_prompt": "yes"}, "add_generation_prompt"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * 70_000}}, "chat_template_kwargs"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": "r" * 1_000_000}, "request_id"),
    ],
)
async def test_a_wrong_value_is_a_400_that_names_its_place(client, fields, param):
    assert error(await client.post(URL, json=chat(**fields)))["param"] == param


async def test_a_missing_field_is_named(client):
    told = error(await client.post(URL, json={"model": "fake/model"}))
    assert (told["param"], told["message"]) == ("messages", "messages is missing")


async def test_an_unknown_model_is_a_404_that_names_those_served(connect, engine):
    client = connect(engine, served_model_names=["a", "org/b"])
    told = error(await client.post(URL, json=chat(model="c")), 404)
    assert told["code"] == "model_not_found"
    assert "a, org/b" in told["message"]
    assert (await client.post(URL, json=chat(model="org/b"))).json()["model"] == "org/b"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_over_the_context_is_refused_in_the_words_that_agents_know(connect, stream):
    client = connect(FakeEngine(max_model_len=20))
    told = error(await client.post(URL, json=chat("x" * 50, stream=stream)))
    assert told["code"] == "context_length_exceeded"
    assert told["param"] == "messages"
    assert "maximum context length is 20 tokens" in told["message"]


async def test_logprobs_have_bytes_and_their_alternatives_and_no_infinities(client):
    body = chat(logprobs=True, top_logprobs=3, max_tokens=8)
    content = (await client.post(URL, json=body)).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]) == ANSWER.encode()[:8]
    assert content[0]["token"] == "H"
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5, -9999.0]


async def test_a_stop_string_is_cut_off_and_named(client):
    [choice] = (await client.post(URL, json=chat(stop=["!", "two"]))).json()["choices"]
    assert choice["message"]["content"] == "Hello, wörld"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "!")


async def test_the_same_seed_gives_the_same_answer_and_none_another(client):
    async def content(**fields):
        response = await client.post(URL, json=chat(temperature=1, **fields))
        return response.json()["choices"][0]["message"]["content"]

    assert await content(seed=1) == await content(seed=1)
    assert await content(seed=1) != await content(seed=2)
    assert await content() != await content()


async def test_a_request_id_of_the_caller_is_the_engines(client, engine):
    answer = (await client.post(URL, json=chat(request_id="mine"))).json()
    assert answer["id"] == "chatcmpl-mine"
    assert engine.started == ["chatcmpl-mine"]


async def test_the_rule_for_ids_is_told(client):
    told = error(await client.post(URL, json=chat(request_id="a b")))
    assert told["message"] == "request_id: must be 1 to 200 letters, digits and . : - _"


async def test_options_of_a_stream_may_be_null_without_one(client):
    assert (await client.post(URL, json=chat(stream_options=None))).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 9},
        {"stop": "One"},
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": True, "max_tokens": 10},
        {"temperature": 1, "seed": 5},
    ],
)
async def test_a_stream_says_the_same_as_a_whole_answer(client, fields):
    whole = (await client.post(URL, json=chat(**fields))).json()
    body = chat(**fields, stream=True, stream_options={"include_usage": True})
    *chunks, last = events(await client.post(URL, json=body))
    [choice] = whole["choices"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert chunks[-1]["choices"][0]["stop_reason"] == choice["stop_reason"]
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    entries = [entry for part in logprobs if part for entry in part["content"]]
    assert (entries or None) == (choice["logprobs"] and choice["logprobs"]["content"])
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert all(last["usage"][name] == whole["usage"][name] for name in counts)


async def test_a_stream_keeps_the_rules_that_clients_rely_on(client):
    body = chat(stream=True, stream_options={"include_usage": True})
    *chunks, last = events(await client.post(URL, json=body))
    assert {chunk["object"] for chunk in (*chunks, last)} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in (*chunks, last)}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_stream_has_no_usage_unless_asked(client):
    chunks = events(await client.post(URL, json=chat(stream=True)))
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("field", ["user", "safety_identifier", "prompt_cache_key"])
async def test_who_asks_says_whose_turns_are_continued(client, engine, field):
    await client.post(URL, json=chat(**{field: "someone"}))
    await client.post(URL, json=chat())
    assert [given.options.turns_key for given in engine.inputs] == ["someone", ""]
