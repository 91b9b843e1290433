import pytest

from tests.server.fakes import ANSWER, FakeEngine
from tests.server.helpers import error, events

pytestmark = pytest.mark.anyio
URL = "/v1/completions"


def body(prompt, **fields):
    return {"model": "fake/model", "prompt": prompt, "temperature": 0, "max_tokens": 6} | fields


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        ("hi", ["hi"]),
        (["hi"], ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
async def test_a_prompt_is_text_or_token_ids_one_or_many(client, engine, prompt, inputs):
    answer = (await client.post(URL, json=body(prompt))).json()
    assert engine.inputs == inputs
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(inputs)))
    assert {choice["text"] for choice in answer["choices"]} == {ANSWER[:6]}
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 6 * len(inputs)


async def test_without_a_limit_sixteen_tokens_are_generated(client, engine):
    await client.post(URL, json={"prompt": "hi"})
    assert engine.sampling[0].max_tokens == 16


async def test_nulls_and_neutral_values_are_taken(client):
    neutral = {
        "echo": False, "suffix": None, "best_of": 1, "n": 1, "logprobs": None, "seed": None,
        "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": None, "user": "u",
        "stream_options": None, "top_p": 1, "stop": None,
    }  # fmt: skip
    assert (await client.post(URL, json=body("hi", **neutral))).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [("suffix", "x"), ("use_beam_search", True), ("bad_words", ["x"])],
)
async def test_what_is_not_served_is_refused_by_name(client, field, value):
    told = error(await client.post(URL, json=body("hi", **{field: value})))
    assert (told["param"], told["code"]) == (field, "unsupported_parameter")


async def test_options_of_a_stream_without_one_and_unsound_ids_are_refused(client):
    told = error(await client.post(URL, json=body("hi", stream_options={"include_usage": True})))
    assert told["param"] == "stream_options"
    assert error(await client.post(URL, json=body("hi", request_id="\n")))["param"] == "request_id"


@pytest.mark.parametrize(
    "prompt",
    [None, 5, {}, [], [[]], "", [""], ["a", 1], [1, "a"], [[1], "a"], [[1.5]], [[True]], [True],
     [1, True], [-1], [257], [10**30], [[1], [2, -7]], [None], [[[1]]], [1.0]],
)  # fmt: skip
async def test_a_bad_prompt_is_a_400_about_the_prompt(client, prompt):
    told = error(await client.post(URL, json=body(prompt)))
    assert told["param"].startswith("prompt")


async def test_the_place_of_a_bad_token_id_is_named(client):
    told = error(await client.post(URL, json=body([[1], [2, 999]])))
    assert told["param"] == "prompt[1]"
    assert "999" in told["message"]
    assert "0 to 256" in told["message"]


async def test_too_many_prompts_are_refused(client):
    told = error(await client.post(URL, json=body(["a"] * 2000)))
    assert "at most 1024" in told["message"]


async def test_a_prompt_over_the_context_is_refused(connect):
    client = connect(FakeEngine(max_model_len=20))
    told = error(await client.post(URL, json=body(["ok", "x" * 50])))
    assert (told["param"], told["code"]) == ("prompt", "context_length_exceeded")


async def test_logprobs_are_four_parallel_lists_with_the_chosen_token_among_the_likeliest(client):
    [choice] = (await client.post(URL, json=body("hi", logprobs=2, max_tokens=9))).json()["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["H", "e", "l", "l", "o", ",", " ", "w", "bytes:\\xc3"]
    assert logprobs["token_logprobs"] == [-0.5] * 9
    assert logprobs["text_offset"][:8] == list(range(8))
    assert logprobs["top_logprobs"][0] == {"H": -0.5, "I": -1.5}
    none = (await client.post(URL, json=body("hi", logprobs=0))).json()["choices"][0]["logprobs"]
    assert none["top_logprobs"][0] == {"H": -0.5}


async def test_a_bad_number_of_logprobs_is_about_logprobs(client):
    assert error(await client.post(URL, json=body("hi", logprobs=99)))["param"] == "logprobs"


@pytest.mark.parametrize("prompt", ["hi", ["a", "b", "c"]])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"stop": "l"}])
async def test_a_stream_says_the_same_as_a_whole_answer(client, prompt, fields):
    whole = (await client.post(URL, json=body(prompt, **fields))).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(await client.post(URL, json=body(prompt, **fields, **options)))
    for expected in whole["choices"]:
        pieces = [
            c for chunk in chunks for c in chunk["choices"] if c["index"] == expected["index"]
        ]
        assert "".join(piece["text"] for piece in pieces) == expected["text"]
        assert [p["finish_reason"] for p in pieces if p["finish_reason"]] == [
            "stop" if "stop" in fields else "length"
        ]
        if expected["logprobs"]:
            for name, values in expected["logprobs"].items():
                parts = [piece["logprobs"][name] for piece in pieces if piece["logprobs"]]
                assert sum(parts, []) == values
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


async def test_one_bad_prompt_in_a_streamed_batch_is_a_400_and_aborts_the_others(connect):
    engine = FakeEngine(max_model_len=20, prefill=0.05)
    response = await connect(engine).post(URL, json=body(["ok", "x" * 50], stream=True))
    assert error(response)["code"] == "context_length_exceeded"
    assert not engine.running
