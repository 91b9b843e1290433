"""What the benches share: facts about the machine, the spread of samples, and looks into an engine.

Imports the standard library alone, so that it also runs where a peer and not Sapwood is installed;
what looks into an engine imports it on use.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sapwood.runtime.core import Executor, StepInFlight
    from sapwood.runtime.step_plan import StepPlan

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
_LIBRARIES = ("numpy", "torch")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The description as it is written, and every default."""


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser for a bench's options; `description` is its docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=_HelpFormatter)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, mean and range of at least one sample."""
    low = median = high = values[0]
    if len(values) > 1:
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {
        "median": median,
        "first_quartile": low,
        "third_quartile": high,
        "mean": statistics.fmean(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code. Threads are torch's, where it is loaded."""
    torch = sys.modules.get("torch")
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "num_threads": torch.get_num_threads() if torch is not None else 1,
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: _version(name) for name in _LIBRARIES},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit, marked where code differs from it; None outside a repository or without git.

    Results that an earlier bench has rewritten do not count as a difference.
    """
    head = _git("rev-parse", "--verify", "--quiet", "HEAD")
    if head.returncode:
        return None
    others = _git("diff", "--quiet", "HEAD", "--", ".", ":(exclude)bench/results")
    return head.stdout.strip() + ("-dirty" if others.returncode else "")


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:  # a machine that is lent for a GPU may have no git
        return subprocess.CompletedProcess(command, 127, stdout="", stderr=str(error))


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of a run, for its result: paths by their names, and not where it goes."""
    return {
        name: value.name if isinstance(value, Path) else value
        for name, value in vars(arguments).items()
        if name != "out"
    }


def write_json(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")


def fill(text: str, name: str, figures: str) -> str:
    """`text` with `figures` between its marks called `name`. Raises ValueError without marks."""
    begin, end = f"<!-- figures: {name} -->", "<!-- end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    filled, count = pattern.subn(lambda _: f"{begin}\n\n{figures}\n\n{end}", text)
    if count != 1:
        raise ValueError(f"the document has {count} marks {begin} with an end, not one")
    return filled


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@contextmanager
def self_times(methods: Iterable[tuple[type, str]]) -> Iterator[dict[str, float]]:
    """Put a timer around each method; gives the seconds spent so far by "Class.method".

    Time in a method that another one of them calls is counted for the inner one only, so that the
    sum is the time spent in any of them. For methods that one thread calls.
    """
    seconds: dict[str, float] = {}
    inner_seconds: list[float] = []  # of each call in progress: time in timed calls below it

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            inner_seconds.append(0.0)
            started = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                elapsed = time.perf_counter() - started
                seconds[name] += elapsed - inner_seconds.pop()
                if inner_seconds:
                    inner_seconds[-1] += elapsed

        return wrapper

    originals = [(owner, name, getattr(owner, name)) for owner, name in methods]
    for owner, name, method in originals:
        seconds[f"{owner.__name__}.{name}"] = 0.0
        setattr(owner, name, timed(f"{owner.__name__}.{name}", method))
    try:
        yield seconds
    finally:
        for owner, name, method in originals:
            setattr(owner, name, method)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step of an engine computed, in numbers.

    `starts` and `ends` [num_chunks] are the positions each chunk spans; its rows attend to all
    tokens before them. `num_distinct_kv_tokens` is counted off the block tables: tokens that the
    rows attend to, each counted once however many requests hold its block.
    """

    seconds: float  # of plan, forward pass, sampling and commit
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    num_logits: int
    num_distinct_kv_tokens: int

    @property
    def num_rows(self) -> int:
        return sum(self.ends) - sum(self.starts)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens attended to, counted once for every request."""
        return sum(self.ends)

    @property
    def is_decode(self) -> bool:
        """Whether every request computed one token and drew the next."""
        return self.num_rows == len(self.starts) == self.num_logits


class SteppedEngine:
    """An engine whose core is stepped on the caller's thread, so that each step can be looked at.

    `options` are those of `sapwood.Engine`. Raises as it does.
    """

    def __init__(self, model: str, **options: Any) -> None:
        from sapwood.runtime.build import build_engine
        from sapwood.runtime.config import EngineConfig

        # One step at a time: what is measured is a whole one.
        config = EngineConfig.from_options(model, **{**options, "overlap": False})
        parts = build_engine(config, time.monotonic)
        self.core = parts.core
        self.info = parts.info
        self.tokenizer = parts.tokenizer
        self.namespace = parts.namespace
        self._inputs = parts.inputs
        self._in_flight: set[str] = set()
        self._recorder = _Recorder(self.core._executor)
        self.core._executor = self._recorder

    def submit(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        """Queue a request that generates `max_tokens`, greedily and past any end token."""
        from sapwood import SamplingParams

        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = self._inputs.process(
            list(prompt_ids), sampling, caller_id=None, now=time.monotonic()
        )
        self._in_flight.add(request.request_id)
        self.core.add(request)

    def step(self) -> Step:
        """One step of the core. Raises RuntimeError where a request failed in it."""
        started = time.perf_counter()
        outputs = self.core.step()
        seconds = time.perf_counter() - started
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.finished:
                self._in_flight.discard(output.request_id)
        return self._recorder.last_step(seconds)

    def run(self) -> list[Step]:
        """Step until nothing is left to do."""
        steps = []
        while self.core.has_work:
            steps.append(self.step())
        return steps

    def abort_all(self) -> None:
        """End all requests; what they computed stays cached."""
        for request_id in self._in_flight:
            self.core.abort(request_id)
        self._in_flight.clear()

    def clear(self) -> None:
        """End all requests and drop all that is cached."""
        self.abort_all()
        self.core.flush_cache()


class _Recorder:
    """An executor around another one that notes what each plan computes."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._chunks: list[tuple[int, int]] = []
        self._num_logits = 0
        self._num_distinct = 0
        self._seconds = 0.0  # spent on taking notes

    def launch(self, plan: StepPlan) -> StepInFlight:
        started = time.perf_counter()
        self._chunks = [(chunk.start, chunk.end) for chunk in plan.chunks]
        self._num_logits = plan.num_logits
        self._num_distinct = _num_distinct_tokens(plan)
        self._seconds = time.perf_counter() - started
        return self._executor.launch(plan)

    def last_step(self, seconds: float) -> Step:
        """The step that took `seconds` with the notes."""
        starts, ends = zip(*self._chunks, strict=True)
        return Step(
            seconds=seconds - self._seconds,
            starts=starts,
            ends=ends,
            num_logits=self._num_logits,
            num_distinct_kv_tokens=self._num_distinct,
        )


def _num_distinct_tokens(plan: StepPlan) -> int:
    """Tokens in the distinct blocks of all tables, as far as any row attends to them.

    Asks neither the segments nor the tree.
    """
    import numpy as np

    block_size = plan.attention.block_size
    blocks, tokens = [], []
    for chunk in plan.chunks:
        num_blocks = -(-chunk.end // block_size)
        blocks.append(chunk.sequence.held_lease.block_table[:num_blocks])
        in_block = np.full(num_blocks, block_size)
        in_block[-1] = chunk.end - (num_blocks - 1) * block_size
        tokens.append(in_block)
    distinct, index = np.unique(np.concatenate(blocks), return_inverse=True)
    num_tokens = np.zeros(len(distinct), np.int64)
    np.maximum.at(num_tokens, index, np.concatenate(tokens))
    return int(num_tokens.sum())
