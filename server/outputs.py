"""From engine outputs to what goes over the wire: one builder per format, streamed or whole.

Both ways take the same `RequestOutput`s, of which a streamed one has only what is new, and share
what counts, names and converts, so that they cannot disagree.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from sapwood.runtime.answer_format import AnswerParts, ToolCallPiece
from sapwood.runtime.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    TokenLogprobs,
)
from sapwood.server.engine import TokenTexts
from sapwood.server.errors import CLIENT_CLOSED_REQUEST, ApiError
from sapwood.server.outputs_sapwood import SapwoodAnswer

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
    reasoning_tokens: int = 0  # of completion_tokens

    def add(self, output: RequestOutput, *, is_first: bool) -> None:
        if is_first:
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens
        self.completion_tokens += output.num_generated_tokens
        self.reasoning_tokens += output.num_reasoning_tokens

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(slots=True, kw_only=True)
class OpenAIAnswer:
    """One answer of `/v1/chat/completions` or `/v1/completions`, in the making.

    Subclasses say how a choice looks. Each prompt has `num_answers` choices, behind those of the
    prompt before it. `include_usage` adds `usage` to each chunk: null, and the counts in a last
    chunk without choices.
    """

    id: str
    model: str
    fingerprint: str
    tokenizer: TokenTexts
    num_answers: int = 1
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    usage: Usage = field(default_factory=Usage)
    counted: set[int] = field(default_factory=set)  # prompts in `usage`
    started: set[int] = field(default_factory=set)  # choices that have begun

    whole_object = ""
    chunk_object = ""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of an answer that is not streamed; `outputs` in the order of the prompts."""
        choices = []
        for prompt_index, output in enumerate(outputs):
            self._count(prompt_index, output)
            for answer in output.outputs:
                index = prompt_index * self.num_answers + answer.index
                choice = {
                    "index": index,
                    **self._whole_choice(index, output, answer),
                    "finish_reason": self._finish_reason(index, answer),
                    "stop_reason": answer.stop_reason,
                }
                choices.append(choice)
        return self._envelope(self.whole_object) | {
            "choices": choices,
            "usage": self.usage.as_dict(),
            **self._whole_extras(outputs),
        }

    def pieces(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The events for what is new in an answer to a prompt; may be none."""
        self._count(prompt_index, output)
        answer = output.outputs[0]
        index = prompt_index * self.num_answers + answer.index
        choices: list[dict[str, Any]] = []
        if index not in self.started:
            self.started.add(index)
            choices += self._opening(index, output)
        logprobs = self._logprobs(index, answer)
        said = self._said(index, answer)
        if not said and logprobs is not None and answer.token_ids:
            said = [self._nothing()]
        for piece in said:
            choices.append({"index": index, **piece, "logprobs": logprobs, "finish_reason": None})
            logprobs = None  # they go with the first
        if reason := self._finish_reason(index, answer):
            last = {"index": index, **self._nothing(), "logprobs": None}
            choices.append(last | {"finish_reason": reason, "stop_reason": answer.stop_reason})
        return b"".join(sse(self._chunk([choice])) for choice in choices)

    def end(self) -> bytes:
        """What follows when every choice is finished."""
        if not self.include_usage:
            return DONE
        return sse(self._chunk([]) | {"usage": self.usage.as_dict()}) + DONE

    def _count(self, prompt_index: int, output: RequestOutput) -> None:
        self.usage.add(output, is_first=prompt_index not in self.counted)
        self.counted.add(prompt_index)

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

    def _whole_choice(
        self, index: int, output: RequestOutput, answer: CompletionOutput
    ) -> dict[str, Any]:
        raise NotImplementedError

    def _whole_extras(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """What stands beside the choices."""
        return {}

    def _opening(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Choices that come before the first piece."""
        return []

    def _said(self, index: int, answer: CompletionOutput) -> list[dict[str, Any]]:
        """What is new in a choice, each in an event of its own; empty where nothing is."""
        raise NotImplementedError

    def _nothing(self) -> dict[str, Any]:
        """What a choice says in an event that says nothing new."""
        raise NotImplementedError

    def _finish_reason(self, index: int, answer: CompletionOutput) -> str | None:
        return finish_reason(answer)

    def _logprobs(self, index: int, answer: CompletionOutput) -> dict[str, Any] | None:
        raise NotImplementedError


@dataclass(slots=True, kw_only=True)
class ChatAnswer(OpenAIAnswer):
    """`chat.completion` and `chat.completion.chunk`.

    Tool calls that an answer ends with finish it with "tool_calls", but with "stop" where the
    caller chose the tool (`names_tool`), as OpenAI has it. One that was cut off, by a limit or by
    a stop string, finishes it with "length": its arguments are no whole JSON object.

    With `may_call` a streamed answer's content begins as null: there may be none.
    """

    may_call: bool = False
    names_tool: bool = False
    # The arguments of each call so far, in pieces, by choice.
    arguments: dict[int, dict[int, list[str]]] = field(default_factory=dict)

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _whole_choice(
        self, index: int, output: RequestOutput, answer: CompletionOutput
    ) -> dict[str, Any]:
        parts = self._take_in(index, answer)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": parts.content or (None if parts.tool_calls else ""),
            "refusal": None,
        }
        if parts.reasoning:
            message["reasoning_content"] = parts.reasoning
        if parts.tool_calls:
            message["tool_calls"] = [_call(call, call.arguments) for call in parts.tool_calls]
        return {"message": message, "logprobs": self._logprobs(index, answer)}

    def _whole_extras(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return _prompt_logprobs(outputs[0], self.tokenizer)

    def _opening(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": None if self.may_call else ""}
        opening = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        # Whole, they stand beside the choices: once.
        return [opening | (_prompt_logprobs(output, self.tokenizer) if index == 0 else {})]

    def _said(self, index: int, answer: CompletionOutput) -> list[dict[str, Any]]:
        return [{"delta": delta} for delta in _deltas(self._take_in(index, answer))]

    def _nothing(self) -> dict[str, Any]:
        return {"delta": {}}

    def _take_in(self, index: int, answer: CompletionOutput) -> AnswerParts:
        """What is new in a choice, or all of it. Arguments are kept to be looked at in the end."""
        parts = AnswerParts(content=answer.text) if answer.parts is None else answer.parts
        for call in parts.tool_calls:
            so_far = self.arguments.setdefault(index, {}).setdefault(call.index, [])
            so_far.append(call.arguments)
        return parts

    def _finish_reason(self, index: int, answer: CompletionOutput) -> str | None:
        """To be asked when all of the choice is taken in."""
        reason, calls = finish_reason(answer), self.arguments.get(index)
        if reason != FinishReason.STOP or not calls:
            return reason
        if not all(_is_object("".join(pieces)) for pieces in calls.values()):
            return FinishReason.LENGTH
        return reason if self.names_tool else "tool_calls"

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
    """`text_completion`, whole and in chunks.

    With `echo`, the texts of the prompts, each choice begins with its prompt, and so do its
    log-probabilities.
    """

    echo: Sequence[str] = ()
    offsets: dict[int, int] = field(default_factory=dict)  # characters so far, by choice

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _whole_choice(
        self, index: int, output: RequestOutput, answer: CompletionOutput
    ) -> dict[str, Any]:
        entries = (*self._echoed(output), *(answer.logprobs or ()))
        has_logprobs = answer.logprobs is not None
        first = int(output.prompt_token_ids[0])
        return {
            "text": self._prompt_text(index) + answer.text,
            "logprobs": self._listed(index, entries, first) if has_logprobs else None,
            **({} if self.echo else _prompt_logprobs(output, self.tokenizer)),
        }

    def _opening(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        if not self.echo:
            extras = _prompt_logprobs(output, self.tokenizer)
            opening = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
            return [opening | extras] if extras else []
        entries, logprobs = self._echoed(output), None
        if output.outputs[0].logprobs is not None:
            logprobs = self._listed(index, entries, int(output.prompt_token_ids[0]))
        text = self._prompt_text(index)
        return [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}]

    def _prompt_text(self, index: int) -> str:
        return self.echo[index // self.num_answers] if self.echo else ""

    def _echoed(self, output: RequestOutput) -> tuple[TokenLogprobs | None, ...]:
        """The prompt's entries, where they are part of the choice."""
        return output.prompt_logprobs or () if self.echo else ()

    def _said(self, index: int, answer: CompletionOutput) -> list[dict[str, Any]]:
        return [{"text": answer.text}] if answer.text else []

    def _nothing(self) -> dict[str, Any]:
        return {"text": ""}

    def _logprobs(self, index: int, answer: CompletionOutput) -> dict[str, Any] | None:
        return None if answer.logprobs is None else self._listed(index, answer.logprobs)

    def _listed(
        self, index: int, entries: Sequence[TokenLogprobs | None], first: int = -1
    ) -> dict[str, Any]:
        """Four parallel lists. The chosen token is always among the likeliest.

        The first token of a prompt has no entry; `first` is its id.
        """
        tokens: list[str] = []
        values: list[float | None] = []
        likeliest: list[dict[str, float] | None] = []
        offsets: list[int] = []
        offset = self.offsets.get(index, 0)
        for entry in entries:
            text = self._text(first if entry is None else entry.token_id)
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
            if entry is None:
                values.append(None)
                likeliest.append(None)
                continue
            top = {self._text(other.token_id): finite(other.logprob) for other in entry.top}
            values.append(finite(entry.logprob))
            likeliest.append(top | {text: finite(entry.logprob)})
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
    """One answer of `/generate`, in the making. What it says is cumulative, as SGLang's is.

    `sapwood` is what is asked of it beside SGLang's fields, None: nothing.
    """

    tokenizer: TokenTexts
    sapwood: SapwoodAnswer | None = None
    with_text: bool = False  # texts in the log-probabilities
    index: int | None = None  # of the prompt, in a streamed batch
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_logprobs: list[list[Any]] = field(default_factory=list)
    top_logprobs: list[list[list[Any]] | None] = field(default_factory=list)
    input_start: int = 0  # the first prompt position in the log-probabilities
    input_token_logprobs: list[list[Any]] = field(default_factory=list)
    input_top_logprobs: list[list[list[Any]] | None] = field(default_factory=list)

    def add(self, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        """Everything so far, with `answer`, a piece in `output`."""
        self.text += answer.text if self.sapwood is None else self.sapwood.add(answer)
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
            if output.prompt_logprobs is not None:
                self._add_prompt(output)
            meta["input_token_logprobs"] = self.input_token_logprobs
            meta["input_top_logprobs"] = self.input_top_logprobs
        result = {"text": self.text, "output_ids": self.token_ids, "meta_info": meta}
        if self.sapwood is not None and (told := self.sapwood.told(answer)):
            result["sapwood"] = told
        return result if self.index is None else result | {"index": self.index}

    def _add_prompt(self, output: RequestOutput) -> None:
        ids = output.prompt_token_ids[self.input_start :].tolist()
        entries = (output.prompt_logprobs or ())[self.input_start :]
        for token_id, entry in zip(ids, entries, strict=True):
            if entry is None:
                text = self.tokenizer.token_text(token_id) if self.with_text else None
                self.input_token_logprobs.append([None, token_id, text])
                self.input_top_logprobs.append(None)
            else:
                self.input_token_logprobs.append(self._token(entry))
                self.input_top_logprobs.append([self._token(o) for o in entry.top] or None)

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
                if answer.ended_by_token and matched is None:
                    matched = self.token_ids[-1]
                return {"type": "stop", "matched": matched}
            case FinishReason.LENGTH:
                return {"type": "length", "length": len(self.token_ids)}
            case FinishReason.ABORT:
                return {"type": "abort", "message": "the request was aborted"}


def _deltas(parts: AnswerParts) -> Iterator[dict[str, Any]]:
    """What is new, in events that clients can add up by themselves.

    A call is opened in an event of its own, with its id and name and no arguments yet.
    """
    if parts.reasoning:
        yield {"reasoning_content": parts.reasoning}
    if parts.content:
        yield {"content": parts.content}
    for call in parts.tool_calls:
        if call.id is not None:
            yield {"tool_calls": [{"index": call.index, **_call(call, "")}]}
        if call.arguments:
            more = {"index": call.index, "function": {"arguments": call.arguments}}
            yield {"tool_calls": [more]}


def _call(call: ToolCallPiece, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _is_object(text: str) -> bool:
    """Whether it is a JSON object, whole."""
    try:
        return isinstance(json.loads(text, parse_int=str), dict)
    except (ValueError, RecursionError):
        return False


def _prompt_logprobs(output: RequestOutput, tokenizer: TokenTexts) -> dict[str, Any]:
    """vLLM's field: for each prompt token the log-probabilities by token id, null for the first.

    A token has a rank if it is among the likeliest that were asked for. Empty where nothing was.
    """
    if output.prompt_logprobs is None:
        return {}
    listed: list[dict[str, Any] | None] = []
    for entry in output.prompt_logprobs:
        if entry is None:
            listed.append(None)
            continue
        ranks = {other.token_id: rank for rank, other in enumerate(entry.top, start=1)}
        tokens: dict[int, Logprob | TokenLogprobs] = {o.token_id: o for o in entry.top}
        listed.append(
            {
                str(token_id): {
                    "logprob": finite(token.logprob),
                    "rank": ranks.get(token_id),
                    "decoded_token": tokenizer.token_text(token_id),
                }
                for token_id, token in ({entry.token_id: entry} | tokens).items()
            }
        )
    return {"prompt_logprobs": listed}


def finish_reason(answer: CompletionOutput) -> str | None:
    """OpenAI's word for why an answer ended. Raises ApiError if it was cut off from elsewhere."""
    if answer.finish_reason is FinishReason.ABORT:
        raise ApiError(
            CLIENT_CLOSED_REQUEST, "the request was aborted", kind="server_error", code="aborted"
        )
    return answer.finish_reason


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
