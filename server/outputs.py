"""From engine outputs to what goes over the wire: one builder per format, streamed or whole.

Both ways take the same `RequestOutput`s, of which a streamed one has only what is new, and share
what counts, names and converts, so that they cannot disagree.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from sapwood.runtime.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    TokenLogprobs,
)
from sapwood.server.engine import TokenTexts
from sapwood.server.errors import CLIENT_CLOSED_REQUEST, ApiError

DONE = b"data: [DONE]\n\n"
MIN_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON does not have


def sse(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


@dataclass(slots=True)
class Usage:
    """Counts of one HTTP request: prompts count once, pieces add up."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, output: RequestOutput, *, is_first: bool) -> None:
        if is_first:
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens
        self.completion_tokens += sum(len(answer.token_ids) for answer in output.outputs)

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True, kw_only=True)
class OpenAIAnswer:
    """One answer of `/v1/chat/completions` or `/v1/completions`, in the making.

    Subclasses say how a choice looks. `include_usage` adds `usage` to each chunk: null, and the
    counts in a last chunk without choices.
    """

    id: str
    model: str
    fingerprint: str
    tokenizer: TokenTexts
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    usage: Usage = field(default_factory=Usage)
    started: set[int] = field(default_factory=set)  # indices of choices that have begun

    whole_object = ""
    chunk_object = ""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of an answer that is not streamed; `outputs` in the order of the prompts."""
        choices = []
        for index, output in enumerate(outputs):
            self._count(index, output)
            answer = output.outputs[0]
            choice = {
                "index": index,
                **self._whole_choice(index, answer),
                "logprobs": self._logprobs(index, answer),
                "finish_reason": finish_reason(answer),
                "stop_reason": answer.stop_reason,
            }
            choices.append(choice)
        return self._envelope(self.whole_object) | {
            "choices": choices,
            "usage": self.usage.as_dict(),
        }

    def pieces(self, index: int, output: RequestOutput) -> bytes:
        """The events for what is new in the answer to prompt `index`; may be none."""
        is_first = index not in self.started
        self._count(index, output)
        answer = output.outputs[0]
        choices: list[dict[str, Any]] = []
        if is_first:
            choices += self._opening(index)
        logprobs = self._logprobs(index, answer)
        if answer.text or logprobs is not None:
            piece = {"index": index, **self._piece(answer.text)}
            choices.append(piece | {"logprobs": logprobs, "finish_reason": None})
        if reason := finish_reason(answer):
            last = {"index": index, **self._piece("", is_last=True), "logprobs": None}
            choices.append(last | {"finish_reason": reason, "stop_reason": answer.stop_reason})
        return b"".join(sse(self._chunk([choice])) for choice in choices)

    def end(self) -> bytes:
        """What follows when every choice is finished."""
        if not self.include_usage:
            return DONE
        return sse(self._chunk([]) | {"usage": self.usage.as_dict()}) + DONE

    def _count(self, index: int, output: RequestOutput) -> None:
        self.usage.add(output, is_first=index not in self.started)
        self.started.add(index)

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._envelope(self.chunk_object) | {"choices": choices}
        return chunk | {"usage": None} if self.include_usage else chunk

    def _whole_choice(self, index: int, answer: CompletionOutput) -> dict[str, Any]:
        raise NotImplementedError

    def _opening(self, index: int) -> list[dict[str, Any]]:
        """Choices that come before the first piece."""
        return []

    def _piece(self, text: str, *, is_last: bool = False) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, index: int, answer: CompletionOutput) -> dict[str, Any] | None:
        raise NotImplementedError


class ChatAnswer(OpenAIAnswer):
    """`chat.completion` and `chat.completion.chunk`."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _whole_choice(self, index: int, answer: CompletionOutput) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": answer.text, "refusal": None}}

    def _opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _piece(self, text: str, *, is_last: bool = False) -> dict[str, Any]:
        return {"delta": {} if is_last else {"content": text}}

    def _logprobs(self, index: int, answer: CompletionOutput) -> dict[str, Any] | None:
        if answer.logprobs is None:
            return None
        entries = []
        for entry in answer.logprobs:
            top = [self._token(other) for other in entry.top]
            entries.append(self._token(entry) | {"top_logprobs": top})
        return {"content": entries, "refusal": None}

    def _token(self, entry: Logprob | TokenLogprobs) -> dict[str, Any]:
        return {
            "token": self.tokenizer.token_text(entry.token_id),
            "logprob": finite(entry.logprob),
            "bytes": list(self.tokenizer.token_raw_bytes(entry.token_id)),
        }


@dataclass(slots=True, kw_only=True)
class TextAnswer(OpenAIAnswer):
    """`text_completion`, whole and in chunks."""

    offsets: dict[int, int] = field(default_factory=dict)  # characters so far, by choice

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _whole_choice(self, index: int, answer: CompletionOutput) -> dict[str, Any]:
        return {"text": answer.text}

    def _piece(self, text: str, *, is_last: bool = False) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, index: int, answer: CompletionOutput) -> dict[str, Any] | None:
        """Four parallel lists. The chosen token is always among the likeliest."""
        if answer.logprobs is None:
            return None
        tokens, values, likeliest, offsets = [], [], [], []
        offset = self.offsets.get(index, 0)
        for entry in answer.logprobs:
            text = self._text(entry.token_id)
            top = {self._text(other.token_id): finite(other.logprob) for other in entry.top}
            tokens.append(text)
            values.append(finite(entry.logprob))
            likeliest.append(top | {text: finite(entry.logprob)})
            offsets.append(offset)
            offset += len(text)
        self.offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": likeliest,
            "text_offset": offsets,
        }

    def _text(self, token_id: int) -> str:
        """A key that no two tokens share: a part of a character is spelled in bytes."""
        raw = self.tokenizer.token_raw_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@dataclass(slots=True, kw_only=True)
class NativeAnswer:
    """One answer of `/generate`, in the making. What it says is cumulative, as SGLang's is."""

    tokenizer: TokenTexts
    with_text: bool = False  # texts in the log-probabilities
    index: int | None = None  # of the prompt, in a streamed batch
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_logprobs: list[list[Any]] = field(default_factory=list)
    top_logprobs: list[list[list[Any]] | None] = field(default_factory=list)

    def add(self, output: RequestOutput) -> dict[str, Any]:
        """Everything so far, with the piece `output`."""
        answer = output.outputs[0]
        self.text += answer.text
        self.token_ids += answer.token_ids
        meta: dict[str, Any] = {
            "id": output.request_id,
            "finish_reason": self._finish_reason(answer),
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(self.token_ids),
            "cached_tokens": output.num_cached_tokens,
        }
        if (finished := output.metrics.finished_time) is not None:
            meta["e2e_latency"] = finished - output.metrics.arrival_time
        if answer.logprobs is not None:
            self._add_logprobs(answer.logprobs)
            meta["output_token_logprobs"] = self.token_logprobs
            meta["output_top_logprobs"] = self.top_logprobs
            meta["input_token_logprobs"] = []
            meta["input_top_logprobs"] = []
        result = {"text": self.text, "output_ids": self.token_ids, "meta_info": meta}
        return result if self.index is None else result | {"index": self.index}

    def _add_logprobs(self, entries: Sequence[TokenLogprobs]) -> None:
        for entry in entries:
            self.token_logprobs.append(self._token(entry))
            self.top_logprobs.append([self._token(other) for other in entry.top] or None)

    def _token(self, entry: Logprob | TokenLogprobs) -> list[Any]:
        text = self.tokenizer.token_text(entry.token_id) if self.with_text else None
        return [finite(entry.logprob), entry.token_id, text]

    def _finish_reason(self, answer: CompletionOutput) -> dict[str, Any] | None:
        match answer.finish_reason:
            case None:
                return None
            case FinishReason.STOP:
                matched = answer.stop_reason
                return {
                    "type": "stop",
                    "matched": self.token_ids[-1] if matched is None else matched,
                }
            case FinishReason.LENGTH:
                return {"type": "length", "length": len(self.token_ids)}
            case FinishReason.ABORT:
                return {"type": "abort", "message": "the request was aborted"}


def finish_reason(answer: CompletionOutput) -> str | None:
    """OpenAI's word for why an answer ended. Raises ApiError if it was cut off from elsewhere."""
    if answer.finish_reason is FinishReason.ABORT:
        raise ApiError(
            CLIENT_CLOSED_REQUEST, "the request was aborted", kind="server_error", code="aborted"
        )
    return answer.finish_reason


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
