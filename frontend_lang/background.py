"""The one event loop that all programs of a process run their requests on.

Knows nothing of programs. The loop runs on one daemon thread, started on first use; user code stays
on its own threads, so a caller's own event loop (as in Jupyter) is neither needed nor in the way.
"""

import asyncio
import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from sapwood.frontend_lang.errors import ProgramUsageError

T = TypeVar("T")

_CLOSE_SECONDS = 2.0  # how long a backend may take to end what is cancelled


class Abortable(Protocol):
    """What hangs on the loop, and must not be left waiting when it closes."""

    def abort(self, cause: BaseException) -> None: ...


class Background:
    """An event loop on a daemon thread, and the ways to it from other threads."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)  # it has no threads of its parent

    def _forget(self) -> None:
        self._inbox: deque[Callable[[], object]] = deque()
        self._is_woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._runs: set[Abortable] = set()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop, running."""
        if self._loop is None:
            self._start()
        assert self._loop is not None
        return self._loop

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs on the loop, where waiting for it would never end."""
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def post(self, callback: Callable[[], object]) -> None:
        """Call `callback`, which must not raise, on the loop soon; from any thread.

        The loop is woken once for all that is posted until it has looked.
        """
        self._inbox.append(callback)
        if not self._is_woken:
            self._is_woken = True
            self.loop.call_soon_threadsafe(self._drain)

    def register(self, run: Abortable) -> None:
        """Abort `run` when the loop is closed before it is unregistered."""
        self._runs.add(run)

    def unregister(self, run: Abortable) -> None:
        self._runs.discard(run)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine on the loop; cancelling the future cancels it. From any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def check_may_wait(self) -> None:
        """Raises ProgramUsageError on the loop."""
        if self.is_current_thread:
            raise ProgramUsageError(
                "this would wait for the event loop that it runs on; in an async program write "
                "await program.arun(...)"
            )

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for it. Raises ProgramUsageError on the loop."""
        try:
            self.check_may_wait()
        except ProgramUsageError:
            coroutine.close()
            raise
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # as at a Ctrl-C
            raise

    def close(self) -> None:
        """Abort all that runs, and end the thread. A later call starts a new one."""
        for run in tuple(self._runs):
            run.abort(ProgramUsageError("the process is closing"))
        with self._start_lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
            self._is_woken = False
        if loop is None or thread is None:
            return
        atexit.unregister(self.close)
        loop.call_soon_threadsafe(loop.stop)  # after what was posted before
        if threading.current_thread() is not thread:
            thread.join(2 * _CLOSE_SECONDS)

    def _drain(self) -> None:
        self._is_woken = False  # before looking: what comes later wakes again
        while self._inbox:
            self._inbox.popleft()()

    def _start(self) -> None:
        with self._start_lock:
            if self._loop is not None:
                return
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_serve, args=(self._loop,), name="sapwood-programs", daemon=True
            )
            self._thread.start()
        atexit.register(self.close)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    while True:
        # What a program raises to end the process passes through the loop, and to whoever waits for
        # the program; it is not to end the loop, which others wait for.
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
            break
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=_CLOSE_SECONDS))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
