"""What happens when clients leave, over real sockets."""

import time
from collections.abc import Callable

import httpx
import pytest

from sapwood.runtime.errors import RequestError
from tests.server.fakes import FakeEngine
from tests.server.helpers import chat, error

CALLS = {
    "chat": ("/v1/chat/completions", chat(), 1),
    "completions": ("/v1/completions", {"prompt": ["a", "b", "c"]}, 3),
    "generate": ("/generate", {"input_ids": [[1], [2]]}, 2),
}


def until(holds: Callable[[], bool]) -> None:
    """Wait for something that must come to hold."""
    end = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "num_prompts"), CALLS.values(), ids=CALLS.keys())
def test_a_client_that_leaves_aborts_all_that_it_asked_for(listen, path, body, num_prompts, stream):
    engine = FakeEngine(prefill=30)
    url = listen(engine)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url + path, json=body | {"stream": stream}, timeout=0.3)
    until(lambda: len(engine.aborted) == num_prompts)
    assert not engine.running


@pytest.mark.parametrize(("path", "body", "num_prompts"), CALLS.values(), ids=CALLS.keys())
def test_a_client_that_leaves_in_mid_stream_aborts_as_well(listen, path, body, num_prompts):
    engine = FakeEngine(delay=0.02, answer="x" * 1000)
    body = body | {"stream": True}
    if path != "/generate":
        body |= {"max_tokens": 1000}
    with httpx.stream("POST", listen(engine) + path, json=body) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        assert len(engine.running) == num_prompts
    until(lambda: len(engine.aborted) == num_prompts)


def test_the_server_goes_on_after_clients_left(listen):
    engine = FakeEngine(delay=0.001)
    url = listen(engine)
    for _ in range(5):
        with httpx.stream("POST", url + "/v1/chat/completions", json=chat(stream=True)) as response:
            next(response.iter_lines())
    until(lambda: not engine.running)
    assert httpx.post(url + "/v1/chat/completions", json=chat()).status_code == 200


def test_a_stream_is_pinged_while_the_prompt_is_being_computed(listen):
    url = listen(FakeEngine(prefill=0.4), ping_seconds=0.1)
    response = httpx.post(url + "/v1/chat/completions", json=chat(stream=True))
    lines = response.text.split("\n\n")
    assert lines[:3] == [": ping"] * 3
    assert '"role":"assistant"' in lines[lines.index(": ping") + lines.count(": ping")]


def test_a_stream_that_has_something_to_say_is_not_pinged(listen):
    url = listen(FakeEngine(delay=0.02), ping_seconds=0.1)
    response = httpx.post(url + "/v1/chat/completions", json=chat(stream=True))
    assert "ping" not in response.text


def test_an_error_after_the_first_ping_is_an_event(listen):
    engine = FakeEngine(prefill=0.25, fail=RequestError("too late", param="x"))
    url = listen(engine, ping_seconds=0.1)
    response = httpx.post(url + "/v1/chat/completions", json=chat(stream=True))
    assert response.status_code == 200
    assert '"too late"' in response.text.split("\n\n")[-2]


def test_a_body_over_the_limit_is_told_to_a_client_that_is_still_sending(listen):
    url = listen(FakeEngine(), max_body_bytes=10_000)
    body = b" " * 50_000_000
    response = httpx.post(url + "/v1/chat/completions", content=body)
    error(response, 413)
    response = httpx.post(url + "/v1/chat/completions", content=iter([body[:1_000_000]] * 50))
    error(response, 413)
