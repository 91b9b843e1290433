"""The object `sapwood`: hints, exact token ids, and constraints as we say them."""

from itertools import pairwise

import pytest

from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec, Whitespace
from sapwood.runtime.hints import NO_HINTS, Hints
from tests.server.fakes import ANSWER, FakeEngine
from tests.server.helpers import chat, error, events

pytestmark = pytest.mark.anyio
HINTS = {
    "program_id": "p1",
    "fork_size": 4,
    "fork_index": 1,
    "more_follows": True,
    "idle_seconds": 2.5,
    "output_tokens": 7,
}
GENERATING = [
    ("/generate", {"text": "hi"}),
    ("/v1/completions", {"prompt": "hi", "model": "fake/model"}),
    ("/v1/chat/completions", chat()),
]


@pytest.mark.parametrize(("path", "body"), GENERATING)
@pytest.mark.parametrize("stream", [False, True])
async def test_hints_reach_the_engine(client, engine, path, body, stream):
    response = await client.post(path, json=body | {"sapwood": {"hints": HINTS}, "stream": stream})
    assert response.status_code == 200
    assert engine.hints == [Hints(**HINTS)]


@pytest.mark.parametrize(("path", "body"), GENERATING)
async def test_without_hints_nothing_is_known(client, engine, path, body):
    for sapwood in (None, {}, {"hints": None}, {"hints": {"program_id": None}}):
        assert (await client.post(path, json=body | {"sapwood": sapwood})).status_code == 200
    assert engine.hints == [NO_HINTS] * 4


@pytest.mark.parametrize(("path", "body"), GENERATING)
@pytest.mark.parametrize(
    ("sapwood", "param"),
    [
        ({"hints": {"priority": 3}}, "sapwood.hints.priority"),
        ({"hints": {"fork_size": 0}}, "sapwood.hints"),
        ({"hints": {"fork_size": "4"}}, "sapwood.hints"),
        ({"hints": {"idle_seconds": 1}}, "sapwood.hints"),
        ({"hints": {"more_follows": 1}}, "sapwood.hints"),
        ({"hints": []}, "sapwood.hints"),
        ({"hint": {}}, "sapwood.hint"),
        (5, "sapwood"),
    ],
)
async def test_wrong_hints_are_refused(client, engine, path, body, sapwood, param):
    told = error(await client.post(path, json=body | {"sapwood": sapwood}))
    assert told["param"] == param
    assert not engine.started


async def test_the_prompts_of_a_batch_have_hints_of_their_own(client, engine):
    asked = [{"hints": {"fork_size": 2, "fork_index": i}} for i in range(2)]
    await client.post("/generate", json={"text": ["a", "b"], "sapwood": asked})
    assert engine.hints == [Hints(fork_size=2, fork_index=i) for i in range(2)]
    wrong = [*asked[:1], {"hints": {"fork_size": 0}}]
    response = await client.post("/generate", json={"text": ["a", "b"], "sapwood": wrong})
    assert error(response)["param"] == "sapwood[1].hints"
    response = await client.post("/generate", json={"text": ["a", "b"], "sapwood": asked[:1]})
    assert error(response)["message"] == "sapwood has 1 entries for 2 prompts"


async def test_text_ids_spell_the_text_without_end_and_stop(client):
    greedy = {"temperature": 0}
    for options, text in ((greedy, ANSWER), (greedy | {"stop": "wör"}, "Hello, ")):
        body = {"text": "hi", "sampling_params": options, "sapwood": {"text_ids": True}}
        told = (await client.post("/generate", json=body)).json()
        assert told["text"] == text
        assert told["sapwood"] == {"text_ids": list(text.encode())}
        assert len(told["output_ids"]) > len(text.encode())


async def test_a_stream_tells_text_ids_once_with_its_last_piece(client):
    body = {
        "text": "hi",
        "sampling_params": {"temperature": 0, "n": 2},
        "sapwood": {"text_ids": True},
        "stream": True,
    }
    told = events(await client.post("/generate", json=body))
    with_ids = [event for event in told if "sapwood" in event]
    assert [event["index"] for event in with_ids] == [0, 1]
    assert all(event["meta_info"]["finish_reason"] for event in with_ids)
    assert all(event["sapwood"]["text_ids"] == list(ANSWER.encode()) for event in with_ids)


THOUGHT = "<think>\nHm, wö.\n</think>\n\nYes. <end>"


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_told_apart_with_the_ids_of_what_is_left(connect, stream):
    client = connect(FakeEngine(answer=THOUGHT))
    body = {
        "input_ids": list(b"hi"),
        "sampling_params": {"temperature": 0, "stop": "<end>"},
        "sapwood": {"separate_reasoning": "qwen3", "text_ids": True},
        "stream": stream,
    }
    response = await client.post("/generate", json=body)
    told = events(response)[-1] if stream else response.json()
    assert told["text"] == "Yes. "
    assert told["sapwood"] == {"reasoning": "Hm, wö.", "text_ids": list(b"Yes. ")}
    if stream:
        texts = [event["text"] for event in events(response)]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


async def test_a_prompt_that_opens_the_reasoning_is_seen(connect):
    client = connect(FakeEngine(answer="Hm.</think>Yes"))
    for prompt in ({"text": "hi<think>\n"}, {"input_ids": [*b"x" * 500, *b"<think>\n"]}):
        body = prompt | {
            "sampling_params": {"temperature": 0},
            "sapwood": {"separate_reasoning": "think"},
        }
        told = (await client.post("/generate", json=body)).json()
        assert (told["text"], told["sapwood"]) == ("Yes", {"reasoning": "Hm."})


async def test_a_model_that_does_not_reason_has_no_reasoning(connect):
    client = connect(FakeEngine(answer=THOUGHT))
    body = {"text": "hi", "sampling_params": {"temperature": 0}}
    told = (
        await client.post("/generate", json=body | {"sapwood": {"separate_reasoning": True}})
    ).json()
    assert (told["text"], told["sapwood"]) == (THOUGHT, {"reasoning": ""})
    response = await client.post(
        "/generate", json=body | {"sapwood": {"separate_reasoning": "loud"}}
    )
    refused = error(response)
    assert refused["param"] == "sapwood.separate_reasoning"
    assert "no way of reasoning called 'loud'" in refused["message"]


async def test_text_ids_are_told_of_those_prompts_that_ask(client):
    asked = [{"text_ids": True}, None]
    first, second = (
        await client.post("/generate", json={"text": ["a", "b"], "sapwood": asked})
    ).json()
    assert "sapwood" in first
    assert "sapwood" not in second


async def test_text_ids_are_refused_where_answers_have_no_place_for_them(client):
    for path, body in GENERATING[1:]:
        response = await client.post(path, json=body | {"sapwood": {"text_ids": True}})
        assert error(response)["param"] == "sapwood.text_ids"


async def test_a_constraint_arrives_as_it_was_said(client, engine):
    spec = ConstraintSpec(
        kind=ConstraintKind.LARK, text='start: "a"+', whitespace=Whitespace.SPACED,
        backend="llguidance",
    )  # fmt: skip
    body = {"text": "hi", "sapwood": {"constraint": spec.as_json()}}
    assert (await client.post("/generate", json=body)).status_code == 200
    [sampling] = engine.sampling
    assert sampling.constraint == spec


@pytest.mark.parametrize(
    ("constraint", "param"),
    [
        ({"kind": "prose", "text": "a"}, "sapwood.constraint.kind"),
        ({"kind": "regex"}, "sapwood.constraint.text"),
        ({"kind": "regex", "text": "a", "flags": "i"}, "sapwood.constraint.flags"),
        ({"kind": "regex", "text": "a", "backend": "mine"}, "sapwood.constraint.backend"),
        ({"kind": "choice", "text": "[]"}, "sapwood.constraint"),
    ],
)
async def test_a_wrong_constraint_is_refused_with_its_place(client, constraint, param):
    response = await client.post(
        "/generate", json={"text": "hi", "sapwood": {"constraint": constraint}}
    )
    assert error(response)["param"] == param


async def test_two_constraints_of_a_prompt_are_refused(client):
    body = {
        "text": "hi",
        "sampling_params": {"regex": "a+"},
        "sapwood": {"constraint": {"kind": "regex", "text": "b+"}},
    }
    told = error(await client.post("/generate", json=body))
    assert told["param"] == "sapwood.constraint"
    assert "give one of them" in told["message"]
