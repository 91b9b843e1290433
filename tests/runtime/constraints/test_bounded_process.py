"""A process that works within bounds: whatever happens in it, the caller is told, and goes on."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sapwood.runtime.constraints.bounded_process import BoundedProcess, Outcome, WorkError
from sapwood.runtime.constraints.messages import write_frame

TASKS = "tests.runtime.constraints.bounded_tasks"
ROOT = Path(__file__).resolve().parents[3]
MIB = 2**20


@pytest.fixture
def process() -> Iterator[BoundedProcess]:
    process = BoundedProcess(f"{TASKS}:make_task", b"setup ", memory_limit=64 * MIB)
    yield process
    process.close()


def outcome_of(process: BoundedProcess, request: bytes, *, deadline: float = 20.0) -> Outcome:
    with pytest.raises(WorkError) as caught:
        process.run(request, deadline=deadline)
    return caught.value.outcome


def answers(process: BoundedProcess) -> bool:
    return process.run(b"echo again", deadline=20.0).body == b"setup again"


def await_(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, "it never came about"
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or at least a zombie that somebody else has yet to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def children_of(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except FileNotFoundError:
        return []


def test_it_tells_when_it_is_ready_and_is_started_by_the_question(process: BoundedProcess) -> None:
    assert process.pid is None
    assert not process.is_ready()
    assert process.pid is not None
    await_(process.is_ready)
    assert answers(process)
    assert process.is_ready()


def test_what_cannot_be_loaded_or_is_closed_is_never_ready() -> None:
    process = BoundedProcess(f"{TASKS}:broken", b"")
    assert not process.is_ready()
    pid = process.pid
    assert pid is not None
    await_(lambda: process.is_ready() or process.pid != pid)
    assert not process.is_ready()
    process.close()
    assert not process.is_ready()
    assert process.pid is None


def test_it_is_started_by_the_first_call_only() -> None:
    process = BoundedProcess(f"{TASKS}:make_task", b"")
    assert process.pid is None
    process.run(b"echo", deadline=20.0)
    assert process.pid is not None
    process.close()


def test_large_requests_and_answers_arrive_whole(process: BoundedProcess) -> None:
    payload = bytes(range(256)) * 4 * 4096  # 4 MiB, far more than a pipe holds
    assert process.run(b"echo " + payload, deadline=20.0).body == b"setup " + payload


def test_a_refusal_keeps_its_message_and_keyword(process: BoundedProcess) -> None:
    with pytest.raises(WorkError, match="not this") as caught:
        process.run(b"refuse", deadline=20.0)
    assert caught.value.outcome is Outcome.REFUSED
    assert caught.value.keyword == "that"


def test_what_a_library_writes_to_stderr_comes_with_the_answer(process: BoundedProcess) -> None:
    assert "ignored" in process.run(b"complain", deadline=20.0).diagnostics
    assert process.run(b"echo", deadline=20.0).diagnostics == ""


def test_past_the_deadline_work_is_killed_and_the_next_call_works(process: BoundedProcess) -> None:
    process.start()
    pid = process.pid
    assert outcome_of(process, b"spin", deadline=0.2) is Outcome.TIMEOUT
    assert answers(process)
    assert process.pid == pid, "only the fork was killed"
    assert not children_of(pid or 0)


def test_past_the_memory_limit_work_is_ended_and_the_next_call_works(
    process: BoundedProcess,
) -> None:
    assert process.run(b"take %d" % (16 * MIB), deadline=20.0).body == b"taken"
    assert outcome_of(process, b"take %d" % (256 * MIB)) is Outcome.MEMORY
    assert answers(process)


@pytest.mark.parametrize("request_", [b"crash", b"raise"])
def test_a_crash_is_told_and_the_next_call_works(process: BoundedProcess, request_: bytes) -> None:
    assert outcome_of(process, request_) is Outcome.ENDED
    assert answers(process)


def test_killed_from_outside_in_the_middle_a_call_is_refused_and_the_next_works(
    process: BoundedProcess,
) -> None:
    process.wait_until_ready()
    pid = process.pid
    assert pid is not None
    outcomes: list[Outcome] = []
    caller = threading.Thread(target=lambda: outcomes.append(outcome_of(process, b"sleep")))
    caller.start()
    await_(lambda: bool(children_of(pid)))
    (fork,) = children_of(pid)
    os.kill(pid, signal.SIGKILL)
    caller.join()
    assert outcomes == [Outcome.ENDED]
    await_(lambda: has_ended(fork))
    assert answers(process)
    assert process.pid != pid


def test_its_fork_killed_from_outside_a_call_is_refused_and_the_next_works(
    process: BoundedProcess,
) -> None:
    process.wait_until_ready()
    pid = process.pid
    assert pid is not None
    outcomes: list[Outcome] = []
    caller = threading.Thread(target=lambda: outcomes.append(outcome_of(process, b"sleep")))
    caller.start()
    await_(lambda: bool(children_of(pid)))
    os.kill(children_of(pid)[0], signal.SIGKILL)
    caller.join()
    assert outcomes == [Outcome.ENDED]
    assert answers(process)
    assert process.pid == pid


def test_close_ends_the_process_and_the_call_that_runs(process: BoundedProcess) -> None:
    process.wait_until_ready()
    pid = process.pid
    assert pid is not None
    outcomes: list[Outcome] = []
    caller = threading.Thread(target=lambda: outcomes.append(outcome_of(process, b"sleep")))
    caller.start()
    await_(lambda: bool(children_of(pid)))
    (fork,) = children_of(pid)
    process.close()
    caller.join()
    assert outcomes == [Outcome.ENDED]
    await_(lambda: has_ended(pid) and has_ended(fork))
    assert outcome_of(process, b"echo") is Outcome.ENDED
    process.close()


def test_it_ends_with_its_parent_however_that_ends() -> None:
    code = f"""
import os, signal, sys, threading, time
from pathlib import Path
from sapwood.runtime.constraints.bounded_process import BoundedProcess
process = BoundedProcess("{TASKS}:make_task", b"")
process.wait_until_ready()
threading.Thread(target=process.run, args=(b"sleep",), kwargs={{"deadline": 60}}).start()
children = Path(f"/proc/{{process.pid}}/task/{{process.pid}}/children")
while not children.read_text():
    time.sleep(0.01)
print(process.pid, children.read_text(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    parent = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    pids = [int(pid) for pid in parent.stdout.split()]
    assert len(pids) == 2
    await_(lambda: all(map(has_ended, pids)))


def test_a_function_that_cannot_be_loaded_is_told_each_time() -> None:
    process = BoundedProcess(f"{TASKS}:broken", b"")
    for _ in range(2):
        with pytest.raises(WorkError, match="cannot be loaded"):
            process.run(b"", deadline=20.0)
    assert process.pid is None
    process.close()


def test_a_process_whose_parent_has_gone_ends_quietly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "sapwood.runtime.constraints.bounded_process_main"]
        + [f"{TASKS}:make_task", str(64 * MIB)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    write_frame(process.stdin.fileno(), b"setup ")
    process.stdin.close()
    with process.stderr:
        said = process.stderr.read()
    assert (process.wait(60), said) == (0, b"")
