"""The graph of a program: what its statements are and what they follow, without what they say."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sapwood.frontend_lang.nodes import Node


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
    CALL = "call"  # another program, which has a state of its own
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
