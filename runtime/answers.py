"""What the core tells to outputs: tokens become text, pieces become answers.

Runs on the caller's side, never in the core.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from sapwood.runtime.answer_format import AnswerParts, joined
from sapwood.runtime.detokenizer import IncrementalDetokenizer
from sapwood.runtime.errors import EngineError
from sapwood.runtime.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    TokenLogprobs,
)
from sapwood.runtime.reasoning import ReasoningFormat
from sapwood.runtime.request import Request, SequenceOutput
from sapwood.runtime.scoring import PromptScores
from sapwood.runtime.stop import StopMatcher


class _AnswerText:
    """The text of one answer as it comes, and what it consists of."""

    def __init__(self, request: Request, token_bytes: Sequence[bytes]) -> None:
        answer_format = request.answer_format
        self._detokenizer = IncrementalDetokenizer(
            token_bytes, StopMatcher.of(request.sampling), request.visible_tokens
        )
        self._reader = None if answer_format is None else answer_format.reader()
        self._counter = (
            answer_format.counter() if isinstance(answer_format, ReasoningFormat) else None
        )

    def add(self, token_ids: Sequence[int], *, finished: bool) -> tuple[str, AnswerParts | None]:
        """The text that has become certain, and its parts where there is a format."""
        text = self._detokenizer.add(token_ids, finished=finished)
        return text, None if self._reader is None else self._reader.feed(text, finished=finished)

    def num_reasoning(self, token_ids: Sequence[int]) -> int:
        """How many more tokens are known to be reasoning."""
        if self._counter is None:
            return 0
        return sum(map(self._counter.add, map(self._detokenizer.bytes_of, token_ids)))


class AnswerBuilder:
    """Turns what the core tells of one request into outputs: the one code path for streams and
    whole answers."""

    def __init__(self, request: Request, token_bytes: Sequence[bytes]) -> None:
        sampling = request.sampling
        self._request = request
        self._texts = [
            _AnswerText(request, token_bytes) for _ in range(sampling.num_computed_answers)
        ]
        self._pieces: list[RequestOutput] = []
        self._num_unfinished = sampling.num_computed_answers

    @property
    def finished(self) -> bool:
        """Whether every answer has ended."""
        return not self._num_unfinished

    def add(self, told: SequenceOutput) -> RequestOutput:
        """The new piece: text, tokens and log-probabilities that were not given out before.

        Raises EngineError for an answer that ended by itself and breaks its constraint: where
        masks do not enforce all of it (`Matcher.verdict`).
        """
        self._num_unfinished -= told.finished
        text_ids = told.token_ids[:-1] if told.ended_by_token else told.token_ids
        answer = self._texts[told.answer_index]
        text, parts = answer.add(text_ids, finished=told.finished)
        piece = CompletionOutput(
            index=told.answer_index,
            text=text,
            token_ids=told.token_ids,
            logprobs=told.logprobs if self._request.sampling.needs_logprobs else None,
            finish_reason=told.finish_reason,
            stop_reason=told.stop_reason,
            ended_by_token=told.ended_by_token,
            parts=parts,
            num_reasoning_tokens=answer.num_reasoning(text_ids),
        )
        output = RequestOutput(
            request_id=self._request.caller_id,
            prompt_token_ids=self._request.prompt_token_ids,
            outputs=(piece,),
            num_cached_tokens=told.num_cached_tokens,
            metrics=told.metrics,
            prompt_logprobs=_prompt_logprobs(self._request, told.prompt_scores),
        )
        self._pieces.append(output)
        if told.finish_reason is FinishReason.STOP and told.stop_reason is None:
            self._judge(told.answer_index)
        return output

    def _judge(self, answer_index: int) -> None:
        matcher = self._request.matcher
        if matcher is None:
            return
        fault = matcher.verdict(self._whole_answer(answer_index).text.encode())
        if fault is not None:
            raise EngineError(
                f"the answer breaks its constraint: {fault}; ask again, or leave the constraint to "
                "a backend that enforces all of it"
            )

    def whole(self) -> RequestOutput:
        """All pieces so far as one output; there is at least one. O(tokens)."""
        last = self._pieces[-1]
        answers = [self._whole_answer(index) for index in range(len(self._texts))]
        num_wanted = self._request.sampling.n
        discarded: list[CompletionOutput] = []
        if len(answers) > num_wanted:
            answers.sort(key=_mean_logprob, reverse=True)
            answers, discarded = answers[:num_wanted], answers[num_wanted:]
            answers = [self._ranked(answer, index) for index, answer in enumerate(answers)]
        told = (piece.prompt_logprobs for piece in self._pieces)
        return RequestOutput(
            request_id=last.request_id,
            prompt_token_ids=last.prompt_token_ids,
            outputs=tuple(answers),
            num_cached_tokens=last.num_cached_tokens,
            metrics=last.metrics,
            prompt_logprobs=next((logprobs for logprobs in told if logprobs is not None), None),
            num_discarded_tokens=sum(len(answer.token_ids) for answer in discarded),
        )

    def _ranked(self, answer: CompletionOutput, index: int) -> CompletionOutput:
        """One of the best, under its new index; without what was needed to choose it only."""
        logprobs = answer.logprobs if self._request.sampling.logprobs else None
        return replace(answer, index=index, logprobs=logprobs)

    def _whole_answer(self, index: int) -> CompletionOutput:
        pieces = [p.outputs[0] for p in self._pieces if p.outputs[0].index == index]
        logprobs: tuple[TokenLogprobs, ...] | None = None
        if self._request.sampling.needs_logprobs:
            logprobs = tuple(chain.from_iterable(piece.logprobs or () for piece in pieces))
        parts = [piece.parts for piece in pieces if piece.parts is not None]
        return CompletionOutput(
            index=index,
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(chain.from_iterable(piece.token_ids for piece in pieces)),
            logprobs=logprobs,
            finish_reason=pieces[-1].finish_reason,
            stop_reason=pieces[-1].stop_reason,
            ended_by_token=pieces[-1].ended_by_token,
            parts=joined(parts) if parts else None,
            num_reasoning_tokens=sum(piece.num_reasoning_tokens for piece in pieces),
        )


def _mean_logprob(answer: CompletionOutput) -> float:
    entries = answer.logprobs or ()
    return sum(entry.logprob for entry in entries) / max(1, len(entries))


def _prompt_logprobs(
    request: Request, told: PromptScores | None
) -> tuple[TokenLogprobs | None, ...] | None:
    """An entry for each prompt token."""
    if told is None:
        return None
    scores = told.scores
    rows = zip(
        request.prompt_token_ids[told.start :].tolist(),
        scores.logprobs.tolist(),
        scores.top_ids.tolist(),
        scores.top_logprobs.tolist(),
        strict=True,
    )
    entries = (
        TokenLogprobs(
            token_id=token_id,
            logprob=logprob,
            top=tuple(map(Logprob, top_ids, top_logprobs)),
        )
        for token_id, logprob, top_ids, top_logprobs in rows
    )
    return (*[None] * told.start, *entries)
