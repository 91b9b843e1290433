"""Blocks of a program: `with s.user():`, `with s.var_scope("x"):`."""

from __future__ import annotations

from typing import Any, Protocol

from sapwood.frontend_lang.nodes import Node, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd


class Appends(Protocol):
    """A state: of a run, or of a trace."""

    def append(self, node: Node | str) -> None: ...


class RoleBlock:
    """One message. With `expr` it is whole at once; without, what a `with` block appends."""

    __slots__ = ("_role", "_state")

    def __init__(self, state: Appends, role: str, expr: Node | str | None) -> None:
        self._state = state
        self._role = role
        if expr is not None:
            state.append(RoleBegin(role) + expr + RoleEnd(role))

    def __enter__(self) -> None:
        self._state.append(RoleBegin(self._role))

    def __exit__(self, *error: Any) -> None:
        self._state.append(RoleEnd(self._role))  # after an exception, too


class ScopeBlock:
    """The text that a `with` block appends, as a variable."""

    __slots__ = ("_name", "_state")

    def __init__(self, state: Appends, name: str) -> None:
        self._state = state
        self._name = name

    def __enter__(self) -> None:
        self._state.append(ScopeBegin(self._name))

    def __exit__(self, *error: Any) -> None:
        self._state.append(ScopeEnd(self._name))
