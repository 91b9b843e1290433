"""JSON over HTTP for backends: one client, its retries, server-sent events, and errors as ours.

Knows no API: paths, bodies and headers are the callers'. Everything that goes wrong is a
SapwoodError, never one of httpx:

    RequestError       400-class: the request is wrong, or the key is; with the server's `param`
    EngineBusyError    429, 503, 529, after the retries
    EngineError        every other failure: 500, no connection, no JSON, a stream that was cut
"""

import asyncio
import json
import random
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sapwood.runtime.errors import (
    ContextLengthError,
    EngineBusyError,
    EngineError,
    RequestError,
    SapwoodError,
)

if TYPE_CHECKING:
    import httpx

CONNECT_SECONDS = 10.0
GROUP_CONNECTIONS = 16
MAX_CONNECTIONS = 256  # of one client; more requests than that wait for one that is free
MAX_EVENT_BYTES = 64 * 2**20
DRAIN_SECONDS = 0.5  # for the end of a body after its last event, so that its connection is kept
QUOTED_CHARACTERS = 300  # of an answer that nobody understands

_BUSY = frozenset({429, 503, 529})
_MAY_PASS = _BUSY | {408, 409, 500, 502, 504}
_BUSY_WORDS = frozenset({"overloaded_error", "rate_limit_error", "rate_limit_exceeded"})
_WRONG_WORDS = frozenset({"invalid_request_error", "BadRequestError", "authentication_error"})
_TOO_LONG = "maximum context length"  # what servers without codes say, in OpenAI's words
_NEVER_PASSES = frozenset({"insufficient_quota", "billing_not_active"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often and when a request is sent again.

    What is retried: a connection that could not be made or that ended before an answer began, and
    the statuses 408, 409, 429, 500, 502, 503, 504 and 529. Not retried: an answer that timed out
    (the server is at work on it) and a stream that had begun. The wait doubles from `first_seconds`
    up to `longest_seconds`, less up to a quarter at random; a server's Retry-After is kept instead,
    and where it is beyond `longest_seconds` there is no retry.
    """

    max_retries: int = 2
    first_seconds: float = 0.5
    longest_seconds: float = 60.0

    def wait(self, num_failures: int, asked: float | None) -> float | None:
        """Seconds before the next try after so many failures, None: there is none."""
        if num_failures > self.max_retries:
            return None
        if asked is not None:
            return asked if asked <= self.longest_seconds else None
        grown = self.first_seconds * 2.0 ** (num_failures - 1)
        return min(grown, self.longest_seconds) * random.uniform(0.75, 1.0)


NO_RETRIES = Retries(max_retries=0)


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event: its name, empty where it has none, and the JSON object in it."""

    name: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a try ended with, and whether another may pass."""

    error: SapwoodError
    may_pass: bool
    retry_after: float | None = None  # seconds


class HttpClient:
    """Sends JSON to one server. Its connections belong to the event loop it is used on; on another
    it opens others.

    `timeout`: seconds without a byte from the server until a request is given up.
    """

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        retries: Retries | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"User-Agent": "sapwood", **(headers or {})}
        self._timeout = timeout
        self._retries = retries or Retries()
        self._opened: _Connections | None = None

    async def get(self, path: str, *, once: bool = False) -> Any:
        """The JSON at `path`; `once`: without retries. Raises SapwoodError."""
        return await self._whole("GET", path, None, NO_RETRIES if once else self._retries)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that answers `body`. Cancelling closes the connection. Raises SapwoodError."""
        return await self._whole("POST", path, body, self._retries)

    async def post_text(self, path: str, body: Mapping[str, Any]) -> str:
        """The text that answers `body`, whatever it is. Raises SapwoodError."""
        async with self._answered("POST", path, body, self._retries) as response:
            return (await response.aread()).decode(errors="replace")

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
        """The events that answer `body`, up to `[DONE]` or the end of the answer.

        An event with an `error` in it is raised. Closing the generator closes the connection.
        Raises SapwoodError.
        """
        async with self._answered("POST", path, body, self._retries) as response:
            reader, chunks = EventReader(self.base_url + path), response.aiter_bytes()
            async for chunk in chunks:
                for event in reader.feed(chunk):
                    yield event
                if reader.is_done:
                    await _drain(chunks)
                    return
            for event in reader.end():
                yield event

    async def aclose(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.aclose()

    def close(self) -> None:
        """`aclose` from any thread; it is done soon after. So it is with who is held no more."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close_soon()

    async def _whole(
        self, method: str, path: str, body: Mapping[str, Any] | None, retries: Retries
    ) -> Any:
        async with self._answered(method, path, body, retries) as response:
            content = await response.aread()
            try:
                return json.loads(content)
            except ValueError as error:
                raise EngineError(
                    f"{self.base_url}{path} answered {response.status_code} with what is no JSON: "
                    f"{_quoted(content)}; is base_url right?"
                ) from error

    @asynccontextmanager
    async def _answered(
        self, method: str, path: str, body: Mapping[str, Any] | None, retries: Retries
    ) -> AsyncIterator["httpx.Response"]:
        """A successful response whose body is not read yet."""
        async with self._open().client() as client:
            response = await self._with_retries(client, method, path, body, retries)
            async with self._read(path, response):
                yield response

    @asynccontextmanager
    async def _read(self, path: str, response: "httpx.Response") -> AsyncIterator[None]:
        """Turns what goes wrong while a body is read into errors of ours, and closes it."""
        import httpx

        try:
            yield
        except httpx.TimeoutException as error:
            raise self._timed_out(path) from error
        except httpx.TransportError as error:
            raise EngineError(
                f"{self.base_url}{path}: the connection ended in the middle of an answer ({error})"
            ) from error
        except httpx.DecodingError as error:
            raise EngineError(f"{self.base_url}{path} sent a damaged body ({error})") from error
        finally:
            await response.aclose()

    async def _with_retries(
        self,
        client: "httpx.AsyncClient",
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        retries: Retries,
    ) -> "httpx.Response":
        content = None if body is None else encoded(body)
        num_failures = 0
        while True:
            outcome = await self._once(client, method, path, content)
            if not isinstance(outcome, _Failure):
                return outcome
            num_failures += 1
            wait = retries.wait(num_failures, outcome.retry_after)
            if not outcome.may_pass or wait is None:
                raise outcome.error
            await asyncio.sleep(wait)

    async def _once(
        self, client: "httpx.AsyncClient", method: str, path: str, content: bytes | None
    ) -> "httpx.Response | _Failure":
        import httpx

        where = self.base_url + path
        headers = {} if content is None else {"Content-Type": "application/json"}
        try:
            request = client.build_request(method, where, content=content, headers=headers)
            response = await client.send(request, stream=True)
            if response.is_success:
                return response
            try:
                refused = await response.aread()
            finally:
                await response.aclose()
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
            wrong = f"{where!r} is no URL that can be asked ({error}); give http:// or https://"
            return _Failure(RequestError(wrong, param="base_url"), may_pass=False)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            reason = str(error) or "no answer"
            lost = f"cannot connect to {self.base_url} ({reason}); is the server running there?"
            return _Failure(EngineError(lost), may_pass=True)
        except httpx.TimeoutException:
            return _Failure(self._timed_out(path), may_pass=False)
        except httpx.TransportError as error:
            lost = f"{where}: the connection ended before an answer began ({error})"
            return _Failure(EngineError(lost), may_pass=True)
        return self._refusal(path, response, refused)

    def _refusal(self, path: str, response: "httpx.Response", content: bytes) -> _Failure:
        try:
            body: Any = json.loads(content)
        except ValueError:
            body = _quoted(content) if content else response.reason_phrase
        told = _Told.of(body)
        status = response.status_code
        may_pass = status in _MAY_PASS and told.code not in _NEVER_PASSES
        error = told.error(status, self.base_url + path)
        return _Failure(error, may_pass, _retry_after(response.headers))

    def _timed_out(self, path: str) -> EngineError:
        return EngineError(
            f"{self.base_url}{path} sent nothing for {self._timeout:g} seconds; give a longer "
            "timeout, or ask for less"
        )

    def _open(self) -> "_Connections":
        """Opened on first use, as they belong to the loop they are used on."""
        loop = asyncio.get_running_loop()
        if self._opened is not None and self._opened.loop is not loop:
            self.close()
        if self._opened is None:
            self._opened = _Connections(self._maker(), loop)
            weakref.finalize(self, self._opened.close_soon)
        return self._opened

    def _maker(self) -> "Callable[[], httpx.AsyncClient]":
        """What makes clients. Certificates are read once."""
        import httpx

        is_secure = urlsplit(self.base_url).scheme == "https"
        return partial(
            httpx.AsyncClient,
            headers=self._headers,
            timeout=httpx.Timeout(self._timeout, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=GROUP_CONNECTIONS),
            verify=httpx.create_ssl_context() if is_secure else False,
            trust_env=not _is_here(self.base_url),
        )


@dataclass(slots=True)
class _Group:
    """A client of the library, and the requests that are under way with it."""

    client: "httpx.AsyncClient"
    num_busy: int = 0


class _Connections:
    """Connections of one loop, in groups: what the library does for each request grows with the
    square of the connections that one of its clients has."""

    def __init__(
        self, make: "Callable[[], httpx.AsyncClient]", loop: asyncio.AbstractEventLoop
    ) -> None:
        self.loop = loop
        self._make = make
        self._groups: list[_Group] = []
        self._free = asyncio.Semaphore(MAX_CONNECTIONS)

    @asynccontextmanager
    async def client(self) -> "AsyncIterator[httpx.AsyncClient]":
        """A client for one request. Waiting for one that is free is no failure, however long it
        takes."""
        async with self._free:
            group = min(self._groups, key=lambda group: group.num_busy, default=None)
            if group is None or group.num_busy >= GROUP_CONNECTIONS:
                group = _Group(self._make())
                self._groups.append(group)
            group.num_busy += 1
            try:
                yield group.client
            finally:
                group.num_busy -= 1

    async def aclose(self) -> None:
        for group in self._groups:
            await group.client.aclose()

    def close_soon(self) -> None:
        """Close them on their loop, from any thread. With a loop that has ended they are gone."""
        is_open = any(not group.client.is_closed for group in self._groups)
        if is_open and self.loop.is_running():
            asyncio.run_coroutine_threadsafe(self.aclose(), self.loop)


def _is_here(url: str) -> bool:
    """Whether it is on this machine: no proxy leads there."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def encoded(body: Mapping[str, Any]) -> bytes:
    """A request body. Raises RequestError for what JSON or UTF-8 cannot say."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the request has half of a surrogate pair ({error.object[error.start]!r}), which is "
            "no character; replace it"
        ) from error
    except ValueError as error:
        raise RequestError(f"the request has a number that JSON has not: {error}") from error


@dataclass(slots=True)
class EventReader:
    """Server-sent events from bytes as they come.

    Lines end only where the format says, not at every separator that Unicode has: those stand in
    JSON unescaped. `where` is named in errors.
    """

    where: str
    is_done: bool = False  # `[DONE]` was read
    _rest: bytes = b""
    _name: str = ""
    _data: list[bytes] = field(default_factory=list)

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """The events that `chunk` completes. Raises SapwoodError."""
        lines = (self._rest + chunk).splitlines(keepends=True)
        self._rest = b""
        if lines and not lines[-1].endswith(b"\n"):  # "\r" may yet be followed by "\n"
            self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EngineError(f"{self.where} sends an event without an end")
        for line in lines:
            yield from self._take(line.rstrip(b"\r\n"))

    def end(self) -> Iterator[Event]:
        """The event that the end of the answer completes, if any."""
        yield from self._take(self._rest.rstrip(b"\r"))
        yield from self._take(b"")

    def _take(self, line: bytes) -> Iterator[Event]:
        if self.is_done:
            return
        if not line:
            yield from self._dispatch()
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._name = value.decode(errors="replace")

    def _dispatch(self) -> Iterator[Event]:
        name, data = self._name, b"\n".join(self._data)
        self._name = ""
        self._data.clear()
        if not data:
            return
        if data == b"[DONE]":
            self.is_done = True
            return
        yield Event(name, self._object(data))

    def _object(self, data: bytes) -> Mapping[str, Any]:
        try:
            value = json.loads(data)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise EngineError(f"{self.where} streams what is no JSON object: {_quoted(data)}")
        if value.get("error"):
            raise _Told.of(value).error(None, self.where)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a server says of an error, in any of the envelopes that are about."""

    message: str
    kind: str | None = None
    param: str | None = None
    code: str | int | None = None

    @classmethod
    def of(cls, body: Any) -> "_Told":
        """OpenAI's and Anthropic's `{"error": {...}}`, SGLang's flat object, FastAPI's `detail`."""
        inner = body.get("error") or body if isinstance(body, dict) else body
        if not isinstance(inner, dict):
            return cls(message=str(inner))
        message = inner.get("message") or inner.get("detail") or inner
        param = inner.get("param")
        return cls(
            message=message if isinstance(message, str) else json.dumps(message),
            kind=inner.get("type"),
            param=param if isinstance(param, str) else None,
            code=inner.get("code"),
        )

    def error(self, status: int | None, where: str) -> SapwoodError:
        """As ours. `status` None: told inside of a stream, where only words say what it is."""
        code = self.code if isinstance(self.code, str) else None
        status = status or (self.code if isinstance(self.code, int) else self._meant_status())
        said = f"{where} answered {status}: {self.message}"
        if code == "context_length_exceeded" or _TOO_LONG in self.message:
            return ContextLengthError(said, param=self.param or "messages")
        if status in (401, 403):
            return RequestError(f"{said}; check api_key", param="api_key", code=code or self.kind)
        if code in _NEVER_PASSES:
            return EngineError(said)
        if status in _BUSY:
            return EngineBusyError(f"{said}; send it again later, or send fewer at once")
        if 400 <= status < 500 and status not in _MAY_PASS:
            return RequestError(said, param=self.param, code=code or self.kind)
        return EngineError(said)

    def _meant_status(self) -> int:
        words = {self.kind, self.code}
        if words & _BUSY_WORDS or self.code == "unavailable":
            return 503
        return 400 if words & _WRONG_WORDS else 500


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait, from any of the forms there are; None: it says nothing
    that can be understood."""
    from email.utils import parsedate_to_datetime  # takes longer to import than all of this

    try:
        if (milliseconds := headers.get("retry-after-ms")) is not None:
            return max(0.0, float(milliseconds) / 1000)
        if (told := headers.get("retry-after")) is None:
            return None
        if told.strip().replace(".", "", 1).isdigit():
            return float(told)
        return max(0.0, parsedate_to_datetime(told).timestamp() - time.time())
    except ValueError:
        return None


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    """Read a body to its end, unless its end is far."""
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            async for _ in chunks:
                pass
    except TimeoutError:
        return


def _quoted(content: bytes) -> str:
    text = content[:QUOTED_CHARACTERS].decode(errors="replace")
    return repr(text + "..." if len(content) > QUOTED_CHARACTERS else text)
