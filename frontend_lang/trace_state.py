"""What a program has for its state while it is traced: the same verbs, and no answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from sapwood.frontend_lang.blocks import RoleBlock, ScopeBlock
from sapwood.frontend_lang.errors import ProgramUsageError, UnknownVariableError
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
    generated_names,
)
from sapwood.frontend_lang.trace_graph import Trace, TracedNode, TraceKind
from sapwood.runtime.errors import SapwoodError

S = TypeVar("S", bound="TraceState")


class TraceError(SapwoodError, TypeError):
    """While a program is traced it needs what only a run knows."""


class Unknown(Value):
    """A text that a run will know. Whatever needs to know it now is a TraceError.

    `source` is the number of the graph's node that gives it.
    """

    __slots__ = ()

    advice: ClassVar[str] = "run the program"

    def _refuse(self, *_: object) -> NoReturn:
        raise TraceError(
            f"the text of {self.name!r} is not known while a program is traced, and the program "
            f"goes on by what it is; {self.advice}"
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


class UnknownArgument(Unknown):
    """An argument that a trace was not given."""

    __slots__ = ()

    advice: ClassVar[str] = "give trace(...) the argument, or run the program"


class Recorder:
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
        return Trace(tuple(self.nodes), tuple(self.prefix), dict(state.names))


class TraceState:
    """As `ProgramState`, where every text of a model is `Unknown`.

    `is_root`: what it says first is what every run begins with.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        variables: Mapping[str, Any] | None = None,
        last: int | None = None,
        depth: int = 0,
        is_root: bool = False,
    ) -> None:
        self.recorder = recorder
        self.names: dict[str, Any] = dict(variables or {})
        self.ret_value: Any = None
        self._gathered: frozenset[str] = frozenset()
        self._last = last
        self._depth = depth
        self._is_root = is_root

    @classmethod
    def root(cls, recorder: Recorder) -> TraceState:
        return cls(recorder, is_root=True)

    @classmethod
    def of_call(cls, recorder: Recorder, name: str) -> TraceState:
        """Of another program, which the traced one runs."""
        return cls(recorder, last=recorder.add(TraceKind.CALL, name=name), depth=1)

    def argument(self, name: str) -> UnknownArgument:
        """An argument that is not given."""
        return UnknownArgument(name, self.recorder.add(TraceKind.ARGUMENT, name=name))

    # Appending

    def __iadd__(self, node: Node | str) -> Self:
        self.append(node)
        return self

    def append(self, node: Node | str) -> None:
        simple = as_node(node)
        for part in _simple_parts(simple):
            self._append(part)
        for name in generated_names(simple):
            if name not in self.names:  # the reasoning before an answer, which is kept apart
                self.names[name] = Unknown(name, self._last)

    def system(self, expr: Node | str | None = None) -> RoleBlock:
        return RoleBlock(self, SYSTEM, expr)

    def user(self, expr: Node | str | None = None) -> RoleBlock:
        return RoleBlock(self, USER, expr)

    def assistant(self, expr: Node | str | None = None) -> RoleBlock:
        return RoleBlock(self, ASSISTANT, expr)

    def var_scope(self, name: str) -> ScopeBlock:
        return ScopeBlock(self, name)

    def set_var(self, name: str, value: Any) -> None:
        self.names[name] = value

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> TraceGroup:
        indices = range(size)  # an unknown size is refused here
        fork = self._add(TraceKind.FORK, detail=str(size))
        return TraceGroup(self, [self._branch(TraceState, fork, index) for index in indices])

    def copy(self, position_ids_offset: list[int] | None = None) -> TraceCopy:
        copy = self._branch(TraceCopy, self._add(TraceKind.FORK, detail="1"), 0)
        copy.group = TraceGroup(self, [copy])
        return copy

    # Reading

    def __getitem__(self, name: str) -> Any:
        if name not in self.names:
            raise UnknownVariableError(name, self.names)
        return self.names[name]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def get_var(self, name: str) -> Any:
        return self[name]

    def get(self, node: Gen[Any] | Select | str) -> Any:
        return self[str(node if isinstance(node, str) else node.name)]

    async def aget(self, node: Gen[Any] | Select | str) -> Any:
        return self.get(node)

    def variables(self) -> tuple[str, ...]:
        return tuple(self.names)

    def get_meta_info(self, name: str) -> Unknown:
        return Unknown(f"get_meta_info({name!r})", self._last)

    def text(self) -> Unknown:
        return Unknown("text()", self._last)

    def messages(self) -> Unknown:
        return Unknown("messages()", self._last)

    def sync(self) -> None:
        """Nothing runs that could be waited for."""

    async def settled(self) -> None:
        """Nothing runs that could be waited for."""

    def error(self) -> None:
        """Nothing has run that could have failed."""

    def trace(self) -> Unknown:
        return Unknown("trace()", self._last)

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

    # For groups

    def gather(self, branches: Sequence[TraceState], before: Mapping[str, Any]) -> None:
        """Make lists of what branches have set, unless they would hide a variable of this state."""
        found: dict[str, list[Any]] = {}
        for branch in branches:
            for name, value in branch.names.items():
                if name not in before or value is not before[name]:
                    found.setdefault(name, []).append(value)
        for name, values in found.items():
            if name not in self.names or name in self._gathered:
                self.names[name] = [*self.names.get(name, ()), *values]
                self._gathered |= {name}

    def join(self, branches: Sequence[TraceState], mode: str) -> None:
        """Go on after branches."""
        uses = tuple(branch._last for branch in branches if branch._last is not None)
        self._add(TraceKind.JOIN, detail=mode, uses=uses)

    # How the graph grows

    def _append(self, node: Node) -> None:
        match node:
            case Constant(text=text):
                self._follow(TraceKind.CONSTANT, node, detail=_shortened(text))
            case RoleBegin(role=role):
                self._follow(TraceKind.ROLE_BEGIN, node, name=role)
            case RoleEnd(role=role):
                self._follow(TraceKind.ROLE_END, node, name=role)
            case ScopeBegin(name=name):
                self._follow(TraceKind.SCOPE_BEGIN, node, name=name)
            case ScopeEnd(name=name):
                self.names[name] = Unknown(name, self._follow(TraceKind.SCOPE_END, node, name=name))
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
            self.names[variable] = Unknown(variable, number)

    def _add(self, kind: TraceKind, **fields: Any) -> int:
        """A node whose text is not known; what comes after it is no prefix any more."""
        if self._is_root:
            self.recorder.end_prefix()
        return self._follow(kind, None, **fields)

    def _follow(self, kind: TraceKind, node: Node | None, **fields: Any) -> int:
        if self._is_root and node is not None:
            self.recorder.begin_with(node)
        self._last = self.recorder.add(kind, previous=self._last, depth=self._depth, **fields)
        return self._last

    def _branch(self, kind: type[S], fork: int, index: int) -> S:
        depth = self._depth + 1
        number = self.recorder.add(TraceKind.BRANCH, detail=str(index), previous=fork, depth=depth)
        branch = kind(self.recorder, variables=self.names, last=number, depth=depth)
        branch._gathered = self._gathered
        return branch


class TraceCopy(TraceState):
    """The branch that `copy()` gives; joined at the end of a `with` block."""

    group: TraceGroup

    def __enter__(self) -> TraceState:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self.group.join()


class TraceGroup(Sequence[TraceState]):
    """As `ForkGroup`."""

    def __init__(self, parent: TraceState, branches: list[Any]) -> None:
        self._parent = parent
        self._branches: list[TraceState] = branches
        self._before = dict(parent.names)

    def __len__(self) -> int:
        return len(self._branches)

    def __iter__(self) -> Iterator[TraceState]:
        return iter(self._branches)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return [branch[key] for branch in self._branches]
        return self._branches[key]

    def __setitem__(self, index: int, branch: TraceState) -> None:
        """`group[0] += node` assigns what it appended to."""
        if self._branches[index] is not branch:
            raise ProgramUsageError("a branch cannot be replaced by another state")

    def __iadd__(
        self, node: Node | str | Sequence[Node | str] | Callable[[int], Node | str]
    ) -> Self:
        if isinstance(node, Node | str):
            nodes: Sequence[Node | str] = [node] * len(self)
        elif callable(node):
            nodes = [node(index) for index in range(len(self))]
        else:
            nodes = node
        for branch, own in zip(self._branches, nodes, strict=True):
            branch.append(own)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self.join()

    def join(self, mode: str = "gather_variable") -> None:
        self._parent.join(self._branches, mode)
        if mode == "gather_variable":
            self._parent.gather(self._branches, self._before)

    async def settled(self) -> None:
        """Nothing runs that could be waited for."""


def _simple_parts(node: Node) -> Iterator[Node]:
    match node:
        case Concat(parts=parts):
            for part in parts:
                yield from _simple_parts(part)
        case SeparateReasoning(body=body):
            yield from _simple_parts(body)
        case _:
            yield node


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}")
