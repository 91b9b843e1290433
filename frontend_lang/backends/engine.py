"""Programs over an engine in the same process.

A program's state is token ids here: constants are encoded once, what was generated is continued as
it is, so whatever was computed of a prompt is found again by the next one.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

from sapwood.frontend_lang.backends.engine_answers import AnswerInProgress
from sapwood.frontend_lang.backends.engine_options import in_options_words, sampling_params
from sapwood.frontend_lang.backends.interface import (
    Answer,
    Call,
    Piece,
    Prompt,
    RoleText,
    Score,
    TokenIds,
)
from sapwood.runtime.async_engine import AsyncEngine
from sapwood.runtime.chat import Chat, ChatOptions, Message
from sapwood.runtime.engine import Engine
from sapwood.runtime.errors import ContextLengthError, RequestError
from sapwood.runtime.hints import Hints
from sapwood.runtime.outputs import RequestOutput
from sapwood.runtime.reasoning import reasoning_tags
from sapwood.runtime.reasoning_block import ReasoningTags
from sapwood.runtime.role_text import role_text
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.separated_reasoning import SeparatedReasoning, tags_of_type
from sapwood.runtime.tokenizer import Tokenizer

_MAX_CHARS_ON_THE_LOOP = 4096  # longer texts are encoded on a thread: about a millisecond and more

_MAX_ROLE_TEXTS = 1024  # that are kept


class EngineEncoder:
    """The tokenizer and the chat template of an engine's model."""

    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._role_texts: dict[tuple[str, ...], RoleText] = {}

    async def encode(self, pieces: Sequence[Piece], *, at_start: bool) -> TokenIds:
        """As `Encoder.encode`. Raises RequestError for a text that no prompt has room for."""
        num_chars = sum(len(piece.text) for piece in pieces)
        if num_chars <= _MAX_CHARS_ON_THE_LOOP:
            return self._encode(pieces, at_start)
        return await asyncio.to_thread(self._encode, pieces, at_start)

    async def role_text(self, roles: tuple[str, ...]) -> RoleText:
        """As `Encoder.role_text`; worked out once for the same roles."""
        known = self._role_texts.get(roles)
        if known is not None:
            return known
        found = RoleText(*await asyncio.to_thread(role_text, self._rendered, roles))
        while len(self._role_texts) >= _MAX_ROLE_TEXTS:
            del self._role_texts[next(iter(self._role_texts))]
        self._role_texts[roles] = found
        return found

    def _encode(self, pieces: Sequence[Piece], at_start: bool) -> TokenIds:
        num_chars = sum(len(piece.text) for piece in pieces)
        min_tokens = num_chars // max(1, self._tokenizer.max_token_bytes)
        if min_tokens >= self._max_model_len:
            raise ContextLengthError(
                f"a text of {num_chars} characters has at least {min_tokens} tokens, and this "
                f"model's maximum context length is {self._max_model_len}; shorten it",
                param="prompt",
            )
        texts = [(piece.text, piece.is_control) for piece in pieces]
        return tuple(self._tokenizer.encode_pieces(texts, at_start=at_start).tolist())

    def _rendered(self, messages: list[Message], opens: bool) -> str:
        options = ChatOptions(add_generation_prompt=opens)
        return self._tokenizer.render_chat(Chat(messages, options)).text


class EngineBackend:
    """A `Backend` over an `AsyncEngine` or an `Engine`, which whoever made it closes.

    An `Engine` stays usable beside it: both are over one core.
    """

    chat_only = False

    def __init__(self, engine: AsyncEngine | Engine) -> None:
        """Raises TypeError for what is no engine."""
        if not isinstance(engine, AsyncEngine | Engine):
            raise TypeError(f"an Engine or an AsyncEngine is needed, not a {type(engine).__name__}")
        self._engine = engine if isinstance(engine, AsyncEngine) else AsyncEngine.over(engine)
        self.name = engine.info.model_name
        self.encoder = EngineEncoder(engine.tokenizer, max_model_len=engine.info.max_model_len)

    @property
    def takes_structural_tags(self) -> bool:
        """Whether the engine's own constraint backend enforces them."""
        return self._engine.config.constraints.constraint_backend != "outlines_core"

    async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
        """As `Backend.generate`. Cancelling it ends the request."""
        sampling = sampling_params(call)
        answers = [self._answer(prompt, call, sampling) for _ in range(sampling.n)]
        with in_options_words():
            [output] = await self._engine.generate(
                [list(_token_ids(prompt))], sampling, hints=call.hints
            )
        return [
            answer.add(output, piece) for answer, piece in zip(answers, output.outputs, strict=True)
        ]

    async def stream(self, prompt: Prompt, call: Call) -> AsyncIterator[Answer]:
        """As `Backend.stream`. Closing it ends the request."""
        sampling = sampling_params(call)
        if sampling.n != 1:
            raise RequestError(
                f"n is {sampling.n}, and one answer is streamed at a time; leave n out, or do not "
                "stream",
                param="n",
            )
        answer = self._answer(prompt, call, sampling)
        token_ids = list(_token_ids(prompt))
        with in_options_words():
            pieces = self._engine.stream(token_ids, sampling, hints=call.hints)
            async with aclosing(pieces):
                async for output in pieces:
                    yield answer.add(output, output.outputs[0])

    async def score(
        self, prompt: Prompt, continuations: Sequence[TokenIds | str], hints: Hints
    ) -> list[Score]:
        """As `Backend.score`. The continuations are submitted together: what they begin with is
        computed once. Nothing is generated."""
        before = _token_ids(prompt)
        scored = [(*before, *await self._encoded(c, before)) for c in continuations]
        # The first token of all has no probability.
        start = max(1, len(before))
        asked = [token_ids for token_ids in scored if len(token_ids) > start]
        outputs: dict[TokenIds, RequestOutput] = {}
        if asked:
            sampling = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start)
            told = await self._engine.generate(
                [list(token_ids) for token_ids in asked],
                sampling,
                hints=[replace(hints, output_tokens=0)] * len(asked),
            )
            outputs = dict(zip(asked, told, strict=True))
        return [_score(token_ids, outputs.get(token_ids), start) for token_ids in scored]

    async def flush_cache(self) -> None:
        """Drop every cached token that no running request holds."""
        await self._engine.flush_cache()

    async def server_info(self) -> Mapping[str, Any]:
        """The model and the engine's settings, by the names of `/get_server_info`, and the counts
        so far as `stats`."""
        info = self._engine.info
        return {
            "model_path": info.model_name,
            "is_generation": True,
            "max_model_len": info.max_model_len,
            "vocab_size": info.vocab_size,
            "has_chat_template": info.has_chat_template,
            "device": info.device,
            "precision": info.precision,
            "kernels": info.kernels,
            "schedule_policy": info.schedule_policy,
            "prefix_caching": info.prefix_caching,
            "page_size": info.block_size,
            "max_total_num_tokens": info.kv_capacity_tokens,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "max_graph_rows": info.max_graph_rows,
            "stats": asdict(self._engine.stats()),
        }

    async def aclose(self) -> None:
        """Nothing was opened here."""

    async def _encoded(self, continuation: TokenIds | str, before: TokenIds) -> TokenIds:
        if isinstance(continuation, str):
            return await self.encoder.encode([Piece(continuation)], at_start=not before)
        return continuation

    def _answer(self, prompt: Prompt, call: Call, sampling: SamplingParams) -> AnswerInProgress:
        tokenizer = self._engine.tokenizer
        tags = self._reasoning_tags(call) if call.separate_reasoning else None
        if tags is None:
            return AnswerInProgress(call, sampling, tokenizer)
        reasoning = SeparatedReasoning(tags, prompt.text, sampling, tokenizer)
        return AnswerInProgress(call, sampling, tokenizer, reasoning)

    def _reasoning_tags(self, call: Call) -> ReasoningTags | None:
        template, name = self._engine.tokenizer.chat_template, self._engine.config.model.reasoning
        return tags_of_type(call.reasoning_type, reasoning_tags(template, name))


def _token_ids(prompt: Prompt) -> TokenIds:
    assert prompt.token_ids is not None, "a program with an encoder has tokens"
    return prompt.token_ids


def _score(token_ids: TokenIds, output: RequestOutput | None, start: int) -> Score:
    if output is None:
        return Score(logprobs=(), token_ids=token_ids)
    entries = (output.prompt_logprobs or ())[start:]
    return Score(
        logprobs=tuple(entry.logprob for entry in entries if entry is not None),
        token_ids=token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )
