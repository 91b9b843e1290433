"""What goes wrong in a program, and where in it.

SapwoodError
├── ProgramError               a statement of a program failed; `__cause__` says why
│   └── ProgramTimeoutError    (also a TimeoutError) the program's time was over
├── UnknownVariableError       (also a KeyError) no statement sets a variable of that name
└── ProgramUsageError          (also a RuntimeError) a call that cannot work where it stands
"""

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import PurePath
from types import FrameType
from typing import NamedTuple

from sapwood.runtime.errors import SapwoodError


class Place(NamedTuple):
    """A line of a program. `str()` of it: `judge.py:12 in score`."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{PurePath(self.file).name}:{self.line} in {self.function}"


class ProgramError(SapwoodError):
    """A statement of a program failed, and with it everything that depends on it.

    `place` is the statement's line, None where it has none; `__cause__` is the error itself.
    """

    def __init__(self, message: str, place: Place | None = None) -> None:
        super().__init__(message)
        self.place = place


class ProgramTimeoutError(ProgramError, TimeoutError):
    """The time that `run(timeout=...)` gave was over; what still ran was aborted."""


class UnknownVariableError(SapwoodError, KeyError):
    """No statement of the program sets a variable of that name; with `in_branch` one of a branch
    does, and none of this state."""

    def __init__(self, name: object, known: Iterable[str], *, in_branch: bool = False) -> None:
        if in_branch:
            super().__init__(
                f"no statement of this state sets a variable {name!r}, but a branch does: read "
                f'branches["{name}"], or call branches.join() first'
            )
            return
        names = sorted(known)
        near = get_close_matches(name, names, n=1) if isinstance(name, str) else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        listed = f"there are {', '.join(names)}" if names else "there are none yet"
        super().__init__(f"no statement before this sets a variable {name!r}; {listed}{hint}")

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show it in quotes


class ProgramUsageError(SapwoodError, RuntimeError):
    """A call that cannot work where it stands, such as one that would wait for itself."""


class Failure:
    """Why a state is dead: the first statement of it that failed. Set once, raised often.

    `is_told`: somebody was told of it, so `run()` need not.
    """

    __slots__ = ("cause", "is_told", "place")

    def __init__(self, cause: BaseException, place: Place | None) -> None:
        self.cause = cause
        self.place = place
        self.is_told = False

    def error(self) -> ProgramError:
        """A new exception each time, as each has a traceback of its own."""
        self.is_told = True
        if isinstance(self.cause, ProgramError):  # a failure of a branch, or of another program
            message, place = str(self.cause), self.cause.place
        else:
            where = f"{self.place}: " if self.place else ""
            message, place = f"{where}{type(self.cause).__name__}: {self.cause}", self.place
        kind = type(self.cause) if isinstance(self.cause, ProgramTimeoutError) else ProgramError
        error = kind(message, place)
        error.__cause__ = self.cause
        return error


# The modules whose frames stand between a program and the interpreter.
_OWN_MODULES = frozenset(
    f"sapwood.frontend_lang.{name}" for name in ("blocks", "errors", "forks", "state")
)


def calling_place() -> Place | None:
    """The innermost line on this thread's stack that is not the interpreter's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _OWN_MODULES:
        frame = frame.f_back
    if frame is None:
        return None
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
