"""Turns constraints into matchers, beside the core and before a request is queued.

A request waits here with nothing but its place in the line: no block, no seat, no id. What is
compiled is kept; what was refused is remembered for a while.
"""

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from sapwood.runtime.config import ConstraintOptions
from sapwood.runtime.constraints.backends import Backends
from sapwood.runtime.constraints.bounded_cache import BoundedCache
from sapwood.runtime.constraints.bounded_process import WorkError
from sapwood.runtime.constraints.compile_line import CompileLine
from sapwood.runtime.constraints.futures import all_of
from sapwood.runtime.constraints.interface import Grammar, GrammarError, Matcher
from sapwood.runtime.constraints.spec import ConstraintSpec
from sapwood.runtime.constraints.watchdog import Watchdog
from sapwood.runtime.errors import (
    EngineBusyError,
    EngineClosedError,
    EngineError,
    RequestError,
    SapwoodError,
)

logger = logging.getLogger(__name__)

NUM_THREADS = 2
MAX_WAITING = 4096  # constraints in line, before a call is told to come back
MAX_GRAMMARS = 1000
MAX_REFUSALS = 1000
MAX_REFUSAL_BYTES = 2**24
REFUSAL_SECONDS = 60.0
WAIT_SECONDS = 120.0  # in line, before a call is told to come back
CLOSE_SECONDS = 10.0  # a compile that runs is waited for that long

MatcherFuture = Future[Matcher | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerStats:
    """A look at a compiler. Counts and seconds are totals since the start.

    Hits, refusals, failures and those turned away are requests; compiles are of constraints.
    """

    num_hits: int  # found compiled
    num_refusals: int  # the constraint was at fault, or took too long
    num_failures: int  # a backend was at fault
    num_turned_away: int  # too many waited already
    num_compiles: int
    num_overruns: int  # of these, longer than the deadline
    compile_seconds: float
    num_waiting: int  # constraints in line
    num_grammars: int  # kept
    grammar_bytes: int


@dataclass(slots=True)
class _Counters:
    num_hits: int = 0
    num_refusals: int = 0
    num_failures: int = 0
    num_turned_away: int = 0
    num_compiles: int = 0
    num_overruns: int = 0
    compile_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why there is no matcher. Each who waits is told with an error of its own.

    `code` says that the constraint is at fault; None: that the engine is.
    """

    message: str
    code: str | None = None

    @property
    def is_refusal(self) -> bool:
        return self.code is not None

    def error(self) -> SapwoodError:
        if self.code is None:
            return EngineError(self.message)
        return RequestError(self.message, param="constraint", code=self.code)


@dataclass(frozen=True, slots=True)
class _Compiled:
    grammar: Grammar
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Refusal:
    failure: _Failure
    forgotten_at: float  # seconds, the compiler's clock


@dataclass(slots=True, eq=False)
class _Job:
    """A constraint that is in line or being compiled, and who waits for it.

    Changed only under the compiler's lock.
    """

    spec: ConstraintSpec
    waiters: set[MatcherFuture] = field(default_factory=set)
    overrun: _Failure | None = None  # once it takes longer than it may


class ConstraintCompiler:
    """Compiles constraints on threads of its own. Thread-safe.

    Equal constraints are compiled once, however many ask at once. Small ones come first, and none
    waits without end (`CompileLine`). What takes longer than the deadline is refused, and kept all
    the same once it is finished. The deadline counts from when the compile begins; making a backend
    and waiting for its turn do not count.

    The engine's default backend is made at once, in the background.
    """

    def __init__(
        self,
        backends: Backends,
        options: ConstraintOptions,
        *,
        clock: Callable[[], float],
        max_waiting: int = MAX_WAITING,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """`clock` gives seconds. The compiler closes `backends`.

        A backend that cannot be stopped may hold all threads. Nobody is left to wait for that, so
        no constraint is in line for longer than `wait_seconds`.
        """
        self._backends = backends
        self._default_backend = options.constraint_backend
        self._deadline = options.constraint_deadline_ms / 1000
        self._clock = clock
        self._max_waiting = max_waiting
        self._lock = threading.Lock()  # over all that follows
        self._has_work = threading.Condition(self._lock)
        self._line: CompileLine[_Job] = CompileLine()
        self._jobs: dict[ConstraintSpec, _Job] = {}  # in line and running
        self._grammars: BoundedCache[ConstraintSpec, Grammar] = BoundedCache(
            max_entries=MAX_GRAMMARS, max_bytes=options.constraint_cache_memory
        )
        self._refusals: BoundedCache[ConstraintSpec, _Refusal] = BoundedCache(
            max_entries=MAX_REFUSALS, max_bytes=MAX_REFUSAL_BYTES
        )
        self._counters = _Counters()
        self._closed = False
        self._watchdog = Watchdog(
            limit=self._deadline, on_overrun=self._refuse_overrun, clock=clock
        )
        self._patience = Watchdog(limit=wait_seconds, on_overrun=self._turn_away, clock=clock)
        first_tasks = (self._make_default_backend, *[None] * (NUM_THREADS - 1))
        self._threads = [
            threading.Thread(
                target=self._run, args=(task,), name=f"sapwood-constraints-{index}", daemon=True
            )
            for index, task in enumerate(first_tasks)
        ]
        for thread in self._threads:
            thread.start()

    def matchers(self, specs: Sequence[ConstraintSpec | None]) -> Future[list[Matcher | None]]:
        """A matcher for each constraint of one call, None for None. Never blocks.

        They are compiled side by side, and it is done at once where all of them are kept. Fails
        with the first that fails: RequestError for a constraint that is wrong, too much work or
        for a backend that is not there, EngineError where a backend fails, EngineBusyError where
        too many of other calls wait, EngineClosedError. Cancel it to wait no more.
        """
        with self._lock:
            has_room = len(self._line) < self._max_waiting
        return all_of(
            [_done(None) if spec is None else self._matcher(spec, has_room) for spec in specs]
        )

    def stats(self) -> CompilerStats:
        """O(1)."""
        with self._lock:
            return CompilerStats(
                **asdict(self._counters),
                num_waiting=len(self._line),
                num_grammars=len(self._grammars),
                grammar_bytes=self._grammars.num_bytes,
            )

    def close(self) -> None:
        """Tell all who wait, close the backends and wait for the threads. Idempotent."""
        with self._lock:
            self._closed = True
            waiters = [future for job in self._jobs.values() for future in job.waiters]
            self._jobs.clear()
            self._line.clear()
            self._grammars.clear()
            self._has_work.notify_all()
        for future in waiters:
            _fail(future, _closed())
        self._watchdog.close()
        self._patience.close()
        self._backends.close()
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
            if thread.is_alive():
                logger.warning("a constraint is still being compiled; its thread is left behind")

    # -- asking ------------------------------------------------------------------------------------

    def _matcher(self, spec: ConstraintSpec, has_room: bool) -> MatcherFuture:
        if spec.backend is None:
            spec = replace(spec, backend=self._default_backend)
        elif (unknown := self._backends.unknown(spec.backend)) is not None:
            return _failed(unknown)
        with self._lock:
            if self._closed:
                return _failed(_closed())
            grammar = self._grammars.get(spec)
            if grammar is None:
                return self._wait_for(spec, has_room)
            self._counters.num_hits += 1
        future: MatcherFuture = Future()
        self._give(future, grammar, spec)
        return future

    def _wait_for(self, spec: ConstraintSpec, has_room: bool) -> MatcherFuture:
        """Wait for a constraint that is not kept, unless waiting is in vain. Under the lock."""
        job = self._jobs.get(spec)
        failure = self._remembered(spec) if job is None else job.overrun
        if failure is not None:
            self._counters.num_refusals += 1
            return _failed(failure.error())
        if job is None:
            if not has_room:
                self._counters.num_turned_away += 1
                return _failed(_too_many(self._max_waiting))
            job = self._jobs[spec] = _Job(spec)
            self._line.add(job, len(spec.text))
            self._patience.watch(job)
            self._has_work.notify()
        future: MatcherFuture = Future()
        job.waiters.add(future)
        future.add_done_callback(partial(self._leave, job))
        return future

    def _remembered(self, spec: ConstraintSpec) -> _Failure | None:
        refusal = self._refusals.get(spec)
        if refusal is None or refusal.forgotten_at <= self._clock():
            return None
        return refusal.failure

    def _leave(self, job: _Job, future: MatcherFuture) -> None:
        """Nobody waits for what was cancelled; a job that nobody waits for leaves the line."""
        if not future.cancelled():
            return
        with self._lock:
            job.waiters.discard(future)
            if not job.waiters and self._line.discard(job):
                self._patience.forget(job)
                del self._jobs[job.spec]

    # -- on the threads ----------------------------------------------------------------------------

    def _run(self, first_task: Callable[[], None] | None) -> None:
        if first_task is not None:
            first_task()
        while (job := self._next_job()) is not None:
            self._settle(job, self._compile(job))

    def _make_default_backend(self) -> None:
        name = self._default_backend
        try:
            self._backends.get(name)
        except EngineClosedError:
            pass
        except BaseException as error:
            failure = _failure_of(error, name)
            logger.warning("constraints that name no backend are refused: %s", failure.message)

    def _next_job(self) -> _Job | None:
        """Waits for one; None once it is closed."""
        with self._lock:
            while not self._closed and not self._line:
                self._has_work.wait()
            if self._closed:
                return None
            job = self._line.take()
            self._patience.forget(job)
            return job

    def _compile(self, job: _Job) -> _Compiled | _Failure:
        """What becomes of a constraint, whatever a backend does."""
        spec, name = job.spec, _backend_name(job.spec)
        try:
            backend = self._backends.get(name)
            with backend.turn(spec):
                started = self._clock()
                try:
                    with self._watchdog.watching(job):
                        grammar = backend.compile(spec, deadline=self._deadline)
                        return _Compiled(grammar, grammar.num_bytes)
                finally:
                    self._count_compile(self._clock() - started)
        except BaseException as error:  # a panic of a backend written in Rust is no Exception
            return _failure_of(error, name)

    def _count_compile(self, seconds: float) -> None:
        with self._lock:
            self._counters.num_compiles += 1
            self._counters.compile_seconds += seconds

    def _settle(self, job: _Job, outcome: _Compiled | _Failure) -> None:
        """Keep what became of a job, and tell who waits for it."""
        spec = job.spec
        with self._lock:
            if self._closed:
                return  # all were told
            del self._jobs[spec]
            waiters, job.waiters = job.waiters, set()
            size = sys.getsizeof(spec.text)
            if isinstance(outcome, _Compiled):
                self._refusals.discard(spec)
                self._grammars.put(spec, outcome.grammar, outcome.num_bytes + size)
            elif outcome.is_refusal:
                refusal = _Refusal(outcome, self._clock() + REFUSAL_SECONDS)
                self._refusals.put(spec, refusal, size)
        for future in waiters:
            if isinstance(outcome, _Compiled):
                self._give(future, outcome.grammar, spec)
            else:
                self._tell(future, outcome)

    def _refuse_overrun(self, job: _Job) -> None:
        """Whoever waits for a job that takes too long, or comes while it still runs, is refused."""
        failure = _Failure(
            f"the constraint is not compiled after {self._deadline * 1000:.0f} ms, the most that "
            "one may take; make it smaller or simpler, or raise the engine's option "
            "constraint_deadline_ms",
            code="constraint_deadline_exceeded",
        )
        with self._lock:
            self._counters.num_overruns += 1
            job.overrun = failure
            waiters, job.waiters = job.waiters, set()
        for future in waiters:
            self._tell(future, failure)

    def _turn_away(self, job: _Job) -> None:
        """Whoever waits for a job that has been in line for too long is told to come back."""
        with self._lock:
            if not self._line.discard(job):
                return  # it was taken up meanwhile
            del self._jobs[job.spec]
            waiters, job.waiters = job.waiters, set()
            self._counters.num_turned_away += len(waiters)
        for future in waiters:
            _fail(future, _waited_too_long())

    def _give(self, future: MatcherFuture, grammar: Grammar, spec: ConstraintSpec) -> None:
        """A matcher to one who waits."""
        try:
            matcher = grammar.matcher()
        except KeyboardInterrupt:  # of the caller's thread
            raise
        except BaseException as error:
            self._tell(future, _failure_of(error, _backend_name(spec)))
            return
        with suppress(InvalidStateError):  # it was cancelled meanwhile
            future.set_result(matcher)

    def _tell(self, future: MatcherFuture, failure: _Failure) -> None:
        with self._lock:
            if failure.is_refusal:
                self._counters.num_refusals += 1
            else:
                self._counters.num_failures += 1
        _fail(future, failure.error())


def _failure_of(error: BaseException, backend: str) -> _Failure:
    """What a backend's error means for who waits. What is none of ours is logged."""
    match error:
        case GrammarError():
            return _Failure(str(error), code="invalid_grammar")
        case RequestError():
            return _Failure(str(error), code=error.code or "invalid_grammar")
        case EngineClosedError():
            return _Failure(str(error))
        case ModuleNotFoundError(name=str(name)) if not name.startswith("sapwood"):
            return _Failure(
                f"the constraint backend {backend!r} needs the package {name}, which is not "
                f"installed; install it (pip install {name.partition('.')[0]}), or choose another "
                "backend",
                code="constraint_backend_not_installed",
            )
    logger.error("the constraint backend %s failed", backend, exc_info=error)
    reason = str(error) if isinstance(error, WorkError) else repr(error)
    return _Failure(
        f"the constraint backend {backend!r} failed on this constraint: {reason}; send it again, "
        "or choose another backend"
    )


def _backend_name(spec: ConstraintSpec) -> str:
    assert spec.backend is not None, "the default has been put in"
    return spec.backend


def _too_many(max_waiting: int) -> EngineBusyError:
    return EngineBusyError(
        f"{max_waiting} constraints wait to be compiled already, and no more may; send the request "
        "again in a while"
    )


def _waited_too_long() -> EngineBusyError:
    return EngineBusyError(
        "the constraint has waited too long for others to be compiled; send the request again in a "
        "while"
    )


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine was closed before the constraint was compiled")


def _done(matcher: Matcher | None) -> MatcherFuture:
    future: MatcherFuture = Future()
    future.set_result(matcher)
    return future


def _failed(error: SapwoodError) -> MatcherFuture:
    future: MatcherFuture = Future()
    future.set_exception(error)
    return future


def _fail(future: MatcherFuture, error: SapwoodError) -> None:
    with suppress(InvalidStateError):  # it was cancelled meanwhile
        future.set_exception(error)
