"""The interpreter of nodes: one executor for each state.

A program's thread appends statements; a task on the loop performs them in order, while there are
any. A statement that fails fails all that follow, and those that come later fail as they come, so
nothing waits for what is dead.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from sapwood.frontend_lang.backends.interface import Answer, Call
from sapwood.frontend_lang.errors import Failure
from sapwood.frontend_lang.feed import Chunk, Feed
from sapwood.frontend_lang.nodes import (
    ASSISTANT,
    Constant,
    Gen,
    Pause,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
)
from sapwood.frontend_lang.options import CONSTRAINTS, Options
from sapwood.frontend_lang.statements import ForkPoint, Look, Statement
from sapwood.frontend_lang.transcript import Transcript, plain_role_text
from sapwood.frontend_lang.variables import Latch, Variable
from sapwood.runtime.constraints.spec import ConstraintSpec
from sapwood.runtime.errors import RequestError
from sapwood.runtime.hints import Hints

if TYPE_CHECKING:
    from sapwood.frontend_lang.running import ProgramRun

_NOT_SAMPLING = frozenset((*CONSTRAINTS, "output_tokens"))  # told by a constraint and by hints


@dataclass(frozen=True, slots=True)
class Branch:
    """Which of how many siblings a state is."""

    index: int
    size: int


class Executor:
    """Performs the statements of one state.

    `submit` and `fail` may be called from any thread; all else runs on the loop. Until `begin` a
    branch only collects its statements.
    """

    __slots__ = (
        "_branch", "_current", "_is_woken", "_queue", "_run", "_scopes", "_task", "failure",
        "feed", "fork_text_len", "transcript",
    )  # fmt: skip

    def __init__(self, run: "ProgramRun", branch: Branch | None = None) -> None:
        self._run = run
        self._branch = branch
        self._queue: deque[Statement] = deque()
        self._current: Statement | None = None
        self._is_woken = True  # the loop looks at the queue before this is False
        self._task: asyncio.Task[None] | None = None
        self._scopes: dict[str, int] = {}  # where in the text each open scope began
        self.failure: Failure | None = None
        self.feed = Feed()
        self.transcript = Transcript(has_tokens=run.backend.encoder is not None)
        self.fork_text_len = 0
        run.executors.append(self)

    def submit(self, statement: Statement) -> None:
        """Perform a statement after those before it."""
        self._queue.append(statement)
        if self.failure is not None:
            self._fail_queued(self.failure)
        elif not self._is_woken:
            self._is_woken = True
            self._run.background.post(self._wake)

    def fail(self, failure: Failure) -> None:
        """End everything that is not done yet; the first failure stays."""
        if self.failure is None:
            self.failure = failure
        current = self._current
        if current is not None:
            current.fail(self.failure)
        self._fail_queued(self.failure)
        self.feed.close(self.failure)

    def cancel(self) -> None:
        """End the request under way, on the loop; `fail` comes first."""
        if self._task is not None:
            self._task.cancel()

    def drained(self) -> Latch:
        """Opens when all that was submitted is done, or has failed."""
        if not self._is_woken or self.failure is not None:
            done = Latch()
            done.open()
            return done
        mark = Variable(None)
        self.submit(Statement(Look(lambda transcript: None), None, mark))
        return mark.latch

    def begin(self) -> None:
        """Start with what was submitted so far; from any thread."""
        self._run.background.post(self._wake)

    def begin_from(self, parent: "Executor") -> None:
        """Start as a branch of another state, with all that it has said so far."""
        self.transcript = parent.transcript.copy()
        self._scopes = dict(parent._scopes)
        self.fork_text_len = len(self.transcript.text)
        self.feed.append(Chunk(self.transcript.text))
        self._wake()

    def _wake(self) -> None:
        if self._task is None and not self._rest():
            self._task = asyncio.get_running_loop().create_task(self._work())
            self._task.add_done_callback(self._stop)

    def _rest(self) -> bool:
        """Go idle, unless there is something to do."""
        if not self._queue:
            self._is_woken = False
            if not self._queue:  # what was submitted before that line woke nobody
                return True
            self._is_woken = True
        return False

    async def _work(self) -> None:
        while not self._rest():
            self._current = statement = self._queue.popleft()
            if self.failure is not None:
                statement.fail(self.failure)
                continue
            try:
                await self._perform(statement)
            except asyncio.CancelledError as error:
                self.fail(Failure(error, statement.place))
                raise
            except BaseException as error:  # whatever it is, nobody may wait for it
                self.fail(Failure(error, statement.place))
            self._current = None

    def _stop(self, task: "asyncio.Task[None]") -> None:
        self._task = None
        if task.cancelled():
            self.fail(Failure(asyncio.CancelledError("the request was cancelled"), None))
        elif self._queue:
            self._wake()

    def _fail_queued(self, failure: Failure) -> None:
        while self._queue:
            try:
                statement = self._queue.popleft()
            except IndexError:  # another thread took the last one
                return
            statement.fail(failure)

    async def _perform(self, statement: Statement) -> None:
        node = statement.node
        match node:
            case Constant(text=text):
                self._say(text)
            case Gen():
                await self._generate(node, statement)
            case RoleBegin(role=role):
                await self._begin_role(role)
            case RoleEnd(role=role):
                self._grow(lambda: self.transcript.end_role(role))
            case ScopeBegin(name=name):
                self._scopes[name] = len(self.transcript.text)
            case ScopeEnd():
                self._end_scope(node, statement)
            case ForkPoint(branches=branches):
                for branch in branches:
                    branch.begin_from(self)
            case Look(question=question):
                _settle(statement, question(self.transcript))
            case Pause():
                pass  # it was told with the answer before it
            case _:
                raise RequestError(f"{type(node).__name__} cannot be appended to a program")

    def _say(self, text: str) -> None:
        self.transcript.add_constant(text)
        self.feed.append(Chunk(text))

    async def _begin_role(self, role: str) -> None:
        encoder = self._run.backend.encoder
        if encoder is None:
            around = plain_role_text(role)
        else:
            around = await encoder.role_text((*self.transcript.roles, role))
        self._grow(lambda: self.transcript.begin_role(role, around))

    def _grow(self, change: Any) -> None:
        """Make a change to the transcript, and tell the feed what it added."""
        before = len(self.transcript.text)
        change()
        self.feed.append(Chunk(self.transcript.text[before:]))

    def _end_scope(self, node: ScopeEnd, statement: Statement) -> None:
        begin = self._scopes.pop(node.name, None)
        if begin is None:
            raise RequestError(f"scope {node.name!r} ends, but did not begin")
        _settle(statement, self.transcript.text[begin:])

    async def _generate(self, node: Gen[Any], statement: Statement) -> None:
        self._check_place_of_gen()
        await self.transcript.settle(self._run.backend.encoder)
        call = self._call(node, statement)
        if self._streams(call.options):
            answer = await self._stream(call, statement)
            answers = [answer]
        else:
            answers = await self._run.backend.generate(self.transcript.prompt(), call)
            self.feed.append(Chunk(answers[0].text, statement.variable, answers[0].meta))
        self.transcript.add_generated(answers[0].text, answers[0].token_ids)
        if statement.reasoning is not None:
            statement.reasoning.settle(_one_or_list([answer.reasoning for answer in answers]))
        _settle(
            statement,
            _one_or_list([answer.text for answer in answers]),
            _one_or_list([answer.meta for answer in answers]),
        )

    async def _stream(self, call: Call, statement: Statement) -> Answer:
        """The whole answer, whose pieces were told as they came."""
        pieces = []
        async for piece in self._run.backend.stream(self.transcript.prompt(), call):
            pieces.append(piece)
            self.feed.append(Chunk(piece.text, statement.variable, piece.meta))
        if not pieces:
            raise RequestError("the backend ended a stream before its first piece")
        return Answer(
            text="".join(piece.text for piece in pieces),
            token_ids=pieces[-1].token_ids,
            reasoning="".join(piece.reasoning for piece in pieces),
            finish_reason=pieces[-1].finish_reason,
            meta=pieces[-1].meta,
        )

    def _streams(self, options: Options) -> bool:
        is_wanted = self._run.is_streamed or self.feed.is_read
        return is_wanted and (options.get("n") or 1) == 1

    def _check_place_of_gen(self) -> None:
        backend, transcript = self._run.backend, self.transcript
        if not backend.chat_only:
            return
        if transcript.role != ASSISTANT:
            raise RequestError(
                f"{backend.name} answers with an assistant's message only; write "
                "s += assistant(gen(...))"
            )
        if transcript.loose_text:
            raise RequestError(
                f"{backend.name} takes messages only, and {transcript.loose_text!r} is in none; "
                "write s += user(...) or system(...) around it"
            )

    def _call(self, node: Gen[Any], statement: Statement) -> Call:
        merged = {**self._run.defaults, **node.options}
        rule = statement.reasoning_rule
        return Call(
            options=cast(
                Options, {name: merged[name] for name in merged if name not in _NOT_SAMPLING}
            ),
            constraint=self._constraint(node),
            hints=self._hints(merged),
            separate_reasoning=rule is not None,
            reasoning_type=rule.model_type if rule else None,
        )

    def _constraint(self, node: Gen[Any]) -> ConstraintSpec | None:
        return node.constraint or self._run.default_constraint

    def _hints(self, options: Mapping[str, Any]) -> Hints:
        branch, following = self._branch, self._following()
        return Hints(
            program_id=self._run.program_id,
            fork_size=branch.size if branch else following.fork_size,
            fork_index=branch.index if branch else None,
            more_follows=following.is_more,
            idle_seconds=following.idle_seconds,
            output_tokens=options.get("output_tokens"),
        )

    def _following(self) -> "_Following":
        """What is known of the statements after the current one."""
        idle_seconds = None
        for statement in tuple(self._queue):
            match statement.node:
                case Pause(seconds=seconds):
                    idle_seconds = (idle_seconds or 0.0) + seconds
                case ForkPoint(branches=branches):
                    return _Following(True, len(branches), idle_seconds)
                case Gen() | Select():
                    return _Following(True, None, idle_seconds)
        is_more = not self._run.has_returned or idle_seconds is not None
        return _Following(is_more, None, idle_seconds)


@dataclass(frozen=True, slots=True)
class _Following:
    is_more: bool
    fork_size: int | None
    idle_seconds: float | None


def _settle(statement: Statement, value: Any, meta: Any = None) -> None:
    if statement.variable is not None:
        statement.variable.settle(value, meta)


def _one_or_list(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
