"""A program's graph, found by running it without a backend.

Arguments that are not given, and all that a model would write, are unknown: they may be joined with
`+`, kept and handed on. A program that needs to know them (an f-string, an `if`, `int(...)`) ends
the trace with an error that says so.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from typing import Any

from sapwood.frontend_lang.arguments import Parameters
from sapwood.frontend_lang.nodes import Node
from sapwood.frontend_lang.trace_graph import Trace
from sapwood.frontend_lang.trace_state import Recorder, TraceState

_RECORDER: ContextVar[Recorder | None] = ContextVar("recorder of the trace under way", default=None)


def trace(
    function: Callable[..., Any], positional: Sequence[Any], arguments: Mapping[str, Any]
) -> Trace:
    """The graph of a program; arguments that are not given are unknown.

    Runs the function once, and with it all that it does beside the model's work. Raises TraceError
    where it needs to know what is unknown, and whatever it raises itself.
    """
    recorder = Recorder()
    state = TraceState.root(recorder)
    _run(function, state, positional, arguments)
    return recorder.trace(state)


def trace_prefix(
    function: Callable[..., Any], positional: Sequence[Any], arguments: Mapping[str, Any]
) -> tuple[Node, ...]:
    """What every run with these arguments begins with. A program that cannot be traced to its end
    is traced as far as it goes."""
    recorder = Recorder()
    # Whatever is wrong with the program is told when it runs; a prefix is only an offer.
    with suppress(Exception):
        _run(function, TraceState.root(recorder), positional, arguments)
    return tuple(recorder.prefix)


def is_tracing() -> bool:
    """Whether this code runs inside of a program that is traced."""
    return _RECORDER.get() is not None


def trace_call(
    function: Callable[..., Any], positional: Sequence[Any], arguments: Mapping[str, Any]
) -> TraceState:
    """Another program that a traced one runs; its state. While `is_tracing` only."""
    recorder = _RECORDER.get()
    assert recorder is not None
    state = TraceState.of_call(recorder, function.__name__)
    _call(function, state, positional, arguments)
    return state


def _run(
    function: Callable[..., Any],
    state: TraceState,
    positional: Sequence[Any],
    arguments: Mapping[str, Any],
) -> None:
    parameters = inspect.signature(function).parameters
    given = inspect.signature(function).bind_partial(None, *positional, **arguments).arguments
    unknown = {
        name: state.argument(name)
        for name in Parameters.of(function).names
        if name not in given and parameters[name].default is inspect.Parameter.empty
    }
    token = _RECORDER.set(state.recorder)
    try:
        _call(function, state, positional, {**arguments, **unknown})
    finally:
        _RECORDER.reset(token)


def _call(
    function: Callable[..., Any],
    state: TraceState,
    positional: Sequence[Any],
    arguments: Mapping[str, Any],
) -> None:
    result = function(state, *positional, **arguments)
    if inspect.iscoroutine(result):
        # On a thread, as a loop may run on this one (as in Jupyter).
        with ThreadPoolExecutor(1) as thread:
            result = thread.submit(copy_context().run, asyncio.run, result).result()
    state.ret_value = result
