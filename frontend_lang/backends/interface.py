"""What a backend is: where a program's answers come from.

One small protocol with three verbs. Everything here is a value; all methods run on the one event
loop of `background.py`, and cancelling a call ends its request.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sapwood.frontend_lang.nodes import Message
from sapwood.frontend_lang.options import Options
from sapwood.runtime.constraints.spec import ConstraintSpec
from sapwood.runtime.hints import Hints

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of constant text. Special tokens are real in what a chat template wrote
    (`is_control`), and only there."""

    text: str
    is_control: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What an answer continues, three ways; a backend takes the one it knows.

    `token_ids` is None for a backend without an encoder. `messages` has the open one last, and is
    empty outside of roles.
    """

    text: str
    token_ids: TokenIds | None = None
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How a prompt is to be answered, beside the prompt."""

    options: Options = field(default_factory=lambda: Options())
    constraint: ConstraintSpec | None = None
    hints: Hints = field(default_factory=Hints)
    separate_reasoning: bool = False
    reasoning_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer, or the newest piece of it: then text and tokens are what is new only.

    `token_ids` spell exactly `text`: without an end token or a stop string, and where a stop began
    inside a token with that token replaced; in a stream they come with the last piece, whole. None
    for a backend without an encoder. `meta` is what `get_meta_info` tells, under SGLang's names:
    prompt_tokens, completion_tokens, cached_tokens, finish_reason {"type", "matched"}, and
    input_token_logprobs, output_token_logprobs, ... where they are asked for.
    """

    text: str
    token_ids: TokenIds | None = None
    reasoning: str = ""
    finish_reason: str | None = None  # "stop", "length", "abort"; None: more will follow
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How likely a continuation is: natural logarithms, one for each token of it.

    `token_ids`: prompt and continuation as they were scored, None without an encoder.
    """

    logprobs: tuple[float, ...]
    token_ids: TokenIds | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RoleText:
    """What a chat template writes around a message: before its content, and after it."""

    prefix: str
    suffix: str


class Encoder(Protocol):
    """The tokenizer and chat template of a backend."""

    async def encode(self, pieces: Sequence[Piece], *, at_start: bool) -> TokenIds:
        """Tokens of constants that stand together. `at_start`: nothing is before them, so that what
        a tokenizer puts in front of every text is put in front."""
        ...

    async def role_text(self, roles: tuple[str, ...]) -> RoleText:
        """What is written around the last message of a conversation of these roles. For an
        assistant's message the prefix is the generation prompt. Raises RequestError where the
        model has no template or the template refuses."""
        ...


class Backend(Protocol):
    """Answers prompts. A backend that cannot do what a call asks raises RequestError that says so;
    it leaves nothing out silently."""

    @property
    def name(self) -> str:
        """What errors call it."""
        ...

    @property
    def encoder(self) -> Encoder | None: ...

    @property
    def chat_only(self) -> bool:
        """Whether it takes messages, and generates in an assistant's message only."""
        ...

    async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
        """`n` whole answers."""
        ...

    def stream(self, prompt: Prompt, call: Call) -> AsyncIterator[Answer]:
        """One answer, piece by piece. Closing it ends the request."""
        ...

    async def score(
        self, prompt: Prompt, continuations: Sequence[TokenIds | str], hints: Hints
    ) -> list[Score]:
        """How likely each of several continuations of a prompt is: tokens where there is an
        encoder, else text. An empty prompt scores them from their second token on."""
        ...

    async def flush_cache(self) -> None: ...
    async def server_info(self) -> Mapping[str, Any]: ...

    async def aclose(self) -> None:
        """Free what the backend itself opened; an engine that was given stays open."""
        ...
