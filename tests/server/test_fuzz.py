"""Whatever JSON is sent, the answer is one of ours: 200 or a 400 with an envelope."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.runtime.hints import Hints
from sapwood.server.app import create_app
from sapwood.server.schemas_constraints import ResponseFormat, StructuredOutputs
from sapwood.server.schemas_native import GenerateRequest, NativeSampling
from sapwood.server.schemas_openai import ChatRequest, CompletionRequest
from sapwood.server.schemas_sapwood import HINT_NAMES, ConstraintFields, NativeSapwoodFields
from sapwood.server.schemas_tokens import DetokenizeRequest, RoleTextRequest, TokenizeRequest
from tests.server.fakes import FakeEngine
from tests.server.helpers import error

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, -(2**63), 10**400, 1e308, -0.0, 0.5]),
    st.floats(),
    st.text(st.characters(), max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def bodies(model: Any, **sound: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Sound requests in which some known fields have any value."""
    names = HINT_NAMES if model is Hints else model.model_fields
    fields = st.sampled_from(sorted(names))
    return st.dictionaries(fields, VALUES, max_size=3).map(lambda changes: sound | changes)


def constraints(model: Any) -> st.SearchStrategy[dict[str, Any]]:
    """A constraint's object whose known fields have sound values, or any."""
    sound = st.sampled_from(
        ["json_schema", "structural_tag", "a+", 'start: "a"', "{}", True, {}, {"schema": {}}, ["a"]]
    )
    names = sorted(field.alias or name for name, field in model.model_fields.items())
    return st.dictionaries(st.sampled_from(names), sound | VALUES, max_size=3)


MESSAGES = [{"role": "user", "content": "hi"}]
SAMPLING = bodies(NativeSampling, max_new_tokens=2)
CALLS = st.one_of(
    st.tuples(
        st.just("/v1/chat/completions"), bodies(ChatRequest, messages=MESSAGES, max_tokens=2)
    ),
    st.tuples(st.just("/v1/completions"), bodies(CompletionRequest, prompt="hi", max_tokens=2)),
    st.tuples(st.just("/generate"), bodies(GenerateRequest, text="hi")),
    st.tuples(st.just("/generate"), SAMPLING.map(lambda s: {"text": "hi", "sampling_params": s})),
    st.tuples(
        st.just("/v1/completions"),
        st.fixed_dictionaries(
            {"prompt": st.just("hi")},
            optional={
                "response_format": constraints(ResponseFormat),
                "structured_outputs": constraints(StructuredOutputs),
            },
        ),
    ),
    st.tuples(
        st.just("/v1/chat/completions"),
        VALUES.map(lambda v: {"messages": [{"role": "user", "content": v}], "max_tokens": 2}),
    ),
    st.tuples(st.sampled_from(["/v1/chat/completions", "/v1/completions", "/generate"]), VALUES),
)
SAPWOOD = st.one_of(
    bodies(NativeSapwoodFields),
    st.fixed_dictionaries({"hints": bodies(Hints)}),
    st.fixed_dictionaries({"constraint": bodies(ConstraintFields, kind="regex", text="a")}),
)
CALLS_OF_PROGRAMS = st.one_of(
    st.tuples(st.just("/generate"), SAPWOOD.map(lambda s: {"text": "hi", "sapwood": s})),
    st.tuples(st.just("/v1/completions"), SAPWOOD.map(lambda s: {"prompt": "hi", "sapwood": s})),
    st.tuples(
        st.just("/tokenize"),
        bodies(TokenizeRequest, prompt="hi")
        | bodies(TokenizeRequest, messages=MESSAGES)
        | bodies(TokenizeRequest, pieces=[{"text": "a"}])
        | bodies(TokenizeRequest, batch=[{"pieces": [{"text": "a"}]}]),
    ),
    st.tuples(st.just("/detokenize"), bodies(DetokenizeRequest, tokens=[1, 2])),
    st.tuples(st.just("/role_text"), bodies(RoleTextRequest, roles=["user"])),
    st.tuples(st.just("/v1/chat/completions/render"), bodies(ChatRequest, messages=MESSAGES)),
)


@pytest.fixture(scope="module")
def post():
    """Sends bytes to an application; one event loop for all examples."""
    transport = httpx.ASGITransport(app=create_app(FakeEngine(answer="ab")))
    client = httpx.AsyncClient(transport=transport, base_url="http://test")
    with asyncio.Runner() as runner:
        yield lambda path, body: runner.run(client.post(path, content=body))


@settings(max_examples=200, deadline=None)
@given(CALLS)
def test_any_json_is_answered_or_refused(post, call):
    path, body = call
    response = post(path, json.dumps(body).encode())
    if response.status_code != 200:
        error(response, 404 if response.json()["error"]["code"] == "model_not_found" else 400)


@settings(max_examples=200, deadline=None)
@given(CALLS_OF_PROGRAMS)
def test_any_json_about_tokens_and_of_programs_is_answered_or_refused(post, call):
    path, body = call
    response = post(path, json.dumps(body).encode())
    if response.status_code != 200:
        error(response, 404 if response.json()["error"]["code"] == "model_not_found" else 400)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["/v1/chat/completions", "/v1/completions", "/generate"]), st.binary())
def test_any_bytes_are_refused(post, path, body):
    error(post(path, body))
