"""The other side of `bounded_process.py`: loads a function and forks for each call of it.

The limits of a call, each by what the kernel does:

- the deadline: the fork is killed, from here; and RLIMIT_CPU ends one that is orphaned;
- memory: RLIMIT_AS, what the address space may grow by. The kernel refuses the very allocation that
  is too much, however fast memory is taken; watching the resident set would see it too late, and
  only as often as one looks. (macOS has the limit but does not keep it.)

Imports no torch by itself.
"""

import gc
import math
import os
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import IO, NoReturn

from sapwood.runtime.constraints.bounded_process import Outcome
from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.messages import (
    pack,
    read_frame,
    unpack,
    write_all,
    write_frame,
)

MAX_DIAGNOSTICS = 4000  # bytes of what libraries write to stderr
# How a library that could not allocate says so before it aborts, or in its exception.
_OUT_OF_MEMORY = ("memory allocation of", "bad_alloc", "MemoryError", "out of memory")

Task = Callable[[bytes], bytes]


def main(task_name: str, memory_limit: int) -> None:
    """Answer requests from stdin on stdout until stdin is closed, or nobody reads the answers."""
    with suppress(BrokenPipeError):
        _serve(task_name, memory_limit)


def _serve(task_name: str, memory_limit: int) -> None:
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what a library prints is no reply
    setup = read_frame(requests)
    if setup is None:
        return
    try:
        task = _load(task_name, setup)
    except Exception as error:
        write_frame(replies, _failure(Outcome.ENDED, f"{type(error).__name__}: {error}"))
        return
    gc.freeze()  # no fork copies pages for the collector's sake
    write_frame(replies, pack({"outcome": Outcome.READY}))
    calls = _Calls(task, memory_limit, requests, replies)
    while (message := read_frame(requests)) is not None:
        write_frame(replies, calls.run(message))


def _load(name: str, setup: bytes) -> Task:
    module, factory = name.split(":")
    task: Task = getattr(import_module(module), factory)(setup)
    return task


def _failure(outcome: Outcome, message: str, *, keyword: str | None = None) -> bytes:
    return pack({"outcome": outcome, "message": message, "keyword": keyword})


@dataclass(frozen=True, slots=True)
class _Calls:
    task: Task
    memory_limit: int
    requests: int
    replies: int

    def run(self, message: bytes) -> bytes:
        """The reply to one request, from a fork that has ended when this returns."""
        header, (request,) = unpack(message)
        deadline: float = header["deadline"]
        reader, writer = os.pipe()
        with tempfile.TemporaryFile() as diagnostics:
            pid = os.fork()
            if pid == 0:
                for fd in (reader, self.requests, self.replies):
                    os.close(fd)
                self._be_the_fork(request, deadline, writer, diagnostics)
            os.close(writer)
            reply = None
            try:
                reply = self._await_reply(reader, deadline)
            finally:
                os.close(reader)
                if reply is None:
                    os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
            return self._reply(reply, os.waitstatus_to_exitcode(status), deadline, diagnostics)

    def _await_reply(self, reader: int, deadline: float) -> bytes | None:
        """What the fork wrote until it ended; None if it has to be killed."""
        until = time.monotonic() + deadline
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        poll.register(self.requests, select.POLLIN)
        content = bytearray()
        while events := dict(poll.poll(max(0.0, until - time.monotonic()) * 1000)):
            if self.requests in events:
                return None  # nobody asks before the last reply: our parent has gone
            piece = os.read(reader, 2**20)
            if not piece:
                return bytes(content)
            content += piece
        return None

    def _reply(
        self, reply: bytes | None, exit_code: int, deadline: float, diagnostics: IO[bytes]
    ) -> bytes:
        if reply is None:
            return _failure(Outcome.TIMEOUT, f"it took longer than {deadline:g} s")
        diagnostics.seek(0)
        text = diagnostics.read(MAX_DIAGNOSTICS).decode(errors="replace")
        if exit_code == 0:
            header, parts = unpack(reply)
            return pack({**header, "diagnostics": text}, *parts)
        if any(words in text for words in _OUT_OF_MEMORY):
            return self._too_much_memory()
        return _failure(Outcome.ENDED, f"the work on it ended early (exit code {exit_code})")

    def _too_much_memory(self) -> bytes:
        limit = f"it took more than {self.memory_limit >> 20} MiB of memory"
        return _failure(Outcome.MEMORY, limit)

    def _be_the_fork(
        self, request: bytes, deadline: float, writer: int, diagnostics: IO[bytes]
    ) -> NoReturn:
        exit_code = 1
        try:
            for fd in (1, 2):
                os.dup2(diagnostics.fileno(), fd)
            _set_limits(self.memory_limit, deadline)
            reply = self._answer(request)
            write_all(writer, reply)
            exit_code = 0
        finally:
            os._exit(exit_code)

    def _answer(self, request: bytes) -> bytes:
        try:
            return pack({"outcome": Outcome.ANSWER}, self.task(request))
        except GrammarError as error:
            if any(words in str(error) for words in _OUT_OF_MEMORY):
                return self._too_much_memory()
            return _failure(Outcome.REFUSED, str(error), keyword=error.keyword)
        except MemoryError:
            return self._too_much_memory()
        except Exception as error:
            return _failure(Outcome.ENDED, f"{type(error).__name__}: {error}")


def _set_limits(memory_limit: int, deadline: float) -> None:
    seconds = math.ceil(deadline) + 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    if (size := _address_space()) is not None:
        resource.setrlimit(resource.RLIMIT_AS, (size + memory_limit, size + memory_limit))


def _address_space() -> int | None:
    """Bytes of our own; None where the system does not tell."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
