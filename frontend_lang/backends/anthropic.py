"""Programs on Anthropic's messages API.

Served: temperature, top_p, top_k, stop strings, n (as so many requests), JSON schemas, choices and
regular expressions (`output_config`), `select` by a constrained answer, and an assistant's message
that has begun. Refused: everything that the API has not, as seeds, penalties, log-probabilities,
stop tokens and grammars.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from sapwood.frontend_lang.backends.answered_select import only_texts, score_by_answer
from sapwood.frontend_lang.backends.api_options import (
    asked,
    conversation,
    is_neutral,
    served_fields,
    stops,
)
from sapwood.frontend_lang.backends.http import HttpClient, Retries
from sapwood.frontend_lang.backends.interface import (
    Answer,
    Call,
    Encoder,
    Prompt,
    Score,
    TokenIds,
)
from sapwood.frontend_lang.backends.json_format import JsonFormat
from sapwood.frontend_lang.nodes import SYSTEM, Message
from sapwood.runtime.errors import EngineError, RequestError
from sapwood.runtime.hints import Hints

ANTHROPIC_URL = "https://api.anthropic.com"
API_VERSION = "2023-06-01"
DEFAULT_TIMEOUT = 600.0  # seconds
DEFAULT_MAX_RETRIES = 2
DEFAULT_MAX_TOKENS = 128  # the API has no default of its own; this is that of a program

_SERVED = frozenset({"max_tokens", "temperature", "top_p", "top_k", "stop", "n"})
_WAY_OUT = "use a backend that has it: RuntimeEndpoint, or Engine"
_NOT_ENDED = "a stream ended before its message did"


@dataclass(frozen=True, slots=True)
class _Request:
    body: Mapping[str, Any]
    num_answers: int
    format: JsonFormat | None


class Anthropic:
    """A model behind `POST /v1/messages`.

    `api_key`: without it ANTHROPIC_API_KEY, which only Anthropic itself requires. `base_url` has no
    `/v1`; without it ANTHROPIC_BASE_URL, or Anthropic itself. `timeout` in seconds without a byte;
    retries are those of `http.Retries`.
    """

    chat_only = True
    encoder: Encoder | None = None

    def __init__(
        self,
        model_name: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_retries: int = DEFAULT_MAX_RETRIES,
    ) -> None:
        """Raises RequestError for a missing key. Connects to nothing yet."""
        url = (base_url or os.environ.get("ANTHROPIC_BASE_URL") or ANTHROPIC_URL).rstrip("/")
        key = (api_key or os.environ.get("ANTHROPIC_API_KEY") or "").strip()
        if not key and url == ANTHROPIC_URL and not headers:
            raise RequestError(
                "Anthropic needs a key; set ANTHROPIC_API_KEY, or give api_key", param="api_key"
            )
        self.name = f"Anthropic's API at {url}"
        self.model_name = model_name
        self._http = HttpClient(
            url,
            headers={
                "anthropic-version": API_VERSION,
                **({"x-api-key": key} if key else {}),
                **(headers or {}),
            },
            timeout=timeout,
            retries=Retries(max_retries=max_retries),
        )

    async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
        """`n` answers are so many requests; the first that fails ends the others."""
        request = self._request(prompt, call)
        tasks = [asyncio.ensure_future(self._one(request)) for _ in range(request.num_answers)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stream(self, prompt: Prompt, call: Call) -> AsyncIterator[Answer]:
        request = self._request(prompt, call)
        if request.num_answers != 1:
            raise RequestError("a stream is one answer; leave out n, or stream", param="n")
        reader = _StreamReader(self.name, request.format)
        body = {**request.body, "stream": True}
        async with aclosing(self._http.events("/v1/messages", body)) as events:
            async for event in events:
                piece = reader.feed(event.data)
                if piece is not None:
                    yield piece
        yield reader.end()

    async def score(
        self, prompt: Prompt, continuations: Sequence[TokenIds | str], hints: Hints
    ) -> list[Score]:
        """See `score_by_answer`: the text that the model answers with, and no probabilities."""
        return await score_by_answer(self, prompt, only_texts(continuations), hints)

    async def flush_cache(self) -> None:
        raise RequestError(f"{self.name} has no cache that a client may empty; {_WAY_OUT}")

    async def server_info(self) -> Mapping[str, Any]:
        return {"base_url": self._http.base_url, "models": await self._http.get("/v1/models")}

    async def aclose(self) -> None:
        await self._http.aclose()

    def close(self) -> None:
        """Close the connections, from any thread."""
        self._http.close()

    async def _one(self, request: _Request) -> Answer:
        body = await self._http.post("/v1/messages", request.body)
        with _in_form(self.name):
            answer = _message(body, self.name)
        if request.format is None:
            return answer
        return Answer(
            text=request.format.text(answer.text),
            reasoning=answer.reasoning,
            finish_reason=answer.finish_reason,
            meta=answer.meta,
        )

    def _request(self, prompt: Prompt, call: Call) -> _Request:
        if call.reasoning_type is not None:
            raise RequestError(
                f"{self.name} tells reasoning apart by itself; leave out model_type",
                param="model_type",
            )
        options = asked(call.options)
        fields = served_fields(options, _SERVED, api=self.name, way_out=_WAY_OUT)
        form = None
        if call.constraint is not None:
            form = JsonFormat.of(call.constraint, api=self.name, has_patterns=True)
        body = {
            "model": self.model_name,
            **self._messages(prompt),
            **_sampling_fields(fields),
            **({} if form is None else {"output_config": {"format": _json_schema(form)}}),
        }
        num_answers = fields.get("n", 1)
        if num_answers < 1:
            raise RequestError(f"n is {num_answers}; give at least 1", param="n")
        return _Request(body, num_answers, form)

    def _messages(self, prompt: Prompt) -> dict[str, Any]:
        closed, begun = conversation(prompt, api=self.name)
        num_system = next(
            (i for i, message in enumerate(closed) if message["role"] != SYSTEM), len(closed)
        )
        system, turns = closed[:num_system], [dict(message) for message in closed[num_system:]]
        self._check_turns(turns)
        if begun:
            turns.append({"role": "assistant", "content": begun})
        blocks = [{"type": "text", "text": message["content"]} for message in system]
        return {**({"system": blocks} if blocks else {}), "messages": turns}

    def _check_turns(self, turns: Sequence[Message]) -> None:
        if not turns:
            raise RequestError(
                f"{self.name} needs a user's message before its answer; write s += user(...)",
                param="messages",
            )
        if any(turn["role"] == SYSTEM for turn in turns):
            raise RequestError(
                f"{self.name} takes system messages at the beginning only; say it there, or as the "
                "user",
                param="messages",
            )


def _sampling_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_tokens": options.get("max_tokens", DEFAULT_MAX_TOKENS)}
    for name in ("temperature", "top_p", "top_k"):
        if name in options and not is_neutral(name, options[name]):
            fields[name] = options[name]
    if sequences := stops(options):
        fields["stop_sequences"] = sequences
    return fields


def _json_schema(form: JsonFormat) -> dict[str, Any]:
    return {"type": "json_schema", "schema": form.schema}


def _message(body: Mapping[str, Any], api: str) -> Answer:
    blocks = body["content"]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    reason = _finish_reason(body["stop_reason"], api)
    return Answer(
        text="".join(texts),
        reasoning="".join(thoughts),
        finish_reason=reason,
        meta=_meta(reason, body.get("stop_sequence"), body.get("usage") or {}),
    )


@dataclass(slots=True)
class _StreamReader:
    """One streamed message, event by event."""

    api: str
    form: JsonFormat | None
    _held: list[str] = field(default_factory=list)  # text that is only understood when it is whole
    _usage: dict[str, Any] = field(default_factory=dict)
    _stop: Mapping[str, Any] = field(default_factory=dict)
    _has_ended: bool = False

    def feed(self, event: Mapping[str, Any]) -> Answer | None:
        """What an event says; None where that is nothing. Raises EngineError."""
        with _in_form(self.api):
            match event["type"]:
                case "message_start":
                    self._usage |= event["message"].get("usage") or {}
                case "content_block_start":
                    return self._piece(event["content_block"])
                case "content_block_delta":
                    return self._piece(event["delta"])
                case "message_delta":
                    self._stop = event["delta"]
                    self._usage |= event.get("usage") or {}
                case "message_stop":
                    self._has_ended = True
        return None

    def _piece(self, said: Mapping[str, Any]) -> Answer | None:
        text, reasoning = said.get("text") or "", said.get("thinking") or ""
        if self.form is not None:
            self._held.append(text)
            text = ""
        return Answer(text=text, reasoning=reasoning) if text or reasoning else None

    def end(self) -> Answer:
        """The last piece. Raises EngineError for a message that was cut off."""
        if not self._has_ended:
            raise EngineError(f"{self.api}: {_NOT_ENDED}")
        text = "".join(self._held)
        reason = _finish_reason(self._stop.get("stop_reason"), self.api)
        return Answer(
            text=text if self.form is None else self.form.text(text),
            finish_reason=reason,
            meta=_meta(reason, self._stop.get("stop_sequence"), self._usage),
        )


def _finish_reason(told: str | None, api: str) -> str:
    """Ours of the API's. Raises EngineError where the model refuses."""
    if told == "refusal":
        raise EngineError(f"the model of {api} refuses to answer; ask for something else")
    return "length" if told in ("max_tokens", "model_context_window_exceeded") else "stop"


def _meta(reason: str, matched: str | None, usage: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's names. What was read from the API's cache, or written to it, is counted apart from
    the input there; here the prompt has all of its tokens."""
    cached = usage.get("cache_read_input_tokens") or 0
    written = usage.get("cache_creation_input_tokens") or 0
    return {
        "finish_reason": {"type": reason, "matched": matched},
        "prompt_tokens": (usage.get("input_tokens") or 0) + cached + written,
        "cached_tokens": cached,
        "completion_tokens": usage.get("output_tokens") or 0,
    }


@contextmanager
def _in_form(api: str) -> Iterator[None]:
    """Turns what a body lacks into an EngineError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"{api} answered in a form that is not Anthropic's ({type(error).__name__}: {error})"
        ) from error
