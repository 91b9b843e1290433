"""Bounds on what a chat template may cost: time, and the size of what it makes.

A thread cannot be ended from outside, so the bounds are checked from within: `metered` writes calls
of a `Meter` into a parsed template, at every turn of a loop, at every call of a macro, and around
every expression that makes something new (calls, filters, `~`, `+`, `*`, `%`).

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
    from jinja2 import nodes

METER = "sapwood_meter"  # the variable that a metered template finds its meter in


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

    def __call__(self, value: Any = None) -> Any:
        """`value` as it is. Raises RequestError where a limit is passed."""
        if self._clock() > self._deadline:
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


def metered(template: nodes.Template) -> nodes.Template:
    """A parsed template with calls of its meter written into it, in place. O(size of template).

    Whoever renders it passes the Meter as the variable `METER`.
    """
    from jinja2 import nodes

    costly = (nodes.Call, nodes.Filter, nodes.Concat, nodes.Add, nodes.Mul, nodes.Mod)
    # Here the syntax tree takes a call or a filter and nothing around it.
    bare = {(nodes.CallBlock, "call"), (nodes.FilterBlock, "filter"), (nodes.AssignBlock, "filter")}

    def call_meter(lineno: int, *values: nodes.Expr) -> nodes.Call:
        meter = nodes.Name(METER, "load", lineno=lineno)
        return nodes.Call(meter, list(values), [], None, None, lineno=lineno)

    def rewritten(node: nodes.Node, *, is_bare: bool = False) -> nodes.Node:
        for name, value in node.iter_fields():
            keeps = (type(node), name) in bare
            if isinstance(value, nodes.Node):
                setattr(node, name, rewritten(value, is_bare=keeps))
            elif isinstance(value, list):
                items = [rewritten(v) if isinstance(v, nodes.Node) else v for v in value]
                setattr(node, name, items)
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            node.body.insert(0, nodes.ExprStmt(call_meter(node.lineno), lineno=node.lineno))
        if isinstance(node, costly) and not is_bare:
            return call_meter(node.lineno, node)
        return node

    rewritten(template)
    assert template.environment is not None, "the parser sets it"
    template.set_environment(template.environment)
    return template
