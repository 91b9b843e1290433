"""What the server needs of an engine: the seam to `sapwood.AsyncEngine`.

A protocol, so that the endpoints can be tested with a fake of a few lines. Nothing here imports
torch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sapwood.runtime.chat import Chat
from sapwood.runtime.hints import Hints
from sapwood.runtime.outputs import RequestOutput
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.turns import PrefixReport

if TYPE_CHECKING:
    from sapwood.runtime.build import EngineInfo as EngineInfo
    from sapwood.runtime.constraints.compiler import CompilerStats as CompilerStats
    from sapwood.runtime.core import EngineStats as EngineStats
    from sapwood.runtime.tokenizer import TokenIds

Prompt = str | Sequence[int]  # text or token ids
# Or the messages of a conversation, alone or with options.
Input = Prompt | Sequence[Mapping[str, Any]] | Chat


class TokenTexts(Protocol):
    """How single tokens read, for log-probabilities."""

    def token_text(self, token_id: int) -> str: ...
    def token_raw_bytes(self, token_id: int) -> bytes: ...


class RenderedText(Protocol):
    """A conversation as the model gets it."""

    @property
    def text(self) -> str: ...


class ServingTokenizer(TokenTexts, Protocol):
    """Text to tokens and back, as `sapwood.runtime.tokenizer.Tokenizer`. May be used on threads."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenIds: ...
    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[TokenIds]: ...
    def encode_pieces(self, pieces: Sequence[tuple[str, bool]], *, at_start: bool) -> TokenIds: ...
    def encode_chat(self, chat: Chat) -> TokenIds: ...
    def render_chat(self, chat: Chat) -> RenderedText: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def special_id(self, content: str) -> int | None: ...

    @property
    def token_bytes(self) -> Sequence[bytes]: ...


class ServingEngine(Protocol):
    """An engine behind the endpoints.

    Cancelling `generate`, and closing what `stream_all` returned, aborts the requests.
    """

    @property
    def info(self) -> EngineInfo: ...
    @property
    def tokenizer(self) -> ServingTokenizer: ...
    @property
    def is_alive(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def constraint_stats(self) -> CompilerStats: ...
    async def generate(
        self,
        inputs: Sequence[Input],
        sampling: Sequence[SamplingParams],
        *,
        request_ids: Sequence[str],
        hints: Hints | Sequence[Hints] | None = None,
    ) -> list[RequestOutput]: ...
    def stream_all(
        self,
        inputs: Sequence[Input],
        sampling: Sequence[SamplingParams],
        *,
        request_ids: Sequence[str],
        hints: Hints | Sequence[Hints] | None = None,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]: ...
    async def explain_prefix(self, chat: Chat) -> PrefixReport: ...
    async def flush_cache(self) -> None: ...
    def close(self) -> None: ...
