"""Bounds on what a chat template may cost: time, and the size of what it makes.

A thread cannot be ended from outside, so the bounds are checked from within: `metered` writes calls
of a `Meter` into a parsed template, at every turn of a loop, at every call of a macro, and around
every expression that makes something new (calls, filters, `~`, `+`, `*`, `%`, blocks that are
assigned).

Bounded thereby: the processor time of a rendering, up to one operation; the length of every string
and list that an expression gives; the length of the text that comes out.

Not bounded: what a single built-in operation does before it returns (`'x' * 10 ** 9`, `2 ** 10 **
9`, one `replace`). A message cannot bring one about by its size alone: over input of n characters
each of them is linear, unless the template itself multiplies. Templates come with the checkpoint
that the server's owner chose, messages come from anyone; the bounds are for the latter, and for
templates that are quadratic in a conversation's length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sapwood.runtime.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes
    from jinja2.runtime import Context

METER = "sapwood_meter"  # the variable that a metered template finds its meter in
_CALLS_PER_LOOK = 16  # at the clock, which takes longer than all the rest


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """`max_seconds` of the rendering thread's processor time; `max_chars` of text, and items of a
    list, that may come out or lie between two expressions."""

    max_seconds: float = 5.0
    max_chars: int = 32 * 1024 * 1024


class Meter:
    """The limits of one rendering, which begins now. Called from within the template."""

    def __init__(self, limits: RenderLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._deadline = clock() + limits.max_seconds
        self._num_calls = 0

    def __call__(self, value: Any) -> Any:
        """`value` as it is. Raises RequestError where a limit is passed."""
        self._num_calls += 1
        if self._num_calls % _CALLS_PER_LOOK == 0 and self._clock() > self._deadline:
            raise RequestError(
                f"the model's chat template worked on the messages for more than "
                f"{self._limits.max_seconds:g} s; send fewer or shorter messages",
                param="messages",
            )
        if isinstance(value, str | list | tuple):
            self._check_size(len(value))
        return value

    def joined(self, chunks: Iterable[str]) -> str:
        """The text of a rendering, from the pieces in which it comes. Raises as above."""
        kept, num_chars = [], 0
        for chunk in chunks:
            kept.append(chunk)
            num_chars += len(chunk)
            self._check_size(num_chars)
        return "".join(kept)

    def _check_size(self, size: int) -> None:
        if size > self._limits.max_chars:
            raise RequestError(
                f"the model's chat template made more than {self._limits.max_chars} characters of "
                "the messages; send fewer or shorter messages",
                param="messages",
            )


def metered(environment: Environment, source: str) -> Template:
    """A template whose renderings take a Meter as the variable `METER` and call it.

    Raises jinja2.TemplateError. O(size of source).
    """
    from jinja2 import pass_context

    @pass_context
    def call_meter(context: Context, value: Any) -> Any:
        return context.parent[METER](value)

    environment.filters[METER] = call_meter
    parsed = environment.parse(source)
    _meter_expressions(parsed)
    parsed.set_environment(environment)
    return environment.from_string(parsed)


def _meter_expressions(node: nodes.Node) -> None:
    """Write the meter into all that is below a node of the syntax tree, in place.

    As a filter, since the sandbox calls filters directly and functions at ten times the cost.
    """
    from jinja2 import nodes

    costly = (nodes.Call, nodes.Filter, nodes.Concat, nodes.Add, nodes.Mul, nodes.Mod)

    def call_meter(value: nodes.Expr | None, lineno: int) -> nodes.Filter:
        return nodes.Filter(value, METER, [], [], None, None, lineno=lineno)

    def is_bare(parent: nodes.Node, field: str, child: nodes.Node) -> bool:
        """Whether `child` has to stay as it is, or is shorter than its parent anyway."""
        return (
            (isinstance(parent, nodes.CallBlock) and field == "call")
            or (isinstance(parent, nodes.FilterBlock | nodes.AssignBlock) and field == "filter")
            or (isinstance(parent, nodes.Add) and isinstance(child, nodes.Add))
        )

    def rewritten(parent: nodes.Node, field: str, child: Any) -> Any:
        if not isinstance(child, nodes.Node):
            return child
        _meter_expressions(child)
        if isinstance(child, costly) and not is_bare(parent, field, child):
            return call_meter(child, child.lineno)
        return child

    for name, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, name, [rewritten(node, name, item) for item in value])
        else:
            setattr(node, name, rewritten(node, name, value))
    if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
        turn = call_meter(nodes.Const(None, lineno=node.lineno), node.lineno)
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
    if isinstance(node, nodes.AssignBlock):
        # A filter without a value, or around such filters, gets the text of the block.
        node.filter = call_meter(node.filter, node.lineno)
