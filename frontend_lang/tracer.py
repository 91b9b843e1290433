"""A program's graph, found by running it without a backend.

Arguments that are not given, and all that a model would write, are unknown: they may be joined with
`+`, kept and handed on, and a program that needs to know them (an f-string, an `if`, `int(...)`)
ends the trace with an error that says so.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

from sapwood.frontend_lang.arguments import Parameters
from sapwood.frontend_lang.nodes import (
    ASSISTANT,
    SYSTEM,
    USER,
    Concat,
    Constant,
    Gen,
    Node,
    Pause,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    SeparateReasoning,
    Value,
    as_node,
)
from sapwood.runtime.errors import SapwoodError


class TraceError(SapwoodError, TypeError):
    """While a program is traced it needs what only a run knows."""


class Unknown(Value):
    """A text that a run will know. Whatever needs to know it now is a TraceError.

    `source` is the number of the graph's node that gives it.
    """

    __slots__ = ()

    def _refuse(self, *_: object) -> NoReturn:
        raise TraceError(
            f"the text of {self.name!r} is not known while a program is traced, and the program "
            "goes on by what it is; give trace(...) the argument, or run the program"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python itself asks for, to see whether it is there
            raise AttributeError(name)
        self._refuse()

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return True if self is other else self._refuse()

    __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = _refuse
    __int__ = __float__ = __index__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __mul__ = __rmul__ = __mod__ = _refuse


class TraceKind(StrEnum):
    """What a node of the graph does."""

    ARGUMENT = "argument"
    CONSTANT = "constant"
    GEN = "gen"
    SELECT = "select"
    VARIABLE = "variable"  # the text of another node, appended again
    ROLE_BEGIN = "role begin"
    ROLE_END = "role end"
    SCOPE_BEGIN = "scope begin"
    SCOPE_END = "scope end"
    PAUSE = "pause"
    FORK = "fork"
    BRANCH = "branch"
    JOIN = "join"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedNode:
    """A node of a program's graph, numbered in the order in which the program made it.

    `previous` is the node that it follows: a branch follows its fork, and what comes after a join
    follows that. `uses` are the nodes whose text it is made of. `depth` counts the forks around it.
    """

    number: int
    kind: TraceKind
    name: str | None = None
    detail: str = ""
    previous: int | None = None
    uses: tuple[int, ...] = ()
    depth: int = 0

    def __str__(self) -> str:
        what = " ".join(part for part in (self.kind, self.name, self.detail) if part)
        used = f" <- {', '.join(f'[{number}]' for number in self.uses)}" if self.uses else ""
        return f"[{self.number}] {what}{used}"


@dataclass(frozen=True, slots=True)
class Trace:
    """A program's graph. `prefix` is what every run begins with: its nodes before the first whose
    text is not known."""

    nodes: tuple[TracedNode, ...]
    prefix: tuple[Node, ...]
    variables: Mapping[str, Any]

    def followers(self, number: int) -> tuple[TracedNode, ...]:
        """The nodes that follow one, in the program's order."""
        return tuple(node for node in self.nodes if node.previous == number)

    def print_graph_dfs(self) -> None:
        """Write the graph to standard output, depth first."""
        sys.stdout.write(f"{self}\n")

    def __str__(self) -> str:
        following: dict[int | None, list[TracedNode]] = {}
        for node in self.nodes:
            following.setdefault(node.previous, []).append(node)
        lines: list[str] = []
        stack = list(reversed(following.get(None, [])))
        while stack:
            node = stack.pop()
            lines.append(f"{'  ' * node.depth}{node}")
            # Branches come before what follows the fork itself.
            after = sorted(following.get(node.number, []), key=lambda each: -each.depth)
            stack.extend(reversed(after))
        return "\n".join(lines)


def trace(
    function: Callable[..., Any], positional: Sequence[Any], arguments: Mapping[str, Any]
) -> Trace:
    """The graph of a program; arguments that are not given are unknown.

    Runs the function once, and with it all that it does beside the model's work. Raises TraceError
    where it needs to know what is unknown, and whatever it raises itself.
    """
    recorder = _Recorder()
    state = TraceState(recorder)
    _run(function, state, positional, arguments)
    return recorder.trace(state)


def trace_prefix(
    function: Callable[..., Any], positional: Sequence[Any], arguments: Mapping[str, Any]
) -> tuple[Node, ...]:
    """What every run with these arguments begins with. A program that cannot be traced to its end
    is traced as far as it goes."""
    recorder = _Recorder()
    try:
        _run(function, TraceState(recorder), positional, arguments)
    except Exception:
        # Whatever is wrong with the program is told when it runs; a prefix is only an offer.
        return tuple(recorder.prefix)
    return tuple(recorder.prefix)


def _run(
    function: Callable[..., Any],
    state: TraceState,
    positional: Sequence[Any],
    arguments: Mapping[str, Any],
) -> None:
    given = inspect.signature(function).bind_partial(None, *positional, **arguments).arguments
    signature = inspect.signature(function).parameters
    unknown = {
        name: state.argument(name)
        for name in Parameters.of(function).names
        if name not in given and signature[name].default is inspect.Parameter.empty
    }
    result = function(state, *positional, **arguments, **unknown)
    if inspect.iscoroutine(result):
        asyncio.run(result)


class _Recorder:
    """The graph while it grows. Written by the states of one trace."""

    def __init__(self) -> None:
        self.nodes: list[TracedNode] = []
        self.prefix: list[Node] = []
        self._is_constant = True

    def add(self, kind: TraceKind, **fields: Any) -> int:
        node = TracedNode(number=len(self.nodes), kind=kind, **fields)
        self.nodes.append(node)
        return node.number

    def begin_with(self, node: Node) -> None:
        if self._is_constant:
            self.prefix.append(node)

    def end_prefix(self) -> None:
        self._is_constant = False

    def trace(self, state: TraceState) -> Trace:
        return Trace(tuple(self.nodes), tuple(self.prefix), dict(state.variables))


class TraceState:
    """What a program has for its state while it is traced: the same verbs, and no answers."""

    def __init__(
        self,
        recorder: _Recorder,
        *,
        variables: Mapping[str, Any] | None = None,
        last: int | None = None,
        depth: int = 0,
    ) -> None:
        self.variables: dict[str, Any] = dict(variables or {})
        self._recorder = recorder
        self._last = last
        self._depth = depth

    # -- what a program appends ------------------------------------------------------------------

    def __iadd__(self, other: Node | str) -> TraceState:
        self._append(as_node(other))
        return self

    def argument(self, name: str) -> Unknown:
        """An argument that is not given."""
        number = self._recorder.add(TraceKind.ARGUMENT, name=name)
        return Unknown(name, number)

    @contextmanager
    def _role(self, role: str) -> Iterator[None]:
        self._append(RoleBegin(role))
        try:
            yield
        finally:
            self._append(RoleEnd(role))

    def _said(self, role: str, expression: Node | str | None) -> Any:
        if expression is None:
            return self._role(role)
        self._append(Concat((RoleBegin(role), as_node(expression), RoleEnd(role))))
        return None

    def system(self, expression: Node | str | None = None) -> Any:
        return self._said(SYSTEM, expression)

    def user(self, expression: Node | str | None = None) -> Any:
        return self._said(USER, expression)

    def assistant(self, expression: Node | str | None = None) -> Any:
        return self._said(ASSISTANT, expression)

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        self._append(ScopeBegin(name))
        try:
            yield
        finally:
            self._append(ScopeEnd(name))

    def fork(self, n: int = 1, position_ids_offset: Sequence[int] | None = None) -> TraceGroup:
        fork = self._add(TraceKind.FORK, detail=str(int(n)))
        return TraceGroup(self, [self._branch(fork, index) for index in range(n)])

    @contextmanager
    def copy(self) -> Iterator[TraceState]:
        yield self.fork(1)[0]

    # -- what a program reads --------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __contains__(self, name: object) -> bool:
        return name in self.variables

    def get(self, what: str | Gen[Any] | Select) -> Any:
        return self.get_var(str(what if isinstance(what, str) else what.name))

    async def aget(self, what: str | Gen[Any] | Select) -> Any:
        return self.get(what)

    def get_var(self, name: str) -> Any:
        if name not in self.variables:
            known = ", ".join(self.variables) or "none yet"
            raise KeyError(f"no statement before this sets a variable {name!r}; there are {known}")
        return self.variables[name]

    def set_var(self, name: str, value: Any) -> None:
        self.variables[name] = value

    def get_meta_info(self, name: str, timeout: float | None = None) -> Unknown:
        return Unknown(f"get_meta_info({name!r})", self._last)

    def text(self) -> Unknown:
        return Unknown("text()", self._last)

    def messages(self) -> Unknown:
        return Unknown("messages()", self._last)

    def sync(self) -> None:
        """Nothing runs that could be waited for."""

    def error(self) -> None:
        """Nothing has run that could have failed."""

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """No text comes."""
        return iter(())

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """No text comes."""
        none: tuple[Any, ...] = ()
        for piece in none:
            yield piece

    # -- how the graph grows ---------------------------------------------------------------------

    def _add(self, kind: TraceKind, **fields: Any) -> int:
        self._recorder.end_prefix()
        return self._follow(kind, **fields)

    def _follow(self, kind: TraceKind, **fields: Any) -> int:
        self._last = self._recorder.add(kind, previous=self._last, depth=self._depth, **fields)
        return self._last

    def _append(self, node: Node) -> None:
        match node:
            case Concat(parts=parts):
                for part in parts:
                    self._append(part)
            case SeparateReasoning(body=body):
                self._recorder.end_prefix()
                self._append(body)
            case Constant(text=text):
                self._recorder.begin_with(node)
                self._follow(TraceKind.CONSTANT, detail=_shortened(text))
            case RoleBegin(role=role):
                self._recorder.begin_with(node)
                self._follow(TraceKind.ROLE_BEGIN, name=role)
            case RoleEnd(role=role):
                self._recorder.begin_with(node)
                self._follow(TraceKind.ROLE_END, name=role)
            case ScopeBegin(name=name):
                self._follow(TraceKind.SCOPE_BEGIN, name=name)
            case ScopeEnd(name=name):
                number = self._follow(TraceKind.SCOPE_END, name=name)
                self.variables[name] = Unknown(name, number)
            case Gen(name=variable, options=options):
                detail = ", ".join(f"{key}={value!r}" for key, value in options.items())
                self._generate(TraceKind.GEN, variable, detail)
            case Select(name=variable, choices=choices):
                self._generate(TraceKind.SELECT, variable, _shortened(" | ".join(choices)))
            case Value(name=name, source=source):
                uses = (source,) if isinstance(source, int) else ()
                self._add(TraceKind.VARIABLE, name=name, uses=uses)
            case Pause(seconds=seconds):
                self._add(TraceKind.PAUSE, detail=f"{seconds:g} s")
            case _:
                self._add(TraceKind.OTHER, detail=type(node).__name__)

    def _generate(self, kind: TraceKind, variable: str | None, detail: str) -> None:
        number = self._add(kind, name=variable, detail=f"({detail})" if detail else "")
        if variable is not None:
            self.variables[variable] = Unknown(variable, number)

    def _branch(self, fork: int, index: int) -> TraceState:
        depth = self._depth + 1
        number = self._recorder.add(TraceKind.BRANCH, detail=str(index), previous=fork, depth=depth)
        return TraceState(self._recorder, variables=self.variables, last=number, depth=depth)

    def join(self, branches: Sequence[TraceState], mode: str, before: frozenset[str]) -> None:
        """What `TraceGroup.join` does to the state that was forked."""
        uses = tuple(branch._last for branch in branches)
        self._add(TraceKind.JOIN, detail=mode, uses=uses)
        if mode != "gather_variable":
            return
        for name in dict.fromkeys(name for branch in branches for name in branch.variables):
            if name not in before:
                found = [each.variables[name] for each in branches if name in each.variables]
                gathered = self.variables.get(name, [])
                self.variables[name] = [*gathered, *found]


class TraceGroup:
    """The branches of a fork while a program is traced."""

    def __init__(self, parent: TraceState, branches: list[TraceState]) -> None:
        self._parent = parent
        self._branches = branches
        self._before = frozenset(
            name for name in parent.variables if not isinstance(parent.variables[name], list)
        )

    def __len__(self) -> int:
        return len(self._branches)

    def __iter__(self) -> Iterator[TraceState]:
        return iter(self._branches)

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return [branch[key] for branch in self._branches]
        return self._branches[key]

    def __iadd__(self, other: Node | str) -> TraceGroup:
        for branch in self._branches:
            branch += other
        return self

    def __enter__(self) -> TraceGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.join()

    def join(self, mode: str = "gather_variable") -> None:
        self._parent.join(self._branches, mode, self._before)


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}")
