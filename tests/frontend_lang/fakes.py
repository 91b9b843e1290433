"""Backends without a model: answers by a script, and a record of what was asked."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sapwood.frontend_lang.backends.interface import (
    Answer,
    Call,
    Encoder,
    Piece,
    Prompt,
    RoleText,
    Score,
    TokenIds,
)
from sapwood.runtime.hints import Hints

BOS = 256  # in front of every text, as with many tokenizers
CONTROL = 257  # added to a byte of a control piece, so that tests can tell the two apart


class ByteEncoder:
    """One token for each byte; bytes of control pieces are tokens of their own."""

    def __init__(self) -> None:
        self.encoded: list[tuple[Piece, ...]] = []

    async def encode(self, pieces: Sequence[Piece], *, at_start: bool) -> TokenIds:
        self.encoded.append(tuple(pieces))
        ids = [BOS] if at_start else []
        for piece in pieces:
            offset = CONTROL if piece.is_control else 0
            ids.extend(byte + offset for byte in piece.text.encode())
        return tuple(ids)

    async def role_text(self, roles: tuple[str, ...]) -> RoleText:
        return RoleText(f"<{roles[-1]}>", f"</{roles[-1]}>")


def spelled(token_ids: Iterable[int]) -> str:
    """The text of a `ByteEncoder`'s tokens."""
    ids = [token - CONTROL if token >= CONTROL else token for token in token_ids if token != BOS]
    return bytes(ids).decode()


class ScriptedError(Exception):
    """What a `FakeBackend` fails with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One call of a backend."""

    verb: str  # "generate", "stream" or "score"
    prompt: Prompt
    call: Call | None = None
    continuations: tuple[TokenIds | str, ...] = ()
    hints: Hints | None = None


class FakeBackend:
    """Answers with what `script` says: one text for all, texts in turn (the last one again and
    again), or a function of the prompt and the call.

    `delay` seconds pass before each answer, and before each piece of a stream (one character).
    The calls whose numbers, from 0, are in `failing` raise ScriptedError. `num_cancelled` counts
    the calls that were cancelled under way, `num_active` those under way.
    """

    def __init__(
        self,
        script: str | Sequence[str] | Callable[[Prompt, Call], str] = "ok",
        *,
        delay: float = 0.0,
        failing: Iterable[int] = (),
        with_encoder: bool = True,
        chat_only: bool = False,
        logprob: Callable[[str], float] = lambda text: -float(len(text)),
    ) -> None:
        self.name = "fake"
        self.encoder: Encoder | None = ByteEncoder() if with_encoder else None
        self.chat_only = chat_only
        self.info: Mapping[str, Any] = {}  # what it also tells of itself
        self.asked: list[Asked] = []
        self.num_cancelled = 0
        self.num_active = 0
        self.is_closed = False
        self.num_flushes = 0
        self._script = script
        self._delay = delay
        self._failing = frozenset(failing)
        self._logprob = logprob
        self._num_answers = 0

    async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
        number = self._record(Asked(verb="generate", prompt=prompt, call=call, hints=call.hints))
        async with _Active(self):
            await self._pass_time()
            self._fail_if_scripted(number)
            count = call.options.get("n") or 1
            return [self._answer(prompt, call) for _ in range(count)]

    async def stream(self, prompt: Prompt, call: Call) -> AsyncIterator[Answer]:
        number = self._record(Asked(verb="stream", prompt=prompt, call=call, hints=call.hints))
        async with _Active(self):
            answer = self._answer(prompt, call)
            for index, letter in enumerate(answer.text):
                await self._pass_time()
                if index == len(answer.text) // 2:
                    self._fail_if_scripted(number)
                yield Answer(text=letter)
            self._fail_if_scripted(number)
            yield Answer(
                text="",
                token_ids=answer.token_ids,
                finish_reason=answer.finish_reason,
                meta=answer.meta,
            )

    async def score(
        self, prompt: Prompt, continuations: Sequence[TokenIds | str], hints: Hints
    ) -> list[Score]:
        asked = Asked(verb="score", prompt=prompt, continuations=tuple(continuations), hints=hints)
        number = self._record(asked)
        async with _Active(self):
            await self._pass_time()
            self._fail_if_scripted(number)
            return [self._score(prompt, continuation) for continuation in continuations]

    async def flush_cache(self) -> None:
        self.num_flushes += 1

    async def server_info(self) -> Mapping[str, Any]:
        return {"name": self.name, "num_calls": len(self.asked), **self.info}

    async def aclose(self) -> None:
        self.is_closed = True

    @property
    def prompts(self) -> list[str]:
        """The texts of all prompts, in the order of the calls."""
        return [asked.prompt.text for asked in self.asked]

    def _record(self, asked: Asked) -> int:
        self.asked.append(asked)
        return len(self.asked) - 1

    async def _pass_time(self) -> None:
        if self._delay:
            await asyncio.sleep(self._delay)

    def _fail_if_scripted(self, number: int) -> None:
        if number in self._failing:
            raise ScriptedError(f"call {number} fails")

    def _answer(self, prompt: Prompt, call: Call) -> Answer:
        text = self._text(prompt, call)
        return Answer(
            text=text,
            token_ids=tuple(text.encode()) if self.encoder else None,
            finish_reason="stop",
            meta={
                "prompt_tokens": len(prompt.token_ids or ()),
                "completion_tokens": len(text.encode()),
                "cached_tokens": 0,
                "finish_reason": {"type": "stop", "matched": None},
            },
        )

    def _text(self, prompt: Prompt, call: Call) -> str:
        if callable(self._script):
            return self._script(prompt, call)
        if isinstance(self._script, str):
            return self._script
        index = min(self._num_answers, len(self._script) - 1)
        self._num_answers += 1
        return self._script[index]

    def _score(self, prompt: Prompt, continuation: TokenIds | str) -> Score:
        if isinstance(continuation, str):
            return Score(logprobs=(self._logprob(continuation),))
        text = spelled(continuation)
        num_scored = len(continuation) if prompt.token_ids else max(len(continuation) - 1, 0)
        return Score(
            logprobs=(self._logprob(text),) * num_scored,
            token_ids=(*(prompt.token_ids or ()), *continuation),
        )


class _Active:
    """Counts a call while it is under way."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend

    async def __aenter__(self) -> None:
        self._backend.num_active += 1

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._backend.num_active -= 1
        if kind is not None and issubclass(kind, asyncio.CancelledError | GeneratorExit):
            self._backend.num_cancelled += 1
