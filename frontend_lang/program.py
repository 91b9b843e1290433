"""Programs: functions whose first argument is a state, and the ways to run them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from sapwood.frontend_lang.arguments import RunArguments, sorted_arguments
from sapwood.frontend_lang.process import PROCESS
from sapwood.frontend_lang.running import ProgramRun
from sapwood.frontend_lang.state import ProgramState


class Program:
    """What `@function` makes of a function."""

    def __init__(
        self, function: Callable[..., Any], num_api_spec_tokens: int | None = None
    ) -> None:
        parameters = tuple(inspect.signature(function).parameters.values())
        if not parameters:
            raise TypeError(
                f"a program takes its state as its first argument: def {function.__name__}(s, ...)"
            )
        self.function = function
        self.num_api_spec_tokens = num_api_spec_tokens
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.parameters = parameters[1:]

    def run(self, /, *args: Any, **arguments: Any) -> ProgramState:
        """Run the program to its end, and return its state."""
        given = sorted_arguments(self.parameters, arguments)
        state = self._begin(given)
        run = state._run
        try:
            run.own()
            state.ret_value = self.function(state, *args, **given.of_program)
            run.has_returned = True
            run.wait_for_all()
            run.check()
        except BaseException as error:
            run.abort(error)
            raise
        finally:
            run.end()
        return state

    def __call__(self, /, *args: Any, **arguments: Any) -> ProgramState:
        return self.run(*args, **arguments)

    def _begin(self, given: RunArguments) -> ProgramState:
        run = ProgramRun(
            PROCESS.background,
            PROCESS.backend(given.backend),
            given.options,
            is_streamed=given.stream,
        )
        state = ProgramState(run)
        state._executor.begin()
        return state
