import asyncio
import json

import pytest

from sapwood.runtime.errors import EngineBusyError, EngineClosedError, EngineError
from tests.server.fakes import FakeEngine
from tests.server.helpers import chat, error

pytestmark = pytest.mark.anyio
URL = "/v1/chat/completions"
GOOD = json.dumps(chat()).encode()


def with_temperature(raw: bytes) -> bytes:
    return GOOD.replace(b'"temperature": 0', b'"temperature": ' + raw)


def with_content(raw: bytes) -> bytes:
    return GOOD.replace(b'"content": "hi"', b'"content": ' + raw)


BAD_BODIES = {
    "empty": b"",
    "no JSON": b"hello",
    "cut off": GOOD[:-5],
    "two values": GOOD + GOOD,
    "a list": b"[1]",
    "null": b"null",
    "a number": b"5",
    "invalid UTF-8": with_content(b'"\xff\xfe"'),
    "an encoded surrogate": with_content(b'"\xed\xa0\x80"'),
    "a lone surrogate": with_content(b'"\\ud83d"'),
    "a lone low surrogate": with_content(b'"\\udc00 "'),
    "NaN": with_temperature(b"NaN"),
    "Infinity": with_temperature(b"Infinity"),
    "minus Infinity": with_temperature(b"-Infinity"),
    "an overflowing number": with_temperature(b"1e999"),
    "a number of 5000 digits": with_temperature(b"1" * 5000),
    "a number of 400 digits": with_temperature(b"1" * 400),
    "deep lists": with_content(b"[" * 100_000),
    "deep closed lists": with_content(b"[" * 50_000 + b"]" * 50_000),
    "deep objects": with_content(b'{"a":' * 100_000),
    "fairly deep lists": with_content(b"[" * 150 + b"]" * 150),
    "many lists": with_content(b"[" + b"[]," * 1_100_000 + b"[]]"),
    "many wrong parts": with_content(b"[" + b"5," * 300_000 + b"5]"),
    "form data": b"model=fake&messages=hi",
    "a byte order mark": b"\xef\xbb\xbf" + GOOD,
    "a raw control character": with_content(b'"a\x00b"'),
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
async def test_a_bad_body_is_a_400_and_a_good_request_goes_on_meanwhile(connect, body):
    client = connect(FakeEngine(delay=0.001))
    good = asyncio.ensure_future(client.post(URL, json=chat()))
    await asyncio.sleep(0.005)
    error(await client.post(URL, content=body))
    assert (await good).json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_other_endpoints_refuse_bad_bodies_as_well(client, path):
    for body in (
        b"",
        b"[",
        b'{"prompt": NaN}',
        b'{"text": "\\ud800"}',
        b"[]",
        b'{"prompt": 1e999}',
    ):
        error(await client.post(path, content=body))


async def test_the_content_type_does_not_matter(client):
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    assert (await client.post(URL, content=GOOD, headers=headers)).status_code == 200


async def test_escaped_pairs_and_every_other_character_are_fine(client, engine):
    await client.post(URL, content=with_content(b'"\\ud83d\\ude00 \\u0000 \xf0\x9f\x98\x80"'))
    assert engine.inputs[0].messages[0]["content"][0]["text"] == "😀 \0 😀"


async def test_a_body_over_the_limit_is_a_413(connect, engine):
    client = connect(engine, max_body_bytes=1000)
    told = error(await client.post(URL, json=chat("x" * 2000)), 413)
    assert told["code"] == "request_too_large"
    assert "1000 bytes" in told["message"]


async def test_a_body_of_undeclared_length_is_not_read_beyond_the_limit(connect, engine):
    num_sent = 0

    async def endless():
        nonlocal num_sent
        for _ in range(10_000):
            num_sent += 1
            yield b" " * 100

    client = connect(engine, max_body_bytes=1000)
    error(await client.post(URL, content=endless()), 413)
    assert num_sent <= 12


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/responses", 404),
        ("POST", "/chat/completions", 404),
        ("GET", "/v1/models/none", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/generate", 405),
    ],
)
async def test_unknown_paths_and_methods_have_the_same_envelope(client, method, path, status):
    told = error(await client.request(method, path), status)
    assert told["type"] == "invalid_request_error"


async def test_an_unknown_path_says_what_to_use_instead(client):
    told = error(await client.post("/v1/responses", json={}), 404)
    assert "/v1/chat/completions" in told["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failing_engine_is_a_500_with_its_words(connect, stream):
    client = connect(FakeEngine(fail=EngineError("a step failed")))
    told = error(await client.post(URL, json=chat(stream=stream)), 500)
    assert (told["type"], told["message"]) == ("server_error", "a step failed")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [EngineClosedError, EngineBusyError])
async def test_an_engine_that_cannot_now_is_a_503_that_says_when_to_retry(connect, kind, stream):
    client = connect(FakeEngine(fail=kind("not now")))
    response = await client.post(URL, json=chat(stream=stream))
    error(response, 503)
    assert int(response.headers["retry-after"]) > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_that_nobody_expected_is_a_500_without_its_details(connect, stream, caplog):
    client = connect(FakeEngine(fail=ZeroDivisionError("secret")))
    told = error(await client.post(URL, json=chat(stream=stream)), 500)
    assert "secret" not in told["message"]
    assert "secret" in caplog.text


async def test_an_error_in_mid_stream_is_an_event_and_the_end(connect):
    client = connect(FakeEngine(fail=EngineError("a step failed"), fail_after=3))
    response = await client.post(URL, json=chat(stream=True))
    assert response.status_code == 200
    *_, last = [line for line in response.text.split("\n\n") if line]
    told = json.loads(last.removeprefix("data: "))["error"]
    assert (told["message"], told["type"]) == ("a step failed", "server_error")


async def test_a_long_message_is_cut(client):
    told = error(await client.post(URL, json=chat(**{"x" * 100_000: 1})))
    assert len(told["message"]) < 3000


async def test_an_id_that_the_client_sent_comes_back_if_it_is_sound(client):
    async def echoed(sent: str) -> str:
        response = await client.get("/health", headers={"X-Request-Id": sent})
        return response.headers["x-request-id"]

    assert await echoed("abc-123") == "abc-123"
    assert (await echoed("a b")).startswith("req_")
    assert (await echoed("x" * 500)).startswith("req_")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_names_its_request_in_the_header_as_in_the_body(client, stream):
    response = await client.post(URL, json=chat(request_id="mine", stream=stream))
    assert response.headers["x-request-id"] == "chatcmpl-mine"
    response = await client.post("/generate", json={"text": "a", "rid": "r", "stream": stream})
    assert response.headers["x-request-id"] == "r"
    odd = {"text": "a", "rid": "r\r\nx: ü", "stream": stream}
    assert (await client.post("/generate", json=odd)).headers["x-request-id"].startswith("req_")
