"""Inputs to requests: rendered, tokenised and checked.

Runs on the caller's side, never in the core.
"""

import itertools
import logging
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np

from sapwood.radix import Namespace
from sapwood.runtime.answer_format import AnswerFormat
from sapwood.runtime.chat import Chat, ChatOptions, Message
from sapwood.runtime.chat_encoder import ChatEncoder, EncodedChat
from sapwood.runtime.chat_template import RenderedChat
from sapwood.runtime.errors import ContextLengthError, RequestError
from sapwood.runtime.hints import NO_HINTS, Hints
from sapwood.runtime.outputs import CompletionOutput
from sapwood.runtime.reasoning import ReasoningFormat, reasoning_start, reasoning_tags
from sapwood.runtime.reasoning_block import ReasoningTags
from sapwood.runtime.request import Request, TokenIds
from sapwood.runtime.request_limits import RequestLimits
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.tokenizer import Tokenizer
from sapwood.runtime.tool_use import ToolUse, tool_use
from sapwood.runtime.turns import PrefixReport

logger = logging.getLogger(__name__)

Input = str | Sequence[int] | TokenIds | Sequence[Message] | Chat

# Ways out for whoever limits a reasoning that cannot be.
_NO_TAGS = "leave it out, or name the model's way of reasoning with the engine's option reasoning"
_NO_CHAT = "this is a plain prompt: leave it out, or send messages"


def is_single(inputs: Any) -> TypeGuard[Input]:
    """Whether this is one input rather than a list of them."""
    if isinstance(inputs, str | np.ndarray | Chat):
        return True
    if not isinstance(inputs, Sequence) or not inputs:
        return False
    return isinstance(inputs[0], int | np.integer | Mapping)


class InputProcessor:
    """Renders, tokenises and checks. Thread-safe; nothing wrong gets past it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        limits: RequestLimits,
        namespace: Namespace,
        reasoning: str = "auto",
    ) -> None:
        """`reasoning` is how the model marks it: a name of `REASONING_TAGS`, "none", or "auto"."""
        self._tokenizer = tokenizer
        self._reasoning_tags = reasoning_tags(tokenizer.chat_template, reasoning)
        self._chats = ChatEncoder(tokenizer)
        self._max_model_len = max_model_len
        self._limits = limits
        self._vocab_size = limits.vocab_size
        self._namespace = namespace
        self._serial_numbers = itertools.count()

    def process(
        self,
        prompt: Input,
        sampling: SamplingParams | None,
        *,
        caller_id: str | None,
        now: float,
        hints: Hints | None = None,
    ) -> Request:
        """A request for the core. Raises RequestError; cost: that of tokenising."""
        sampling = sampling if sampling is not None else SamplingParams()
        if not isinstance(sampling, SamplingParams):
            raise RequestError(
                f"sampling must be SamplingParams, not {type(sampling).__name__}", param="sampling"
            )
        if not isinstance(hints, Hints | None):
            raise RequestError(f"hints must be a Hints, not {type(hints).__name__}", param="hints")
        tools = tool_use(_options_of(prompt), self._tokenizer.tool_format)
        if tools is not None and sampling.max_tokens != 0:
            sampling = replace(sampling, constraint=tools.constraint(sampling.constraint))
        chat = self._encoded_chat(prompt) if _is_chat(prompt) else None
        token_ids = self._token_ids(prompt) if chat is None else chat.token_ids
        if not len(token_ids):
            raise RequestError(
                "the prompt is empty; give at least one token of text",
                param="prompt" if chat is None else "messages",
            )
        room = self._max_model_len - len(token_ids)
        if room < 1:
            raise self._too_long(prompt, str(len(token_ids)))
        self._limits.check(sampling, len(token_ids), self._tokenizer.eos_token_ids)
        answer_format = self._answer_format(chat, sampling, tools)
        token_ids.flags.writeable = False
        caller_id = caller_id if caller_id is not None else f"req-{uuid.uuid4().hex}"
        if chat is not None and chat.divergence is not None:
            logger.info(
                "%s: diverges from the conversation's last turn at token %d of %d: %s",
                caller_id,
                chat.divergence.position,
                len(token_ids),
                chat.divergence.reason,
            )
        return Request(
            request_id=str(next(self._serial_numbers)),
            caller_id=caller_id,
            prompt_token_ids=token_ids,
            sampling=sampling,
            max_tokens=room if sampling.max_tokens is None else sampling.max_tokens,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            eos_token_ids=self._tokenizer.eos_token_ids,
            arrival_time=now,
            namespace=self._namespace,
            chat=None if chat is None or _is_open(prompt) else chat.prompt,
            answer_format=answer_format,
            visible_tokens=self._visible_tokens(answer_format),
            hints=NO_HINTS if hints is None else hints,
        )

    def remember(self, request: Request, answer: CompletionOutput) -> None:
        """Keep what a finished conversation request was answered, for its next turn.

        Does nothing for a request that is no conversation, nor where the caller decided on tokens
        (biases, token lists, an open last message): others who come to have the same text should
        not get tokens that a model would hardly choose. O(prompt + answer).
        """
        if request.chat is not None and request.sampling.token_edits is None:
            self._chats.remember(
                request.chat,
                request.prompt_token_ids,
                answer.token_ids,
                answer.text,
                None if answer.parts is None else answer.parts.content,
            )

    def explain(self, chat: Chat | Sequence[Message]) -> PrefixReport:
        """How much of a conversation continues its last turn, and why no more. Raises RequestError.

        Cost: that of tokenising. Changes nothing but the order in which turns are forgotten.
        """
        return self._encoded_chat(chat).report

    def _answer_format(
        self, chat: EncodedChat | None, sampling: SamplingParams, tools: ToolUse | None
    ) -> AnswerFormat | None:
        """How the answer is read."""
        tags = self._reasoning_tags
        if sampling.max_reasoning_tokens is not None and (tags is None or chat is None):
            raise RequestError(
                "max_reasoning_tokens is for conversations of a model that reasons before it "
                f"answers; {_NO_TAGS if tags is None else _NO_CHAT}",
                param="max_reasoning_tokens",
            )
        inner = None if tools is None else tools.answer_format
        if tags is None or chat is None:
            return inner
        return _reasoning_format(tags, chat.rendered, inner)

    def _visible_tokens(self, answer_format: AnswerFormat | None) -> Mapping[int, bytes]:
        """Special tokens that whoever reads the answer has to see."""
        markers = () if answer_format is None else answer_format.markers
        return {i: m.encode() for m in markers if (i := self._tokenizer.special_id(m)) is not None}

    def _encoded_chat(self, chat: Chat | Sequence[Message]) -> EncodedChat:
        rendered = self._chats.render(chat)
        self._check_size(chat, rendered.text)
        return self._chats.encode(rendered, self._namespace)

    def _token_ids(self, prompt: Any) -> TokenIds:
        if isinstance(prompt, str):
            self._check_size(prompt, prompt)
            return self._tokenizer.encode(prompt)
        return self._checked_ids(prompt)

    def _check_size(self, prompt: Input, text: str) -> None:
        """Refuse a text that cannot fit, before tokens are made of it for seconds."""
        min_tokens = len(text) // max(1, self._tokenizer.max_token_bytes)
        if min_tokens >= self._max_model_len:
            raise self._too_long(prompt, f"at least {min_tokens}")

    def _too_long(self, prompt: Input, num_tokens: str) -> ContextLengthError:
        return ContextLengthError(
            f"This model's maximum context length is {self._max_model_len} tokens, and the "
            f"prompt has {num_tokens}, which leaves none for the answer; shorten the "
            "prompt, or start the engine with a larger max_model_len or KV cache",
            param="messages" if _is_chat(prompt) else "prompt",
        )

    def _checked_ids(self, prompt: Any) -> TokenIds:
        """A copy of the given ids as int32, each of them within the vocabulary."""
        wanted = f"whole numbers from 0 to {self._vocab_size - 1}"
        try:
            ids = np.array(prompt)
        except (ValueError, OverflowError) as error:
            raise RequestError(f"a prompt of token ids takes {wanted}", param="prompt") from error
        if ids.size == 0:
            return np.empty(0, np.int32)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError(
                f"a prompt is a string, a list of token ids ({wanted}) or a list of chat messages",
                param="prompt",
            )
        outside = ids[(ids < 0) | (ids >= self._vocab_size)]
        if outside.size:
            raise RequestError(
                f"token id {outside[0]} is outside the vocabulary; it takes {wanted}",
                param="prompt",
            )
        return ids.astype(np.int32)


def _reasoning_format(
    tags: ReasoningTags, rendered: RenderedChat, inner: AnswerFormat | None
) -> ReasoningFormat:
    """How a model that reasons answers this conversation, after its reasoning as `inner` says."""
    options = rendered.options
    open_message = rendered.messages[-1]["content"] if options.continue_final_message else None
    start = reasoning_start(tags, rendered.text, open_message)
    return ReasoningFormat(tags=tags, start=start, separate=options.separate_reasoning, inner=inner)


def _is_chat(prompt: Any) -> TypeGuard[Chat | Sequence[Message]]:
    return isinstance(prompt, Chat) or (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and bool(prompt)
        and isinstance(prompt[0], Mapping)
    )


def _options_of(prompt: Input) -> ChatOptions:
    return prompt.options if isinstance(prompt, Chat) else ChatOptions()


def _is_open(prompt: Input) -> bool:
    """Whether a conversation's last message is the beginning of the answer."""
    return _options_of(prompt).continue_final_message
