"""What `/tokenize`, `/detokenize` and `/role_text` take: vLLM's bodies, SGLang's, and ours."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from sapwood.runtime.chat import Chat
from sapwood.runtime.role_text import MAX_ROLES
from sapwood.server.body import checked
from sapwood.server.errors import ApiError
from sapwood.server.schemas import MAX_PROMPTS, Wire, refused
from sapwood.server.schemas_openai import ChatRequest

# A few hundred milliseconds of a thread.
MAX_CHARACTERS = 2 * 2**20
MAX_TOKENS = 2**20
MAX_PIECES = 65_536

_NO_MEDIA = "only text is served; leave it out"
# What of a conversation's request decides on its text.
_CHAT_FIELDS = (
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
)


class Form(StrEnum):
    """What is to be tokenised, by the field that says it."""

    PROMPT = "prompt"
    MESSAGES = "messages"
    PIECES = "pieces"
    BATCH = "batch"


_FIELDS_OF: Mapping[Form, tuple[str, ...]] = MappingProxyType(
    {
        Form.PROMPT: ("add_special_tokens",),
        Form.MESSAGES: _CHAT_FIELDS,
        Form.PIECES: ("at_start",),
        Form.BATCH: (),
    }
)
_OBJECTS = WithJsonSchema({"type": "array", "items": {"type": "object"}})


class TextPiece(Wire):
    """A piece of text; special tokens in it are real only where a chat template wrote it."""

    text: str
    is_control: bool | None = None


class TextInPieces(Wire):
    """Pieces that stand together. `at_start`: nothing is before them."""

    pieces: Annotated[list[TextPiece], Field(max_length=MAX_PIECES, fail_fast=True)]
    at_start: bool | None = None


class TokenizeRequest(Wire):
    """One of `prompt`, `messages`, `pieces` and `batch`, which is several texts in pieces.

    `add_special_tokens` (true if not given) is for prompts; a conversation has those that its
    template writes. `at_start` is for `pieces`: nothing is before them.
    """

    model: str | None = None
    prompt: Annotated[Any, WithJsonSchema({"description": "a string or a list of strings"})] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    messages: Annotated[Any, _OBJECTS] = None
    tools: Annotated[Any, _OBJECTS] = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    mm_processor_kwargs: Annotated[Any, refused(_NO_MEDIA, {})] = None

    pieces: Annotated[list[TextPiece], Field(max_length=MAX_PIECES, fail_fast=True)] | None = None
    at_start: bool | None = None
    batch: (
        Annotated[list[TextInPieces], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | None
    ) = None

    def form(self) -> Form:
        """Which of the four it is. Raises ApiError for none, for several and for fields of
        another."""
        given = [form for form in Form if getattr(self, form) is not None]
        if len(given) != 1:
            raise ApiError(400, f"give one of {', '.join(Form)}", param="prompt")
        [form] = given
        for name in (*_CHAT_FIELDS, "add_special_tokens", "at_start"):
            if name not in _FIELDS_OF[form] and getattr(self, name) not in (None, False):
                raise ApiError(400, f"{name} is not for {form}; leave it out", param=name)
        return form

    @property
    def is_single(self) -> bool:
        """Whether the answer is of one text, and not a list."""
        return self.batch is None and not isinstance(self.prompt, list)

    def prompts(self) -> list[str]:
        """The texts. Raises ApiError."""
        texts = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if not texts or set(map(type, texts)) != {str}:
            raise ApiError(
                400, "prompt must be a string, or a list of strings, not empty", param="prompt"
            )
        if len(texts) > MAX_PROMPTS:
            raise ApiError(
                400,
                f"prompt has {len(texts)} texts, at most {MAX_PROMPTS} are taken",
                param="prompt",
            )
        _check_length(texts, "prompt")
        return texts

    def chat(self) -> Chat:
        """The conversation. Raises ApiError, RequestError."""
        given = {name: getattr(self, name) for name in _CHAT_FIELDS}
        return checked(given, ChatRequest).chat()

    def texts_in_pieces(self) -> list[TextInPieces]:
        """Of `pieces` or `batch`. Raises ApiError."""
        texts, param = self.batch, Form.BATCH
        if texts is None:
            texts = [TextInPieces(pieces=self.pieces or [], at_start=self.at_start)]
            param = Form.PIECES
        _check_length([piece.text for text in texts for piece in text.pieces], param)
        return texts


class DetokenizeRequest(Wire):
    """`skip_special_tokens` (true if not given, as SGLang has it) is for the answer's `text`; its
    `prompt` has them all, as vLLM has it."""

    model: str | None = None
    tokens: Annotated[
        Any, WithJsonSchema({"description": "token ids or a list of lists of token ids"})
    ]
    skip_special_tokens: bool | None = None

    def lists(self, vocab_size: int) -> tuple[list[list[int]], bool]:
        """The lists of token ids, and whether it is a single one. Raises ApiError."""
        value = self.tokens
        if not isinstance(value, list):
            raise _bad_tokens("must be a list of token ids, or a list of such lists")
        is_single = not value or type(value[0]) is not list
        lists = [value] if is_single else value
        if set(map(type, lists)) != {list} or not all(set(map(type, x)) <= {int} for x in lists):
            raise _bad_tokens("must hold whole numbers only, or lists of them only")
        num_tokens = sum(map(len, lists))
        if len(lists) > MAX_PROMPTS or num_tokens > MAX_TOKENS:
            raise _bad_tokens(
                f"has {num_tokens} ids in {len(lists)} lists, at most {MAX_TOKENS} ids in "
                f"{MAX_PROMPTS} lists are taken; send several requests"
            )
        for ids in filter(None, lists):
            outside = min(ids) if min(ids) < 0 else max(ids)
            if not 0 <= outside < vocab_size:
                raise _bad_tokens(
                    f"has token id {str(outside)[:20]}; the vocabulary is 0 to {vocab_size - 1}"
                )
        return lists, is_single


class RoleTextRequest(Wire):
    """The roles of a conversation's messages, in their order."""

    model: str | None = None
    roles: Annotated[list[str], Field(min_length=1, max_length=MAX_ROLES)]


def _check_length(texts: Sequence[str], param: str) -> None:
    """Raises ApiError for more text than one request may have tokenised."""
    length = sum(map(len, texts))
    if length > MAX_CHARACTERS:
        raise ApiError(
            400,
            f"{param} has {length} characters, at most {MAX_CHARACTERS} are taken at once; send "
            "several requests",
            param=param,
        )


def _bad_tokens(what: str) -> ApiError:
    return ApiError(400, f"tokens {what}", param="tokens")
