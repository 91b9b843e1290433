"""The synchronous engine."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
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
class _AnyThread:
    """The place of inboxes that are filled from wherever something is told."""

    def run(self, deliver: Callable[[], None]) -> bool:
        deliver()
        return True


class _Inbox:
    """Where the outputs of one call arrive; the thread that made it waits for them."""

    place = _AnyThread()

    def __init__(self) -> None:
        self._queue: SimpleQueue[SequenceOutput | None] = SimpleQueue()

    def put(self, told: SequenceOutput | None) -> None:
        self._queue.put(told)

    def take(self) -> SequenceOutput:
        told = self._queue.get()
        if told is None:
            raise EngineClosedError("the engine was closed before the request was done")
        if told.error is not None:
            raise EngineError(told.error)
        return told


class Engine(EngineBase):
    """A model that answers, one call at a time or from several threads.

        with Engine("smollm2") as engine:
            [output] = engine.generate("The capital of France is")

    Requests that share a prefix share its computation, within a call and between calls.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self,
        inputs: Input | Sequence[Input],
        sampling: Sampling = None,
        *,
        hints: Hinting = None,
    ) -> list[RequestOutput]:
        """Answer one input or a list of them, in their order; one input gives a list of one.

        An input is a string, a list of token ids, a list of chat messages or a `Chat`. `sampling`
        holds for all of them, or is a list with one for each; so do `hints`, which change when
        something runs and what is kept, never an answer. Raises RequestError before anything runs,
        EngineError if the engine fails.
        """
        requests = self._constrained(self._requests(inputs, sampling, hints=hints))
        builders = {request.request_id: self._builder(request) for request in requests}
        inbox = _Inbox()
        unfinished = set(builders)
        self._mail.submit(requests, inbox)
        try:
            while unfinished:
                told = inbox.take()
                builder = builders[told.request_id]
                builder.add(told)
                if builder.finished:
                    unfinished.discard(told.request_id)
        finally:
            self._mail.withdraw(requests, unfinished)
        return [self._whole(request, builders[request.request_id]) for request in requests]

    def stream(
        self,
        input: Input,
        sampling: SamplingParams | None = None,
        *,
        hints: Hints | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Answer one input piece by piece; each output has what is new only.

        Leaving the loop early ends the request. Raises like `generate`.
        """
        requests = self._streamable(self._requests([input], sampling, hints=hints))
        [request] = self._constrained(requests)
        return self._pieces(request)

    def _constrained(self, requests: list[Request]) -> list[Request]:
        """The requests with their matchers, once all their constraints are compiled."""
        matchers = self._matchers(requests)
        try:
            return self._with_matchers(requests, matchers.result())
        finally:
            matchers.cancel()  # where the caller was interrupted

    def _pieces(self, request: Request) -> Generator[RequestOutput, None, None]:
        builder = self._builder(request)
        inbox = _Inbox()
        unfinished = {request.request_id}
        self._mail.submit([request], inbox)
        try:
            while unfinished:
                piece = builder.add(inbox.take())
                if builder.finished:
                    unfinished.clear()
                    self._remember(request, builder)
                yield piece
        finally:
            self._mail.withdraw([request], unfinished)

    def explain_prefix(self, chat: Chat | Sequence[Message]) -> PrefixReport:
        """How much of a conversation continues its last turn, and why no more.

        Raises RequestError. Runs nothing; cost: that of tokenising.
        """
        return self._inputs.explain(chat)

    def flush_cache(self) -> None:
        """Drop every cached token that no running request holds."""
        self._core.flush_cache().result()
