"""The state of a program: what `s` is in `s += gen("answer")`.

Appending never waits. Reading waits for what is read, and raises what went wrong before it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from sapwood.frontend_lang.answering import Branch
from sapwood.frontend_lang.blocks import RoleBlock, ScopeBlock
from sapwood.frontend_lang.errors import (
    ProgramError,
    ProgramUsageError,
    UnknownVariableError,
    calling_place,
)
from sapwood.frontend_lang.executor import Executor
from sapwood.frontend_lang.feed import Chunk, TextReader, VariableReader
from sapwood.frontend_lang.forks import ForkGroup
from sapwood.frontend_lang.nodes import (
    ASSISTANT,
    SYSTEM,
    USER,
    Gen,
    Message,
    Node,
    Select,
    as_node,
)
from sapwood.frontend_lang.statements import ForkPoint, Look, Statement, statements_of
from sapwood.frontend_lang.transcript import Transcript
from sapwood.frontend_lang.variables import Latch, Names, Variable

if TYPE_CHECKING:
    from sapwood.frontend_lang.running import ProgramRun
    from sapwood.frontend_lang.trace_view import StateTrace

T = TypeVar("T")


class ProgramState:
    """A program's text so far and its variables. Made by `run`, and by `fork`."""

    def __init__(
        self,
        run: ProgramRun,
        *,
        names: Names | None = None,
        branch: Branch | None = None,
    ) -> None:
        self._run = run
        self._names = names or Names()
        self._executor = Executor(run, branch)
        self._group: ForkGroup | None = None  # that it is a branch of
        self.ret_value: Any = None  # what the program returned
        run.names.append(self._names)

    # Appending

    def __iadd__(self, node: Node | str) -> Self:
        self.append(node)
        return self

    def append(self, node: Node | str) -> None:
        """`s += node` as a call. Raises TypeError for what is neither node nor text."""
        if self._run.has_returned:
            raise ProgramUsageError("this program has ended; nothing can be appended to its state")
        statements = list(statements_of(as_node(node), calling_place()))
        for statement in statements:
            self._register(statement)
        self._executor.worker.submit(*statements)

    def system(self, expr: Node | str | None = None) -> RoleBlock:
        """A system message: `s.system("...")`, or `with s.system():`."""
        return RoleBlock(self, SYSTEM, expr)

    def user(self, expr: Node | str | None = None) -> RoleBlock:
        """A user's message: `s.user("...")`, or `with s.user():`."""
        return RoleBlock(self, USER, expr)

    def assistant(self, expr: Node | str | None = None) -> RoleBlock:
        """The model's message: `s.assistant(gen("answer"))`, or `with s.assistant():`."""
        return RoleBlock(self, ASSISTANT, expr)

    def var_scope(self, name: str) -> ScopeBlock:
        """`with s.var_scope("x"):` makes the text of the block variable `x`, readable after it."""
        return ScopeBlock(self, name)

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> ForkGroup:
        """Branches that each go on from here on their own. Costs nothing of the text before.

        They begin when this state has done all that was appended to it before.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ProgramUsageError(f"fork takes a whole number of branches from 1, not {size!r}")
        return self._forked([ProgramState] * size, position_ids_offset)

    def copy(self, position_ids_offset: list[int] | None = None) -> StateCopy:
        """A branch that goes on from here; `with s.copy() as t:` joins it at the end."""
        [copy] = self._forked([StateCopy], position_ids_offset)
        assert isinstance(copy, StateCopy)
        return copy

    def set_var(self, name: str, value: Any) -> None:
        """Give a variable a value that no statement gives it."""
        self._names.add(name, Variable.of(name, value))

    # Reading

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Any:
        """The text of a variable (a list of texts for n > 1). Raises ProgramError."""
        return self._waited(name).value()

    def get_var(self, name: str) -> Any:
        """`s[name]` by SGLang's name."""
        return self[name]

    def get_meta_info(self, name: str) -> Any:
        """What the backend told of an answer: counts, finish reason, log-probabilities, by SGLang's
        names; a list of it for n > 1."""
        return self._waited(name).meta()

    @overload
    def get(self, node: Gen[T]) -> T: ...
    @overload
    def get(self, node: Select | str) -> Any: ...
    def get(self, node: Gen[T] | Select | str) -> Any:
        """The value of a `gen` as its `output_type`, `dtype` or `json_schema` says; else the text.

        By node, its type is known to type checkers; after a join, and for n > 1, it is a list
        of values. Raises ProgramError, and AnswerError for an
        answer that spells no such value, as when it was cut.
        """
        return self._waited(_name_of(node)).parsed()

    @overload
    async def aget(self, node: Gen[T]) -> T: ...
    @overload
    async def aget(self, node: Select | str) -> Any: ...
    async def aget(self, node: Gen[T] | Select | str) -> Any:
        """`get` for async programs and readers."""
        name = _name_of(node)
        while (change := self._next_name(name)) is not None:
            await change.wait_async()
        variable = self._variable(name)
        await variable.latch.wait_async()
        return variable.parsed()

    def variables(self) -> tuple[str, ...]:
        """The names of all variables, in the order in which they were set first."""
        return tuple(self._names)

    def text(self) -> str:
        """All text so far, with what a chat template writes around messages. Asked from outside of
        a streamed program it is the whole text, and waits for its end."""
        text: str = self._look(lambda transcript: transcript.text)
        return text

    def messages(self) -> list[Message]:
        """All messages so far; the open one is the last."""
        messages: list[Message] = self._look(lambda transcript: list(transcript.messages))
        return messages

    def sync(self) -> None:
        """Wait until all that was appended is done. Raises ProgramError."""
        self._look(lambda transcript: None)

    @property
    def _is_inside(self) -> bool:
        """Whether what was appended so far is meant, and not the whole of the program. A branch is
        the program's own, whichever of its threads asks."""
        return self._group is not None or self._run.is_inside

    async def settled(self) -> None:
        """`sync` for async programs and readers: after it nothing that was appended before has to
        be waited for, so `s["x"]`, `text()` and `join()` answer at once. Raises nothing."""
        if not self._is_inside:
            await self._run.ended.wait_async()
        await self._executor.worker.drained().wait_async()

    def error(self) -> ProgramError | None:
        """Wait until all that was appended is done or has failed; what has failed."""
        self._wait_for_program()
        self._run.wait(self._executor.worker.drained())
        failure = self._executor.worker.failure
        return None if failure is None else failure.error()

    def trace(self) -> StateTrace:
        """What was done so far, with tokens and times. Waits until all that was appended is done or
        has failed, and raises nothing; `str()` of it is the program's tree."""
        from sapwood.frontend_lang.trace_view import trace_of

        self._run.wait(self._executor.worker.drained())
        return trace_of(self._executor)

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text piece by piece as it comes: all of it, or that of one variable.

        Ends with the program; asked by the program itself, with what it has appended so far. Raises
        ProgramError after the last piece before what failed.
        """
        for chunk in self._chunks(var_name):
            if chunk.text:
                yield chunk.text

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """`text_iter` on any event loop; with `return_meta_data` pairs of text and meta."""
        reader = self._reader(var_name)
        while (step := reader.step()) is not None:
            if isinstance(step, Latch):
                await step.wait_async()
            elif return_meta_data:
                yield step.text, step.meta
            elif step.text:
                yield step.text

    def __repr__(self) -> str:
        return f"<ProgramState {self._run.program_id}: {', '.join(self._names) or 'no variables'}>"

    # For forks and programs

    def _forked(
        self, kinds: Sequence[type[ProgramState]], position_ids_offset: list[int] | None
    ) -> ForkGroup:
        if position_ids_offset is not None:
            raise ProgramUsageError(
                "position_ids_offset is not supported: a branch has the positions of its text"
            )
        size = len(kinds)
        branches = [
            kind(
                self._run,
                names=self._names.copy(),
                branch=Branch(index, size) if size > 1 else self._executor.branch,
            )
            for index, kind in enumerate(kinds)
        ]
        group = ForkGroup(self, branches)
        for branch in branches:
            branch._group = group
        self.append(ForkPoint(tuple(branch._executor for branch in branches)))
        return group

    def _chunks(self, var_name: str | None) -> Iterator[Chunk]:
        reader = self._reader(var_name)
        while (step := reader.step()) is not None:
            if isinstance(step, Latch):
                self._run.wait(step)
            else:
                yield step

    def _reader(self, var_name: str | None) -> TextReader | VariableReader:
        is_inside = self._is_inside
        feed = self._executor.feed
        if var_name is not None:
            return VariableReader(feed, self._names, var_name, may_wait=not is_inside)
        return TextReader(feed, self._executor.worker.drained() if is_inside else None)

    def _waited(self, name: str) -> Variable:
        while (change := self._next_name(name)) is not None:
            self._run.wait(change)
        variable = self._variable(name)
        self._run.wait(variable.latch)
        return variable

    def _variable(self, name: str) -> Variable:
        if name not in self._names and any(name in names for names in self._run.names):
            raise UnknownVariableError(name, self._names, in_branch=True)
        return self._names[name]

    def _next_name(self, name: str) -> Latch | None:
        """What to wait for before `name` may be there; None: it is, or it is not going to be."""
        if self._is_inside:
            return None
        change = self._names.change()  # taken first: a name that is added after this opens it
        return None if name in self._names else change

    def _look(self, question: Callable[[Transcript], Any]) -> Any:
        """What the transcript says when all is done that was appended."""
        self._wait_for_program()
        worker, answer = self._executor.worker, Variable(None)
        if worker.is_at_rest and worker.failure is None:
            return question(self._executor.transcript)
        worker.submit(Statement(Look(question), calling_place(), answer))
        self._run.wait(answer.latch)
        return answer.value()

    def _wait_for_program(self) -> None:
        """Asked from outside, the whole of a program is meant, not what it has said by chance."""
        if not self._is_inside:
            self._run.wait(self._run.ended)

    def _register(self, statement: Statement) -> None:
        for variable in (statement.variable, statement.reasoning):
            if variable is not None and variable.name is not None:
                self._names.add(variable.name, variable)


class StateCopy(ProgramState):
    """The branch that `copy()` gives. As a `with` block it is joined at the end: what it has set
    becomes lists of one."""

    def __enter__(self) -> ProgramState:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None and self._group is not None:
            self._group.join()


def _name_of(node: Gen[Any] | Select | str) -> str:
    if isinstance(node, str):
        return node
    if node.name is None:
        raise ProgramUsageError("this gen has no name to read it by; write gen('name', ...)")
    return node.name
