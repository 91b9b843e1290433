"""What the core tells to outputs: tokens become text, pieces become answers.

Runs on the caller's side, never in the core.
"""

from collections.abc import Sequence

from sapwood.runtime.detokenizer import IncrementalDetokenizer
from sapwood.runtime.outputs import (
    CompletionOutput,
    FinishReason,
    RequestOutput,
    TokenLogprobs,
)
from sapwood.runtime.request import Request, SequenceOutput
from sapwood.runtime.stop import StopMatcher


class AnswerBuilder:
    """Turns what the core tells of one request into outputs: the one code path for streams and
    whole answers."""

    def __init__(self, request: Request, token_bytes: Sequence[bytes]) -> None:
        self._request = request
        self._detokenizer = IncrementalDetokenizer(token_bytes, StopMatcher.of(request.sampling))
        self._pieces: list[RequestOutput] = []

    def add(self, told: SequenceOutput) -> RequestOutput:
        """The new piece: text, tokens and log-probabilities that were not given out before."""
        ended_by_token = told.finish_reason is FinishReason.STOP and not isinstance(
            told.stop_reason, str
        )
        text_ids = told.token_ids[:-1] if ended_by_token else told.token_ids
        piece = CompletionOutput(
            index=0,
            text=self._detokenizer.add(text_ids, finished=told.finished),
            token_ids=told.token_ids,
            logprobs=told.logprobs if self._request.sampling.logprobs else None,
            finish_reason=told.finish_reason,
            stop_reason=told.stop_reason,
        )
        output = RequestOutput(
            request_id=self._request.caller_id,
            prompt_token_ids=self._request.prompt_token_ids,
            outputs=(piece,),
            num_cached_tokens=told.num_cached_tokens,
            metrics=told.metrics,
        )
        self._pieces.append(output)
        return output

    def whole(self) -> RequestOutput:
        """All pieces so far as one output; there is at least one. O(tokens)."""
        last = self._pieces[-1]
        answers = [piece.outputs[0] for piece in self._pieces]
        logprobs: tuple[TokenLogprobs, ...] | None = None
        if self._request.sampling.logprobs:
            logprobs = tuple(entry for answer in answers for entry in answer.logprobs or ())
        whole = CompletionOutput(
            index=0,
            text="".join(answer.text for answer in answers),
            token_ids=tuple(token for answer in answers for token in answer.token_ids),
            logprobs=logprobs,
            finish_reason=answers[-1].finish_reason,
            stop_reason=answers[-1].stop_reason,
        )
        return RequestOutput(
            request_id=last.request_id,
            prompt_token_ids=last.prompt_token_ids,
            outputs=(whole,),
            num_cached_tokens=last.num_cached_tokens,
            metrics=last.metrics,
        )
