"""What a run did, as a tree: each node with its tokens and its time.

`tracer.py` tells what a program would do; this tells what it has done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sapwood.frontend_lang.nodes import (
    Constant,
    Gen,
    Node,
    Pause,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Value,
)
from sapwood.frontend_lang.statements import Append, ForkPoint

if TYPE_CHECKING:
    from sapwood.frontend_lang.errors import Place
    from sapwood.frontend_lang.executor import Executor

MAX_TEXT_LEN = 40  # characters of a node's text that are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node that was performed. Tokens are None where the backend tells none; of a node that asks
    a backend for nothing they are, too. A `select` asks once for each of its `num_choices`, and its
    tokens are those of all prompts.

    `cached_tokens` are those of the prompt that the backend had computed before. `branches` are
    the records of a fork's branches.
    """

    kind: str
    name: str | None = None
    text: str = ""
    place: Place | None = None
    seconds: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    num_choices: int | None = None
    branches: tuple[tuple[NodeRecord, ...], ...] = ()

    @property
    def asks(self) -> bool:
        """Whether it asked a backend for something."""
        return self.kind in ("gen", "select")


@dataclass(frozen=True, slots=True)
class StateTrace:
    """The records of a state, in order. `error`: why it goes on no further."""

    records: tuple[NodeRecord, ...]
    error: str | None = None

    def walk(self) -> Iterator[NodeRecord]:
        """All records, those of branches too, depth first."""
        stack = [iter(self.records)]
        while stack:
            record = next(stack[-1], None)
            if record is None:
                stack.pop()
                continue
            yield record
            stack.extend(iter(branch) for branch in reversed(record.branches))

    def __str__(self) -> str:
        """A line for each node, and one with the sums; branches are indented."""
        rows = [("", _summary(list(self.walk()))), *_rows(self.records, 1)]
        if self.error is not None:
            rows.append((f"  failed: {self.error}", ""))
        width = max((len(label) for label, figures in rows if figures), default=0)
        return "\n".join(
            f"{label:<{width}}  {figures}".rstrip() if label and figures else label or figures
            for label, figures in rows
        )


def trace_of(executor: Executor) -> StateTrace:
    """What a state has done so far, with the branches that it has forked."""
    failure = executor.worker.failure
    error = None if failure is None else " ".join(str(failure.error()).split())
    return StateTrace(_records(executor), error)


def _records(executor: Executor) -> tuple[NodeRecord, ...]:
    return tuple(
        _record(step.node, step.place, step.text, step.end - step.begin, step.meta)
        for step in tuple(executor.steps)
    )


def _record(
    node: Node, place: Place | None, text: str, seconds: float, meta: Mapping[str, Any]
) -> NodeRecord:
    kind, name = _kind_and_name(node)
    branches = node.branches if isinstance(node, ForkPoint) else ()
    return NodeRecord(
        kind=kind,
        name=name,
        text=text,
        place=place,
        seconds=seconds,
        prompt_tokens=meta.get("prompt_tokens"),
        cached_tokens=meta.get("cached_tokens"),
        completion_tokens=meta.get("completion_tokens"),
        num_choices=len(node.choices) if isinstance(node, Select) else None,
        branches=tuple(_records(branch) for branch in branches),
    )


def _kind_and_name(node: Node) -> tuple[str, str | None]:
    match node:
        case Gen(name=name):
            return "gen", name
        case Select(name=name):
            return "select", name
        case Constant():
            return "constant", None
        case RoleBegin(role=role):
            return "role begin", role
        case RoleEnd(role=role):
            return "role end", role
        case ScopeBegin(name=name):
            return "scope begin", name
        case ScopeEnd(name=name):
            return "scope end", name
        case Value(name=name):
            return "variable", name
        case Pause(seconds=seconds):
            return "pause", f"{seconds:g} s"
        case ForkPoint(branches=branches):
            return "fork", str(len(branches))
        case Append():
            return "join", None
    return type(node).__name__, None


Row = tuple[str, str]  # what it is, and what it cost


def _rows(records: Sequence[NodeRecord], depth: int) -> Iterator[Row]:
    for record in records:
        name = f" {record.name}" if record.name else ""
        text = f" {_shortened(record.text)}" if record.text else ""
        yield f"{'  ' * depth}{record.kind}{name}{text}", _figures(record) if record.asks else ""
        for index, branch in enumerate(record.branches):
            yield f"{'  ' * (depth + 1)}branch {index}", ""
            yield from _rows(branch, depth + 2)


def _figures(record: NodeRecord) -> str:
    parts = [] if record.num_choices is None else [f"{record.num_choices} choices"]
    if record.prompt_tokens is not None:
        in_all = "" if record.num_choices is None else " in all"
        cached = f"({record.cached_tokens or 0:,} cached)"
        parts.append(f"prompt {record.prompt_tokens:,}{in_all} {cached}")
    if record.completion_tokens is not None:
        parts.append(f"generated {record.completion_tokens:,}")
    return ", ".join((*parts, f"{record.seconds * 1000:.1f} ms"))


def _summary(records: Sequence[NodeRecord]) -> str:
    asking = [record for record in records if record.asks]
    prompt, cached, generated = (
        sum(getattr(record, name) or 0 for record in asking)
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
    )
    requests = f"{len(asking):,} request{'' if len(asking) == 1 else 's'}"
    return f"{requests}: prompt {prompt:,} ({cached:,} cached), generated {generated:,} tokens"


def _shortened(text: str) -> str:
    half = MAX_TEXT_LEN // 2
    return repr(text if len(text) <= MAX_TEXT_LEN else f"{text[:half]}...{text[-half:]}")
