"""What a program reads: values that are there later, and the waiting for them.

Knows no nodes and no backend. A value is settled once, on the loop or on the thread of a statement
that fails at once, and may be waited for on any thread and any event loop.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from sapwood.frontend_lang.errors import Failure, UnknownVariableError

Parse = Callable[[str, Mapping[str, Any]], Any]  # the value of a text, and what was told of it
Text = str | list[str]  # a list for n > 1 and for what was gathered from branches
Meta = Mapping[str, Any] | list[Mapping[str, Any]]


class Latch:
    """Opens once. Waiting costs nothing where it is open already."""

    __slots__ = ("_callbacks", "_lock", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []

    def open(self) -> None:
        """Open it, and wake all that wait; the second time does nothing."""
        with self._lock:
            if self.is_open:
                return
            self.is_open = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def when_open(self, callback: Callable[[], object]) -> None:
        """Call `callback` once: at once where it is open, else on the thread that opens it."""
        with self._lock:
            if not self.is_open:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread. False: `timeout` seconds passed first."""
        if self.is_open:
            return True
        gate = threading.Lock()
        gate.acquire()
        self.when_open(gate.release)
        return gate.acquire(timeout=-1 if timeout is None else timeout)

    async def wait_async(self) -> None:
        """Wait on the running loop, whichever it is."""
        if self.is_open:
            return
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits on it any more
                loop.call_soon_threadsafe(woken.set)

        self.when_open(wake)
        await woken.wait()


class Variable:
    """The text of one statement: unknown, then settled or failed, for good.

    `parse` says what value a text of it spells; None: the text itself.
    """

    __slots__ = ("_failure", "_meta", "_parse", "_value", "latch", "name")

    def __init__(self, name: str | None, parse: Parse | None = None) -> None:
        self.name = name
        self._parse = parse
        self.latch = Latch()
        self._value: Any = None
        self._meta: Meta = {}
        self._failure: Failure | None = None

    @staticmethod
    def of(name: str, value: Any) -> "Variable":
        """A variable whose value is known."""
        variable = Variable(name)
        variable.settle(value)
        return variable

    @property
    def failure(self) -> Failure | None:
        return self._failure

    def settle(self, value: Any, meta: Meta | None = None) -> None:
        """Give it its value; too late where it was settled or has failed."""
        if not self.latch.is_open:
            self._value = value
            self._meta = meta or {}
            self.latch.open()

    def fail(self, failure: Failure) -> None:
        """Let every reader raise; too late where it was settled."""
        if not self.latch.is_open:
            self._failure = failure
            self.latch.open()

    def value(self) -> Any:
        """The value, after the latch has opened. Raises ProgramError."""
        self._check()
        return self._value

    def parsed(self) -> Any:
        """What `value()` spells. Raises ProgramError, and what the parsing raises."""
        value = self.value()
        if self._parse is None:
            return value
        if isinstance(self._meta, list):
            return [self._parse(text, meta) for text, meta in zip(value, self._meta, strict=True)]
        return self._parse(value, self._meta)

    def meta(self) -> Meta:
        """What its backend told of it, after the latch has opened. Raises ProgramError."""
        self._check()
        return self._meta

    def _check(self) -> None:
        assert self.latch.is_open
        if self._failure is not None:
            raise self._failure.error()


class Gathered(Variable):
    """What branches found, as a list; a later join of the same name adds to it.

    `parts` are the branches' variables, `before` is what an earlier join gathered.
    """

    __slots__ = ("_before", "_parts")

    def __init__(self, name: str, parts: Sequence[Variable], before: Variable | None) -> None:
        super().__init__(name)
        self._parts = parts
        self._before = before

    @property
    def parts(self) -> Sequence[Variable]:
        return self._parts

    def gather(self) -> None:
        """Settle it; all that it is made of is settled. Raises ProgramError."""
        found = [part.value() for part in self._parts]
        self.settle([*(self._before.value() if self._before is not None else ()), *found])

    def parsed(self) -> list[Any]:
        """The values of all branches, each as its own statement says."""
        self._check()
        joins: list[Gathered] = []  # the newest first; in a loop, as there may be thousands
        join: Variable | None = self
        while isinstance(join, Gathered):
            joins.append(join)
            join = join._before
        return [part.parsed() for each in reversed(joins) for part in each._parts]


class Names:
    """The variables of a state by name, in the order in which its statements set them.

    Written by the program's own thread, as it appends; read by any.
    """

    __slots__ = ("_by_name", "_is_complete", "_next")

    def __init__(self, by_name: Mapping[str, Variable] | None = None) -> None:
        self._by_name: dict[str, Variable] = dict(by_name or {})
        self._is_complete = False
        self._next = Latch()  # opens when a name is added, or none will be any more

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._by_name))

    def __getitem__(self, name: str) -> Variable:
        """Raises UnknownVariableError."""
        variable = self._by_name.get(name)
        if variable is None:
            raise UnknownVariableError(name, self._by_name)
        return variable

    def add(self, name: str, variable: Variable) -> None:
        """Set a name, anew where it was set before."""
        self._by_name[name] = variable
        self._turn()

    def complete(self) -> None:
        """No name will be added any more."""
        self._is_complete = True
        self._turn()

    def copy(self) -> "Names":
        return Names(self._by_name)

    def change(self) -> Latch | None:
        """Opens when there may be a new name; None: there will be none."""
        latch = self._next
        return None if self._is_complete else latch

    def _turn(self) -> None:
        latch, self._next = self._next, Latch()
        latch.open()
