"""The state of a program: what `s` is in `s += gen("answer")`.

Appending never waits. Reading waits for what is read, and raises what went wrong before it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, overload

from sapwood.frontend_lang.blocks import RoleBlock, ScopeBlock
from sapwood.frontend_lang.errors import ProgramError, ProgramUsageError, calling_place
from sapwood.frontend_lang.executor import Branch, Executor
from sapwood.frontend_lang.feed import Chunk, TextReader, VariableReader
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
from sapwood.frontend_lang.parsing import parsed
from sapwood.frontend_lang.statements import ForkPoint, Look, Statement, statements_of
from sapwood.frontend_lang.transcript import Transcript
from sapwood.frontend_lang.variables import Latch, Meta, Names, Variable

if TYPE_CHECKING:
    from sapwood.frontend_lang.forks import ForkGroup
    from sapwood.frontend_lang.running import ProgramRun

T = TypeVar("T")


class ProgramState:
    """A program's text so far and its variables. Made by `run`, and by `fork`."""

    def __init__(
        self, run: ProgramRun, names: Names | None = None, branch: Branch | None = None
    ) -> None:
        self._run = run
        self._names = names or Names()
        self._nodes: dict[str, Node] = {}
        self._executor = Executor(run, branch)
        self.ret_value: Any = None  # what the program returned
        run.all_names.append(self._names)

    # Appending

    def __iadd__(self, node: Node | str) -> ProgramState:
        self.append(node)
        return self

    def append(self, node: Node | str) -> None:
        """`s += node` as a call. Raises TypeError for what is neither node nor text."""
        if self._run.has_returned:
            raise ProgramUsageError("this program has ended; nothing can be appended to its state")
        for statement in statements_of(as_node(node), calling_place()):
            self._register(statement)
            self._executor.submit(statement)

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
        """Branches that each go on from here on their own. Costs nothing of the text before."""
        from sapwood.frontend_lang.forks import ForkGroup

        if position_ids_offset is not None:
            raise ProgramUsageError(
                "position_ids_offset is not supported: branches see the positions of their text"
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ProgramUsageError(f"fork takes a whole number of branches from 1, not {size!r}")
        branches = [
            ProgramState(self._run, self._names.copy(), Branch(index, size))
            for index in range(size)
        ]
        for branch in branches:
            branch._nodes = dict(self._nodes)
        point = ForkPoint(tuple(branch._executor for branch in branches))
        self.append(point)
        return ForkGroup(self, branches)

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

    def get_meta_info(self, name: str) -> Meta:
        """What the backend told of an answer: counts, finish reason, log-probabilities."""
        return self._waited(name).meta()

    @overload
    def get(self, node: Gen[T]) -> T: ...
    @overload
    def get(self, node: Select | str) -> Any: ...
    def get(self, node: Gen[T] | Select | str) -> Any:
        """The value of a `gen` as its `output_type` or `dtype`; the text where it has neither."""
        name = node if isinstance(node, str) else _name_of(node)
        return parsed(self._nodes.get(name), self[name])

    async def aget(self, node: Gen[T] | Select | str) -> Any:
        """`get` for async programs, by name or by node."""
        name = node if isinstance(node, str) else _name_of(node)
        variable = self._names[name]
        await variable.latch.wait_async()
        return parsed(self._nodes.get(name), variable.value())

    def text(self) -> str:
        """All text so far, with what a chat template puts around messages."""
        text: str = self._look(lambda transcript: transcript.text)
        return text

    def messages(self) -> list[Message]:
        """All messages so far; the open one is the last."""
        messages: list[Message] = self._look(lambda transcript: list(transcript.messages))
        return messages

    def sync(self) -> None:
        """Wait until all that was appended is done. Raises ProgramError."""
        self._look(lambda transcript: None)

    def error(self) -> ProgramError | None:
        """Wait until all that was appended is done or has failed; what has failed."""
        self._run.wait(self._executor.drained())
        failure = self._executor.failure
        return None if failure is None else failure.error()

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text piece by piece as it comes: all of it, or that of one variable.

        Ends with the program; asked by the program itself, with what it has appended so far. Raises
        ProgramError after the last piece before what failed.
        """
        for chunk in self._chunks(var_name):
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
            else:
                yield step.text

    def __repr__(self) -> str:
        return f"<ProgramState {self._run.program_id}: {', '.join(self._names) or 'no variables'}>"

    # For forks and programs

    def _chunks(self, var_name: str | None) -> Iterator[Chunk]:
        reader = self._reader(var_name)
        while (step := reader.step()) is not None:
            if isinstance(step, Latch):
                self._run.wait(step)
            else:
                yield step

    def _reader(self, var_name: str | None) -> TextReader | VariableReader:
        is_own = self._run.is_owner
        if var_name is not None:
            return VariableReader(self._executor.feed, self._names, var_name, may_wait=not is_own)
        until = self._executor.drained() if is_own else None
        return TextReader(self._executor.feed, until)

    def _waited(self, name: str) -> Variable:
        while name not in self._names and not self._run.is_owner:
            change = self._names.change()  # the program is elsewhere, and may set it yet
            if change is None or name in self._names:
                break
            self._run.wait(change)
        variable = self._names[name]
        self._run.wait(variable.latch)
        return variable

    def _look(self, question: Callable[[Transcript], Any]) -> Any:
        answer = Variable(None)
        if self._run.has_ended and self._executor.failure is None:
            return question(self._executor.transcript)
        self._executor.submit(Statement(Look(question), None, answer))
        self._run.wait(answer.latch)
        return answer.value()

    def _register(self, statement: Statement) -> None:
        for variable in (statement.variable, statement.reasoning):
            if variable is not None and variable.name is not None:
                self._names.add(variable.name, variable)
                self._nodes.pop(variable.name, None)
        if isinstance(statement.node, Gen) and statement.node.name is not None:
            self._nodes[statement.node.name] = statement.node


def _name_of(node: Gen[Any] | Select) -> str:
    if node.name is None:
        raise ProgramUsageError("this gen has no name to read it by; write gen('name', ...)")
    return node.name
