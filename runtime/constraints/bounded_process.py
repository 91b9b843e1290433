"""Runs a function of bytes in another process, within a deadline and a limit of memory.

For work whose cost nobody knows beforehand and that has no limits of its own: the library that
does it cannot be interrupted, but a process can be killed. The other side is
`bounded_process_main.py`: it loads the function once and then forks for each call, so that what is
killed is the fork, and the next call finds the function loaded. POSIX only.

Nothing but bytes goes over the border (`messages.py`).
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from enum import StrEnum

from sapwood.runtime.constraints.messages import (
    FRAME_LEN_SIZE,
    frame_len,
    pack,
    unpack,
    write_frame,
)

MEMORY_LIMIT = 2**30  # bytes that one call may take
START_SECONDS = 120.0  # importing torch and transformers on a busy machine
GRACE_SECONDS = 5.0  # beyond a deadline, until the process itself is given up


class Outcome(StrEnum):
    """What became of a call."""

    READY = "ready"  # of no call: the function is loaded
    ANSWER = "answer"
    REFUSED = "refused"  # by the function itself
    TIMEOUT = "timeout"
    MEMORY = "memory"
    ENDED = "ended"  # a crash, or killed from outside


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the function returned, and what libraries wrote to stderr meanwhile."""

    body: bytes
    diagnostics: str


class WorkError(Exception):
    """A call that gave no answer. `keyword` is what a function that refused said of it."""

    def __init__(self, outcome: Outcome, message: str, *, keyword: str | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.keyword = keyword


class BoundedProcess:
    """One function in a process of its own, started when it is first wanted. Thread-safe.

    `task` is `module:factory`: called with `setup` in the process, the factory gives the function,
    which takes and returns bytes and raises GrammarError to refuse. One call runs at a time; the
    deadline of another counts from its own beginning.

    The process ends with `close`, and when its parent ends in whatever way, since its input is
    closed then.
    """

    def __init__(self, task: str, setup: bytes, *, memory_limit: int = MEMORY_LIMIT) -> None:
        self._task = task
        self._setup = setup
        self._memory_limit = memory_limit
        self._lock = threading.Lock()  # over all use of the child but killing it
        self._child: _Child | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process that runs, if one does."""
        child = self._child
        return None if child is None else child.pid

    def start(self) -> None:
        """Start the process, if none runs, without waiting until the function is loaded."""
        with self._lock:
            self._running_child()

    def wait_until_ready(self) -> None:
        """Start the process and wait until the function is loaded. Raises WorkError."""
        with self._lock:
            self._ready_child()

    def is_ready(self) -> bool:
        """Whether the function is loaded. Starts the process, if none runs; does not wait."""
        child = self._child
        if child is not None and child.is_ready:
            return True
        if not self._lock.acquire(blocking=False):
            return False  # somebody else waits for it
        try:
            child = self._running_child()
            return child.has_told() and self._ready_child().is_ready
        except (WorkError, OSError):
            return False
        finally:
            self._lock.release()

    def run(self, request: bytes, *, deadline: float) -> Answer:
        """The function's answer within `deadline` seconds. Raises WorkError.

        Starting the process, where that is necessary, comes on top of the deadline.
        """
        with self._lock:
            child = self._ready_child()
            message = pack({"deadline": deadline}, request)
            return self._exchange(child, message, deadline + GRACE_SECONDS)

    def close(self) -> None:
        """End the process and the call that runs, which raises WorkError. Idempotent."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()
        with self._lock:
            self._drop_child()

    def _running_child(self) -> "_Child":
        if self._closed:
            raise WorkError(Outcome.ENDED, "the backend is closed; make a new one")
        if self._child is None:
            self._child = _Child(self._task, self._memory_limit)
            if self._closed:  # meanwhile, by another thread that saw no child to kill
                self._child.kill()
            self._set_up(self._child)
        return self._child

    def _set_up(self, child: "_Child") -> None:
        try:
            child.send(self._setup)
        except OSError:
            self._drop_child()
            raise _ended() from None

    def _ready_child(self) -> "_Child":
        child = self._running_child()
        if not child.is_ready:
            try:
                self._exchange(child, None, START_SECONDS)
            except WorkError:
                self._drop_child()
                raise
            child.is_ready = True
        return child

    def _exchange(self, child: "_Child", message: bytes | None, timeout: float) -> Answer:
        try:
            if message is not None:
                child.send(message)
            reply = child.receive(timeout)
        except (OSError, TimeoutError):
            self._drop_child()
            raise _ended() from None
        header, parts = unpack(reply)
        outcome = Outcome(header["outcome"])
        if outcome not in (Outcome.ANSWER, Outcome.READY):
            raise WorkError(outcome, header["message"], keyword=header.get("keyword"))
        return Answer(body=parts[0] if parts else b"", diagnostics=header.get("diagnostics", ""))

    def _drop_child(self) -> None:
        """The next call gets another."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.reap()


def _ended() -> WorkError:
    return WorkError(Outcome.ENDED, "the process that works on it was ended from outside")


class _Child:
    """The process and the pipes to it. `kill` may be called from any thread."""

    def __init__(self, task: str, memory_limit: int) -> None:
        # -P: the working directory is not searched, unless it is where we are found ourselves.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        main = "sapwood.runtime.constraints.bounded_process_main"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", main, task, str(memory_limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,  # a group of its own, so that `kill` reaches its forks
        )
        self.is_ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: bytes) -> None:
        """Raises OSError where the process has ended."""
        assert self._process.stdin is not None
        write_frame(self._process.stdin.fileno(), message)

    def has_told(self) -> bool:
        """Whether there is something to receive, or the process has ended."""
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def receive(self, timeout: float) -> bytes:
        """One message. Raises TimeoutError, and BrokenPipeError where the process has ended."""
        until = time.monotonic() + timeout
        return self._read(frame_len(self._read(FRAME_LEN_SIZE, until)), until)

    def _read(self, size: int, until: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        content = bytearray()
        while len(content) < size:
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise TimeoutError
            piece = os.read(fd, min(size - len(content), 2**20))
            if not piece:
                raise BrokenPipeError
            content += piece
        return bytes(content)

    def kill(self) -> None:
        """End the process and its fork at once."""
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended, and so have its forks

    def reap(self) -> None:
        """Wait for the process that was killed, and close the pipes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
