"""What all endpoints of one application share: the engine once it is there, names and limits."""

import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel

import sapwood
from sapwood.runtime.errors import SapwoodError
from sapwood.runtime.hints import NO_HINTS, Hints
from sapwood.runtime.outputs import RequestOutput
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.server.body import read_json
from sapwood.server.connection import unless_left
from sapwood.server.engine import Input, ServingEngine
from sapwood.server.errors import ApiError, unavailable
from sapwood.server.metrics import ServerMetrics
from sapwood.server.schemas import in_callers_words

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one HTTP request asks of the engine: the three sequences have an entry per prompt.

    `names` are the caller's words for ours, for errors. `hints` hold for all prompts, or are one
    for each.
    """

    prompts: Sequence[Input]
    sampling: Sequence[SamplingParams]
    request_ids: Sequence[str]
    names: Mapping[str, str] = field(default_factory=dict)
    hints: Hints | Sequence[Hints] = NO_HINTS


@dataclass(slots=True)
class _PromptLogprobs:
    """An engine tells those of a prompt once; each answer's first piece gets them here."""

    told: dict[int, RequestOutput] = field(default_factory=dict)  # by prompt
    begun: set[tuple[int, int]] = field(default_factory=set)  # prompts and answers

    def joined(self, prompt_index: int, piece: RequestOutput) -> RequestOutput:
        if piece.prompt_logprobs is not None:
            self.told[prompt_index] = piece
        answer = (prompt_index, piece.outputs[0].index)
        if answer in self.begun:
            return piece
        self.begun.add(answer)
        telling = self.told.get(prompt_index, piece)
        return replace(piece, prompt_logprobs=telling.prompt_logprobs)


class Serving:
    """The engine behind an application, and the ways in which endpoints use it.

    With `load`, the engine is made on a thread by `start` and belongs to us: `close` ends it.
    """

    def __init__(
        self,
        *,
        engine: ServingEngine | None,
        load: Callable[[], ServingEngine] | None,
        served_model_names: Sequence[str],
        max_body_bytes: int,
        ping_seconds: float,
    ) -> None:
        self._engine = engine
        self._load = load
        self._names = tuple(served_model_names)
        self._failure: Exception | None = None
        self._closed = False
        self._lock = threading.Lock()  # between the end of loading and `close`
        self.max_body_bytes = max_body_bytes
        self.ping_seconds = ping_seconds
        self.metrics = ServerMetrics(lambda: self._engine)

    def start(self) -> None:
        """Begin to load, if there is something to load. Returns at once."""
        if self._load is not None:
            # A daemon: a process that is told to end does not wait for weights.
            threading.Thread(target=self._make_engine, name="sapwood-load", daemon=True).start()

    def close(self) -> None:
        """End the engine if it is ours: requests in flight fail. May take as long as a step."""
        with self._lock:
            self._closed = True
        if self._engine is not None and self._load is not None:
            self._engine.close()

    def _make_engine(self) -> None:
        assert self._load is not None
        try:
            engine = self._load()
        except Exception as error:
            self._failure = error
            if not isinstance(error, SapwoodError):
                logger.exception("the engine could not be made")
            return
        with self._lock:
            if not self._closed:
                self._engine = engine
                return
        engine.close()

    @property
    def engine(self) -> ServingEngine:
        """The engine. Raises ApiError (503) while there is none."""
        if self._engine is not None:
            return self._engine
        if self._failure is not None:
            raise unavailable(f"the model could not be loaded: {self._failure}")
        raise unavailable("the model is being loaded; try again in a moment")

    @property
    def has_failed(self) -> bool:
        """Whether waiting is in vain: loading failed, or the engine died."""
        dead = self._engine is not None and not self._engine.is_alive
        return self._failure is not None or dead

    @property
    def model_names(self) -> tuple[str, ...]:
        return self._names or (self.engine.info.model_name,)

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same seed may give another answer."""
        info = self.engine.info
        what = (sapwood.__version__, info.model_name, info.precision, info.device, info.kernels)
        return f"fp_{sha256(repr(what).encode()).hexdigest()[:10]}"

    def model_name(self, asked: str | None) -> str:
        """The name to answer under. Raises ApiError (404) for a model that is not served."""
        names = self.model_names
        if asked is None:
            return names[0]
        if asked not in names:
            served = ", ".join(names)
            raise ApiError(
                404,
                f"the model {asked[:200]!r} is not served here; served: {served}",
                param="model",
                code="model_not_found",
            )
        return asked

    async def read(self, request: Request, model: type[Model]) -> Model:
        """The request's body, checked. Raises ApiError."""
        return await read_json(request, model, max_bytes=self.max_body_bytes)

    async def answer(self, request: Request, work: Work) -> list[RequestOutput]:
        """Whole answers, in the order of the prompts. Raises ClientLeft, ApiError, SapwoodError."""
        answers = self.engine.generate(
            work.prompts, work.sampling, request_ids=work.request_ids, hints=work.hints
        )
        with in_callers_words(work.names):
            outputs = await unless_left(request.receive, answers)
        for output in outputs:
            self._note_finished(output, output.num_generated_tokens)
        return outputs

    async def stream(self, work: Work) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """What is new in the answer to each prompt, as it comes. Close it to abort them all.

        The first piece of each answer has the prompt's log-probabilities, if they are asked for.
        """
        prompts = _PromptLogprobs()
        num_tokens = [0] * len(work.prompts)
        num_answers = [sampling.n for sampling in work.sampling]
        pieces = self.engine.stream_all(
            work.prompts, work.sampling, request_ids=work.request_ids, hints=work.hints
        )
        with in_callers_words(work.names):
            async with aclosing(pieces):
                async for index, output in pieces:
                    num_tokens[index] += output.num_generated_tokens
                    num_answers[index] -= output.finished
                    if not num_answers[index]:
                        self._note_finished(output, num_tokens[index])
                    yield index, prompts.joined(index, output)

    def _note_finished(self, output: RequestOutput, num_tokens: int) -> None:
        times = output.metrics
        arrived = times.arrival_time
        self.metrics.observe(times, model=self.engine.info.model_name, num_tokens=num_tokens)
        logger.info(
            "%s: %s; prompt %d, cached %d, generated %d tokens; first after %.3f s, last %.3f s",
            output.request_id,
            output.outputs[0].finish_reason,
            len(output.prompt_token_ids),
            output.num_cached_tokens,
            num_tokens,
            (times.first_token_time or arrived) - arrived,
            (times.finished_time or arrived) - arrived,
        )


def _serving(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving


# What an endpoint declares to get at it.
ServingDep = Annotated[Serving, Depends(_serving)]
