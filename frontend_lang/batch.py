"""One program, run for many arguments.

All runs live on the loop. A plain function has a thread while it runs itself, none while its
answers are computed; an async one has none at all. `gate.py` says in which order they begin.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from sapwood.frontend_lang.backends.recording import Recording
from sapwood.frontend_lang.errors import ProgramTimeoutError, ProgramUsageError
from sapwood.frontend_lang.gate import Gate, GatedBackend, Ticket
from sapwood.frontend_lang.process import PROCESS
from sapwood.frontend_lang.room import Room

if TYPE_CHECKING:
    from sapwood.frontend_lang.arguments import Invocation
    from sapwood.frontend_lang.backends.interface import Backend
    from sapwood.frontend_lang.program import Program
    from sapwood.frontend_lang.state import ProgramState

logger = logging.getLogger(__name__)

AUTO_THREADS = 256  # threads that mostly wait; each is some dozen kilobytes
AUTO_WIDTH = 128  # programs at work at the backend
GROW_SECONDS = 0.001  # jobs that have waited so long get more threads
INFO_SECONDS = 1.0  # that a backend may take to tell of its cache
MAX_IN_FLIGHT = 1024  # programs that have begun; those that wait for their turn are sorted


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How a batch is run. Raises TypeError for a value that is none."""

    num_threads: int | Literal["auto"] = "auto"
    progress_bar: bool = False
    on_error: Literal["raise", "return"] = "raise"

    def __post_init__(self) -> None:
        number = self.num_threads
        is_number = isinstance(number, int) and not isinstance(number, bool) and number > 0
        if number != "auto" and not is_number:
            raise TypeError(f"num_threads is a number from 1, or 'auto', not {number!r}")
        if self.on_error not in ("raise", "return"):
            raise TypeError(f"on_error is 'raise' or 'return', not {self.on_error!r}")

    @property
    def threads(self) -> int:
        return AUTO_THREADS if self.num_threads == "auto" else self.num_threads

    @property
    def width(self) -> int:
        """How many programs may work at the backend at once."""
        return AUTO_WIDTH if self.num_threads == "auto" else self.num_threads


def run_batch(
    program: Program, batch_arguments: Iterable[Mapping[str, Any]], plan: BatchPlan
) -> Generator[ProgramState]:
    """The states of the runs, in the order of their arguments, as soon as they are there.

    Raises TypeError for arguments that the program does not take, before anything runs, and
    ProgramUsageError on the loop itself. Closing the iterator aborts what still runs.
    """
    if PROCESS.background.is_current_thread:
        raise ProgramUsageError(
            "run_batch waits, and would wait for the event loop that it runs on; in an async "
            "program gather several arun(...)"
        )
    if program.settings.get("stream"):
        raise TypeError(
            "a batch gives whole states; leave stream out, or take run(stream=True) for one "
            "program (generator_style=True gives each state as soon as it is done)"
        )
    items = _items_of(program, batch_arguments)
    return _in_order(_Batch(program, items, plan), len(items), plan)


def _items_of(program: Program, batch_arguments: Iterable[Mapping[str, Any]]) -> list[Invocation]:
    items = []
    for index, arguments in enumerate(batch_arguments):
        if not isinstance(arguments, Mapping):
            raise TypeError(
                f"item {index} of the batch is a {type(arguments).__name__}; each is a mapping of "
                'arguments, such as {"question": "..."}'
            )
        try:
            items.append(program.invocation((), arguments))
        except TypeError as error:
            raise TypeError(f"item {index} of the batch: {error}") from None
    return items


def _in_order(batch: _Batch, size: int, plan: BatchPlan) -> Generator[ProgramState]:
    """States in the order of the items. The first failure, whichever item's, is raised at once
    where it is to be raised."""
    progress = _Progress(size) if plan.progress_bar else None
    done: dict[int, ProgramState] = {}
    next_index = 0
    with closing(batch.results()) as results:
        for finished in results:
            if finished.error is not None and plan.on_error == "raise":
                raise finished.error
            done[finished.index] = finished.state
            if progress is not None:
                progress.step()
            while next_index in done:
                yield done.pop(next_index)
                next_index += 1


@dataclass(frozen=True, slots=True)
class _Finished:
    index: int
    state: ProgramState
    error: BaseException | None


class _Batch:
    """The runs of one batch. `results` is for the caller's thread, all else runs on the loop."""

    def __init__(self, program: Program, items: list[Invocation], plan: BatchPlan) -> None:
        self._program = program
        self._backend = PROCESS.backend(program.settings.get("backend"))
        self._unseated = deque(enumerate(items))
        # Who gives a number means it. A record has no cache, and counts what it is asked.
        self._is_fitted = (
            plan.num_threads == "auto"
            and self._backend.encoder is not None
            and not isinstance(self._backend, Recording)
        )
        self._is_async = inspect.iscoroutinefunction(program.function)
        self._num_seats = MAX_IN_FLIGHT if self._is_async else plan.threads
        self._threads = _Threads(min(self._num_seats, len(items)))
        self._in_flight: set[asyncio.Task[None]] = set()
        self._has_changed = asyncio.Event()
        self._gate = Gate(
            self._backend, width=plan.width, more_to_come=lambda: bool(self._unseated)
        )
        self._finished: queue.SimpleQueue[_Finished | None] = queue.SimpleQueue()

    def results(self) -> Generator[_Finished]:
        """What comes out, as it does. Closing it aborts the rest."""
        running = PROCESS.background.start(self._run())
        running.add_done_callback(lambda _: self._finished.put(None))
        try:
            while (finished := self._finished.get()) is not None:
                yield finished
            running.result()
        finally:
            running.cancel()
            self._threads.close()

    async def _run(self) -> None:
        try:
            if self._is_fitted:
                self._gate.room = Room.of(await _info_of(self._backend))
            while self._unseated or self._in_flight:
                self._seat()
                self._has_changed.clear()
                await self._has_changed.wait()
                if self._gate.room.is_curious:
                    self._gate.take(await _info_of(self._backend))
        finally:
            self._unseated.clear()  # or the seats of those that end now would be taken
            self._gate.close()
            for task in self._in_flight:
                task.cancel()
            if self._in_flight:
                await asyncio.wait(self._in_flight)

    def _seat(self) -> None:
        """Begin as many programs as may."""
        while self._unseated and self._num_seats and len(self._in_flight) < MAX_IN_FLIGHT:
            index, given = self._unseated.popleft()
            self._num_seats -= 1
            ticket = self._gate.ticket()
            task = asyncio.get_running_loop().create_task(self._run_one(index, given, ticket))
            self._in_flight.add(task)
            task.add_done_callback(self._leave)

    def _leave(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._has_changed.set()

    def _free_seat(self) -> None:
        self._num_seats += 1
        self._seat()

    async def _run_one(self, index: int, given: Invocation, ticket: Ticket) -> None:
        state = self._program.begin(given, GatedBackend(self._backend, ticket))
        run, task = state._run, asyncio.current_task()
        assert task is not None

        def end(cause: BaseException) -> None:
            run.abort(cause)  # what reads a variable on a thread ends by that
            task.cancel()

        deadline = _Deadline(given.settings.get("timeout"), end)
        ticket.watch(deadline.pause, deadline.resume)
        deadline.resume()
        error: BaseException | None = None
        try:
            state.ret_value = await run.perform_async(lambda: self._call(state, given))
        except BaseException as raised:
            error = deadline.error or raised
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            deadline.pause()
            ticket.leave()
        self._finished.put(_Finished(index, state, error))

    async def _call(self, state: ProgramState, given: Invocation) -> Any:
        """The program's own function, to its end."""
        call = partial(self._program.function, state, *given.positional, **given.arguments)
        try:
            return await (call() if self._is_async else self._threads.run(call))
        finally:
            self._free_seat()


async def _info_of(backend: Backend) -> Mapping[str, Any]:
    """What a backend tells of itself, nothing where it does not: programs will meet the error of
    one that is broken, and say where."""
    try:
        info = await asyncio.wait_for(backend.server_info(), INFO_SECONDS)
    except Exception:
        logger.debug("the backend does not tell of its cache", exc_info=True)
        return {}
    return info if isinstance(info, Mapping) else {}


class _Deadline:
    """Ends a run when its own time is over. Time counts between `resume` and `pause`."""

    def __init__(self, seconds: float | None, end: Callable[[BaseException], None]) -> None:
        self.error: ProgramTimeoutError | None = None  # set once the time is over
        self._total = self._left = seconds
        self._end = end
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0

    def resume(self) -> None:
        if self._left is not None and self._timer is None:
            loop = asyncio.get_running_loop()
            self._since = loop.time()
            self._timer = loop.call_later(max(self._left, 0.0), self._expire)

    def pause(self) -> None:
        if self._left is not None and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left -= asyncio.get_running_loop().time() - self._since

    def _expire(self) -> None:
        self.error = ProgramTimeoutError(
            f"the program has not ended within its {self._total:g} seconds"
        )
        self._end(self.error)


class _Threads:
    """At most `size` daemon threads: a program that never ends does not keep the process.

    There are twice as many whenever jobs have waited for a moment: programs that only append are
    done in no time, and one thread will do for all of them.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_started = 0
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, call: Callable[[], Any]) -> Any:
        """What `call` returns, from a thread."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def work() -> None:
            result: Any = None
            error: BaseException | None = None
            try:
                result = call()
            except StopIteration as raised:  # no future takes it
                error = RuntimeError("the program raised StopIteration")
                error.__cause__ = raised
            except BaseException as raised:
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        self._jobs.put(work)
        if self._timer is None:
            self._grow()
        return await done

    def _grow(self) -> None:
        self._timer = None
        if self._num_started == self._size or self._jobs.empty():
            return
        for _ in range(min(max(self._num_started, 1), self._size - self._num_started)):
            self._num_started += 1
            name = f"sapwood-batch-{self._num_started}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        self._timer = asyncio.get_running_loop().call_later(GROW_SECONDS, self._grow)

    def close(self) -> None:
        """Let the threads end with what they do now. Nothing is run any more."""
        for _ in range(self._num_started):
            self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class _Progress:
    """A line on standard error that says how far a batch is."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_done = 0
        self._started = time.monotonic()
        self._is_line = sys.stderr.isatty()

    def step(self) -> None:
        self._num_done += 1
        is_last = self._num_done == self._size
        if not (self._is_line or is_last):
            return  # a log has the end only
        seconds = time.monotonic() - self._started
        line = f"{self._num_done}/{self._size} programs, {seconds:.1f} s"
        start = "\r" if self._is_line else ""
        sys.stderr.write(f"{start}{line}{os.linesep if is_last else ''}")
        sys.stderr.flush()
