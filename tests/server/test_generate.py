import pytest

from tests.server.fakes import ANSWER, END, FakeEngine
from tests.server.helpers import error, events

pytestmark = pytest.mark.anyio
URL = "/generate"
GREEDY = {"temperature": 0}


async def test_one_text_gives_one_object(client):
    request = {"text": "hi", "sampling_params": GREEDY, "rid": "r1"}
    result = (await client.post(URL, json=request)).json()
    assert result["text"] == ANSWER
    assert result["output_ids"] == [*ANSWER.encode(), END]
    meta = result["meta_info"]
    assert meta["id"] == "r1"
    assert meta["finish_reason"] == {"type": "stop", "matched": END}
    assert (meta["prompt_tokens"], meta["cached_tokens"]) == (2, 0)
    assert meta["completion_tokens"] == len(result["output_ids"])
    assert meta["e2e_latency"] >= 0
    assert "output_token_logprobs" not in meta


async def test_a_batch_gives_a_list_and_may_differ_by_prompt(client, engine):
    request = {
        "input_ids": [[1, 2], [3]],
        "sampling_params": [GREEDY | {"max_new_tokens": 3}, GREEDY | {"stop": "wör"}],
        "rid": ["a", "b"],
        "return_logprob": [True, False],
        "top_logprobs_num": [2, 0],
    }
    first, second = (await client.post(URL, json=request)).json()
    assert first["text"] == ANSWER[:3]
    assert first["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert len(first["meta_info"]["output_top_logprobs"][0]) == 2
    assert second["text"] == "Hello, "
    assert second["meta_info"]["finish_reason"] == {"type": "stop", "matched": "wör"}
    assert "output_token_logprobs" not in second["meta_info"]
    assert engine.started == ["a", "b"]


async def test_one_id_for_a_batch_is_told_apart(client, engine):
    await client.post(URL, json={"text": ["a", "b"], "rid": "r"})
    assert engine.started == ["r_0", "r_1"]


async def test_a_null_id_is_a_new_one(client, engine):
    response = await client.post(URL, json={"text": "hi", "rid": [None]})
    assert response.status_code == 200
    await client.post(URL, json={"text": ["a", "b", "c"], "rid": [None, "mine", None]})
    assert engine.started[2] == "mine"
    assert len(set(engine.started)) == 4
    assert all(engine.started)


@pytest.mark.parametrize("rid", ["", "a\nb", "a b", "é", "r" * 201, "r" * 1_000_000])
async def test_an_id_that_cannot_stand_in_a_log_is_refused(client, engine, rid):
    for request in ({"text": "hi", "rid": rid}, {"text": ["a", "b"], "rid": [None, rid]}):
        told = error(await client.post(URL, json=request))
        assert told["param"] == "rid"
        assert told["message"] == "rid must be 1 to 200 letters, digits and . : - _"
    assert not engine.started


async def test_a_request_not_to_log_is_refused_as_it_has_no_effect(client):
    told = error(await client.post(URL, json={"text": "hi", "no_logs": True}))
    assert (told["param"], told["code"]) == ("no_logs", "unsupported_parameter")
    for neutral in (None, False):
        request = {"text": "hi", "no_logs": neutral}
        assert (await client.post(URL, json=request)).status_code == 200


async def test_a_batch_of_one_is_a_list(client):
    assert len((await client.post(URL, json={"text": ["a"]})).json()) == 1


async def test_defaults_are_sglangs(client, engine):
    await client.post(URL, json={"text": "hi"})
    [params] = engine.sampling
    assert (params.max_tokens, params.temperature, params.top_k, params.seed) == (
        128,
        1.0,
        -1,
        None,
    )
    await client.post(URL, json={"text": "hi", "sampling_params": {"max_new_tokens": None}})
    assert engine.sampling[1].max_tokens is None


async def test_options_reach_the_engine(client, engine):
    options = {
        "max_new_tokens": 9, "min_new_tokens": 2, "stop": ["x"], "stop_token_ids": [5],
        "temperature": 0.5, "top_p": 0.9, "top_k": 1 << 30, "min_p": 0.1, "ignore_eos": True,
        "sampling_seed": 7,
    }  # fmt: skip
    await client.post(URL, json={"text": "hi", "sampling_params": options})
    [params] = engine.sampling
    assert (params.max_tokens, params.min_tokens, params.seed) == (9, 2, 7)
    for name in ("temperature", "top_p", "top_k", "min_p", "ignore_eos"):
        assert getattr(params, name) == options[name]


async def test_logprobs_are_triples_with_text_on_request(client):
    request = {"text": "hi", "sampling_params": GREEDY, "return_logprob": True}
    request |= {"top_logprobs_num": 2, "logprob_start_len": -1}
    meta = (await client.post(URL, json=request)).json()["meta_info"]
    assert meta["output_token_logprobs"][0] == [-0.5, ord("H"), None]
    assert meta["output_top_logprobs"][0] == [[-0.5, ord("H"), None], [-1.5, ord("I"), None]]
    request["return_text_in_logprobs"] = True
    meta = (await client.post(URL, json=request)).json()["meta_info"]
    assert meta["output_token_logprobs"][0] == [-0.5, ord("H"), "H"]


async def test_neutral_values_are_taken(client):
    options = {
        "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1, "n": 1,
        "json_schema": None, "regex": "", "ebnf": None, "stop_regex": [], "no_stop_trim": False,
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "logit_bias": {},
        "custom_params": None, "structural_tag": None, "stream_interval": 1,
    }  # fmt: skip
    request = {
        "text": "hi", "sampling_params": options, "image_data": None, "lora_path": None,
        "return_hidden_states": False, "session_params": None, "priority": None,
        "logprob_start_len": None, "token_ids_logprob": None, "log_metrics": True,
    }  # fmt: skip
    response = await client.post(URL, json=request)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("request_fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": 5}, "text"),
        ({"text": [1, 2]}, "text"),
        ({"text": []}, "text"),
        ({"text": ""}, "text"),
        ({"input_ids": "a"}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [300]}, "input_ids"),
        ({"input_ids": [[1], [300]]}, "input_ids[1]"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"seed": 1, "sampling_seed": 2}}, "sampling_params.seed"),
        ({"text": "a", "sampling_params": {"max_tokens": 5}}, "sampling_params.max_tokens"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 5}]}, "sampling_params[1].top_p"),
        ({"text": "a", "sampling_params": "x"}, "sampling_params"),
        ({"text": ["a", "b"], "rid": ["r"]}, "rid"),
        ({"text": "a", "rid": 5}, "rid"),
        ({"text": "a", "return_logprob": 1}, "return_logprob"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "foo": 1}, "foo"),
    ],
)
async def test_a_wrong_value_is_a_400_that_names_its_place(client, request_fields, param):
    assert error(await client.post(URL, json=request_fields))["param"] == param


async def test_a_prompt_over_the_context_is_refused_in_the_callers_words(connect):
    client = connect(FakeEngine(max_model_len=20))
    assert error(await client.post(URL, json={"text": "x" * 50}))["param"] == "text"
    assert error(await client.post(URL, json={"input_ids": [7] * 50}))["param"] == "input_ids"


async def test_a_stream_is_cumulative_and_ends_with_the_whole_answer(client):
    request = {"text": "hi", "sampling_params": GREEDY, "return_logprob": True}
    whole = (await client.post(URL, json=request)).json()
    pieces = events(await client.post(URL, json=request | {"stream": True}))
    assert all(b["text"].startswith(a["text"]) for a, b in zip(pieces, pieces[1:], strict=False))
    assert [piece["meta_info"]["completion_tokens"] for piece in pieces] == list(
        range(1, len(pieces) + 1)
    )
    for piece in pieces[:-1]:
        assert piece["meta_info"]["finish_reason"] is None
    last = pieces[-1]
    for name in ("text", "output_ids"):
        assert last[name] == whole[name]
    for name in ("finish_reason", "output_token_logprobs", "completion_tokens"):
        assert last["meta_info"][name] == whole["meta_info"][name]


async def test_pieces_of_a_streamed_batch_say_which_prompt_they_belong_to(client):
    request = {"text": ["a", "b"], "sampling_params": GREEDY, "stream": True}
    pieces = events(await client.post(URL, json=request))
    last = {piece["index"]: piece["text"] for piece in pieces}
    assert last == {0: ANSWER, 1: ANSWER}
