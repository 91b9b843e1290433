"""Functions that tests run in a bounded process."""

import os
import time

from sapwood.runtime.constraints.bounded_process_main import Task
from sapwood.runtime.constraints.interface import GrammarError


def make_task(setup: bytes) -> Task:
    """Does what the request's first word says."""

    def task(request: bytes) -> bytes:
        verb, _, rest = request.partition(b" ")
        match verb:
            case b"echo":
                return setup + rest
            case b"refuse":
                raise GrammarError("not this", keyword="that")
            case b"complain":
                os.write(2, b"some of it is ignored\n")
                return b""
            case b"spin":
                while True:
                    pass
            case b"sleep":
                time.sleep(60)
            case b"take":
                return b"x" * int(rest) and b"taken"
            case b"crash":
                os.abort()
            case b"raise":
                raise KeyError("unexpected")
        raise AssertionError(request)

    return task


def broken(setup: bytes) -> Task:
    raise RuntimeError("cannot be loaded")
