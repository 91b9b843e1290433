"""The processes that run the sections, and what is known of them from the lines they write.

A section may crash its process, break its device or hang; what it had found by then is kept, and
the sections behind it run in another process. Imports no torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.sections import SECTION_BY_NAME, Scale

ROOT = Path(__file__).resolve().parent.parent.parent
NO_DEVICE = 2  # exit status of a worker
GRACE_SECONDS = 15  # that a section may overrun before its process is killed
POLL_SECONDS = 0.1


@dataclass(slots=True)
class Outcome:
    """What is known of one section. Filled while its lines are read."""

    section: str
    status: str = "running"  # complete, failed, crashed, timed out
    error: str | None = None
    seconds: float | None = None
    clocks: list[str | None] = field(default_factory=list)  # before and after
    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class Worker:
    """A process of `gpu.worker`, by its command line without the file that it is to write to.

    What it prints goes to a log. `seconds` is for all of its sections, then it is killed; a section
    may take `grace` longer than it has.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        seconds: float,
        environment: Mapping[str, str],
        grace: float = GRACE_SECONDS,
    ) -> None:
        folder = Path(tempfile.mkdtemp(dir=folder))
        self._lines, self._log = folder / "lines", folder / "log"
        self._lines.touch()
        self._grace = grace
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--lines", str(self._lines)],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._deadline = time.monotonic() + seconds

    @classmethod
    def of(
        cls,
        sections: Sequence[str],
        scale: Scale,
        seconds: float,
        folder: Path,
        shard: tuple[int, int] = (0, 1),
    ) -> Worker:
        """One that runs `sections` in this order."""
        command = [sys.executable, "-m", "gpu.worker", *sections]
        command += ["--scale", scale.value, "--seconds", f"{seconds:.1f}"]
        command += ["--shard", f"{shard[0]}/{shard[1]}"]
        return cls(command, folder, seconds=seconds, environment=environment_of(scale))

    @property
    def log(self) -> str:
        """The end of what the process wrote."""
        return self._log.read_text(errors="replace")[-4000:]

    @property
    def has_no_device(self) -> bool:
        return self._process.returncode == NO_DEVICE

    def outcomes(self) -> Iterator[Outcome]:
        """Each section's outcome when it is known. Ends with the process, which is killed where a
        section overruns, and where nobody asks for more."""
        try:
            yield from self._outcomes()
        finally:
            self.kill()

    def _outcomes(self) -> Iterator[Outcome]:
        facts: dict[str, Any] = {}
        current: Outcome | None = None
        limit = self._deadline
        with self._lines.open(encoding="utf-8") as lines:
            while True:
                has_ended = self._process.poll() is not None  # before the last lines are read
                for line in _whole_lines(lines):
                    event = json.loads(line)
                    if event["event"] == "facts":
                        facts = event["facts"]
                    elif event["event"] == "begin":
                        current = Outcome(event["section"], facts=facts)
                        current.clocks.append(event["clocks"])
                        seconds = SECTION_BY_NAME[current.section].seconds + self._grace
                        limit = min(self._deadline, time.monotonic() + seconds)
                    elif current is not None and event["event"] == "row":
                        current.rows.append(event["row"])
                    elif current is not None:
                        current.status = "failed" if event["error"] else "complete"
                        current.error, current.seconds = event["error"], event["seconds"]
                        current.clocks.append(event["clocks"])
                        yield current
                        current, limit = None, self._deadline
                if has_ended:
                    break
                if time.monotonic() > limit:
                    self.kill()
                    if current is not None:
                        current.status = "timed out"
                    break
                time.sleep(POLL_SECONDS)
        if current is not None:
            if current.status == "running":
                current.status = "crashed"
            current.error = self.log
            yield current

    def kill(self) -> None:
        """End the process and all it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _whole_lines(lines: Any) -> Iterator[str]:
    """The lines that are there by now; one that is not written to its end is left for later."""
    while True:
        place = lines.tell()
        line = lines.readline()
        if not line.endswith("\n"):
            lines.seek(place)
            return
        yield line


def environment_of(scale: Scale) -> Mapping[str, str]:
    """Variables of a worker's process."""
    paths = [str(ROOT), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # What Triton's next version will no longer do by itself; unset, it warns.
        "TRITON_DEFAULT_FP_FUSION": os.environ.get("TRITON_DEFAULT_FP_FUSION", "1"),
    }
    if scale is Scale.DRY:
        return {**environment, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    if scale is Scale.REHEARSAL:
        # Beside others: threads that wait actively would take the processors from compilers.
        environment["OMP_NUM_THREADS"] = "1"
    return environment
