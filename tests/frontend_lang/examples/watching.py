"""A backend that notes what passes through it, to count what a program had to compute."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from sapwood.frontend_lang.backends.interface import (
    Answer,
    Backend,
    Call,
    Prompt,
    Score,
    TokenIds,
)
from sapwood.runtime.hints import Hints


def num_distinct_tokens(sequences: Sequence[TokenIds]) -> int:
    """The tokens of the tree that sequences make."""
    return len({ids[:end] for ids in sequences for end in range(1, len(ids) + 1)})


class WatchingBackend:
    """`prompts` and `sequences`, prompt and answer, of all requests, as tokens."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.name = backend.name
        self.encoder = backend.encoder
        self.chat_only = backend.chat_only
        self.prompts: list[TokenIds] = []
        self.sequences: list[TokenIds] = []

    async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
        answers = await self._backend.generate(prompt, call)
        for answer in answers:
            self._note(prompt, answer.token_ids)
        return answers

    async def stream(self, prompt: Prompt, call: Call) -> AsyncIterator[Answer]:
        async for piece in self._backend.stream(prompt, call):
            if piece.finish_reason is not None:
                self._note(prompt, piece.token_ids)
            yield piece

    async def score(
        self, prompt: Prompt, continuations: Sequence[TokenIds | str], hints: Hints
    ) -> list[Score]:
        for continuation in continuations:
            assert not isinstance(continuation, str)
            self._note(prompt, continuation)
        return await self._backend.score(prompt, continuations, hints)

    async def flush_cache(self) -> None:
        await self._backend.flush_cache()

    async def server_info(self) -> Mapping[str, Any]:
        return await self._backend.server_info()

    async def aclose(self) -> None:
        await self._backend.aclose()

    def _note(self, prompt: Prompt, continuation: TokenIds | None) -> None:
        assert prompt.token_ids is not None
        assert continuation is not None
        self.prompts.append(prompt.token_ids)
        self.sequences.append((*prompt.token_ids, *continuation))
