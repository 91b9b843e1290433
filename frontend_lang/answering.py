"""How a `gen` is asked of a backend: its options, its hints, and its answer whole or in pieces."""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

from sapwood.frontend_lang.backends.interface import Answer, Backend, Call, Prompt
from sapwood.frontend_lang.healing import Healed, heal
from sapwood.frontend_lang.nodes import ASSISTANT, Gen, Pause, Select
from sapwood.frontend_lang.options import CONSTRAINTS, Options
from sapwood.frontend_lang.statements import ForkPoint, ReasoningRule, Statement
from sapwood.frontend_lang.transcript import Transcript
from sapwood.runtime.constraints.spec import ConstraintSpec
from sapwood.runtime.errors import EngineError, RequestError
from sapwood.runtime.hints import MAX_SECONDS, Hints

_TOLD_OTHERWISE = frozenset((*CONSTRAINTS, "output_tokens"))  # as a constraint, and as a hint


@dataclass(frozen=True, slots=True)
class Branch:
    """Which of how many siblings a state is."""

    index: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a run says of answers whose own `gen` does not."""

    options: Options
    constraint: ConstraintSpec | None = None

    def call(self, node: Gen[Any], hints: Hints, rule: ReasoningRule | None) -> Call:
        """How a `gen` is to be answered. What a constraint or a hint tells is no option there."""
        merged = {**self.options, **node.options}
        options = {name: merged[name] for name in merged if name not in _TOLD_OTHERWISE}
        return Call(
            options=cast(Options, options),
            constraint=node.constraint or self.constraint,
            hints=hints,
            separate_reasoning=rule is not None,
            reasoning_type=rule.model_type if rule else None,
        )

    def output_tokens(self, node: Gen[Any]) -> int | None:
        """How long the answer will be, as far as the program guesses."""
        return node.options.get("output_tokens", self.options.get("output_tokens"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """What is known of a state's statements after the current one."""

    is_more: bool
    fork_size: int | None = None
    idle_seconds: float | None = None

    @classmethod
    def of(cls, queue: Sequence[Statement], *, may_grow: bool) -> "Following":
        """`may_grow`: the program may append more."""
        idle: float | None = None
        for statement in queue:
            match statement.node:
                case Pause(seconds=seconds):
                    idle = min((idle or 0.0) + seconds, MAX_SECONDS)
                case ForkPoint(branches=branches):
                    size = len(branches) if len(branches) > 1 else None
                    return cls(is_more=True, fork_size=size, idle_seconds=idle)
                case Gen() | Select():
                    return cls(is_more=True, idle_seconds=idle)
        return cls(is_more=may_grow or idle is not None, idle_seconds=idle)


def hints_of(
    program_id: str, branch: Branch | None, following: Following, output_tokens: int | None = None
) -> Hints:
    """What the scheduler should know of a request of this state."""
    return Hints(
        program_id=program_id,
        fork_size=branch.size if branch else following.fork_size,
        fork_index=branch.index if branch else None,
        more_follows=following.is_more,
        idle_seconds=following.idle_seconds,
        output_tokens=output_tokens,
    )


def check_place(backend: Backend, transcript: Transcript) -> None:
    """Raises RequestError where a backend that takes messages only could not be asked."""
    if not backend.chat_only:
        return
    if transcript.role != ASSISTANT:
        raise RequestError(
            f"{backend.name} takes messages only, and answers with an assistant's; write "
            "s += assistant(gen(...))"
        )
    if transcript.loose_text:
        raise RequestError(
            f"{backend.name} takes messages only, and {transcript.loose_text[:60]!r} is in none; "
            "write s += user(...) or system(...) around it"
        )


@dataclass(frozen=True, slots=True)
class Question:
    """A `gen` as it is put to a backend: a prompt, and the call with what healing changed in it."""

    backend: Backend
    prompt: Prompt
    healed: Healed

    @classmethod
    async def of(cls, backend: Backend, transcript: Transcript, call: Call) -> "Question":
        """Encodes what is pending in the transcript. A constraint may take its last tokens off: it
        stays pending then, and the answer's tokens spell it, too."""
        healed = Healed(token_ids=(), call=call)
        if backend.encoder is not None and call.constraint is not None:
            await transcript.settle_generated(backend.encoder)
            healed = await heal(backend.encoder, transcript.token_ids, transcript.pending, call)
        else:
            await transcript.settle(backend.encoder)
        return cls(backend, transcript.prompt(healed.token_ids), healed)

    async def answers(self) -> list[Answer]:
        """The whole answers. Raises what the backend raises, and EngineError if it gives none."""
        answers = await self.backend.generate(self.prompt, self.healed.call)
        if not answers:
            raise self._no_answer()
        return [self.healed.answer(answer) for answer in answers]

    async def streamed(self, tell: Callable[[Answer], None]) -> Answer:
        """The whole answer, each piece of which was told as it came. Raises as `answers` does."""
        texts: list[str] = []
        reasoning: list[str] = []
        last: Answer | None = None
        stream = self.backend.stream(self.prompt, self.healed.call)
        async with aclosing(stream) as pieces:  # type: ignore[type-var]
            async for last in self.healed.pieces(pieces):
                texts.append(last.text)
                reasoning.append(last.reasoning)
                tell(last)
        if last is None:
            raise self._no_answer()
        return replace(last, text="".join(texts), reasoning="".join(reasoning))

    def add(self, answer: Answer, transcript: Transcript) -> None:
        """Let the transcript go on with an answer."""
        if answer.token_ids is None or self.healed.call.constraint is None:
            transcript.add_generated(answer.text, answer.token_ids)
        else:
            transcript.add_joint(answer.text, self.healed.token_ids + answer.token_ids)

    def _no_answer(self) -> EngineError:
        return EngineError(f"{self.backend.name} gave no answer")
