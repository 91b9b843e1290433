"""The engine for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from sapwood.runtime.chat import Chat, Message
from sapwood.runtime.engine_base import EngineBase, Hinting, Sampling
from sapwood.runtime.errors import EngineClosedError, EngineError
from sapwood.runtime.hints import Hints
from sapwood.runtime.outputs import RequestOutput
from sapwood.runtime.processing import Input
from sapwood.runtime.request import Request, SequenceOutput
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.turns import PrefixReport


@dataclass(frozen=True, slots=True)
class _Loop:
    """The place of all inboxes that were made on an event loop: one wake-up for a whole step."""

    loop: asyncio.AbstractEventLoop

    def run(self, deliver: Callable[[], None]) -> bool:
        try:
            self.loop.call_soon_threadsafe(deliver)
        except RuntimeError:  # the loop is closed, and with it everyone who waited on it
            return False
        return True


class _Inbox:
    """Where the outputs of one call arrive, on the event loop that made it."""

    def __init__(self) -> None:
        self.place = _Loop(asyncio.get_running_loop())
        self._queue: asyncio.Queue[SequenceOutput | None] = asyncio.Queue()

    def put(self, told: SequenceOutput | None) -> None:
        self._queue.put_nowait(told)

    async def take(self) -> SequenceOutput:
        told = await self._queue.get()
        if told is None:
            raise EngineClosedError("the engine was closed before the request was done")
        if told.error is not None:
            raise EngineError(told.error)
        return told


class AsyncEngine(EngineBase):
    """A model that answers many callers on an event loop.

        async with AsyncEngine("smollm2") as engine:
            async for piece in engine.stream("The capital of France is"):
                print(piece.outputs[0].text, end="")

    Making one loads the model, which takes a while: do it before the loop, or on a thread.
    Tokenising and templates run on threads, never on the loop.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    async def generate(
        self,
        inputs: Input | Sequence[Input],
        sampling: Sampling = None,
        *,
        request_ids: Sequence[str] | None = None,
        hints: Hinting = None,
    ) -> list[RequestOutput]:
        """Answer one input or a list of them, as `Engine.generate`.

        Cancelling the call ends its requests. Raises RequestError before anything runs,
        EngineError if the engine fails.
        """
        requests = await asyncio.to_thread(self._requests, inputs, sampling, request_ids, hints)
        requests = await self._constrained(requests)
        builders = {request.request_id: self._builder(request) for request in requests}
        inbox = _Inbox()
        unfinished = set(builders)
        self._mail.submit(requests, inbox)
        try:
            while unfinished:
                told = await inbox.take()
                builder = builders[told.request_id]
                builder.add(told)
                if builder.finished:
                    unfinished.discard(told.request_id)
        finally:
            self._mail.withdraw(requests, unfinished)
        return [self._whole(request, builders[request.request_id]) for request in requests]

    async def stream(
        self,
        input: Input,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        hints: Hints | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one input piece by piece; each output has what is new only.

        Closing the iterator, or cancelling who reads it, ends the request.
        """
        ids = None if request_id is None else [request_id]
        pieces = self.stream_all([input], sampling, request_ids=ids, hints=hints)
        async with aclosing(pieces):
            async for _, output in pieces:
                yield output

    async def stream_all(
        self,
        inputs: Sequence[Input],
        sampling: Sampling = None,
        *,
        request_ids: Sequence[str] | None = None,
        hints: Hinting = None,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Answer a list of inputs piece by piece; each piece comes with its input's index.

        All inputs are checked before any is submitted, and they are submitted together. Closing
        the iterator ends what is unfinished.
        """
        requests = await asyncio.to_thread(
            self._requests, list(inputs), sampling, request_ids, hints
        )
        requests = await self._constrained(self._streamable(requests))
        builders = {
            request.request_id: (index, self._builder(request))
            for index, request in enumerate(requests)
        }
        inbox = _Inbox()
        unfinished = set(builders)
        self._mail.submit(requests, inbox)
        try:
            while unfinished:
                told = await inbox.take()
                index, builder = builders[told.request_id]
                piece = builder.add(told)
                if builder.finished:
                    unfinished.discard(told.request_id)
                    self._remember(requests[index], builder)
                yield index, piece
        finally:
            self._mail.withdraw(requests, unfinished)

    async def abort(self, request_id: str) -> bool:
        """End a request; its caller gets what there is, with finish reason "abort".

        False if no such request is in flight. The id is compared exactly.
        """
        core_id = self._mail.request_id(request_id)
        if core_id is None:
            return False
        self._core.abort(core_id)
        return True

    async def explain_prefix(self, chat: Chat | Sequence[Message]) -> PrefixReport:
        """How much of a conversation continues its last turn, as `Engine.explain_prefix`."""
        return await asyncio.to_thread(self._inputs.explain, chat)

    async def flush_cache(self) -> None:
        """Drop every cached token that no running request holds."""
        await asyncio.wrap_future(self._core.flush_cache())

    async def _constrained(self, requests: list[Request]) -> list[Request]:
        """The requests with their matchers, once all their constraints are compiled.

        No thread waits for them. Cancelling it leaves nothing behind.
        """
        matchers = self._matchers(requests)
        if not matchers.done():
            await asyncio.wrap_future(matchers)
        return self._with_matchers(requests, matchers.result())
