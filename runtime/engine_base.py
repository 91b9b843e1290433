"""What the two faces of an engine have in common."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from sapwood.radix import NodeView
from sapwood.runtime.answers import AnswerBuilder
from sapwood.runtime.build import EngineInfo, build_engine
from sapwood.runtime.chat import Chat
from sapwood.runtime.config import EngineConfig
from sapwood.runtime.constraints.compiler import CompilerStats, ConstraintCompiler
from sapwood.runtime.constraints.interface import Matcher
from sapwood.runtime.constraints.reasoning import ReasoningMatchers
from sapwood.runtime.core import EngineStats
from sapwood.runtime.errors import RequestError
from sapwood.runtime.hints import Hints
from sapwood.runtime.mailroom import Mailroom
from sapwood.runtime.outputs import RequestOutput
from sapwood.runtime.processing import Input, InputProcessor, is_single
from sapwood.runtime.reasoning import ReasoningFormat
from sapwood.runtime.request import Request
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.tokenizer import Tokenizer

Sampling = SamplingParams | Sequence[SamplingParams] | None
Hinting = Hints | Sequence[Hints] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What the engines over one core have in common.

    The core itself is its thread's alone, so that the model's memory goes when that ends.
    """

    config: EngineConfig
    info: EngineInfo
    tokenizer: Tokenizer
    inputs: InputProcessor
    compiler: ConstraintCompiler
    reasoning: ReasoningMatchers
    mail: Mailroom

    @classmethod
    def load(cls, config: EngineConfig) -> "_Shared":
        parts = build_engine(config, time.monotonic)
        return cls(
            config=config,
            info=parts.info,
            tokenizer=parts.tokenizer,
            inputs=parts.inputs,
            compiler=parts.compiler,
            reasoning=parts.reasoning,
            mail=Mailroom(parts.core),
        )


class EngineBase:
    """Loads a model and runs its core on a thread. Several may live in one process.

    Engines of both faces may be over one core (`over`): they share all that they know and compute,
    and closing one closes all.
    """

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        """`options` are the fields of the groups in `sapwood.runtime.config`.

        Raises ConfigError for an unknown one, ModelError where the model cannot be served.
        """
        self._take(_Shared.load(EngineConfig.from_options(model, **options)))

    @classmethod
    def over(cls, engine: "EngineBase") -> Self:
        """An engine of this face over the model and the cache of another one. O(1)."""
        face = cls.__new__(cls)
        face._take(engine._shared)
        return face

    def _take(self, shared: _Shared) -> None:
        self._shared = shared
        self.config = shared.config
        self.info = shared.info
        self.tokenizer = shared.tokenizer
        self._clock = time.monotonic
        self._inputs = shared.inputs
        self._compiler = shared.compiler
        self._reasoning = shared.reasoning
        self._mail = shared.mail
        self._core = shared.mail.core

    def stats(self) -> EngineStats:
        """Counts as of the last step. O(1)."""
        return self._core.stats

    def constraint_stats(self) -> CompilerStats:
        """Counts of compiled and refused constraints. O(1)."""
        return self._compiler.stats()

    def tree(self) -> list[NodeView]:
        """The radix tree between two steps, depth first. O(nodes)."""
        return self._core.tree().result()

    @property
    def is_alive(self) -> bool:
        """Whether requests are being worked on."""
        return self._core.is_alive

    def close(self) -> None:
        """End all requests and free the model. Idempotent."""
        self._core.close()
        self._compiler.close()

    def _requests(
        self,
        inputs: Input | Sequence[Input],
        sampling: Sampling,
        request_ids: Sequence[str] | None = None,
        hints: Hinting = None,
    ) -> list[Request]:
        """Checked requests for one input or many. Raises before anything is submitted."""
        self._core.check_process()  # constraints are compiled by threads, too
        if not isinstance(inputs, Sequence | np.ndarray | Chat):
            raise RequestError(
                f"inputs are strings, token ids or chat messages, not {type(inputs).__name__}",
                param="inputs",
            )
        alone = isinstance(inputs, Chat) or is_single(inputs)
        prompts: list[Any] = [inputs] if alone else list(inputs)  # type: ignore[arg-type]
        if not isinstance(sampling, Sequence):
            sampling = [sampling] * len(prompts)  # type: ignore[list-item]
        if not isinstance(hints, Sequence):
            hints = [hints] * len(prompts)  # type: ignore[list-item]
        ids: Sequence[str | None] = [None] * len(prompts) if request_ids is None else request_ids
        for name, given in (("sampling", sampling), ("request_ids", ids), ("hints", hints)):
            if len(given) != len(prompts):
                raise RequestError(
                    f"{len(prompts)} inputs and {len(given)} {name}; give one for each input",
                    param=name,
                )
        now = self._clock()
        requests = [
            self._inputs.process(prompt, params, caller_id=caller_id, now=now, hints=told)
            for prompt, params, caller_id, told in zip(prompts, sampling, ids, hints, strict=True)
        ]
        for request in requests:
            self._prepare_reasoning(request)
        return requests

    def _prepare_reasoning(self, request: Request) -> None:
        """Do here what may take a while: matchers are put together on an event loop."""
        answer_format, sampling = request.answer_format, request.sampling
        if isinstance(answer_format, ReasoningFormat):
            self._reasoning.prepare(
                answer_format.tags,
                answer_format.start,
                is_constrained=sampling.constraint is not None,
                max_tokens=sampling.max_reasoning_tokens,
            )

    def _matchers(self, requests: Sequence[Request]) -> Future[list[Matcher | None]]:
        """What becomes of the requests' constraints, as `ConstraintCompiler.matchers`."""
        return self._compiler.matchers([request.sampling.constraint for request in requests])

    def _with_matchers(
        self, requests: Sequence[Request], matchers: Sequence[Matcher | None]
    ) -> list[Request]:
        pairs = zip(requests, matchers, strict=True)
        return [self._with_matcher(request, matcher) for request, matcher in pairs]

    def _with_matcher(self, request: Request, matcher: Matcher | None) -> Request:
        """The request with all that its answers are held to; `matcher` is of its constraint."""
        answer_format = request.answer_format
        if isinstance(answer_format, ReasoningFormat):
            matcher = self._reasoning.around(
                matcher,
                answer_format.tags,
                answer_format.start,
                max_tokens=request.sampling.max_reasoning_tokens,
            )
        return request if matcher is None else replace(request, matcher=matcher)

    def _streamable(self, requests: list[Request]) -> list[Request]:
        """The requests. Raises RequestError for one whose answers can be told only at its end."""
        for request in requests:
            sampling = request.sampling
            if sampling.num_computed_answers > sampling.n:
                raise RequestError(
                    f"best_of is {sampling.best_of} and n {sampling.n}: the best are known only "
                    "when all have ended; do not stream, or leave best_of out",
                    param="best_of",
                )
        return requests

    def _builder(self, request: Request) -> AnswerBuilder:
        return AnswerBuilder(request, self.tokenizer.token_bytes)

    def _whole(self, request: Request, builder: AnswerBuilder) -> RequestOutput:
        """The finished answers, which are kept for the next turn of their conversation."""
        output = builder.whole()
        for answer in output.outputs:
            self._inputs.remember(request, answer)
        return output

    def _remember(self, request: Request, builder: AnswerBuilder) -> None:
        """The same where nobody wants them whole."""
        if request.chat is not None:
            self._whole(request, builder)
