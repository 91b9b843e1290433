"""Programs over HTTP: our own server, and whatever speaks SGLang's native API.

With our server a program's state is token ids, as with an engine in the same process: constants
are tokenised once, generated tokens come back as ids and are sent again as they are. SGLang gets
text.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from sapwood.frontend_lang.backends.endpoint_encoder import EndpointEncoder
from sapwood.frontend_lang.backends.endpoint_scores import score_texts, score_tokens
from sapwood.frontend_lang.backends.generate_wire import (
    SapwoodWire,
    SGLangWire,
    Wire,
    generate_body,
    in_options_words,
    whole_answer,
)
from sapwood.frontend_lang.backends.http import HttpClient, Retries
from sapwood.frontend_lang.backends.interface import (
    Answer,
    Call,
    Encoder,
    Piece,
    Prompt,
    Score,
    TokenIds,
)
from sapwood.frontend_lang.backends.role_formats import role_texts, role_texts_of_model
from sapwood.runtime.errors import EngineError, RequestError
from sapwood.runtime.hints import Hints

if TYPE_CHECKING:
    from sapwood.runtime.reasoning import ReasoningReader

T = TypeVar("T")

DAY = 86_400.0  # seconds: how long an answer may take where no timeout is given
INFO_SECONDS = 30.0  # that a server may take to say who it is
# A connection that is lost may be had anew; an answer that failed may not be tried twice silently.
_RETRIES = Retries(max_retries=1, first_seconds=0.1, longest_seconds=1.0)
_SERVER_INFO_PATHS = ("/get_server_info", "/server_info")
_INFO_PATHS = ("/get_model_info", "/model_info", *_SERVER_INFO_PATHS)


class RuntimeEndpoint:
    """A `Backend` over HTTP.

        backend = RuntimeEndpoint("http://127.0.0.1:8000")

    Making one asks the server who it is. Cancelling a call closes its connection, which ends its
    request. `timeout`: seconds without a byte from the server until a request is given up.
    `chat_template` says how conversations are written, where the server does not tell or tells
    otherwise: `chatml`, `llama-3`, or a Jinja template.

    Raises EngineError where nobody answers, RequestError where the server wants another `api_key`
    or `url` is none.
    """

    chat_only = False

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.url = _checked_url(url)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        seconds = DAY if timeout is None else timeout

        def client(timeout: float) -> HttpClient:
            return HttpClient(self.url, headers=headers, timeout=timeout, retries=_RETRIES)

        around = None if chat_template is None else role_texts(chat_template)
        self._info = _result_of(_asked_who(client(min(seconds, INFO_SECONDS))))
        self.name: str = str(self._info.get("model_path") or self.url)
        self._http = client(seconds)
        self._tokens: EndpointEncoder | None = None
        self._wire: SapwoodWire | SGLangWire = SapwoodWire()
        if self._info.get("server") == "sapwood":
            self._tokens = EndpointEncoder(self._http, around)
        else:
            takes_seeds = bool(self._info.get("enable_deterministic_inference"))
            around = around or role_texts_of_model(self.name)
            self._wire = SGLangWire(around, takes_seeds=takes_seeds)

    @property
    def encoder(self) -> Encoder | None:
        """None for a server that takes text."""
        return self._tokens

    async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
        """As `Backend.generate`."""
        num_answers = call.options.get("n") or 1
        body = generate_body(self._wire, prompt, call, stream=False)
        with in_options_words():
            told = await self._http.post("/generate", body)
        results = told if isinstance(told, list) else [told]
        if len(results) != num_answers:
            raise EngineError(f"{num_answers} answers were asked for, and {len(results)} came")
        return [self._news(prompt, call).add(result) for result in results]

    async def stream(self, prompt: Prompt, call: Call) -> AsyncIterator[Answer]:
        """As `Backend.stream`."""
        news, answer = self._news(prompt, call), None
        body = generate_body(self._wire, prompt, call, stream=True)
        with in_options_words():
            async with aclosing(self._http.events("/generate", body)) as events:
                async for event in events:
                    answer = news.add(event.data)
                    yield answer
        if answer is None or answer.finish_reason is None:
            raise EngineError(f"{self.url} ended a stream before its answer had ended")

    async def score(
        self, prompt: Prompt, continuations: Sequence[TokenIds | str], hints: Hints
    ) -> list[Score]:
        """As `Backend.score`. All continuations go in one request; nothing is generated."""
        if self._tokens is None:
            assert isinstance(self._wire, SGLangWire)
            texts = [text for text in continuations if isinstance(text, str)]
            assert len(texts) == len(continuations), "without an encoder there are no tokens"
            return await score_texts(self._http, self._wire.text(prompt), texts)
        before = prompt.token_ids or ()
        further = [await self._encoded(c, at_start=not before) for c in continuations]
        return await score_tokens(self._http, before, further, hints)

    async def flush_cache(self) -> None:
        """Drop every cached prefix that no running request uses."""
        await self._http.post_text("/flush_cache", {})

    async def server_info(self) -> Mapping[str, Any]:
        """What the server tells of its settings and of what it did so far."""
        info: Mapping[str, Any] = await _first_found(self._http, _SERVER_INFO_PATHS)
        return info

    async def aclose(self) -> None:
        """Close the connections. The server goes on."""
        await self._http.aclose()

    def close(self) -> None:
        """The same, from any thread; so it is with an endpoint that nobody holds any more."""
        self._http.close()

    async def _encoded(self, continuation: TokenIds | str, *, at_start: bool) -> TokenIds:
        if not isinstance(continuation, str):
            return continuation
        assert self._tokens is not None
        return await self._tokens.encode([Piece(continuation)], at_start=at_start)

    def _news(self, prompt: Prompt, call: Call) -> "_News":
        """What tells the pieces of one answer. Raises RequestError."""
        if not call.separate_reasoning or isinstance(self._wire, SapwoodWire):
            return _News(self._wire)
        from sapwood.runtime.reasoning import ReasoningReader, reasoning_start
        from sapwood.runtime.separated_reasoning import tags_of_type

        tags = tags_of_type(call.reasoning_type, None)
        if tags is None:
            raise RequestError(
                "this server does not tell how its model marks its reasoning; name the way with "
                "separate_reasoning(..., model_type=...)",
                param="model_type",
            )
        text = self._wire.text(prompt)
        return _News(self._wire, ReasoningReader(tags, reasoning_start(tags, text)))


class _News:
    """What is new of an answer whose server says all of it each time.

    `reader` tells reasoning from content, for a server that does not.
    """

    def __init__(self, wire: Wire, reader: "ReasoningReader | None" = None) -> None:
        self._wire = wire
        self._reader = reader
        self._said = Answer(text="")

    def add(self, result: Mapping[str, Any]) -> Answer:
        """The piece that `result` adds. Raises EngineError."""
        answer = whole_answer(self._wire, result)
        has_ended = answer.finish_reason is not None
        if not has_ended:  # a character that is not whole yet may be shown by its replacement
            answer = replace(answer, text=answer.text.rstrip("\ufffd"))
        told = replace(
            answer,
            text=_continuation(self._said.text, answer.text),
            reasoning=_continuation(self._said.reasoning, answer.reasoning),
        )
        self._said = answer
        if self._reader is None:
            return told
        parts = self._reader.feed(told.text, finished=has_ended)
        return replace(told, text=parts.content, reasoning=parts.reasoning)


def _continuation(said: str, text: str) -> str:
    """What is new in a text. Raises EngineError where it takes something back."""
    if not text.startswith(said):
        raise EngineError(
            "the server streams pieces of text, and not all of it each time; start it without "
            "the option that has it do so (SGLang's --stream-output)"
        )
    return text[len(said) :]


async def _asked_who(http: HttpClient) -> Mapping[str, Any]:
    """What a server says of its model, and of itself where it is not ours. Raises EngineError,
    RequestError."""
    try:
        info = await _first_found(http, _INFO_PATHS)
        if isinstance(info, dict) and info.get("server") != "sapwood":
            info = await _first_found(http, _SERVER_INFO_PATHS) | info
    finally:
        await http.aclose()
    if not isinstance(info, dict):
        raise EngineError(f"{http.base_url} tells nothing of its model: {str(info)[:300]}")
    return info


async def _first_found(http: HttpClient, paths: Sequence[str]) -> Any:
    """What stands at the first of `paths` that the server has."""
    for path in paths:
        try:
            return await http.get(path)
        except RequestError as error:
            if error.param == "api_key":
                raise
            missing = error
    raise EngineError(
        f"{http.base_url} has none of {', '.join(paths)}: it is neither Sapwood's server nor "
        "SGLang's; for others there are the backends OpenAI and Anthropic"
    ) from missing


def _result_of(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, waited for here: on a thread, as a loop may run on this one."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="sapwood-endpoint") as pool:
        return pool.submit(asyncio.run, work).result()


def _checked_url(url: str) -> str:
    """Where the server's own paths begin. Raises RequestError."""
    base = url.rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise RequestError(f"{url!r} is no URL; write http://{base}", param="url")
    if base.endswith("/v1"):
        raise RequestError(
            f"{url!r} is where OpenAI's API begins, and an endpoint has paths of its own; leave "
            "/v1 out",
            param="url",
        )
    return base
