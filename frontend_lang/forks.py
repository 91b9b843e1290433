"""Branches of a state that go on side by side, and how they come together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from sapwood.frontend_lang.errors import ProgramUsageError
from sapwood.frontend_lang.nodes import Node
from sapwood.frontend_lang.statements import Append
from sapwood.frontend_lang.variables import Gathered, Variable

if TYPE_CHECKING:
    from sapwood.frontend_lang.state import ProgramState

JoinMode = Literal["gather_variable", "concate_and_append"]


class ForkGroup(Sequence["ProgramState"]):
    """The branches of one `fork`, in their order."""

    def __init__(self, parent: ProgramState, branches: list[ProgramState]) -> None:
        self._parent = parent
        self._branches = branches
        self._names_before = parent._names.copy()
        self._joined: set[Variable] = set()  # what earlier joins have gathered of the branches

    def __len__(self) -> int:
        return len(self._branches)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._branches)

    @overload
    def __getitem__(self, key: int) -> ProgramState: ...
    @overload
    def __getitem__(self, key: slice) -> list[ProgramState]: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | slice | str) -> Any:
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

    def __enter__(self) -> ForkGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self.join()

    def join(self, mode: JoinMode = "gather_variable") -> None:
        """Bring the branches together: what they have set becomes lists of the parent, which go on
        where an earlier join has gathered the same names. A variable of the parent's own stays.

        `gather_variable` waits for the branches, and raises ProgramError for one that failed.
        `concate_and_append` also appends to the parent what they have said since the fork, and does
        not wait: a branch that failed fails the parent there.
        """
        gathered = self._gathered()
        if mode == "gather_variable":
            for branch in self._branches:
                branch.sync()
            for variable in gathered:
                variable.gather()
        elif mode == "concate_and_append":
            executors = tuple(branch._executor for branch in self._branches)
            self._parent.append(Append(executors, gathered))
        else:
            raise ProgramUsageError(
                f"join mode {mode!r} is none; there are 'gather_variable' and 'concate_and_append'"
            )
        for variable in gathered:
            assert variable.name is not None
            self._parent._names.add(variable.name, variable)
            self._joined.update(variable.parts)

    async def settled(self) -> None:
        """Wait for all branches in an async program; `join()` and `group["x"]` then answer at
        once. Raises nothing."""
        for branch in self._branches:
            await branch.settled()

    def _gathered(self) -> tuple[Gathered, ...]:
        """For each name that branches have set since the fork, or since they were joined last, in
        their order, all they found."""
        own = self._parent._names
        names = dict.fromkeys(name for branch in self._branches for name in branch._names)
        gathered = []
        for name in names:
            parts = [each._names[name] for each in self._branches if self._has_set(each, name)]
            before = own[name] if name in own else None
            if parts and (before is None or isinstance(before, Gathered)):
                gathered.append(Gathered(name, parts, before))
        return tuple(gathered)

    def _has_set(self, branch: ProgramState, name: str) -> bool:
        if name not in branch._names or branch._names[name] in self._joined:
            return False
        before = self._names_before
        return name not in before or branch._names[name] is not before[name]

    def __repr__(self) -> str:
        return f"<ForkGroup of {len(self)}>"
