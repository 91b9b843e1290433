"""The work of one state: statements in their order, from a queue that any thread may fill.

Knows not what a statement does. A task runs on the loop while there is something to do, so a state
that rests costs no task and no thread. A statement that fails fails all that follow, those that
come later too, so nothing ever waits for what is dead.
"""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Protocol

from sapwood.frontend_lang.background import Background
from sapwood.frontend_lang.errors import Failure
from sapwood.frontend_lang.statements import Look, Statement
from sapwood.frontend_lang.variables import Latch, Variable


class Owner(Protocol):
    """Whose statements a worker performs."""

    async def perform(self, statement: Statement) -> None:
        """What a statement does. Whatever it raises is the failure of the state."""
        ...

    def close(self, failure: Failure) -> None:
        """The state is dead; from any thread, and more than once."""
        ...


class Worker:
    """Performs statements one after the other.

    `submit` and `fail` may be called from any thread, all else on the loop only. What is submitted
    before `begin` waits for it.
    """

    __slots__ = (
        "_background", "_current", "_is_awake", "_owner", "_queue", "_task", "failure"
    )  # fmt: skip

    def __init__(self, background: Background, owner: Owner) -> None:
        self._background = background
        self._owner = owner
        self._queue: deque[Statement] = deque()
        self._current: Statement | None = None
        self._is_awake = True  # the loop will look at the queue; before `begin`, with that
        self._task: asyncio.Task[None] | None = None
        self.failure: Failure | None = None

    @property
    def queue(self) -> tuple[Statement, ...]:
        """What is still to be performed."""
        return tuple(self._queue)

    @property
    def is_at_rest(self) -> bool:
        """Whether all that was submitted is done or has failed."""
        return not self._is_awake or self.failure is not None

    def submit(self, *statements: Statement) -> None:
        """Perform statements after those before them. Together they are there at once, so the first
        sees that the others follow."""
        self._queue.extend(statements)
        if self.failure is not None:
            self.fail(self.failure)
        elif not self._is_awake:
            self._is_awake = True
            self._background.post(self.begin)

    def fail(self, failure: Failure) -> None:
        """End everything that is not done, branches that have not begun with it; the first failure
        stays."""
        dying = [(self, failure)]
        while dying:  # no recursion: forks of forks may be thousands deep
            worker, cause = dying.pop()
            dying.extend(worker._die(cause))

    def cancel(self) -> None:
        """End the statement under way; `fail` comes first."""
        if self._task is not None:
            self._task.cancel()

    def drained(self) -> Latch:
        """Opens when all that was submitted is done or has failed."""
        mark = Variable(None)
        if self.is_at_rest:
            mark.settle(None)
        else:
            self.submit(Statement(Look(lambda transcript: None), None, mark))
        return mark.latch

    def begin(self) -> None:
        """Work while there is something to do."""
        if self._task is None and not self._rest():
            self._task = asyncio.get_running_loop().create_task(self._work())
            # A task that is cancelled before its first step runs nothing of itself.
            self._task.add_done_callback(self._stop)

    async def _work(self) -> None:
        while not self._rest():
            await self._perform(self._queue.popleft())

    async def _perform(self, statement: Statement) -> None:
        self._current = statement
        try:
            if self.failure is None:
                await self._owner.perform(statement)
        except asyncio.CancelledError as error:
            self.fail(Failure(error, statement.place))
            raise
        except BaseException as error:  # whatever it is, nobody may wait for this statement
            self.fail(Failure(error, statement.place))
        if self.failure is not None:
            self.fail(self.failure)  # it may have been set before this statement was the current
        self._current = None

    def _rest(self) -> bool:
        """Go to rest, unless there is something to do."""
        if not self._queue:
            self._is_awake = False
            if not self._queue:  # who submitted before that line saw it awake
                return True
            self._is_awake = True
        return False

    def _stop(self, task: "asyncio.Task[None]") -> None:
        self._task = None
        if task.cancelled():
            self.fail(Failure(asyncio.CancelledError("the program was cancelled"), None))
        elif self._queue:
            self.begin()

    def _die(self, failure: Failure) -> "list[tuple[Worker, Failure]]":
        """Fail what this state has to do; the workers of branches that die with it, and why."""
        if self.failure is None:
            self.failure = failure
        statements = self._taken_queue()
        if (current := self._current) is not None:
            statements.insert(0, current)
        orphans: list[tuple[Worker, Failure]] = []
        for statement in statements:
            statement.fail(self.failure)
            orphans.extend((branch.worker, self.failure) for branch in statement.branches)
        self._owner.close(self.failure)
        return orphans

    def _taken_queue(self) -> list[Statement]:
        statements = []
        with suppress(IndexError):  # it is empty, or another thread took the last one
            while True:
                statements.append(self._queue.popleft())
        return statements
