"""Branches of a state that go on side by side, and how they come together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from sapwood.frontend_lang.errors import ProgramUsageError
from sapwood.frontend_lang.nodes import Node
from sapwood.frontend_lang.statements import Append
from sapwood.frontend_lang.variables import Variable

if TYPE_CHECKING:
    from sapwood.frontend_lang.state import ProgramState

JoinMode = Literal["gather_variable", "concate_and_append"]


class ForkGroup(Sequence["ProgramState"]):
    """The branches of one `fork`, in their order."""

    def __init__(self, parent: ProgramState, branches: list[ProgramState]) -> None:
        self._parent = parent
        self._branches = branches
        self._names_before = frozenset(parent._names)

    def __len__(self) -> int:
        return len(self._branches)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._branches)

    def __getitem__(self, key: Any) -> Any:
        """A branch by its index, or the list of the branches' values of a variable."""
        if isinstance(key, str):
            return [branch[key] for branch in self._branches]
        return self._branches[key]

    def __setitem__(self, index: int, branch: ProgramState) -> None:
        """`group[0] += node` assigns what it appended to."""
        if self._branches[index] is not branch:
            raise ProgramUsageError("a branch cannot be replaced by another state")

    def __iadd__(
        self, node: Node | str | Sequence[Node | str] | Callable[[int], Node | str]
    ) -> ForkGroup:
        """Append the same to each branch, or one of a list to each, or what a function says of
        its index."""
        if callable(node):
            nodes: Sequence[Node | str] = [node(index) for index in range(len(self))]
        elif isinstance(node, Node | str):
            nodes = [node] * len(self)
        else:
            nodes = node
        for branch, own in zip(self._branches, nodes, strict=True):
            branch.append(own)
        return self

    def join(self, mode: JoinMode = "gather_variable") -> None:
        """Bring the branches together.

        `gather_variable` waits for them, and makes of every variable that is new in them a list of
        the parent's, which goes on where a fork before this one gathered the same name.
        `concate_and_append` appends what they have said since the fork to the parent. Raises
        ProgramError for a branch that failed.
        """
        if mode == "gather_variable":
            self._gather()
        elif mode == "concate_and_append":
            self._parent.append(Append(tuple(branch._executor for branch in self._branches)))
        else:
            raise ProgramUsageError(
                f"join mode {mode!r} is none; there are 'gather_variable' and 'concate_and_append'"
            )

    def _gather(self) -> None:
        names = self._parent._names
        for name in self._new_names():
            found = [branch[name] for branch in self._branches if name in branch]
            before = names[name].value() if name in names else []
            names.add(name, Variable.of(name, [*before, *found]))

    def _new_names(self) -> list[str]:
        new = {name: None for branch in self._branches for name in branch._names}
        return [name for name in new if name not in self._names_before]

    def __repr__(self) -> str:
        return f"<ForkGroup of {len(self)}>"
