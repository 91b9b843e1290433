"""Programs: functions whose first argument is a state, and the ways to run them."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial, update_wrapper
from typing import Any, Self, cast

from sapwood.frontend_lang.answering import Defaults
from sapwood.frontend_lang.arguments import (
    RUN_DEFAULTS,
    Invocation,
    Parameters,
    check_call,
    invocation_of,
    options_of,
)
from sapwood.frontend_lang.constraint import constraint_of_options
from sapwood.frontend_lang.process import PROCESS
from sapwood.frontend_lang.running import ProgramRun
from sapwood.frontend_lang.state import ProgramState


class Program:
    """What `@function` makes of a function.

    `run` and `arun` take the arguments of the function, and beside them `backend`, `stream`,
    `timeout` (seconds of the whole run) and the options that answers have when their own `gen` says
    nothing else. A name that is both is the function's; `with_options` reaches the option.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        num_api_spec_tokens: int | None = None,
        *,
        base: Invocation | None = None,
    ) -> None:
        self.function = function
        self.num_api_spec_tokens = num_api_spec_tokens
        self.parameters = Parameters.of(function)
        self.base = base or Invocation(options=RUN_DEFAULTS)
        update_wrapper(cast(Any, self), function)

    def bind(self, /, *args: Any, **arguments: Any) -> Self:
        """The same program with some of its arguments given; those of `run` come on top."""
        return self._over(self._invocation(args, arguments))

    def with_options(self, **options: Any) -> Self:
        """The same program with other defaults of `run`, whatever its own parameters are called.

        Raises TypeError for an unknown option.
        """
        return self._over(options_of(options).over(self.base))

    def run(self, /, *args: Any, **arguments: Any) -> ProgramState:
        """Run to the end, and return the state; with `stream=True` return it at once, to be read as
        it grows.

        Works on any thread. Raises TypeError for arguments that do not fit, ProgramError for a
        statement that failed, and what the program raises itself.
        """
        invocation = self._invocation(args, arguments)
        execution = _Execution(self.function, invocation)
        if invocation.settings.get("stream"):
            execution.start()
        elif execution.is_async:
            PROCESS.background.run(execution.perform_async())
        else:
            execution.perform()
        return execution.state

    async def arun(self, /, *args: Any, **arguments: Any) -> ProgramState:
        """`run` for async callers, on any event loop. A program that is no `async def` runs on a
        thread of its own. To cancel it aborts its requests."""
        invocation = self._invocation(args, arguments)
        execution = _Execution(self.function, invocation)
        future = execution.start()
        if not invocation.settings.get("stream"):
            try:
                await asyncio.wrap_future(future)
            except asyncio.CancelledError as error:
                execution.state._run.abort(error)
                raise
        return execution.state

    def __call__(self, /, *args: Any, **arguments: Any) -> ProgramState:
        """`run`."""
        return self.run(*args, **arguments)

    def __repr__(self) -> str:
        return f"<Program {self.function.__qualname__}>"

    def _invocation(self, args: tuple[Any, ...], arguments: dict[str, Any]) -> Invocation:
        return invocation_of(self.parameters, args, arguments).over(self.base)

    def _over(self, base: Invocation) -> Self:
        return type(self)(self.function, self.num_api_spec_tokens, base=base)


class _Execution:
    """A program that is called: its state, and the ways to perform it."""

    def __init__(self, function: Callable[..., Any], invocation: Invocation) -> None:
        check_call(function, invocation)
        settings, options = invocation.settings, invocation.options
        run = ProgramRun(
            PROCESS.background,
            PROCESS.backend(settings.get("backend")),
            Defaults(options=options, constraint=constraint_of_options(options)),
            is_streamed=bool(settings.get("stream")),
        )
        self.state = ProgramState(run)
        self.is_async = inspect.iscoroutinefunction(function)
        self._call = partial(function, self.state, *invocation.positional, **invocation.arguments)
        PROCESS.background.post(self.state._executor.worker.begin)
        if (timeout := settings.get("timeout")) is not None:
            run.limit(timeout)

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
