"""Answers that end with their connection: what a client that left had asked for is aborted.

ASGI tells of a closed connection only to who listens, so both kinds of answer listen while the
engine works.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sapwood.runtime.errors import SapwoodError
from sapwood.server.errors import ApiError, ClientLeft, as_api_error
from sapwood.server.outputs import sse

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SOUND_ID = re.compile(r"[\w.:-]{1,200}", re.ASCII)
PING = b": ping\n\n"  # an SSE comment: proxies and clients see life, parsers skip it


def is_sound_id(request_id: str) -> bool:
    """Whether it can stand in a header and in a line of the log."""
    return _SOUND_ID.fullmatch(request_id) is not None


def id_headers(request_id: str) -> dict[str, str]:
    """The header that names a request; none for an id that cannot stand in one."""
    return {"x-request-id": request_id} if is_sound_id(request_id) else {}


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Cancels it and raises ClientLeft once the connection is closed."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        await _cancel(task, left)


class EventStream(Response):
    """Server-sent events, pinged while there is nothing to say.

    The answer begins with the first event or the first ping: an error before that becomes an
    answer of its own, with its status; a later one is sent as an event and ends the stream. When
    the connection closes, `events` is closed at once.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        headers: Mapping[str, str],
        ping_seconds: float,
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        )
        del self.headers["content-length"]
        self._events = events
        self._ping_seconds = ping_seconds
        self._started = False
        self._last_sent = time.monotonic()
        self._sending = asyncio.Lock()  # a ping never comes between the head and the first event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send))
        watcher = asyncio.ensure_future(self._watch(receive, send))
        try:
            await asyncio.wait((writer, watcher), return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
            else:
                logger.info("a client left a stream of %s", scope["path"])
        finally:
            await _cancel(writer, watcher)
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        try:
            async for event in self._events:
                if event:
                    await self._send(send, event)
        except Exception as error:
            if not self._started:
                raise
            if not isinstance(error, (SapwoodError, ApiError)):
                logger.exception("a stream ends with an error that nobody expected")
            await self._send(send, sse(as_api_error(error).envelope))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Return when the client has left; ping until then."""
        while True:
            try:
                message = await asyncio.wait_for(receive(), self._ping_seconds)
            except TimeoutError:
                if time.monotonic() - self._last_sent >= self._ping_seconds:
                    await self._send(send, PING)
                continue
            if message["type"] == "http.disconnect":
                return

    async def _send(self, send: Send, data: bytes) -> None:
        async with self._sending:
            if not self._started:
                self._started = True
                head = {"status": self.status_code, "headers": self.raw_headers}
                await send({"type": "http.response.start", **head})
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._last_sent = time.monotonic()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    """End `tasks` and wait until they have ended, whatever they end with."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
