"""Blocks of a program: `with s.user():`, `with s.var_scope("x"):`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sapwood.frontend_lang.nodes import Node, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd

if TYPE_CHECKING:
    from sapwood.frontend_lang.forks import ForkGroup
    from sapwood.frontend_lang.state import ProgramState


class RoleBlock:
    """One message. With `expr` it is whole at once; without, what a `with` block appends."""

    __slots__ = ("_role", "_state")

    def __init__(self, state: ProgramState, role: str, expr: Node | str | None) -> None:
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

    def __init__(self, state: ProgramState, name: str) -> None:
        self._state = state
        self._name = name

    def __enter__(self) -> None:
        self._state.append(ScopeBegin(self._name))

    def __exit__(self, *error: Any) -> None:
        self._state.append(ScopeEnd(self._name))


class CopyBlock:
    """A branch for the length of a `with` block; what it sets becomes lists of one."""

    __slots__ = ("_group", "_offset", "_state")

    def __init__(self, state: ProgramState, position_ids_offset: list[int] | None) -> None:
        self._state = state
        self._offset = position_ids_offset
        self._group: ForkGroup | None = None

    def __enter__(self) -> ProgramState:
        self._group = self._state.fork(1, self._offset)
        return self._group[0]

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None and self._group is not None:
            self._group.join()
