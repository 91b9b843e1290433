"""The client that backends share: retries, events, errors, and connections that end."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from email.utils import formatdate
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.frontend_lang.backends.http import Event, EventReader, HttpClient, Retries, encoded
from sapwood.runtime.errors import (
    ContextLengthError,
    EngineBusyError,
    EngineError,
    RequestError,
    SapwoodError,
)
from tests.frontend_lang.http_fakes import (
    FakeServer,
    Reply,
    Script,
    in_turn,
    reply,
    stream,
    with_server,
)

T = TypeVar("T")
QUICK = Retries(max_retries=2, first_seconds=0.001)
BUSY = {"error": {"message": "slow down", "type": "rate_limit_error", "param": None, "code": None}}


@asynccontextmanager
async def client_of(server: FakeServer, **options: Any) -> AsyncIterator[HttpClient]:
    client = HttpClient(server.url, **({"retries": QUICK} | options))
    try:
        yield client
    finally:
        await client.aclose()


def posted(script: Script, **options: Any) -> tuple[Any, FakeServer]:
    """What one POST comes to, an error included, and the server."""

    async def work(server: FakeServer) -> tuple[Any, FakeServer]:
        async with client_of(server, **options) as client:
            try:
                return await client.post("/x", {"a": 1}), server
            except SapwoodError as error:
                return error, server

    return with_server(script, work)


def streamed(script: Script) -> tuple[list[Event], SapwoodError | None, FakeServer]:
    async def work(server: FakeServer) -> tuple[list[Event], SapwoodError | None, FakeServer]:
        events = []
        async with client_of(server) as client:
            try:
                async for event in client.events("/x", {}):
                    events.append(event)
            except SapwoodError as error:
                return events, error, server
        return events, None, server

    return with_server(script, work)


def test_a_post_sends_json_and_reads_json() -> None:
    answer, server = posted(in_turn(reply({"text": "wörld 🌍"})))
    assert answer == {"text": "wörld 🌍"}
    [received] = server.received
    assert (received.method, received.path, received.body) == ("POST", "/x", {"a": 1})
    assert received.headers["content-type"] == "application/json"


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
def test_what_may_pass_is_sent_again_until_it_passes(status: int) -> None:
    answer, server = posted(in_turn(reply(BUSY, status), reply(BUSY, status), reply("done")))
    assert answer == "done"
    assert len(server.received) == 3


@pytest.mark.parametrize(
    "status, kind", [(429, EngineBusyError), (503, EngineBusyError), (500, EngineError)]
)
def test_the_retries_are_bounded(status: int, kind: type[EngineError]) -> None:
    error, server = posted(in_turn(reply(BUSY, status)))
    assert type(error) is kind
    assert "slow down" in str(error)
    assert len(server.received) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_a_wrong_request_is_sent_once(status: int) -> None:
    body = {"error": {"message": "n is 0", "type": "invalid_request_error", "param": "n"}}
    error, server = posted(in_turn(reply(body, status)))
    assert isinstance(error, RequestError)
    assert "n is 0" in str(error)
    assert error.param == ("api_key" if status in (401, 403) else "n")
    assert len(server.received) == 1


def test_a_used_up_quota_is_not_asked_for_again() -> None:
    body = {"error": {"message": "no money left", "code": "insufficient_quota"}}
    error, server = posted(in_turn(reply(body, 429)))
    assert type(error) is EngineError
    assert len(server.received) == 1


def test_a_server_that_asks_for_a_long_wait_is_not_waited_for() -> None:
    error, server = posted(in_turn(reply(BUSY, 429, retry_after="3600")))
    assert isinstance(error, EngineBusyError)
    assert len(server.received) == 1


@pytest.mark.parametrize(
    "name, told", [("retry_after", "0"), ("retry_after_ms", "1"), ("retry_after", "soon")]
)
def test_a_wait_that_a_server_asks_for_is_kept(name: str, told: str) -> None:
    patient = Retries(max_retries=1, first_seconds=0.001)
    answer, server = posted(
        in_turn(reply(BUSY, 503, **{name: told}), reply("done")), retries=patient
    )
    assert answer == "done"
    assert len(server.received) == 2


def test_a_wait_until_a_date_that_is_past_is_none() -> None:
    slow = Retries(max_retries=1, first_seconds=3600, longest_seconds=3600)
    date = formatdate(time.time() - 5, usegmt=True)
    answer, _ = posted(in_turn(reply(BUSY, 503, retry_after=date), reply("done")), retries=slow)
    assert answer == "done"


def test_waits_double_up_to_a_limit_and_an_asked_one_comes_first() -> None:
    retries = Retries(max_retries=4, first_seconds=1.0, longest_seconds=5.0)
    for num_failures, seconds in [(1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0)]:
        wait = retries.wait(num_failures, None)
        assert wait is not None and 0.75 * seconds <= wait <= seconds
    assert retries.wait(5, None) is None
    assert retries.wait(1, 4.5) == 4.5
    assert retries.wait(1, 5.5) is None


def test_a_connection_that_ends_before_an_answer_is_tried_again() -> None:
    answer, server = posted(in_turn(Reply(is_silent=True), reply("done")))
    assert answer == "done"
    assert server.num_connections == 2


def test_a_server_that_says_nothing_is_given_up_and_not_asked_again() -> None:
    error, server = posted(in_turn(Reply(delay=5.0)), timeout=0.05)
    assert type(error) is EngineError
    assert "timeout" in str(error)
    assert len(server.received) == 1


def test_a_server_that_is_not_there_is_named() -> None:
    async def main() -> None:
        async with FakeServer(in_turn(reply(0))) as server:
            url = server.url
        client = HttpClient(url, retries=QUICK)
        try:
            with pytest.raises(EngineError, match=url):
                await client.get("/x")
        finally:
            await client.aclose()

    asyncio.run(main())


def test_a_url_that_is_none_is_a_wrong_request() -> None:
    async def main() -> None:
        client = HttpClient("127.0.0.1:80", retries=QUICK)
        try:
            with pytest.raises(RequestError, match="http://") as caught:
                await client.get("/x")
        finally:
            await client.aclose()
        assert caught.value.param == "base_url"

    asyncio.run(main())


def test_an_answer_that_is_no_json_is_quoted() -> None:
    error, _ = posted(in_turn(Reply(chunks=(b"<html>proxy</html>",))))
    assert type(error) is EngineError
    assert "<html>proxy" in str(error)


def test_an_answer_that_is_cut_in_the_middle_is_an_error() -> None:
    error, server = posted(in_turn(Reply(chunks=(b'{"a": ',), is_cut=True)))
    assert type(error) is EngineError
    assert "middle" in str(error)
    assert len(server.received) == 1


@pytest.mark.parametrize(
    "body, param",
    [
        ({"error": {"message": "too cold", "param": "t"}}, "t"),
        (
            {"type": "error", "error": {"type": "invalid_request_error", "message": "too cold"}},
            None,
        ),
        ({"object": "error", "message": "too cold", "code": 400}, None),
        ({"detail": "too cold"}, None),
        ({"detail": [{"loc": ["body"], "msg": "too cold"}]}, None),
        ({"error": "too cold"}, None),
        ("too cold", None),
    ],
)
def test_every_envelope_of_an_error_is_read(body: Any, param: str | None) -> None:
    error, _ = posted(in_turn(reply(body, 400)))
    assert isinstance(error, RequestError)
    assert "too cold" in str(error)
    assert error.param == param


@pytest.mark.parametrize(
    "told",
    [
        {"message": "too long", "code": "context_length_exceeded"},
        {"message": "This model's maximum context length is 8 tokens"},
    ],
)
def test_a_prompt_that_is_too_long_is_known_as_such(told: Mapping[str, str]) -> None:
    error, _ = posted(in_turn(reply({"error": told}, 400)))
    assert isinstance(error, ContextLengthError)


def test_a_stream_gives_its_events_and_keeps_its_connection() -> None:
    async def work(server: FakeServer) -> None:
        async with client_of(server) as client:
            for _ in range(3):
                events = [event async for event in client.events("/x", {})]
                assert [event.data for event in events] == [{"a": "ü\u2028"}, {"b": 2}]
                assert events[1].name == "named"
        assert server.num_connections == 1

    with_server(lambda _: stream({"a": "ü\u2028"}, ("named", {"b": 2})), work)


def test_a_stream_is_retried_before_it_begins_and_never_after() -> None:
    events, error, server = streamed(in_turn(reply(BUSY, 503), stream({"a": 1})))
    assert ([event.data for event in events], error) == ([{"a": 1}], None)
    assert len(server.received) == 2
    events, error, server = streamed(in_turn(stream({"a": 1}, is_cut=True)))
    assert [event.data for event in events] == [{"a": 1}]
    assert type(error) is EngineError
    assert len(server.received) == 1


@pytest.mark.parametrize(
    "told, kind",
    [
        ({"message": "no", "type": "invalid_request_error"}, RequestError),
        ({"message": "no", "type": "BadRequestError", "code": 400}, RequestError),
        ({"message": "no", "type": "overloaded_error"}, EngineBusyError),
        ({"message": "no", "type": "server_error"}, EngineError),
        ({"message": "no", "code": 503}, EngineBusyError),
    ],
)
def test_an_error_inside_of_a_stream_ends_it(
    told: Mapping[str, Any], kind: type[SapwoodError]
) -> None:
    events, error, _ = streamed(in_turn(stream({"a": 1}, {"error": told}, {"b": 2})))
    assert [event.data for event in events] == [{"a": 1}]
    assert type(error) is kind


@pytest.mark.parametrize("data", [b"data: {nope\n\n", b"data: [1]\n\n", b"data: 7\n\n"])
def test_an_event_that_is_no_object_is_an_error(data: bytes) -> None:
    _, error, _ = streamed(in_turn(Reply(chunks=(data,))))
    assert type(error) is EngineError


def left_by(work: Callable[[HttpClient], Awaitable[None]], script: Script) -> None:
    """Start `work`, cancel it once its request is there, and wait until the server sees it."""

    async def main(server: FakeServer) -> None:
        async with client_of(server) as client:
            task = asyncio.ensure_future(work(client))
            while not server.received:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(server.has_left.wait(), 5)

    with_server(script, main)


def test_cancelling_a_post_closes_its_connection() -> None:
    async def post(client: HttpClient) -> None:
        await client.post("/x", {})

    left_by(post, in_turn(Reply(delay=30.0)))


def test_closing_a_stream_early_closes_its_connection() -> None:
    async def work(server: FakeServer) -> None:
        async with client_of(server) as client:
            async with aclosing(client.events("/x", {})) as events:
                async for _ in events:
                    break
            # The pool has nothing to give back: the next request needs a connection of its own.
            assert [event.data async for event in client.events("/x", {})]
        assert server.num_connections == 2

    endless = stream(*({"a": i} for i in range(200)))
    with_server(in_turn(endless), work)


def test_what_no_json_can_say_is_refused_before_it_is_sent() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        encoded({"text": "\ud800"})
    with pytest.raises(RequestError, match="number"):
        encoded({"top_p": float("nan")})


@settings(max_examples=60, deadline=None)
@given(
    datas=st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=8)), max_size=5),
    newline=st.sampled_from(["\n", "\r\n", "\r"]),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_events_are_the_same_however_their_bytes_are_cut(
    datas: list[dict[str, str]], newline: str, cuts: list[int]
) -> None:
    datas = [{name: value for name, value in data.items() if name != "error"} for data in datas]
    lines = [": a comment"]
    for data in datas:
        lines += [f"data:{json.dumps(data, ensure_ascii=False)}", "id: 7", ""]
    content = newline.join([*lines, "data: [DONE]", "", ""]).encode()
    places = sorted({min(cut, len(content)) for cut in (0, *cuts, len(content))})
    reader = EventReader("here")
    events: list[Event] = []
    for begin, end in zip(places, places[1:], strict=False):
        events += reader.feed(content[begin:end])
    events += reader.end()
    assert [event.data for event in events] == datas
    assert reader.is_done
