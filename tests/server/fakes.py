"""An engine without a model: bytes are tokens, answers are canned, and aborts are recorded."""

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from sapwood.runtime.answer_format import AnswerParts, AnswerReader, ToolCallPiece
from sapwood.runtime.chat import Chat, plain_messages
from sapwood.runtime.chat_template import RenderedChat
from sapwood.runtime.constraints.compiler import CompilerStats
from sapwood.runtime.control_tokens import ControlledText
from sapwood.runtime.errors import ContextLengthError, RequestError
from sapwood.runtime.hints import Hints
from sapwood.runtime.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.tools import ToolChoice, ToolMode
from sapwood.runtime.turns import Divergence, PrefixReport

T = TypeVar("T")

END = 256  # the id of the end token
ANSWER = "Hello, wörld! One, two, three."


class ByteTokenizer:
    """Puts nothing in front of a text; `<end>`, where a template wrote it, is the end token."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        return np.array(list(text.encode()), np.int32)

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]], *, at_start: bool) -> np.ndarray:
        ids: list[int] = []
        for text, is_control in pieces:
            parts = text.split("<end>") if is_control else [text]
            for i, part in enumerate(parts):
                ids += [*[END][: i > 0], *part.encode()]
        return np.array(ids, np.int32)

    def encode_chat(self, chat: Chat) -> np.ndarray:
        return self.encode_pieces([(self.render_chat(chat).text, True)], at_start=True)

    def render_chat(self, chat: Chat) -> RenderedChat:
        messages = plain_messages(chat.messages)
        text = "".join(f"{m['role']}:{m['content']}<end>" for m in messages)
        text += "assistant:" if chat.options.opens_an_answer else ""
        return RenderedChat(ControlledText(text, (), has_quoted=False), messages, chat.options)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [id for id in token_ids if not (skip_special_tokens and self.is_special(id))]
        return b"".join(map(self.token_raw_bytes, kept)).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id == END

    def special_id(self, content: str) -> int | None:
        return END if content == "<end>" else None

    @property
    def token_bytes(self) -> Sequence[bytes]:
        return [*(bytes([byte]) for byte in range(256)), b""]

    def token_raw_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == END else bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.token_raw_bytes(token_id).decode(errors="replace")


def call(name: str, arguments: str) -> str:
    """A tool call as `CallReader` finds it in an answer."""
    return f"\x01{name}\x02{arguments}\x03"


class CallReader:
    """Reads an answer's calls, which no text of an answer looks like."""

    def __init__(self) -> None:
        self._index, self._name, self._where = -1, "", "\x03"

    def feed(self, text: str, *, finished: bool) -> AnswerParts:
        content: list[str] = []
        pieces: list[ToolCallPiece] = []
        for character in text:
            if character in "\x01\x02\x03":
                self._where = character
                if character == "\x01":
                    self._index, self._name = self._index + 1, ""
                if character == "\x02":
                    id = f"call_{self._index}"
                    pieces.append(ToolCallPiece(index=self._index, id=id, name=self._name))
            elif self._where == "\x01":
                self._name += character
            elif self._where == "\x02":
                pieces.append(ToolCallPiece(index=self._index, arguments=character))
            else:
                content.append(character)
        return AnswerParts(content="".join(content), tool_calls=tuple(pieces))


def whole_parts(text: str) -> AnswerParts:
    """The parts of a whole answer, each call in one piece."""
    parts = CallReader().feed(text, finished=True)
    opened = [piece for piece in parts.tool_calls if piece.id is not None]
    calls = [
        replace(call, arguments="".join(p.arguments for p in parts.tool_calls if p.index == i))
        for i, call in enumerate(opened)
    ]
    return replace(parts, tool_calls=tuple(calls))


@dataclass(frozen=True)
class Canned:
    """`has_calls`: they are read, if there are any."""

    text: str
    has_calls: bool


class FakeEngine:
    """Answers `answer`, or letters drawn with the seed if the temperature is not 0.

    Where a conversation has tools, calls in `answer` (see `call`) are told as such; `must_call` is
    answered where a call is required. A constrained answer is always `answer`: whoever asks for one
    knows what satisfies it.

    `delay` is the time of a step, `prefill` that before the first token. `fail` is raised after
    `fail_after` tokens.
    """

    def __init__(
        self,
        *,
        answer: str = ANSWER,
        must_call: str = "",
        max_model_len: int = 4096,
        delay: float = 0.0,
        prefill: float = 0.0,
        fail: Exception | None = None,
        fail_after: int = 0,
    ) -> None:
        self.answer, self.must_call = answer, must_call
        self.delay, self.prefill = delay, prefill
        self.fail, self.fail_after = fail, fail_after
        self.tokenizer = ByteTokenizer()
        self.is_alive = True
        self.running: set[str] = set()
        self.started: list[str] = []
        self.aborted: list[str] = []
        self.inputs: list[Any] = []
        self.sampling: list[SamplingParams] = []
        self.hints: list[Hints] = []  # of every prompt
        self.num_flushes = 0
        self.closed = False
        self._seen: set[bytes] = set()
        self._counts = {"prompt_tokens": 0, "cached_tokens": 0, "generated_tokens": 0}
        self._finished: dict[str, int] = {}
        self.info = SimpleNamespace(
            model_name="fake/model", precision="float32", device="cpu", kernels="none",
            schedule_policy="lpm", prefix_caching=True, max_model_len=max_model_len,
            num_kv_blocks=64, block_size=16, kv_capacity_tokens=1024, kv_bytes=2**20,
            vocab_size=257, load_seconds=0.1, created=1_700_000_000, has_chat_template=True,
            reasoning_tags=None, max_num_batched_tokens=512, max_graph_rows=0,
        )  # fmt: skip

    def stats(self) -> Any:
        return SimpleNamespace(
            num_running=len(self.running), num_waiting=0, num_free_blocks=60, num_tree_blocks=4,
            num_warm_blocks=0, num_taken_up=0, fixed_rows_per_step=None,
            kv_usage=0.0, num_steps=1, computed_tokens=1, num_preemptions=0, num_quarantines=0,
            num_finished_by_reason=self._finished, **self._counts,
        )  # fmt: skip

    def constraint_stats(self) -> CompilerStats:
        names = [field.name for field in fields(CompilerStats)]
        return CompilerStats(**dict.fromkeys(names, 0))

    async def generate(
        self,
        inputs: Sequence[Any],
        sampling: Sequence[SamplingParams],
        *,
        request_ids: Sequence[str],
        hints: Hints | Sequence[Hints] | None = None,
    ) -> list[RequestOutput]:
        self._take_hints(hints, len(inputs))
        prompts = [self._prompt(prompt) for prompt in inputs]
        runs = zip(prompts, sampling, request_ids, map(self._answer_to, inputs), strict=True)
        tasks = [asyncio.ensure_future(self._whole(*run)) for run in runs]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stream_all(
        self,
        inputs: Sequence[Any],
        sampling: Sequence[SamplingParams],
        *,
        request_ids: Sequence[str],
        hints: Hints | Sequence[Hints] | None = None,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        self._take_hints(hints, len(inputs))
        prompts = [self._prompt(prompt) for prompt in inputs]
        runs = zip(prompts, sampling, request_ids, map(self._answer_to, inputs), strict=True)
        async with aclosing(merged([self._run(*run) for run in runs])) as pieces:
            async for piece in pieces:
                yield piece

    async def explain_prefix(self, chat: Chat) -> PrefixReport:
        num_tokens = len(self._prompt(chat))
        there = Divergence(position=3, expected_text="a", found_text="b", reason="it differs")
        return PrefixReport(num_tokens=num_tokens, num_remembered_tokens=2, divergence=there)

    async def flush_cache(self) -> None:
        self.num_flushes += 1
        self._seen.clear()

    def close(self) -> None:
        self.closed = True

    def _take_hints(self, hints: Hints | Sequence[Hints] | None, num_inputs: int) -> None:
        told = hints if isinstance(hints, Sequence) else [hints or Hints()] * num_inputs
        assert len(told) == num_inputs, "hints are for all prompts, or one for each"
        self.hints += told

    def _answer_to(self, given: Any) -> Canned:
        choice = given.options.choice if isinstance(given, Chat) else ToolChoice(ToolMode.NONE)
        if choice.mode is ToolMode.NONE:
            return Canned(self.answer, has_calls=False)
        must_call = choice.mode is not ToolMode.AUTO and self.must_call
        return Canned(must_call or self.answer, has_calls=True)

    def _prompt(self, given: Any) -> np.ndarray:
        self.inputs.append(given)
        if isinstance(given, Chat):
            given = given.messages
        if isinstance(given, str):
            ids = list(given.encode())
        elif isinstance(given[0], Mapping):
            ids = list("".join(f"{m['role']}:{_text(m)}\n" for m in given).encode())
        else:
            ids = list(given)
        if not ids:
            raise RequestError("the prompt is empty; give at least one token", param="prompt")
        if len(ids) >= self.info.max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {self.info.max_model_len} tokens, and the "
                f"prompt has {len(ids)}",
                param="messages" if isinstance(given[0], Mapping) else "prompt",
            )
        return np.array(ids, np.int32)

    async def _whole(
        self, ids: np.ndarray, sampling: SamplingParams, rid: str, canned: Canned
    ) -> RequestOutput:
        pieces = [piece async for piece in self._run(ids, sampling, rid, canned)]
        wholes = []
        for index in range(sampling.n):
            answers = [p.outputs[0] for p in pieces if p.outputs[0].index == index]
            logprobs = tuple(entry for answer in answers for entry in answer.logprobs or ())
            text = "".join(answer.text for answer in answers)
            whole = CompletionOutput(
                index=index,
                text=text,
                parts=whole_parts(text) if canned.has_calls else None,
                token_ids=tuple(token for answer in answers for token in answer.token_ids),
                logprobs=logprobs if sampling.logprobs else None,
                finish_reason=answers[-1].finish_reason,
                stop_reason=answers[-1].stop_reason,
                ended_by_token=answers[-1].ended_by_token,
            )
            wholes.append(whole)
        return replace(pieces[0], outputs=tuple(wholes), metrics=pieces[-1].metrics)

    async def _run(
        self, ids: np.ndarray, sampling: SamplingParams, rid: str, canned: Canned
    ) -> AsyncGenerator[RequestOutput, None]:
        readers: list[AnswerReader] = [CallReader() for _ in range(sampling.n)]
        self.sampling.append(sampling)
        self.started.append(rid)
        self.running.add(rid)
        arrival, finished = time.monotonic(), False
        cached = len(ids) - 1 if ids.tobytes() in self._seen else 0
        self._seen.add(ids.tobytes())
        try:
            await asyncio.sleep(self.prefill)
            first = time.monotonic()
            steps = [
                (index, *step)
                for index in range(sampling.n)
                for step in _steps(canned.text, sampling, index)
            ]
            for i, (index, token, text, reason, matched) in enumerate(steps):
                await asyncio.sleep(self.delay)
                if self.fail is not None and i >= self.fail_after:
                    finished = True
                    raise self.fail
                now = time.monotonic() if reason else None
                finished = i + 1 == len(steps)
                token_ids = () if token is None else (token,)
                parts = readers[index].feed(text, finished=bool(reason))
                piece = CompletionOutput(
                    index=index, text=text, token_ids=token_ids,
                    logprobs=_logprobs(token_ids, sampling), finish_reason=reason,
                    stop_reason=matched, ended_by_token=token == END,
                    parts=parts if canned.has_calls else None,
                )  # fmt: skip
                times = RequestMetrics(
                    arrival_time=arrival, first_scheduled_time=arrival, first_token_time=first,
                    finished_time=now,
                )  # fmt: skip
                self._count(piece, len(ids) if i == 0 else 0, cached if i == 0 else 0)
                output = RequestOutput(
                    request_id=rid, prompt_token_ids=ids, outputs=(piece,),
                    num_cached_tokens=cached, metrics=times,
                )  # fmt: skip
                yield output if i else replace(output, prompt_logprobs=_of_prompt(ids, sampling))
        finally:
            self.running.discard(rid)
            if not finished:
                self.aborted.append(rid)

    def _count(self, piece: CompletionOutput, prompt_tokens: int, cached_tokens: int) -> None:
        self._counts["prompt_tokens"] += prompt_tokens
        self._counts["cached_tokens"] += cached_tokens
        self._counts["generated_tokens"] += 1
        if piece.finish_reason is not None:
            reason = str(piece.finish_reason)
            self._finished[reason] = self._finished.get(reason, 0) + 1


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _of_prompt(
    ids: np.ndarray, sampling: SamplingParams
) -> tuple[TokenLogprobs | None, ...] | None:
    if sampling.prompt_logprobs is None:
        return None
    start = max(1, sampling.prompt_logprobs_start)
    given = [_top(token, sampling.prompt_logprobs) for token in ids.tolist()]
    return (*[None] * start, *given[start:])


def _steps(
    answer: str, sampling: SamplingParams, index: int
) -> list[tuple[int | None, str, FinishReason | None, str | int | None]]:
    """Token, new text, finish reason and what matched, for each step of an answer."""
    if sampling.max_tokens == 0:
        return [(None, "", FinishReason.LENGTH, None)]
    if sampling.temperature and sampling.constraint is None:
        draw = random.Random(None if sampling.seed is None else sampling.seed + index)
        answer = "".join(draw.choice("abcdefgh ") for _ in range(24))
    limit = 10_000 if sampling.max_tokens is None else sampling.max_tokens
    data, text_len, steps = answer.encode(), 0, []
    ends = [(data.find(stop.encode()), stop) for stop in sampling.stop if stop.encode() in data]
    cut, stop = min(ends, default=(len(data), None))
    for i, token in enumerate((*data, END)):
        at_stop = stop is not None and i + 1 == cut + len(stop.encode())
        so_far = data[: min(i + 1, cut)].decode(errors="ignore")
        new, text_len = so_far[text_len:], len(so_far)
        reason: FinishReason | None = None
        if at_stop or token == END:
            reason = FinishReason.STOP
        elif i + 1 == limit:
            reason = FinishReason.LENGTH
        steps.append((token, new, reason, stop if at_stop else None))
        if reason:
            break
    return steps


def _logprobs(
    token_ids: tuple[int, ...], sampling: SamplingParams
) -> tuple[TokenLogprobs, ...] | None:
    if not sampling.logprobs:
        return None
    return tuple(_top(token, sampling.top_logprobs) for token in token_ids)


def _top(token: int, num_top: int) -> TokenLogprobs:
    values = [-0.5, -1.5, -math.inf, *(-3.0 - i for i in range(20))]
    top = tuple(Logprob((token + i) % 257, values[i]) for i in range(num_top))
    return TokenLogprobs(token_id=token, logprob=-0.5, top=top)


async def merged(
    streams: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams with the index of each one's stream, as they come.

    The first error ends them all; so does closing.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((index, item))
        except Exception as error:
            queue.put_nowait(error)
        queue.put_nowait(None)

    pumps = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(streams)]
    num_open = len(pumps)
    try:
        while num_open:
            match await queue.get():
                case None:
                    num_open -= 1
                case Exception() as error:
                    raise error
                case (index, item):
                    yield index, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
