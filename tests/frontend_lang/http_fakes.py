"""A small HTTP server on a real socket: it answers by a script, and keeps what was sent to it."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    method: str
    path: str
    headers: Mapping[str, str]
    body: Any  # JSON, None without one


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer. `chunks` are sent one by one, as a stream is; `is_cut`: the connection ends after
    them, before the body does. `delay`: seconds before anything is sent."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    chunks: Sequence[bytes] = ()
    is_cut: bool = False
    is_silent: bool = False  # the connection ends, or stays open for ever, without an answer
    delay: float = 0.0


Script = Callable[[Received], Reply]


def reply(body: Any, status: int = 200, **headers: str) -> Reply:
    """A JSON body; the headers' names have _ for -."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status=status, headers=named, chunks=(json.dumps(body).encode(),))


def stream(*datas: Any, is_cut: bool = False, is_done: bool = True) -> Reply:
    """Server-sent events of JSON; a pair has a name first."""
    chunks = []
    for data in datas:
        name, value = data if isinstance(data, tuple) else ("", data)
        line = f"event: {name}\n" if name else ""
        chunks.append(f"{line}data: {json.dumps(value, ensure_ascii=False)}\n\n".encode())
    if is_done and not is_cut:
        chunks.append(b"data: [DONE]\n\n")
    return Reply(headers={"content-type": "text/event-stream"}, chunks=chunks, is_cut=is_cut)


def in_turn(*replies: Reply) -> Script:
    """One after the other; the last one again and again."""
    left = list(replies)
    return lambda _: left.pop(0) if len(left) > 1 else left[0]


class FakeServer:
    """`received`: the requests; `num_connections`: how many connections brought them; `has_left`
    is set when a client closes its connection before its answer is whole."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.received: list[Received] = []
        self.num_connections = 0
        self.has_left = asyncio.Event()
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "FakeServer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def bodies(self) -> list[Any]:
        """The bodies of what was posted."""
        return [received.body for received in self.received if received.method == "POST"]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self.num_connections += 1
        try:
            while (request := await _received(reader)) is not None:
                self.received.append(request)
                if not await self._answer(self.script(request), reader, writer):
                    break
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(task)
            writer.close()

    async def _answer(
        self, answer: Reply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the connection stays open."""
        if answer.delay:
            left = asyncio.ensure_future(reader.read(1))
            await asyncio.wait((left,), timeout=answer.delay)
            if left.done():
                self.has_left.set()
                return False
            left.cancel()
        if answer.is_silent:
            return False
        writer.write(_head(answer))
        for chunk in answer.chunks:
            writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)
        if answer.is_cut:
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _head(answer: Reply) -> bytes:
    headers = {"transfer-encoding": "chunked", "content-type": "application/json"}
    lines = [f"{name}: {value}" for name, value in (headers | dict(answer.headers)).items()]
    return "\r\n".join([f"HTTP/1.1 {answer.status} Whatever", *lines, "", ""]).encode()


async def _received(reader: asyncio.StreamReader) -> Received | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(
        method=method, path=path, headers=headers, body=json.loads(body) if body else None
    )


def with_server(script: Script, work: Callable[[FakeServer], Awaitable[T]]) -> T:
    """What `work` returns, on a loop of its own, with a server that follows `script`."""

    async def main() -> T:
        async with FakeServer(script) as server:
            return await asyncio.wait_for(work(server), 10)

    return asyncio.run(main())
