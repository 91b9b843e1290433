"""What a caller gets back.

`RequestOutput` is the same type whether an answer is streamed or whole: a streamed one carries
the new text, tokens and log-probabilities only, a whole one carries them all.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from sapwood.runtime.answer_format import AnswerParts


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # an end token, a stop token id or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the caller went away or asked for it


@dataclass(frozen=True, slots=True)
class Logprob:
    """The model's own log-probability of one token, before temperature and filters."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position; `top` is sorted, most likely first."""

    token_id: int
    logprob: float
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer, or the newest piece of it.

    `token_ids` holds every token that was generated, those of a stop string and the end token
    included; `text` never holds either. `stop_reason` is the stop string or the stop token id
    that ended the answer, None for the model's own end token, and for an answer that its
    constraint leaves nothing to add to. `ended_by_token`: the last token is an end token.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    ended_by_token: bool = False
    parts: AnswerParts | None = None  # of `text`, where the answer is written in a format
    num_reasoning_tokens: int = 0  # of `token_ids`, tags included


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Seconds on one monotonic clock; None where it has not happened yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The state of one request. `num_cached_tokens` counts prompt tokens that were not computed.

    `prompt_logprobs` has an entry for each prompt token if they were asked for, None for the first
    one and those before `prompt_logprobs_start`; a streamed request has it in its first output.
    `num_discarded_tokens` counts those of answers that `best_of` left out.
    """

    request_id: str
    prompt_token_ids: NDArray[np.int32]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_discarded_tokens: int = 0

    @property
    def num_generated_tokens(self) -> int:
        """Of all answers in this output, and of those that were left out."""
        return self.num_discarded_tokens + sum(len(output.token_ids) for output in self.outputs)

    @property
    def num_reasoning_tokens(self) -> int:
        """Of the answers in this output."""
        return sum(output.num_reasoning_tokens for output in self.outputs)

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)
