"""However a run is ended from outside, its requests end with it, and nobody is left waiting."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

import sapwood as sgl
from sapwood.frontend_lang.background import Background
from sapwood.frontend_lang.errors import ProgramUsageError
from sapwood.frontend_lang.state import ProgramState
from sapwood.frontend_lang.variables import Latch
from tests.frontend_lang.fakes import FakeBackend
from tests.frontend_lang.interrupts import interrupt_when
from tests.frontend_lang.loops import own_loop

ROOT = Path(__file__).resolve().parents[2]
FOR_EVER = 3600.0


def until(is_true: Callable[[], bool]) -> None:
    """Wait for what another thread does soon."""
    deadline = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@sgl.function
def tree(s: ProgramState) -> None:
    s += "q"
    branches = s.fork(3)
    branches += sgl.gen("x")
    branches.join()


@sgl.function
async def async_tree(s: ProgramState) -> None:
    s += "q"
    branches = s.fork(3)
    branches += sgl.gen("x")
    await branches.settled()
    branches.join()


PROGRAMS = pytest.mark.parametrize("program", [tree, async_tree], ids=["sync", "async"])


def ended(backend: FakeBackend) -> Callable[[], bool]:
    """Whether the three requests of `tree` were cancelled at the backend."""
    return lambda: backend.num_active == 0 and backend.num_cancelled == 3


@PROGRAMS
def test_a_timeout_aborts_the_requests_of_all_branches(program: sgl.Program) -> None:
    backend = FakeBackend(delay=FOR_EVER)
    with pytest.raises(sgl.ProgramTimeoutError, match=r"0.05 seconds") as caught:
        program.run(backend=backend, timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, sgl.ProgramError)
    until(ended(backend))


@PROGRAMS
def test_a_run_in_time_is_not_aborted_later(program: sgl.Program) -> None:
    state = program.run(backend=FakeBackend(), timeout=0.2)
    time.sleep(0.25)
    assert state["x"] == ["ok"] * 3
    assert state.error() is None


@PROGRAMS
def test_a_streamed_run_has_its_timeout_too(program: sgl.Program) -> None:
    backend = FakeBackend(delay=FOR_EVER)
    state = program.run(backend=backend, timeout=0.05, stream=True)
    assert isinstance(state.error(), sgl.ProgramTimeoutError)
    until(ended(backend))


@PROGRAMS
def test_a_timeout_of_the_caller_aborts_the_requests(program: sgl.Program) -> None:
    backend = FakeBackend(delay=FOR_EVER)

    async def ask() -> None:
        async with asyncio.timeout(0.05):
            await program.arun(backend=backend)

    with pytest.raises(TimeoutError):
        asyncio.run(ask())
    until(ended(backend))


@PROGRAMS
def test_cancelling_a_run_aborts_its_requests(program: sgl.Program) -> None:
    backend = FakeBackend(delay=FOR_EVER)

    async def ask() -> None:
        task = asyncio.create_task(program.arun(backend=backend))
        while backend.num_active < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ask())
    until(ended(backend))


@pytest.mark.parametrize(
    ("program", "inside"), [(tree, Latch.wait), (async_tree, Future.result)], ids=["sync", "async"]
)
def test_an_interrupt_aborts_the_requests_and_is_raised(
    program: sgl.Program, inside: Callable[..., object]
) -> None:
    backend = FakeBackend(delay=FOR_EVER)
    interrupt_when(lambda: backend.num_active == 3, inside=inside)
    with pytest.raises(KeyboardInterrupt):
        program.run(backend=backend)
    until(ended(backend))


def test_an_interrupt_of_who_reads_a_streamed_program_aborts_its_requests() -> None:
    backend = FakeBackend(delay=FOR_EVER)
    state = tree.run(backend=backend, stream=True)
    interrupt_when(lambda: backend.num_active == 3, inside=Latch.wait)
    with pytest.raises(KeyboardInterrupt):
        list(state.text_iter())
    until(ended(backend))


def test_an_exception_of_the_program_aborts_its_requests() -> None:
    backend = FakeBackend(delay=FOR_EVER)

    @sgl.function
    def program(s: ProgramState) -> None:
        group = s.fork(3)
        group += sgl.gen("x")
        until(lambda: backend.num_active == 3)
        raise ValueError

    with pytest.raises(ValueError):
        program.run(backend=backend)
    until(ended(backend))


def test_a_run_ends_with_the_failure_of_a_branch_that_nobody_joined() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s.fork(1)[0].append(sgl.gen("x"))

    with pytest.raises(sgl.ProgramError, match="call 0 fails"):
        program.run(backend=FakeBackend(failing=[0]))


def test_a_failure_of_a_branch_that_the_program_was_told_of_is_its_own_business() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        [branch] = s.fork(1)
        branch += sgl.gen("x")
        with pytest.raises(sgl.ProgramError):
            branch["x"]
        s += sgl.gen("fallback")

    assert program.run(backend=FakeBackend(failing=[0]))["fallback"] == "ok"


def test_a_run_waits_for_branches_that_nobody_joined() -> None:
    backend = FakeBackend(delay=0.01)

    @sgl.function
    def program(s: ProgramState) -> None:
        s.fork(1)[0].append(sgl.gen("x"))

    program.run(backend=backend)
    assert len(backend.asked) == 1
    assert backend.num_active == 0


def test_an_async_program_that_would_wait_for_its_own_loop_is_told_so() -> None:
    @sgl.function
    async def reads(s: ProgramState) -> None:
        s += sgl.gen("a")
        s["a"]

    @sgl.function
    async def runs(s: ProgramState) -> None:
        async_tree.run(backend=FakeBackend())

    @sgl.function
    async def reads_after(s: ProgramState) -> None:
        s += sgl.gen("a")
        await s.settled()
        assert (s["a"], s.text(), s.error()) == ("ok", "ok", None)
        assert "".join(s.text_iter()) == "ok"

    @sgl.function
    async def runs_a_plain_one(s: ProgramState) -> None:
        tree.run(backend=FakeBackend())

    for program, way_out in ((reads, "aget"), (runs, "arun"), (runs_a_plain_one, "arun")):
        with pytest.raises(ProgramUsageError, match=f"event loop that it runs on.*{way_out}"):
            program.run(backend=FakeBackend(delay=0.01))
    reads_after.run(backend=FakeBackend())


def test_programs_run_inside_of_programs() -> None:
    @sgl.function
    def outer(s: ProgramState) -> None:
        s += "a" + tree.run(backend=FakeBackend("in"))["x"][0]

    @sgl.function
    async def outer_async(s: ProgramState) -> None:
        inner = await asyncio.gather(
            *(f.arun(backend=FakeBackend("in")) for f in (tree, async_tree))
        )
        s += "a" + inner[1]["x"][0]

    for program in (outer, outer_async):
        assert program.run(backend=FakeBackend()).text() == "ain"


def test_async_programs_await_their_variables() -> None:
    @sgl.function
    async def program(s: ProgramState) -> str:
        s += sgl.gen("a")
        first, second = await asyncio.gather(s.aget("a"), s.aget("a"))
        with pytest.raises(KeyError):
            await s.aget("never")
        return str(first + second)

    async def ask() -> ProgramState:
        return await program.arun(backend=FakeBackend())

    assert program.run(backend=FakeBackend()).ret_value == "okok"
    assert asyncio.run(ask()).ret_value == "okok"


@pytest.fixture
def background() -> Iterator[Background]:
    with own_loop() as background:
        yield background


def test_closing_the_loop_settles_all_that_waits(background: Background) -> None:
    backend = FakeBackend(delay=FOR_EVER)
    state = tree.run(backend=backend, stream=True)
    until(lambda: backend.num_active == 3)
    threading.Timer(0.02, background.close).start()
    with pytest.raises(sgl.ProgramError, match="closing"):
        state.text()
    until(ended(backend))
    assert tree.run(backend=FakeBackend())["x"] == ["ok"] * 3  # on a new loop


def test_a_closed_loop_leaves_finished_states_readable(background: Background) -> None:
    state = tree.run(backend=FakeBackend())
    background.close()
    assert (state["x"], state.text(), state.error()) == (["ok"] * 3, "q", None)


SCRIPT = """
import os, sys
import sapwood as sgl
from tests.frontend_lang.fakes import FakeBackend

@sgl.function
def ask(s):
    s += "q" + sgl.gen("a")

assert ask.run(backend=FakeBackend())["a"] == "ok"
{rest}
"""


def run_script(rest: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", SCRIPT.format(rest=rest)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_process_ends_quietly_while_a_program_still_runs() -> None:
    done = run_script("ask.run(backend=FakeBackend(delay=3600), stream=True)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_programs_run_in_a_forked_process() -> None:
    done = run_script(
        "child = os.fork()\n"
        "assert ask.run(backend=FakeBackend())['a'] == 'ok'\n"
        "os.write(1, b'ran\\n')\n"
        "if child: sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert (done.returncode, done.stdout.split()) == (0, ["ran", "ran"])
