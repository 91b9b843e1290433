"""What a program is made of: small frozen values, joined by `+`.

A program appends nodes to a state (`s += "Q: " + question + gen("answer")`); `executor.py` is the
one interpreter of them. Nodes hold no state, so one may be appended many times and to many states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from sapwood.frontend_lang.choices import ChoicesMethod
    from sapwood.frontend_lang.options import Options
    from sapwood.runtime.constraints.spec import ConstraintSpec

T = TypeVar("T")

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"


@dataclass(frozen=True, slots=True)
class Node:
    """Base of all: a piece of a program."""

    def __add__(self, other: Node | str) -> Node:
        return Concat((*_parts(self), *_parts(as_node(other))))

    def __radd__(self, other: str) -> Node:
        return Concat((*_parts(as_node(other)), *_parts(self)))

    def __str__(self) -> str:
        kind = type(self).__name__.lower()
        raise TypeError(
            f"a {kind} cannot stand in an f-string, as its text is not known yet; join it with +: "
            '"Hello " + gen(...)'
        )

    def __format__(self, spec: str) -> str:
        return str(self)


@dataclass(frozen=True, slots=True)
class Constant(Node):
    """Text that the program gives. What it spells of special tokens is text."""

    text: str


@dataclass(frozen=True, slots=True)
class Concat(Node):
    """One after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Gen(Node, Generic[T]):
    """Text that the model gives, kept as variable `name`. T: what `state.get` makes of it.

    `constraint` is what `options` say the text must be, made once, where the node is.
    """

    name: str | None
    options: Options
    constraint: ConstraintSpec | None = None


@dataclass(frozen=True, slots=True)
class Select(Node):
    """One of several texts: the one that `method` prefers by the model's probabilities."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod


@dataclass(frozen=True, slots=True)
class RoleBegin(Node):
    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Node):
    role: str


@dataclass(frozen=True, slots=True)
class ScopeBegin(Node):
    """The text from here to the end of the scope becomes variable `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Node):
    name: str


@dataclass(frozen=True, slots=True)
class SeparateReasoning(Node):
    """In `body` what a model wrote as its reasoning is kept apart, as variable
    `<name>_reasoning_content` of each `gen`. `model_type` names the tags, None: the model's own."""

    body: Node
    model_type: str | None = None


@dataclass(frozen=True, slots=True)
class Pause(Node):
    """Between the nodes before and after it the program is away for about `seconds` (a tool runs):
    its prefix is worth keeping meanwhile."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Value(Node):
    """A variable of another state, or an argument while a program is traced: text that is not known
    yet. `str()` of it is an error that says so."""

    name: str
    source: object = field(default=None, compare=False)

    def __str__(self) -> str:
        raise TypeError(
            f"the text of {self.name!r} is not known while a program is traced; join it with + "
            "instead of an f-string"
        )


def as_node(value: object) -> Node:
    """A node of a text. Raises TypeError for what is neither."""
    if isinstance(value, Node):
        return value
    if isinstance(value, str):
        return Constant(value)
    if is_state(value):
        advice = (
            "append with s += ..., and for the steps of another program call a plain function "
            "with s"
        )
    elif value is None:
        advice = "did a function return nothing?"
    else:
        advice = "write str(...) around it"
    raise TypeError(
        f"a program is made of texts and of nodes such as gen(...), not of "
        f"{type(value).__name__}; {advice}"
    )


def is_state(value: object) -> bool:
    """Whether it is the state of a program, of a run or of a trace."""
    return hasattr(value, "fork") and hasattr(value, "var_scope")


def _parts(node: Node) -> tuple[Node, ...]:
    return node.parts if isinstance(node, Concat) else (node,)


def generated_names(node: Node) -> Sequence[str]:
    """The variables that a node will set, in their order."""
    match node:
        case Gen(name=str(name)) | Select(name=str(name)):
            return (name,)
        case Concat(parts=parts):
            return tuple(name for part in parts for name in generated_names(part))
        case SeparateReasoning(body=body):
            names = generated_names(body)
            return tuple(name for own in names for name in (own, f"{own}_reasoning_content"))
    return ()


Message = Mapping[str, str]  # {"role": ..., "content": ...}
