"""Statements: nodes as they are appended, each with its line and the variables that it will set.

Also the nodes that only the interpreter itself appends.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from sapwood.frontend_lang.errors import Failure, Place
from sapwood.frontend_lang.nodes import (
    Concat,
    Gen,
    Node,
    ScopeEnd,
    Select,
    SeparateReasoning,
)
from sapwood.frontend_lang.values import parse_value
from sapwood.frontend_lang.variables import Gathered, Variable

if TYPE_CHECKING:
    from sapwood.frontend_lang.executor import Executor
    from sapwood.frontend_lang.transcript import Transcript


@dataclass(frozen=True, slots=True)
class ForkPoint(Node):
    """Here branches begin, each with a copy of all before it."""

    branches: "tuple[Executor, ...]"


@dataclass(frozen=True, slots=True)
class Append(Node):
    """The new text of branches, one after the other. `gathered` are settled with it."""

    branches: "tuple[Executor, ...]"
    gathered: tuple[Gathered, ...] = ()


@dataclass(frozen=True, slots=True)
class Look(Node):
    """A question about the transcript at this point; the statement's variable is the answer."""

    question: "Callable[[Transcript], Any]"


class ReasoningRule(NamedTuple):
    """How an answer's reasoning is kept apart: `model_type` names the tags, None: the model's."""

    model_type: str | None


class Statement(NamedTuple):
    """One node, as it stands in a program."""

    node: Node
    place: Place | None
    variable: Variable | None = None
    reasoning: Variable | None = None  # set beside `variable`
    reasoning_rule: ReasoningRule | None = None

    def fail(self, failure: Failure) -> None:
        """Nothing will come of it. Its `branches` are the caller's to fail."""
        if self.variable is not None:
            self.variable.fail(failure)
        if self.reasoning is not None:
            self.reasoning.fail(failure)
        if isinstance(self.node, Append):
            for variable in self.node.gathered:
                variable.fail(failure)

    @property
    def branches(self) -> "tuple[Executor, ...]":
        """The branches that begin here, and die with this statement."""
        return self.node.branches if isinstance(self.node, ForkPoint) else ()


def statements_of(
    node: Node, place: Place | None, rule: ReasoningRule | None = None
) -> Iterator[Statement]:
    """The simple statements that a node stands for, in their order."""
    match node:
        case Concat(parts=parts):
            for part in parts:
                yield from statements_of(part, place, rule)
        case SeparateReasoning(body=body, model_type=model_type):
            yield from statements_of(body, place, ReasoningRule(model_type))
        case Gen(name=name, options=options):
            reasoning = Variable(reasoning_name(name)) if rule and name else None
            variable = Variable(name, partial(parse_value, options))
            yield Statement(node, place, variable, reasoning, rule)
        case Select(name=name) | ScopeEnd(name=name):
            yield Statement(node, place, Variable(name))
        case _:
            yield Statement(node, place)


def reasoning_name(name: str) -> str:
    """The variable that holds the reasoning before the answer `name`."""
    return f"{name}_reasoning_content"
