"""The engine's outputs as answers of a program: whole, or piece by piece."""

from dataclasses import replace
from typing import Any

from sapwood.frontend_lang.backends.interface import Answer, Call, TokenIds
from sapwood.runtime.answer_tokens import answer_token_ids
from sapwood.runtime.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    TokenLogprobs,
)
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.separated_reasoning import SeparatedReasoning
from sapwood.runtime.tokenizer import Tokenizer

_Entry = tuple[float | None, int, str | None]  # SGLang's: log-probability, token id, text


class AnswerInProgress:
    """One answer of the engine, which comes in pieces or at once.

    Without `reasoning` its text is the engine's. With it the text is read again from the tokens,
    as the engine shows no tags that are special tokens.
    """

    def __init__(
        self,
        call: Call,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        reasoning: "SeparatedReasoning | None" = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._reasoning = reasoning
        self._with_text = bool(call.options.get("return_text_in_logprobs"))
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    def add(self, output: RequestOutput, piece: CompletionOutput) -> Answer:
        """What is new with a piece of an output; the last one has the tokens of all."""
        self._token_ids += piece.token_ids
        self._logprobs += piece.logprobs or ()
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        text, reasoning = piece.text, ""
        if self._reasoning is not None:
            text_ids = piece.token_ids[:-1] if piece.ended_by_token else piece.token_ids
            text, reasoning = self._reasoning.add(text_ids, finished=_has_ended(piece))
        return Answer(
            text=text,
            reasoning=reasoning,
            token_ids=self._spelled(piece) if _has_ended(piece) else None,
            finish_reason=None if piece.finish_reason is None else piece.finish_reason.value,
            meta=self._meta(output, piece),
        )

    def _spelled(self, last: CompletionOutput) -> TokenIds:
        whole = replace(last, token_ids=tuple(self._token_ids))
        token_ids = answer_token_ids(whole, self._sampling, self._tokenizer)
        if self._reasoning is None:
            return token_ids
        return self._reasoning.content_token_ids(token_ids)

    def _meta(self, output: RequestOutput, piece: CompletionOutput) -> dict[str, Any]:
        """What SGLang tells of an answer, so far."""
        meta: dict[str, Any] = {
            "id": output.request_id,
            "finish_reason": self._finish_reason(piece),
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(self._token_ids),
            "cached_tokens": output.num_cached_tokens,
        }
        if (finished := output.metrics.finished_time) is not None:
            meta["e2e_latency"] = finished - output.metrics.arrival_time
        if self._sampling.logprobs:
            meta |= self._logprobs_meta(output)
        return meta

    def _finish_reason(self, piece: CompletionOutput) -> dict[str, Any] | None:
        match piece.finish_reason:
            case None:
                return None
            case FinishReason.STOP:
                matched = piece.stop_reason
                if matched is None and piece.ended_by_token:
                    matched = self._token_ids[-1]
                return {"type": "stop", "matched": matched}
            case FinishReason.LENGTH:
                return {"type": "length", "length": len(self._token_ids)}
            case FinishReason.ABORT:
                return {"type": "abort", "message": "the request was aborted"}

    def _logprobs_meta(self, output: RequestOutput) -> dict[str, Any]:
        start = self._sampling.prompt_logprobs_start
        ids = output.prompt_token_ids[start:].tolist() if self._prompt_logprobs else []
        of_prompt = self._prompt_logprobs[start:]
        return {
            "output_token_logprobs": list(map(self._entry, self._logprobs)),
            "output_top_logprobs": list(map(self._top, self._logprobs)),
            "input_token_logprobs": [
                (None, token_id, self._text(token_id)) if entry is None else self._entry(entry)
                for token_id, entry in zip(ids, of_prompt, strict=True)
            ],
            "input_top_logprobs": [
                None if entry is None else self._top(entry) for entry in of_prompt
            ],
        }

    def _top(self, entry: TokenLogprobs) -> list[_Entry] | None:
        return [self._entry(other) for other in entry.top] or None

    def _entry(self, entry: Logprob | TokenLogprobs) -> _Entry:
        return entry.logprob, entry.token_id, self._text(entry.token_id)

    def _text(self, token_id: int) -> str | None:
        return self._tokenizer.token_text(token_id) if self._with_text else None


def _has_ended(piece: CompletionOutput) -> bool:
    return piece.finish_reason is not None
