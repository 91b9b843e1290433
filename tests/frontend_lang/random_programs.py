"""Random programs, as data: what they append, read and catch, and how they are performed."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from hypothesis import strategies as st

import sapwood as sgl
from sapwood.frontend_lang.nodes import Node
from sapwood.frontend_lang.state import ProgramState

NAMES = ("a", "b", "c")
MAX_STATEMENTS = 20


@dataclass(frozen=True)
class Statement:
    """One statement. `kind` says which; `body` are those inside of it."""

    kind: str
    name: str = "a"
    size: int = 1
    body: tuple["Statement", ...] = ()


SIMPLE = st.builds(
    Statement,
    kind=st.sampled_from(
        ("constant", "gen", "gen", "gen", "gen_many", "select", "set_var", "pause", "read", "get",
         "text", "messages", "meta", "error", "sync", "iterate", "iterate_name", "contains")
    ),
    name=st.sampled_from(NAMES),
)  # fmt: skip
STATEMENTS = st.recursive(
    SIMPLE,
    lambda inner: st.builds(
        Statement,
        kind=st.sampled_from(
            ("role", "assistant", "scope", "fork", "fork_append", "fork_left", "copy", "caught")
        ),
        name=st.sampled_from(NAMES),
        size=st.integers(1, 3),
        body=st.lists(inner, min_size=1, max_size=4).map(tuple),
    ),
    max_leaves=6,
)
PROGRAMS = st.lists(STATEMENTS, min_size=5, max_size=MAX_STATEMENTS).map(tuple)


def perform(s: ProgramState, program: tuple[Statement, ...], in_role: bool = False) -> None:
    """Do what a program says. What is read is asked for as most programs would: a name that may
    not be there, and after a failure once more in the except clause."""
    for statement in program:
        if statement.kind in ("role", "assistant") and in_role:
            perform(s, statement.body, in_role)
        elif statement.kind in _BLOCKS:
            _BLOCKS[statement.kind](s, statement, in_role)
        else:
            with suppress(KeyError):
                _SIMPLE[statement.kind](s, statement.name)


def _append(s: ProgramState, node: Node | str) -> None:
    s += node


_SIMPLE: dict[str, Callable[[ProgramState, str], object]] = {
    "constant": lambda s, name: _append(s, f"text {name} "),
    "gen": lambda s, name: _append(s, sgl.gen(name, max_tokens=4)),
    "gen_many": lambda s, name: _append(s, "x" + sgl.gen(name, n=2) + sgl.gen("other")),
    "select": lambda s, name: _append(s, "is " + sgl.select(name, ["yes", "no"])),
    "set_var": lambda s, name: s.set_var(name, "set"),
    "pause": lambda s, name: _append(s, sgl.pause(0.1)),
    "read": lambda s, name: s[name],
    "get": lambda s, name: s.get(name),
    "text": lambda s, name: s.text(),
    "messages": lambda s, name: s.messages(),
    "meta": lambda s, name: s.get_meta_info(name),
    "error": lambda s, name: s.error(),
    "sync": lambda s, name: s.sync(),
    "iterate": lambda s, name: list(s.text_iter()),
    "iterate_name": lambda s, name: list(s.text_iter(name)),
    "contains": lambda s, name: name in s,
}


def _role(s: ProgramState, statement: Statement, in_role: bool) -> None:
    with s.user():
        perform(s, statement.body, True)


def _assistant(s: ProgramState, statement: Statement, in_role: bool) -> None:
    with s.assistant():
        perform(s, statement.body, True)


def _scope(s: ProgramState, statement: Statement, in_role: bool) -> None:
    with s.var_scope(statement.name):
        perform(s, statement.body, in_role)


def _fork(s: ProgramState, statement: Statement, in_role: bool) -> None:
    group = s.fork(statement.size)
    for branch in group:
        perform(branch, statement.body, in_role)
    group.join()


def _fork_append(s: ProgramState, statement: Statement, in_role: bool) -> None:
    group = s.fork(statement.size)
    for branch in group:
        perform(branch, statement.body, in_role)
    group.join("concate_and_append")


def _fork_left(s: ProgramState, statement: Statement, in_role: bool) -> None:
    for branch in s.fork(statement.size):
        perform(branch, statement.body, in_role)


def _copy(s: ProgramState, statement: Statement, in_role: bool) -> None:
    with s.copy() as copy:
        perform(copy, statement.body, in_role)


def _caught(s: ProgramState, statement: Statement, in_role: bool) -> None:
    try:
        perform(s, statement.body, in_role)
        s.text()
    except sgl.ProgramError:
        with suppress(sgl.ProgramError):
            perform(s, statement.body, in_role)
        s += "fallback" + sgl.gen(statement.name)


_BLOCKS: dict[str, Callable[[ProgramState, Statement, bool], None]] = {
    "role": _role,
    "assistant": _assistant,
    "scope": _scope,
    "fork": _fork,
    "fork_append": _fork_append,
    "fork_left": _fork_left,
    "copy": _copy,
    "caught": _caught,
}
