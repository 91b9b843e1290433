"""One run of a program: what its states share, and how it ends.

However a run ends (done, failed, out of time, cancelled, the process closing) each of its states is
settled, and each of its requests is over.
"""

import asyncio
import secrets
import threading

from sapwood.frontend_lang.backends.interface import Backend
from sapwood.frontend_lang.background import Background
from sapwood.frontend_lang.errors import Failure, ProgramUsageError
from sapwood.frontend_lang.executor import Executor
from sapwood.frontend_lang.options import Options
from sapwood.frontend_lang.variables import Latch, Names
from sapwood.runtime.constraints.spec import ConstraintSpec


class ProgramRun:
    """Shared by the states of one run. `defaults` are the options of answers that give none."""

    def __init__(
        self,
        background: Background,
        backend: Backend,
        defaults: Options,
        *,
        default_constraint: ConstraintSpec | None = None,
        is_streamed: bool = False,
    ) -> None:
        self.background = background
        self.backend = backend
        self.defaults = defaults
        self.default_constraint = default_constraint
        self.is_streamed = is_streamed
        self.program_id = f"program-{secrets.token_hex(8)}"
        self.executors: list[Executor] = []  # the first is the program's own, then its branches'
        self.all_names: list[Names] = []
        self.has_returned = False  # the program appends nothing any more
        self.has_ended = False
        self._owner: int | asyncio.Task[object] | None = None
        background.register(self)

    def own(self) -> None:
        """This thread, or this task on the loop, runs the program."""
        self._owner = self._current()

    @property
    def is_owner(self) -> bool:
        """Whether the program itself is asking, which must not wait for its own end."""
        return self._owner == self._current()

    def wait(self, latch: Latch, timeout: float | None = None) -> bool:
        """Block until the latch opens. Raises ProgramUsageError on the loop itself."""
        if latch.is_open:
            return True
        if self.background.is_current_thread:
            raise ProgramUsageError(
                "this would wait for the event loop that it runs on; in an async program write "
                'await s.aget("name"), await s.async_text(), ...'
            )
        return latch.wait(timeout)

    def wait_for_all(self) -> None:
        """Block until every statement is done."""
        for executor in self.executors:
            self.wait(executor.drained())

    async def wait_for_all_async(self) -> None:
        for executor in self.executors:
            await executor.drained().wait_async()

    def abort(self, cause: BaseException) -> None:
        """End all that is not done, with requests under way; from any thread, and any number of
        times."""
        for executor in tuple(self.executors):
            executor.fail(Failure(cause, None))
        self.background.post(self._cancel)

    def end(self) -> None:
        """Nothing will be appended, and all that was is done."""
        self.has_returned = self.has_ended = True
        self.background.unregister(self)
        for names in self.all_names:
            names.complete()
        for executor in self.executors:
            executor.feed.close(executor.failure)

    def check(self) -> None:
        """Raises ProgramError for a failure of the program's own state, or for one of a branch
        that nobody was told of."""
        own, *branches = self.executors
        if own.failure is not None:
            raise own.failure.error()
        for branch in branches:
            if branch.failure is not None and not branch.failure.is_told:
                raise branch.failure.error()

    def _cancel(self) -> None:
        for executor in self.executors:
            executor.cancel()

    def _current(self) -> "int | asyncio.Task[object] | None":
        if self.background.is_current_thread:
            return asyncio.current_task()
        return threading.get_ident()
