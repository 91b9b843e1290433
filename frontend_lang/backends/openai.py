"""Programs on OpenAI's API, of OpenAI and of the many servers that speak it.

What a chat model's server is asked for depends on its kind (`dialects.py`):

| | OpenAI | not known | vLLM, SGLang, Sapwood |
|---|---|---|---|
| JSON schema, choices | `response_format` | `response_format` | the server's own fields |
| regular expression | a pattern in a schema | refused | the server's own fields |
| grammar | refused | refused | served (SGLang: EBNF) |
| a message that has begun | refused | refused | continued |

Models that complete text continue whatever there is; only vLLM, SGLang and Sapwood constrain them.
`select` is by echoed log-probabilities there: all three methods, where the server tells them.

Chat APIs tell no log-probabilities of a given text. There `score` asks for an answer that is one of
the texts, and gives that one 0 and the others minus infinity: `token_length_normalized` and
`greedy_token_selection` choose it, `unconditional_likelihood_normalized` is refused.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from sapwood.frontend_lang.backends import dialects
from sapwood.frontend_lang.backends.answered_select import only_texts, score_by_answer
from sapwood.frontend_lang.backends.api_options import (
    asked,
    conversation,
    is_neutral,
    served_fields,
    stops,
)
from sapwood.frontend_lang.backends.dialects import (
    DIALECTS,
    LOGPROB_OPTIONS,
    Dialect,
    constrained,
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
from sapwood.frontend_lang.backends.openai_answers import (
    Expected,
    StreamReader,
    echoed_scores,
    whole_answers,
)
from sapwood.runtime.errors import EngineError, RequestError
from sapwood.runtime.hints import NO_HINTS, Hints

OPENAI_URL = "https://api.openai.com/v1"
DEFAULT_TIMEOUT = 600.0  # seconds
DEFAULT_MAX_RETRIES = 2
# The models of OpenAI that complete text. Elsewhere such a name says nothing.
COMPLETION_MODELS = frozenset({"gpt-3.5-turbo-instruct", "davinci-002", "babbage-002"})

_NO_TOKENS = "use a backend that serves it: RuntimeEndpoint, or Engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    path: str
    body: Mapping[str, Any]
    expected: Expected


class OpenAI:
    """A model behind `POST /chat/completions`, or `/completions` for one that completes text.

    `base_url` ends in `/v1`; without it OPENAI_BASE_URL, or OpenAI itself. `api_key`: without it
    OPENAI_API_KEY, which only OpenAI itself requires. `is_chat_model`: without it, all but OpenAI's
    three models for completions. `dialect` is a name in `DIALECTS`; without it the server is asked
    once. `timeout` in seconds without a byte; retries are those of `http.Retries`.
    """

    encoder: Encoder | None = None

    def __init__(
        self,
        model_name: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        is_chat_model: bool | None = None,
        dialect: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_retries: int = DEFAULT_MAX_RETRIES,
    ) -> None:
        """Raises RequestError for a missing key or an unknown dialect. Connects to nothing yet."""
        url = (base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")
        key = (api_key or os.environ.get("OPENAI_API_KEY") or "").strip()
        if not key and url == OPENAI_URL and not headers:
            raise RequestError(
                "OpenAI needs a key; set OPENAI_API_KEY, or give api_key (or the base_url of "
                "another server)",
                param="api_key",
            )
        bearer = {"Authorization": f"Bearer {key}"} if key else {}
        self.name = f"OpenAI's API at {url}"
        self.model_name = model_name
        self.chat_only = (
            model_name not in COMPLETION_MODELS if is_chat_model is None else is_chat_model
        )
        self._http = HttpClient(
            url,
            headers=bearer | dict(headers or {}),
            timeout=timeout,
            retries=Retries(max_retries=max_retries),
        )
        self._dialect = _given_dialect(dialect, url)
        self._asking = asyncio.Lock()

    async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
        request = self._request(await self._known_dialect(), prompt, call)
        body = await self._http.post(request.path, request.body)
        return whole_answers(body, request.expected)

    async def stream(self, prompt: Prompt, call: Call) -> AsyncIterator[Answer]:
        request = self._request(await self._known_dialect(), prompt, call)
        if request.expected.num_answers != 1:
            raise RequestError("a stream is one answer; leave out n, or stream", param="n")
        body = {**request.body, "stream": True, "stream_options": {"include_usage": True}}
        reader = StreamReader(request.expected)
        async with aclosing(self._http.events(request.path, body)) as events:
            async for event in events:
                piece = reader.feed(event.data)
                if piece is not None:
                    yield piece
        yield reader.end()

    async def score(
        self, prompt: Prompt, continuations: Sequence[TokenIds | str], hints: Hints
    ) -> list[Score]:
        """Of texts; see the module for what a chat model answers. One request for all."""
        texts = only_texts(continuations)
        if self.chat_only:
            return await score_by_answer(self, prompt, texts, hints)
        dialect = await self._known_dialect()
        full = [prompt.text + text for text in texts]
        body = {
            "model": self.model_name,
            "prompt": full,
            "echo": True,
            "max_tokens": 0,
            "logprobs": 1,
            **_hint_fields(hints, dialect),
        }
        answer = await self._http.post("/completions", body)
        return echoed_scores(answer, full, len(prompt.text), self.name)

    async def flush_cache(self) -> None:
        raise RequestError(f"{self.name} has no cache that a client may empty; {_NO_TOKENS}")

    async def server_info(self) -> Mapping[str, Any]:
        """The server's list of models and what is known of it."""
        dialect = await self._known_dialect()
        models = await self._http.get("/models")
        return {"base_url": self._http.base_url, "dialect": dialect.name, "models": models}

    async def aclose(self) -> None:
        await self._http.aclose()

    def close(self) -> None:
        """Close the connections, from any thread."""
        self._http.close()

    async def _known_dialect(self) -> Dialect:
        """The server's, asked of it once. One that fails to say is asked again at the next call;
        what is wrong with it this one will tell."""
        async with self._asking:
            if self._dialect is None:
                try:
                    self._dialect = dialects.owner_of(await self._http.get("/models", once=True))
                except RequestError:
                    self._dialect = dialects.COMPATIBLE  # it has no such list, or not for us
                except EngineError:
                    return dialects.COMPATIBLE
            return self._dialect

    def _request(self, dialect: Dialect, prompt: Prompt, call: Call) -> _Request:
        options = asked(call.options)
        fields = served_fields(options, dialect.options, api=self.name, way_out=_NO_TOKENS)
        limit = constrained(call.constraint, dialect, api=self.name, is_chat=self.chat_only)
        body = {
            "model": self.model_name,
            **self._prompt_fields(prompt, dialect),
            **_sampling_fields(fields, dialect, is_chat=self.chat_only),
            **limit.fields,
            **self._reasoning_fields(call, dialect),
            **_hint_fields(call.hints, dialect),
        }
        expected = Expected(
            api=self.name,
            is_chat=self.chat_only,
            num_answers=fields.get("n", 1),
            logprobs=bool(fields.get("return_logprob")),
            num_top_logprobs=fields.get("top_logprobs_num", 0),
            format=limit.format,
        )
        path = "/chat/completions" if self.chat_only else "/completions"
        return _Request(path=path, body=body, expected=expected)

    def _prompt_fields(self, prompt: Prompt, dialect: Dialect) -> dict[str, Any]:
        if not self.chat_only:
            return {"prompt": prompt.text}
        closed, begun = conversation(prompt, api=self.name)
        messages = [dict(message) for message in closed]
        if not begun:
            return {"messages": messages}
        if not dialect.continues_messages:
            raise RequestError(
                f"{self.name} cannot go on with an assistant's message that has begun "
                f"({begun[:40]!r}); let gen be the first in it, give the program "
                "num_api_spec_tokens, or use a model for completions",
                param="messages",
            )
        opened = {"role": "assistant", "content": begun}
        how = {"continue_final_message": True, "add_generation_prompt": False}
        return {"messages": [*messages, opened], **how}

    def _reasoning_fields(self, call: Call, dialect: Dialect) -> dict[str, Any]:
        """Where the server tells reasoning apart, it does so for programs that ask."""
        if call.reasoning_type is not None:
            raise RequestError(
                f"{self.name} tells reasoning apart by the model's own format, if at all; leave "
                "out model_type",
                param="model_type",
            )
        if not self.chat_only:
            if call.separate_reasoning:
                raise RequestError(
                    f"{self.name} does not tell reasoning apart in completions; use a chat model",
                    param="separate_reasoning",
                )
            return {}
        return (
            {"separate_reasoning": call.separate_reasoning} if dialect.separates_reasoning else {}
        )


class LiteLLM(OpenAI):
    """A model behind a LiteLLM proxy, or behind any other URL that speaks OpenAI's API.

    Sends OpenAI's own fields and nothing more, as the proxy passes them on to whatever it knows.
    `api_key`: without it LITELLM_PROXY_API_KEY.
    """

    def __init__(
        self,
        model_name: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        is_chat_model: bool | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_retries: int = DEFAULT_MAX_RETRIES,
    ) -> None:
        """`base_url`: without it LITELLM_PROXY_API_BASE. Raises RequestError if there is none."""
        url = base_url or os.environ.get("LITELLM_PROXY_API_BASE")
        if not url:
            raise RequestError(
                "LiteLLM needs the URL of a proxy or of a provider; give base_url, or set "
                "LITELLM_PROXY_API_BASE",
                param="base_url",
            )
        super().__init__(
            model_name,
            base_url=url,
            api_key=api_key or os.environ.get("LITELLM_PROXY_API_KEY"),
            is_chat_model=is_chat_model,
            dialect=dialects.COMPATIBLE.name,
            headers=headers,
            timeout=timeout,
            max_retries=max_retries,
        )
        self.name = f"LiteLLM's API at {url}"


def _given_dialect(name: str | None, url: str) -> Dialect | None:
    if name is None:
        return dialects.OPENAI if url == OPENAI_URL else None
    if name not in DIALECTS:
        raise RequestError(
            f"dialect is one of {', '.join(DIALECTS)}, not {name!r}", param="dialect"
        )
    return DIALECTS[name]


def _sampling_fields(
    options: Mapping[str, Any], dialect: Dialect, *, is_chat: bool
) -> dict[str, Any]:
    """The fields of options that are served."""
    fields: dict[str, Any] = {}
    for name, value in options.items():
        if name in LOGPROB_OPTIONS or (dialect.is_openai and is_neutral(name, value)):
            continue
        match name:
            case "stop":
                value = stops(options)
            case "stop_regex":
                value = [value] if isinstance(value, str) else list(value)
            case "stop_token_ids":
                value = list(value)
            case "logit_bias":
                value = {str(token_id): bias for token_id, bias in value.items()}
            case "max_tokens" if is_chat and dialect.is_openai:
                name = "max_completion_tokens"
        if value not in ([], {}):
            fields[name] = value
    return fields | _logprob_fields(options, is_chat=is_chat)


def _logprob_fields(options: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    if not options.get("return_logprob"):
        return {}
    num_top = options.get("top_logprobs_num", 0)
    if not is_chat:
        return {"logprobs": max(1, num_top)}  # 0 is none to some servers
    return {"logprobs": True, **({"top_logprobs": num_top} if num_top else {})}


def _hint_fields(hints: Hints, dialect: Dialect) -> dict[str, Any]:
    """Hints never change an answer, so that other servers need not know of them."""
    if not dialect.takes_hints or hints == NO_HINTS:
        return {}
    told = {name: value for name, value in asdict(hints).items() if value is not None}
    return {"sapwood": {"hints": told}}
