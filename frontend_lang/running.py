"""One run of a program: what its states share, and how it ends.

However a run ends (done, failed, out of time, cancelled, the process closing) each of its states is
settled, and each of its requests is over.
"""

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from sapwood.frontend_lang.answering import Defaults
from sapwood.frontend_lang.backends.interface import Backend
from sapwood.frontend_lang.background import Background
from sapwood.frontend_lang.errors import Failure, ProgramTimeoutError, ProgramUsageError
from sapwood.frontend_lang.executor import Executor
from sapwood.frontend_lang.speculation import Speculator
from sapwood.frontend_lang.variables import Latch, Names


class ProgramRun:
    """Shared by the states of one run.

    `is_streamed`: answers are asked for in pieces, and the state is read from outside while the
    program runs. The first of `executors` is the program's own, the others are its branches'.
    """

    def __init__(
        self,
        background: Background,
        backend: Backend,
        defaults: Defaults,
        *,
        is_streamed: bool = False,
        num_api_spec_tokens: int | None = None,
    ) -> None:
        self._num_api_spec_tokens = num_api_spec_tokens
        self.background = background
        self.backend = backend
        self.defaults = defaults
        self.is_streamed = is_streamed
        self.program_id = f"program-{secrets.token_hex(8)}"
        self.executors: list[Executor] = []
        self.names: list[Names] = []
        self.has_returned = False  # the program appends nothing any more
        self.ended = Latch()  # and all that it appended is done
        self._outcome_lock = threading.Lock()
        self._has_succeeded = False
        self._thread_id: int | None = None  # of a program that is a plain function
        self._timer: asyncio.TimerHandle | None = None
        background.register(self)

    @property
    def is_inside(self) -> bool:
        """Whether the program itself asks, which must not wait for what it has yet to do."""
        if not self.is_streamed:
            return True  # nobody else has the state before the end
        return self.background.is_current_thread or threading.get_ident() == self._thread_id

    def speculator(self) -> Speculator | None:
        """Of one state, where the program asks for speculation."""
        if self._num_api_spec_tokens is None:
            return None
        return Speculator(self.backend, self._num_api_spec_tokens)

    def perform(self, program: Callable[[], Any]) -> Any:
        """Call a program on this thread, and wait for all that it appended. Raises ProgramError,
        and what the program raises."""
        self._thread_id = threading.get_ident()
        try:
            result = program()
            self.has_returned = True
            for executor in self.executors:
                self.wait(executor.worker.drained())
            self._succeed()
        except BaseException as error:
            self.abort(error)
            raise
        finally:
            self._end()
        return result

    async def perform_async(self, program: Callable[[], Awaitable[Any]]) -> Any:
        """`perform` of an async program, on the loop. To cancel it aborts its requests."""
        try:
            result = await program()
            self.has_returned = True
            for executor in self.executors:
                await executor.worker.drained().wait_async()
            self._succeed()
        except BaseException as error:
            self.abort(error)
            raise
        finally:
            self._end()
        return result

    def wait(self, latch: Latch) -> None:
        """Block until the latch opens. Raises ProgramUsageError on the loop itself."""
        if latch.is_open:
            return
        if self.background.is_current_thread:
            raise ProgramUsageError(
                "this would wait for the event loop that it runs on; in an async program write "
                'await s.aget("name"), or await s.settled() before it'
            )
        try:
            latch.wait()
        except KeyboardInterrupt as error:  # also of who reads a streamed program
            self.abort(error)
            raise

    def limit(self, seconds: float) -> None:
        """Abort the run when it is not over in time."""
        error = ProgramTimeoutError(
            f"the program was not done in {seconds:g} seconds, and was aborted; raise timeout"
        )

        def start() -> None:
            if not self.ended.is_open:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(seconds, lambda: self.abort(error))

        self.background.post(start)

    def abort(self, cause: BaseException) -> None:
        """End all that is not done, with the requests under way; from any thread, and any number of
        times. Too late where the run has succeeded."""
        failure = Failure(cause, None)
        with self._outcome_lock:
            if self._has_succeeded:
                return
            for executor in tuple(self.executors):
                executor.worker.fail(failure)
        self.background.post(self._cancel)

    def _succeed(self) -> None:
        """Nothing can be aborted any more. Raises ProgramError where something has failed."""
        with self._outcome_lock:
            self._check()
            self._has_succeeded = True

    def _check(self) -> None:
        """Raises ProgramError for a failure of the program's own state, or for one of a branch
        that nobody was told of."""
        own, *branches = [executor.worker.failure for executor in self.executors]
        if own is not None:
            raise own.error()
        for failure in branches:
            if failure is not None and not failure.is_told:
                raise failure.error()

    def _end(self) -> None:
        self.has_returned = True
        self.background.unregister(self)
        if self._timer is not None:
            self.background.post(self._timer.cancel)
        for names in self.names:
            names.complete()
        for executor in self.executors:
            executor.feed.close(executor.worker.failure)
        self.ended.open()

    def _cancel(self) -> None:
        for executor in self.executors:
            executor.worker.cancel()
