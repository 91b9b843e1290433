"""An engine in a process of its own: start it, ask it, let it sleep, end it.

Linux only: it reads /proc. A process group is what is paused, resumed and ended, so that the
workers an engine starts are meant too.
"""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

EXIT_SECONDS = 10.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class EngineDiedError(Exception):
    """The process ended."""


class NoAnswerError(EngineDiedError):
    """The process did not answer in time and was ended."""


class EngineProcess:
    """A running adapter of `peer_engines/`, awake or paused.

    A paused engine takes no CPU time, whatever its threads would do while they wait.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, *, timeout: float
    ) -> None:
        """Start it and wait until it is ready. Raises EngineDiedError."""
        log.parent.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                start_new_session=True,
            )
        self._log = log
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.description = self._answer(timeout)
        self.ready_seconds = time.perf_counter() - started
        self.last_used = time.monotonic()
        self._is_paused = False

    def ask(self, command: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Wake it, send a command and wait for the answer. Raises EngineDiedError."""
        self.resume()
        self.last_used = time.monotonic()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # told by the answer that does not come
        return self._answer(timeout)

    def pause(self) -> None:
        if not self._is_paused:
            self._signal(signal.SIGSTOP)
            self._is_paused = True

    def resume(self) -> None:
        if self._is_paused:
            self._signal(signal.SIGCONT)
            self._is_paused = False

    def stop(self) -> None:
        """End it, by force if it does not go. Idempotent."""
        self.resume()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b'{"op": "exit"}\n')
            self._process.stdin.close()
            self._process.wait(EXIT_SECONDS)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            pass
        self._signal(signal.SIGKILL)
        self._process.wait()

    def peak_bytes(self) -> int:
        """Largest resident sizes so far, summed over its processes.

        Pages that two of its processes share count twice, and peaks need not have been at once.
        """
        return sum(_peak_bytes(pid) for pid in self._pids())

    def cpu_seconds(self) -> float:
        """CPU time that its processes have used so far."""
        return sum(process_cpu_seconds(pid) for pid in self._pids())

    def _answer(self, timeout: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout)
        except Empty:
            self.stop()
            raise NoAnswerError(f"no answer in {timeout:.0f} s") from None
        if not line:
            status = self._process.wait()
            raise EngineDiedError(f"ended with status {status}: {_last_line(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass  # all of it has ended

    def _pids(self) -> list[int]:
        group = self._process.pid
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in pids if (fields := _stat(pid)) and int(fields[2]) == group]


def process_cpu_seconds(pid: int) -> float:
    """User and system time of a process so far; 0 where it has ended."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND if fields else 0.0


def machine_busy_seconds() -> float:
    """CPU time that all of the machine has used since it started, time stolen from it included."""
    line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_SECOND


def available_bytes() -> int:
    """Memory that can be taken without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/pid/stat from the state on; empty where the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def _peak_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in text.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "nothing in its log"
