"""Text to tokens and back, in the words of vLLM, of SGLang and our own."""

import pytest

from sapwood.server.schemas_tokens import MAX_CHARACTERS, MAX_TOKENS
from tests.server.fakes import END
from tests.server.helpers import error, user

pytestmark = pytest.mark.anyio
HELLO = list(b"Hello")


async def test_a_prompt_is_answered_with_the_fields_of_both_servers(client):
    told = (await client.post("/tokenize", json={"prompt": "Hello"})).json()
    assert told == {"tokens": HELLO, "count": 5, "max_model_len": 4096, "token_strs": None}
    body = {"model": "fake/model", "prompt": "Hello", "return_token_strs": True}
    told = (await client.post("/v1/tokenize", json=body)).json()
    assert told["token_strs"] == list("Hello")


async def test_a_list_of_prompts_is_answered_with_lists(client):
    body = {"prompt": ["Hello", "", "é"], "add_special_tokens": False, "return_token_strs": True}
    told = (await client.post("/tokenize", json=body)).json()
    assert told["tokens"] == [HELLO, [], list("é".encode())]
    assert told["count"] == [5, 0, 2]
    assert told["token_strs"] == [list("Hello"), [], ["\ufffd", "\ufffd"]]


async def test_a_conversation_has_its_templates_special_tokens(client):
    for opens, rest in ((None, b"assistant:"), (True, b"assistant:"), (False, b"")):
        body = {"messages": [user("a <end>")], "add_generation_prompt": opens}
        told = (await client.post("/tokenize", json=body)).json()
        assert told["tokens"][-len(rest) - 1 :] == [END, *rest]
        assert told["count"] == len(told["tokens"])


async def test_what_decides_on_a_conversations_text_is_checked_as_in_a_chat(client):
    for fields, param in (
        ({"messages": [{"role": "narrator", "content": "x"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
        ({"messages": [user("x")], "chat_template": "{{ x }}"}, "chat_template"),
        ({"messages": [user("x")], "chat_template_kwargs": 5}, "chat_template_kwargs"),
    ):
        assert error(await client.post("/tokenize", json=fields))["param"] == param


async def test_special_tokens_are_real_in_control_pieces_only(client):
    pieces = [{"text": "<end>"}, {"text": "a<end>", "is_control": True}, {"text": "b"}]
    told = (await client.post("/tokenize", json={"pieces": pieces, "at_start": True})).json()
    assert told["tokens"] == [*b"<end>a", END, *b"b"]
    assert (await client.post("/tokenize", json={"pieces": []})).json()["tokens"] == []
    batch = [{"pieces": pieces[1:], "at_start": False}, {"pieces": []}, {"pieces": pieces[:1]}]
    told = (await client.post("/tokenize", json={"batch": batch})).json()
    assert told["tokens"] == [[*b"a", END, *b"b"], [], [*b"<end>"]]
    assert told["count"] == [3, 0, 5]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "pieces": []}, "prompt"),
        ({"prompt": "a", "messages": [user("a")]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": {"a": "b"}}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": "a" * (MAX_CHARACTERS + 1)}, "prompt"),
        ({"prompt": "a", "at_start": True}, "at_start"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": [user("a")], "add_special_tokens": True}, "add_special_tokens"),
        ({"pieces": [{"text": "a"}], "add_special_tokens": True}, "add_special_tokens"),
        ({"pieces": [{"text": "a" * (MAX_CHARACTERS + 1)}]}, "pieces"),
        ({"pieces": ["a"]}, "pieces[0]"),
        ({"pieces": [], "batch": [{"pieces": []}]}, "prompt"),
        ({"batch": []}, "batch"),
        ({"batch": [{"pieces": []}], "at_start": True}, "at_start"),
        ({"batch": [{"pieces": []}, {"pieces": [{"text": 1}]}]}, "batch[1].pieces[0].text"),
        ({"batch": [{"pieces": [{"text": "a" * MAX_CHARACTERS}]}] * 2}, "batch"),
        ({"pieces": [{"text": "a", "control": True}]}, "pieces[0].control"),
        ({"prompt": "a", "text": "a"}, "text"),
    ],
)
async def test_a_wrong_tokenize_is_refused_with_its_field(client, body, param):
    assert error(await client.post("/tokenize", json=body))["param"] == param


async def test_tokens_are_read_as_vllm_and_as_sglang_read_them(client):
    tokens = [*HELLO, END]
    told = (await client.post("/detokenize", json={"tokens": tokens})).json()
    assert told == {"prompt": "Hello<end>", "text": "Hello"}
    body = {"tokens": [tokens, [], [END]], "skip_special_tokens": False}
    told = (await client.post("/v1/detokenize", json=body)).json()
    assert told == {"prompt": ["Hello<end>", "", "<end>"], "text": ["Hello<end>", "", "<end>"]}
    assert (await client.post("/detokenize", json={"tokens": []})).json()["text"] == ""


@pytest.mark.parametrize(
    "tokens",
    [
        None,
        "abc",
        [1.5],
        [True],
        [-1],
        [257],
        [2**70],
        [[1], [999]],
        [[1], 2],
        [1, [2]],
        [["a"]],
        [0] * (MAX_TOKENS + 1),
        [[]] * 1025,
    ],
)
async def test_wrong_tokens_are_refused(client, tokens):
    assert error(await client.post("/detokenize", json={"tokens": tokens}))["param"] == "tokens"


async def test_a_conversation_is_rendered_as_the_model_gets_it(client, engine):
    body = {"messages": [user("hi")], "model": "fake/model"}
    told = (await client.post("/v1/chat/completions/render", json=body)).json()
    assert told == {"text": "user:hi<end>assistant:"}
    body |= {"add_generation_prompt": False}
    told = (await client.post("/v1/chat/completions/render", json=body)).json()
    assert told == {"text": "user:hi<end>"}
    assert not engine.started


async def test_what_stands_around_a_message_is_told(client):
    for roles, prefix in (
        (["user"], "user:"),
        (["system", "user"], "user:"),
        (["user", "assistant"], "assistant:"),
    ):
        told = (await client.post("/role_text", json={"roles": roles})).json()
        assert told == {"prefix": prefix, "suffix": "<end>"}


async def test_roles_that_cannot_be_rendered_are_refused(client):
    for roles in ([], ["narrator"], ["user"] * 1025, "user", [1]):
        told = error(await client.post("/role_text", json={"roles": roles}))
        assert told["param"].startswith("roles")


async def test_a_model_that_is_not_served_is_not_asked(client):
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/role_text", {"roles": ["user"]}),
        ("/v1/chat/completions/render", {"messages": [user("a")]}),
    ):
        told = error(await client.post(path, json=body | {"model": "gpt-x"}), 404)
        assert told["code"] == "model_not_found"


async def test_what_is_served_is_told_in_sglangs_words(client, engine):
    model = (await client.get("/get_model_info")).json()
    assert (model["model_path"], model["is_generation"]) == ("fake/model", True)
    assert (model["server"], model["max_model_len"]) == ("sapwood", 4096)
    assert (await client.get("/model_info")).json() == model
    await client.post("/generate", json={"text": "hi"})
    told = (await client.get("/get_server_info")).json()
    assert told.items() > model.items()
    assert told["stats"]["prompt_tokens"] == 2
    assert (told["max_num_batched_tokens"], told["max_graph_rows"]) == (512, 0)
    assert (await client.get("/server_info")).json() == told


async def test_the_cache_is_flushed_by_get_too(client, engine):
    assert (await client.get("/flush_cache")).status_code == 200
    assert engine.num_flushes == 1
