"""Programs: functions whose first argument is a state, and the ways to run them."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from sapwood.frontend_lang.answering import Defaults
from sapwood.frontend_lang.arguments import (
    RUN_DEFAULTS,
    Invocation,
    Parameters,
    Settings,
    check_call,
    invocation_of,
    options_of,
)
from sapwood.frontend_lang.constraint import constraint_of_options, with_number_stops
from sapwood.frontend_lang.nodes import Concat, Gen
from sapwood.frontend_lang.process import PROCESS
from sapwood.frontend_lang.running import ProgramRun
from sapwood.frontend_lang.state import ProgramState
from sapwood.frontend_lang.tracer import is_tracing, trace, trace_call, trace_prefix

if TYPE_CHECKING:
    from collections.abc import Generator

    from sapwood.frontend_lang.backends.interface import Backend
    from sapwood.frontend_lang.trace_graph import Trace


class Program:
    """What `@function` makes of a function.

    `run` and `arun` take the arguments of the function, and beside them `backend`, `stream`,
    `timeout` (seconds of the whole run) and the options that answers have when their own `gen` says
    nothing else. A name that is both is the function's; `with_options` reaches the option.
    """

    __name__: str

    def __init__(
        self,
        function: Callable[..., Any],
        num_api_spec_tokens: int | None = None,
        base: Invocation | None = None,
    ) -> None:
        self.function = function
        self.num_api_spec_tokens = num_api_spec_tokens
        self.parameters = Parameters.of(function)
        self._base = base or options_of(RUN_DEFAULTS)
        update_wrapper(cast(Any, self), function)

    @property
    def settings(self) -> Settings:
        """What `bind` and `with_options` have settled for every run."""
        return self._base.settings

    def bind(self, /, *args: Any, **arguments: Any) -> Program:
        """The same program, always called with these arguments and options; those of `run` come on
        top."""
        return self._with(invocation_of(self.parameters, args, arguments))

    def with_options(self, /, **options: Any) -> Program:
        """The same program with these options (`temperature=0`, `backend=...`), also where a
        parameter of the program has such a name. Raises TypeError for an unknown one."""
        return self._with(options_of(options))

    def run(self, /, *args: Any, **arguments: Any) -> ProgramState:
        """Run to the end, and return the state; with `stream=True` return it at once, to be read as
        it grows.

        Works on any thread. Raises TypeError for arguments that do not fit, ProgramError for a
        statement that failed, and what the program raises itself.
        """
        given = self.invocation(args, arguments)
        if is_tracing():
            return self._traced(given)
        if not given.settings.get("stream"):
            PROCESS.background.check_may_wait()
        execution = _Execution(self, given)
        if given.settings.get("stream"):
            execution.start()
        elif execution.is_async:
            PROCESS.background.run(execution.perform_async())
        else:
            execution.perform()
        return execution.state

    async def arun(self, /, *args: Any, **arguments: Any) -> ProgramState:
        """`run` for async callers, on any event loop. A program that is no `async def` runs on a
        thread of its own. To cancel it aborts its requests."""
        given = self.invocation(args, arguments)
        if is_tracing():
            return self._traced(given)
        execution = _Execution(self, given)
        future = execution.start()
        if not given.settings.get("stream"):
            try:
                await asyncio.wrap_future(future)
            except asyncio.CancelledError as error:
                execution.state._run.abort(error)
                raise
        return execution.state

    def __call__(self, /, *args: Any, **arguments: Any) -> ProgramState:
        """`run`."""
        return self.run(*args, **arguments)

    @overload
    def run_batch(
        self,
        batch_arguments: Iterable[Mapping[str, Any]],
        *,
        generator_style: Literal[False] = False,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        on_error: Literal["raise", "return"] = "raise",
        **options: Any,
    ) -> list[ProgramState]: ...
    @overload
    def run_batch(
        self,
        batch_arguments: Iterable[Mapping[str, Any]],
        *,
        generator_style: Literal[True],
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        on_error: Literal["raise", "return"] = "raise",
        **options: Any,
    ) -> Generator[ProgramState]: ...
    def run_batch(
        self,
        batch_arguments: Iterable[Mapping[str, Any]],
        *,
        generator_style: bool = False,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        on_error: Literal["raise", "return"] = "raise",
        **options: Any,
    ) -> list[ProgramState] | Generator[ProgramState]:
        """Run the program once for each of several keyword arguments; the states in their order.

        What the programs have in common is computed once, and they begin depth first over the tree
        of their prompts (`gate.py`). At most `num_threads` of them work at the backend, and run on
        threads, at once; "auto" is many, and no more than the backend's cache holds where computing
        again would cost more (`room.py`). An async program needs no thread. With `generator_style`
        states come as soon as they, and those before them, are done. `on_error="raise"`: the first
        error of any of them is raised, and the others are aborted; `"return"`: its state's
        `error()` tells. `options` are those of `run`; a `timeout` is each program's own, without
        its wait for its turn.
        """
        from sapwood.frontend_lang.batch import BatchPlan, run_batch

        if is_tracing():
            return [self.run(**arguments) for arguments in batch_arguments]
        plan = BatchPlan(num_threads=num_threads, progress_bar=progress_bar, on_error=on_error)
        states = run_batch(self.with_options(**options), batch_arguments, plan)
        return states if generator_style else list(states)

    def trace(self, /, *args: Any, **arguments: Any) -> Trace:
        """The program's graph, without a backend; arguments that are not given are unknown.

        Raises TraceError where the program needs to know what only a run does.
        """
        given = self._given(args, arguments)
        return trace(self.function, given.positional, given.arguments)

    def cache(self, backend: object = None) -> None:
        """Let a backend compute what every run begins with: all before the first text that is not
        known. The function is run once, without a backend, to find it. Does nothing where a backend
        takes messages only. Raises ProgramError."""
        chosen = PROCESS.backend(self.settings.get("backend") if backend is None else backend)
        prefix = trace_prefix(self.function, self._base.positional, self._base.arguments)
        if prefix and not chosen.chat_only:
            # An answer of one token is the least that every backend can be asked for.
            least: Gen[str] = Gen(None, {"max_tokens": 1, "temperature": 0.0})
            Program(lambda s: s.append(Concat((*prefix, least)))).run(backend=chosen)

    def __repr__(self) -> str:
        return f"<Program {self.function.__qualname__}>"

    def invocation(self, args: tuple[Any, ...], arguments: Mapping[str, Any]) -> Invocation:
        """What the program is called with. Raises TypeError, before anything runs."""
        given = self._given(args, arguments)
        check_call(self.function, given)
        return given

    def begin(self, given: Invocation, backend: Backend | None = None) -> ProgramState:
        """The state of a run that begins; `backend` instead of the one that is given."""
        options = with_number_stops(given.options)
        run = ProgramRun(
            PROCESS.background,
            backend or PROCESS.backend(given.settings.get("backend")),
            Defaults(options=options, constraint=constraint_of_options(options)),
            is_streamed=bool(given.settings.get("stream")),
            num_api_spec_tokens=self.num_api_spec_tokens,
        )
        state = ProgramState(run)
        run.background.post(state._executor.worker.begin)
        return state

    def _given(self, args: tuple[Any, ...], arguments: Mapping[str, Any]) -> Invocation:
        return invocation_of(self.parameters, args, arguments).over(self._base)

    def _traced(self, given: Invocation) -> ProgramState:
        """The state of a program that a traced program runs."""
        return cast(ProgramState, trace_call(self.function, given.positional, given.arguments))

    def _with(self, layer: Invocation) -> Program:
        return type(self)(self.function, self.num_api_spec_tokens, layer.over(self._base))


class _Execution:
    """A program that is called: its state, and the ways to perform it."""

    def __init__(self, program: Program, given: Invocation) -> None:
        self.state = program.begin(given)
        self.is_async = inspect.iscoroutinefunction(program.function)
        self._call = partial(program.function, self.state, *given.positional, **given.arguments)
        if (timeout := given.settings.get("timeout")) is not None:
            self.state._run.limit(timeout)

    def perform(self) -> None:
        """On this thread, to the end."""
        self.state.ret_value = self.state._run.perform(self._call)

    async def perform_async(self) -> None:
        """On the loop, to the end."""
        self.state.ret_value = await self.state._run.perform_async(self._call)

    def start(self) -> Future[None]:
        """Beside the caller: on the loop, or on a thread of its own."""
        if self.is_async:
            return PROCESS.background.start(self.perform_async())
        future: Future[None] = Future()
        threading.Thread(
            target=self._perform_for, args=(future,), name="sapwood-program", daemon=True
        ).start()
        return future

    def _perform_for(self, future: Future[None]) -> None:
        try:
            self.perform()
        except BaseException as error:
            with suppress(Exception):  # nobody waits any more
                future.set_exception(error)
        else:
            with suppress(Exception):
                future.set_result(None)
