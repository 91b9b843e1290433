"""The interpreter of nodes: what each of them does to the state that it was appended to."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from sapwood.frontend_lang.answering import (
    Branch,
    Following,
    Question,
    check_place,
    hints_of,
)
from sapwood.frontend_lang.backends.interface import Answer
from sapwood.frontend_lang.choices import select
from sapwood.frontend_lang.errors import Failure, Place
from sapwood.frontend_lang.feed import Chunk, Feed
from sapwood.frontend_lang.nodes import (
    Constant,
    Gen,
    Node,
    Pause,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Value,
)
from sapwood.frontend_lang.statements import Append, ForkPoint, Look, Statement
from sapwood.frontend_lang.transcript import Transcript, plain_role_text
from sapwood.frontend_lang.variables import Variable
from sapwood.frontend_lang.worker import Worker
from sapwood.runtime.errors import RequestError
from sapwood.runtime.hints import Hints

if TYPE_CHECKING:
    from sapwood.frontend_lang.running import ProgramRun

T = TypeVar("T")


class Step(NamedTuple):
    """A statement that was performed. `text` is what it added, `meta` what a backend told of it;
    `begin` and `end` are seconds of `time.perf_counter`."""

    node: Node
    place: Place | None
    text: str
    begin: float
    end: float
    meta: Mapping[str, Any]


class Executor:
    """Performs the statements of one state, on the loop."""

    __slots__ = (
        "_run", "_scopes", "_speculator", "branch", "feed", "steps", "transcript", "worker",
    )  # fmt: skip

    def __init__(self, run: ProgramRun, branch: Branch | None = None) -> None:
        self._run = run
        self.branch = branch
        self._speculator = run.speculator()
        self._scopes: tuple[tuple[str, int], ...] = ()  # the open ones, and where each began
        self.worker = Worker(run.background, self)
        self.feed = Feed()
        self.steps: list[Step] = []
        self.transcript = Transcript(has_tokens=run.backend.encoder is not None)
        run.executors.append(self)

    def begin_from(self, parent: Executor) -> None:
        """Start as a branch of another state, with all that it has said so far."""
        self.transcript = parent.transcript.copy()
        self._scopes = parent._scopes
        self.feed.append(Chunk(self.transcript.text))
        self.worker.begin()

    def close(self, failure: Failure) -> None:
        """The state is dead: who reads along is told."""
        self.feed.close(failure)

    async def perform(self, statement: Statement) -> None:
        """Do what a statement says. Raises whatever goes wrong with it."""
        if isinstance(statement.node, Look):
            _settle(statement, statement.node.question(self.transcript))
            return
        text_len, begin = len(self.transcript.text), perf_counter()
        meta = await self._perform(statement.node, statement)
        text = self.transcript.text[text_len:]
        self.steps.append(
            Step(statement.node, statement.place, text, begin, perf_counter(), meta or {})
        )

    async def _perform(self, node: Node, statement: Statement) -> Mapping[str, Any] | None:
        match node:
            case Constant(text=text):
                self._say(text)
            case Gen():
                return await self._generate(node, statement)
            case Select():
                return await self._select(node, statement)
            case RoleBegin(role=role):
                await self._begin_role(role)
            case RoleEnd(role=role):
                self._end_role(role)
            case ScopeBegin(name=name):
                self._scopes = (*self._scopes, (name, len(self.transcript.text)))
            case ScopeEnd(name=name):
                _settle(statement, self._scope_text(name))
            case ForkPoint(branches=branches):
                for branch in branches:
                    branch.begin_from(self)
            case Append(branches=branches, gathered=gathered):
                for branch in branches:
                    await self._append(branch)
                for variable in gathered:
                    variable.gather()
            case Value(source=Variable() as variable):
                await variable.latch.wait_async()
                self._say(str(variable.value()))
            case Pause():
                pass  # told with the answer before it
            case _:
                raise RequestError(f"{type(node).__name__} cannot be appended to a program")
        return None

    def _say(self, text: str) -> None:
        self.transcript.add_constant(text)
        self.feed.append(Chunk(text))

    async def _begin_role(self, role: str) -> None:
        encoder = self._run.backend.encoder
        if encoder is None:
            around = plain_role_text(role)
        else:
            roles = (*(message["role"] for message in self.transcript.messages), role)
            around = await encoder.role_text(roles)
        self.transcript.begin_role(role, around)
        self.feed.append(Chunk(around.prefix))

    def _end_role(self, role: str) -> None:
        before = len(self.transcript.text)
        self.transcript.end_role(role)
        self.feed.append(Chunk(self.transcript.text[before:]))

    def _scope_text(self, name: str) -> str:
        for index in reversed(range(len(self._scopes))):  # of equal names the inner one
            opened, begin = self._scopes[index]
            if opened == name:
                self._scopes = self._scopes[:index] + self._scopes[index + 1 :]
                return self.transcript.text[begin:]
        raise RequestError(f"the scope {name!r} ends, but has not begun")

    async def _append(self, branch: Executor) -> None:
        """What a branch has said since its fork, as a continuation of this state."""
        await branch.worker.drained().wait_async()
        if branch.worker.failure is not None:
            raise branch.worker.failure.error()
        before = len(self.transcript.text)
        self.transcript.repeat(branch.transcript.taken_changes())
        self.feed.append(Chunk(self.transcript.text[before:]))

    async def _generate(self, node: Gen[Any], statement: Statement) -> Mapping[str, Any]:
        check_place(self._run.backend, self.transcript)
        hints = self._hints(self._run.defaults.output_tokens(node))
        call = self._run.defaults.call(node, hints, statement.reasoning_rule)
        question = await Question.of(self._run.backend, self.transcript, call)
        answers = await self._answers(question, statement)
        question.add(answers[0], self.transcript)
        if statement.reasoning is not None:
            statement.reasoning.settle(_one_or_list([answer.reasoning for answer in answers]))
        _settle(
            statement,
            _one_or_list([answer.text for answer in answers]),
            _one_or_list([answer.meta for answer in answers]),
        )
        return answers[0].meta

    async def _answers(self, question: Question, statement: Statement) -> list[Answer]:
        def tell(answer: Answer) -> None:
            self.feed.append(Chunk(answer.text, statement.variable, answer.meta))

        call = question.healed.call
        if self._speculator is not None:
            upcoming = [following.node for following in self.worker.queue]
            answer = await self._speculator.answer(question.prompt, call, upcoming)
            if answer is not None:
                tell(answer)
                return [answer]
        is_read_along = self._run.is_streamed or self.feed.is_read
        if is_read_along and (call.options.get("n") or 1) == 1:
            return [await question.streamed(tell)]
        answers = await question.answers()
        tell(answers[0])
        return answers

    async def _select(self, node: Select, statement: Statement) -> Mapping[str, Any]:
        backend, transcript = self._run.backend, self.transcript
        await transcript.settle_generated(backend.encoder)
        selected = await select(
            backend,
            transcript.prompt(),
            node.choices,
            node.method,
            settled=transcript.token_ids,
            pending=transcript.pending,
            hints=self._hints(),
        )
        if selected.token_ids is None:
            transcript.add_generated(selected.text, None)
        else:
            transcript.add_joint(selected.text, selected.token_ids)
        self.feed.append(Chunk(selected.text, statement.variable, selected.meta))
        _settle(statement, selected.text, selected.meta)
        return selected.meta

    def _hints(self, output_tokens: int | None = None) -> Hints:
        following = Following.of(self.worker.queue, may_grow=not self._run.has_returned)
        return hints_of(self._run.program_id, self.branch, following, output_tokens)


def _settle(statement: Statement, value: Any, meta: Any = None) -> None:
    if statement.variable is not None:
        statement.variable.settle(value, meta)


def _one_or_list(values: list[T]) -> T | list[T]:
    return values[0] if len(values) == 1 else values
