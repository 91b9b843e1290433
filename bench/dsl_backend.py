"""A backend that answers at once, so that what is timed is the language alone."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from sapwood.frontend_lang.backends.interface import (
    Answer,
    Call,
    Piece,
    Prompt,
    RoleText,
    Score,
    TokenIds,
)
from sapwood.runtime.hints import Hints

_TEXT = " an answer"


class InstantEncoder:
    """A token for each byte; roles as ChatML writes them."""

    async def encode(self, pieces: Sequence[Piece], *, at_start: bool) -> TokenIds:
        return tuple(b"".join(piece.text.encode() for piece in pieces))

    async def role_text(self, roles: tuple[str, ...]) -> RoleText:
        return RoleText(f"<|im_start|>{roles[-1]}\n", "<|im_end|>\n")


class InstantBackend:
    name = "instant"
    chat_only = False

    def __init__(self) -> None:
        self.encoder = InstantEncoder()
        self._answer = Answer(
            text=_TEXT, token_ids=tuple(_TEXT.encode()), finish_reason="stop", meta={}
        )

    async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
        return [self._answer] * (call.options.get("n") or 1)

    async def stream(self, prompt: Prompt, call: Call) -> AsyncIterator[Answer]:
        yield self._answer

    async def score(
        self, prompt: Prompt, continuations: Sequence[TokenIds | str], hints: Hints
    ) -> list[Score]:
        return [Score(logprobs=(-1.0,) * len(continuation)) for continuation in continuations]

    async def flush_cache(self) -> None:
        pass

    async def server_info(self) -> Mapping[str, Any]:
        return {}

    async def aclose(self) -> None:
        pass
