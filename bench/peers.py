"""How fast is Sapwood beside the other engines that run on two CPU cores?

    python bench/peers.py --setup       # builds what is missing, then measures everything
    python bench/peers.py               # everything; writes results/peers-cpu.json and .md
    python bench/peers.py --only a,c --engines sapwood-int8,vllm     # prints, writes nothing
    python bench/peers.py --quick       # Sapwood once, against its committed figures

The same model (SmolLM2-135M-Instruct), the same token ids, greedy, fixed lengths, two threads on
two cores. Each engine is a process in an environment of its own, loaded and warmed up before it
is timed, and paused while another one runs. First the engines run every workload once, taking
turns within a workload; then Sapwood, the best peer of each workload and, where they are compared,
the best one in float32 run it twice more. Those that are known to be slower come last, with what
is left of 45 minutes. Every repetition has fresh prompts.

A full run writes results. With --only or --engines, --write puts what was measured in the place
of the same cells of the committed results, each cell with the commit and the time of its run.
"""

import argparse
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import common
import peer_report
from peer_catalogue import ENGINES, NUM_THREADS, EngineSpec, command, environment_variables
from peer_process import (
    EngineDiedError,
    EngineProcess,
    NoAnswerError,
    available_bytes,
    machine_busy_seconds,
    process_cpu_seconds,
)
from peer_report import PRIMED
from peer_setup import ENVIRONMENTS, Places, default_root, missing, set_up
from workloads import LETTERS, MMLU_FOLDER, WORKLOADS, Job, Kind, WorkloadBuilder

from sapwood.runtime.tokenizer import Tokenizer

NUM_RUNS = 3
CUT_OFF_SECONDS = 100.0
MIN_CUT_OFF_SECONDS = 20.0
LATE_CUT_OFF_FACTOR = 3.0
"""Engines that are measured late are cut off at that many times the best time of a workload."""

BUDGET_SECONDS = 45 * 60.0
FLOAT32_COMPARED = ("a", "b", "c", "cw", "d")
"""Workloads in which float32 engines are compared among themselves, from several runs."""

READY_TIMEOUT_SECONDS = 400.0
GIB = 2**30
SPARE_BYTES = 3 * GIB
"""Memory to leave free: engines grow while they run."""

PRIMED_REPETITIONS = 10
"""Added to the repetition of a primed run: the same engine has seen the other's prompts."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: an engine, or an engine whose client sends shared prefixes first."""

    spec: EngineSpec
    primed: bool = False

    @property
    def name(self) -> str:
        return f"{self.spec.name}{PRIMED}" if self.primed else self.spec.name


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a repetition (from 1) of a workload in a row."""

    row: Row
    workload: str
    repetition: int


@dataclass(slots=True)
class Results:
    """What has been measured, and what is known of each engine. `Bench` alone changes it."""

    engines: dict[str, dict[str, Any]]
    runs: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)

    def add(self, cell: Cell, run: dict[str, Any]) -> None:
        self.runs.setdefault(cell.row.name, {}).setdefault(cell.workload, []).append(run)

    def of(self, row: Row, workload: str) -> list[dict[str, Any]]:
        return self.runs.get(row.name, {}).get(workload, [])

    def median(self, row: Row, workload: str) -> float | None:
        values = [run["value"] for run in self.of(row, workload) if "value" in run]
        return statistics.median(values) if values else None


class Bench:
    """Runs cells on engines that it starts, pauses and ends as memory and time permit."""

    def __init__(
        self,
        places: Places,
        builder: WorkloadBuilder,
        *,
        scale: float,
        left_out: Mapping[str, str],
    ) -> None:
        """`left_out` tells why engines cannot be measured, by name."""
        self.results = Results({name: {"failed": reason} for name, reason in left_out.items()})
        self._places = places
        self._builder = builder
        self._warm_up = WorkloadBuilder(builder.tokenizer, data=builder.data, scale=0.25 * scale)
        self._started = time.monotonic()
        self._commit = common.commit()
        self._processes: dict[str, EngineProcess] = {}
        self._out_of_use: set[str] = set()  # engines that would not start

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def run(self, cells: Sequence[Cell], estimate: "Estimate", *, reserve: float = 0.0) -> None:
        """Run cells in their order; those that time does not permit are noted as not run.

        `reserve` seconds are to be left when the last one is done.
        """
        for index, cell in enumerate(cells):
            remaining = sum(map(estimate.seconds, cells[index:]))
            if cell.row.spec.name in self._out_of_use:
                continue
            if self.elapsed + estimate.seconds(cell) + reserve > BUDGET_SECONDS:
                if not self.results.of(cell.row, cell.workload):
                    self._note(cell, {"not_run": "no time left"})
                continue
            run = self._measure(cell)
            run |= {"repetition": cell.repetition, "commit": self._commit, "time": _now()}
            self._note(cell, run)
            estimate.learn(cell, run)
            self._tell(cell, run, remaining + reserve)

    def close(self) -> None:
        for name in list(self._processes):
            self._stop(name)

    def _note(self, cell: Cell, run: dict[str, Any]) -> None:
        self.results.add(cell, run)
        # What there is survives a crash; a look at it is also possible while it runs.
        common.write_json(
            self._places.root / "unfinished.json",
            {"engines": self.results.engines, "rows": self.results.runs},
        )

    def _measure(self, cell: Cell) -> dict[str, Any]:
        spec = cell.row.spec
        try:
            process = self._process(spec)
        except EngineDiedError as error:
            self._out_of_use.add(spec.name)
            self.results.engines.setdefault(spec.name, {})["failed"] = str(error)
            return {"error": str(error)}
        repetition = cell.repetition + (PRIMED_REPETITIONS if cell.row.primed else 0)
        job = self._builder.build(cell.workload, repetition)
        cut_off = self._cut_off(cell)
        try:
            with _others_share(process) as share:
                answer = _ask(process, job, cut_off, primed=cell.row.primed)
        except NoAnswerError:
            del self._processes[spec.name]
            return {"cut_off": cut_off}
        except EngineDiedError as error:
            del self._processes[spec.name]
            return {"error": str(error)}
        self._look_at(spec, process)
        process.pause()
        if "seconds" not in answer:
            return answer
        run = {"value": _value(job, answer), "seconds": answer["seconds"], **share}
        first_token_ids = [token_ids[0] for token_ids in answer["token_ids"]]
        # Strings, as a list in JSON takes a line for each number.
        run["first_token_ids"] = " ".join(map(str, first_token_ids))
        run["first_answer_ids"] = " ".join(map(str, answer["token_ids"][0][:32]))
        if cell.workload == "m":
            run |= self._marks(repetition, first_token_ids)
        return run

    def _cut_off(self, cell: Cell) -> float:
        """Seconds after which a run is given up."""
        if not cell.row.spec.is_late:
            return CUT_OFF_SECONDS
        seconds = [
            run["seconds"]
            for row, workloads in self.results.runs.items()
            for run in workloads.get(cell.workload, [])
            if "seconds" in run and PRIMED not in row
        ]
        best = min(seconds, default=CUT_OFF_SECONDS)
        return min(CUT_OFF_SECONDS, max(MIN_CUT_OFF_SECONDS, LATE_CUT_OFF_FACTOR * best))

    def _process(self, spec: EngineSpec) -> EngineProcess:
        """The engine's process, started and warmed up if need be. Raises EngineDiedError."""
        self._make_room(spec)
        if spec.name not in self._processes:
            process = EngineProcess(
                command(spec, self._places),
                environment_variables(spec),
                self._places.log(spec.name),
                timeout=READY_TIMEOUT_SECONDS,
            )
            self._processes[spec.name] = process
            self._look_at(spec, process)
            for name in ("a", "b", "c"):
                answer = _ask(process, self._warm_up.build(name, 0), CUT_OFF_SECONDS)
                if "error" in answer:
                    self._stop(spec.name)
                    raise EngineDiedError(answer["error"])
        return self._processes[spec.name]

    def _look_at(self, spec: EngineSpec, process: EngineProcess) -> None:
        """Note what is known of an engine; of several processes the first one's loading counts."""
        known = self.results.engines.setdefault(
            spec.name,
            {
                "title": spec.title,
                "weights": spec.weights,
                "activations": process.description.get("activations", spec.activations),
                "kv_cache": process.description.get("kv_cache", spec.kv_cache),
                "is_sapwood": spec.is_sapwood,
                "is_float32": spec.is_float32,
                "versions": process.description["versions"],
                "settings": process.description["settings"],
                "ready_seconds": process.ready_seconds,
                "peak_bytes": 0,
            },
        )
        known["peak_bytes"] = max(known["peak_bytes"], process.peak_bytes())

    def _make_room(self, spec: EngineSpec) -> None:
        """End idle engines, longest unused first, until there is memory for this one."""
        is_running = spec.name in self._processes
        needed = SPARE_BYTES + (0 if is_running else int(spec.memory_gib * GIB))
        idle = [name for name in self._processes if name != spec.name]
        idle.sort(key=lambda name: (ENGINES[name].is_slow_to_load, self._processes[name].last_used))
        for name in idle:
            if available_bytes() >= needed:
                return
            self._stop(name)

    def _stop(self, name: str) -> None:
        self._processes.pop(name).stop()

    def _marks(self, repetition: int, token_ids: Sequence[int]) -> dict[str, Any]:
        """What was answered to the multiple-choice questions; "-" is no letter."""
        questions = self._builder.mmlu(repetition)
        letters = "".join(
            LETTERS[question.letter_ids.index(token_id)] if token_id in question.letter_ids else "-"
            for question, token_id in zip(questions, token_ids, strict=True)
        )
        right = sum(q.answer == letter for q, letter in zip(questions, letters, strict=True))
        return {"letters": letters, "num_right": right}

    def _tell(self, cell: Cell, run: Mapping[str, Any], remaining: float) -> None:
        unit = WORKLOADS[cell.workload].unit
        figure = peer_report.figure(run, WORKLOADS[cell.workload])
        others = f", others took {run['others_share']:.0%}" if "others_share" in run else ""
        print(
            f"[{self.elapsed / 60:4.1f} min, {remaining / 60:4.1f} to go] "
            f"{cell.workload:2} {cell.row.name:24} {figure} {unit}{others}",
            flush=True,
        )


class Estimate:
    """How long a cell will take: as it took before, else a guess by workload. Seconds."""

    GUESSES: Mapping[str, float] = MappingProxyType(
        {"a": 5, "b": 4, "c": 40, "cw": 30, "d": 25, "e": 6, "t": 40, "m": 60, "s": 30}
    )

    def __init__(self, committed: Mapping[str, Any]) -> None:
        self._seconds: dict[tuple[str, str], float] = {}
        for row, cells in committed.get("rows", {}).items():
            for workload, cell in cells.items():
                for run in cell["runs"]:
                    self._learn(row, workload, run)

    def seconds(self, cell: Cell) -> float:
        return self._seconds.get((cell.row.name, cell.workload), self.GUESSES[cell.workload])

    def learn(self, cell: Cell, run: Mapping[str, Any]) -> None:
        self._learn(cell.row.name, cell.workload, run)

    def _learn(self, row: str, workload: str, run: Mapping[str, Any]) -> None:
        if "seconds" in run:
            self._seconds[row, workload] = run["seconds"]
        elif "cut_off" in run:
            self._seconds[row, workload] = run["cut_off"]


def main() -> None:
    arguments = _parse()
    signal.signal(signal.SIGTERM, _exit)  # so that engines are ended
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_THREADS])
    places = Places(arguments.env_dir)
    specs = [ENGINES[name] for name in arguments.engines]
    environments = [name for name in ENVIRONMENTS if any(s.environment == name for s in specs)]
    failures: dict[str, str] = {}
    if arguments.setup or arguments.setup_only:
        failures = set_up(places, environments)
    if arguments.setup_only:
        raise SystemExit(1 if failures else 0)
    skipped = _skipped(specs, places, failures)
    specs = [spec for spec in specs if spec.name not in skipped]
    committed = peer_report.read(arguments.results)
    builder = _builder(arguments, places)
    bench = Bench(places, builder, scale=arguments.scale, left_out=skipped)
    try:
        _measure_all(bench, specs, arguments, Estimate(committed))
    finally:
        bench.close()
    result = _result(bench, arguments)
    if arguments.quick:
        print(peer_report.against_committed(result, committed))
        return
    if arguments.write:
        merged = result if arguments.is_full else peer_report.merged(committed, result)
        peer_report.write(arguments.results, merged)
        result = merged
    print(peer_report.markdown(result))


def _measure_all(
    bench: Bench, specs: Sequence[EngineSpec], arguments: argparse.Namespace, estimate: Estimate
) -> None:
    """Everyone once, whoever matters twice more, and the late ones with what time is left."""
    prompt_rows = list(_rows(spec for spec in specs if not spec.is_late))
    late_rows = list(_rows(spec for spec in specs if spec.is_late))
    workloads: Sequence[str] = arguments.only
    # The best peers are taken to be about as fast as Sapwood.
    sapwood = [row for row in prompt_rows if row.spec.is_sapwood]
    repeated = 2 * sum(map(estimate.seconds, _cells(sapwood, workloads, 1)))
    reserve = (arguments.runs - 1) * repeated
    bench.run(_cells(prompt_rows, workloads, 1), estimate, reserve=reserve)
    _repeat(bench, prompt_rows, arguments, estimate)
    bench.run(_cells(late_rows, workloads, 1), estimate)
    _repeat(bench, [*prompt_rows, *late_rows], arguments, estimate)


def _repeat(
    bench: Bench, rows: Sequence[Row], arguments: argparse.Namespace, estimate: Estimate
) -> None:
    """Further runs for the rows that matter among `rows`, where they lack them."""
    for repetition in range(2, arguments.runs + 1):
        cells = [
            Cell(row, workload, repetition)
            for workload in arguments.only
            for row in _rows_that_matter(bench.results, rows, workload)
            # Prompts that an engine has seen would come from its cache.
            if all(run.get("repetition") != repetition for run in bench.results.of(row, workload))
        ]
        bench.run(cells, estimate)


def _rows_that_matter(results: Results, rows: Sequence[Row], workload: str) -> list[Row]:
    """Sapwood's, and of the unprimed peers the best and the best in float32."""
    peers = [row for row in rows if not row.spec.is_sapwood and not row.primed]
    chosen = [row for row in rows if row.spec.is_sapwood]
    groups = [peers]
    if workload in FLOAT32_COMPARED:
        groups.append([row for row in peers if row.spec.is_float32])
    for candidates in groups:
        medians = {
            row: median
            for row in candidates
            if (median := results.median(row, workload)) is not None
        }
        if medians:
            pick = max if WORKLOADS[workload].more_is_better else min
            chosen.append(pick(medians, key=lambda row: medians[row]))
    return list(dict.fromkeys(chosen))


def _rows(specs: Iterable[EngineSpec]) -> Iterator[Row]:
    for spec in specs:
        yield Row(spec)
        if spec.primed:
            yield Row(spec, primed=True)


def _cells(rows: Sequence[Row], workloads: Sequence[str], repetition: int) -> list[Cell]:
    return [
        Cell(row, workload, repetition)
        for workload in workloads
        for row in rows
        if workload in (row.spec.primed if row.primed else row.spec.workloads)
    ]


@contextmanager
def _others_share(process: EngineProcess) -> Iterator[dict[str, float]]:
    """Fills in the share of the two cores that neither the engine nor this process took."""
    share: dict[str, float] = {}

    def others() -> float:
        own = process.cpu_seconds() + process_cpu_seconds(os.getpid())
        return machine_busy_seconds() - own

    before, started = others(), time.perf_counter()
    yield share
    elapsed = time.perf_counter() - started
    share["others_share"] = max(0.0, others() - before) / (NUM_THREADS * elapsed)


def _ask(
    process: EngineProcess, job: Job, cut_off: float, *, primed: bool = False
) -> dict[str, Any]:
    """What the engine measured. It should cut itself off; if it cannot, it is ended."""
    command = {"op": "run", "job": job.to_json(), "primed": primed, "cut_off": cut_off}
    patience = cut_off * (1 + len(job.before)) + 15
    return process.ask(command, patience)


def _value(job: Job, answer: Mapping[str, Any]) -> float:
    """The figure of a run, in the workload's unit."""
    match job.kind:
        case Kind.DECODE:
            decode_seconds = answer["finish_seconds"][0] - answer["first_token_seconds"][0]
            return float((job.num_generated_tokens - 1) / decode_seconds)
        case Kind.PREFILL:
            return float(job.num_prompt_tokens / answer["first_token_seconds"][0])
        case Kind.FIRST_TOKEN:
            return float(statistics.median(answer["first_token_seconds"]))
        case Kind.BATCH | Kind.CHATS:
            return float(answer["seconds"])


def _skipped(
    specs: Sequence[EngineSpec], places: Places, failures: Mapping[str, str]
) -> dict[str, str]:
    """Why engines cannot be measured, by name."""
    reasons = {}
    for spec in specs:
        if spec.environment is None:
            continue
        if spec.environment in failures:
            reasons[spec.name] = f"set-up failed: {failures[spec.environment]}"
        elif missing(places, spec.environment):
            reasons[spec.name] = "not set up (--setup does it)"
    for name, reason in reasons.items():
        print(f"{name} is left out: {reason}")
    return reasons


def _builder(arguments: argparse.Namespace, places: Places) -> WorkloadBuilder:
    tokenizer = Tokenizer.from_folder(places.checkpoint())
    return WorkloadBuilder(tokenizer, data=arguments.data, scale=arguments.scale)


def _result(bench: Bench, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "question": "how fast is Sapwood beside the other engines on two CPU cores",
        "model": "SmolLM2-135M-Instruct, from its Q4_1 GGUF dequantised to float32",
        "machine": common.machine() | {"num_threads": NUM_THREADS},
        "commit": common.commit(),
        "time": _now(),
        "minutes": round(bench.elapsed / 60, 1),
        "settings": {
            "scale": arguments.scale,
            "cut_off_seconds": CUT_OFF_SECONDS,
            "budget_seconds": BUDGET_SECONDS,
        },
        "workloads": {
            name: {"title": WORKLOADS[name].title, "unit": WORKLOADS[name].unit}
            for name in arguments.only
        },
        "engines": bench.results.engines,
        "rows": peer_report.summarised(bench.results.runs),
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setup", action="store_true", help="build what is missing first")
    parser.add_argument("--setup-only", action="store_true", help="and measure nothing")
    parser.add_argument("--only", type=_names(WORKLOADS), help="workloads: a,c,...")
    parser.add_argument("--engines", type=_names(ENGINES), help="engines: " + ",".join(ENGINES))
    parser.add_argument("--quick", action="store_true", help="Sapwood once; writes nothing")
    parser.add_argument("--runs", type=int, default=NUM_RUNS, help="of those that matter")
    parser.add_argument("--write", action="store_true", help="merge a partial run's cells")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="shrink everything, to try things out"
    )
    parser.add_argument("--data", type=Path, default=MMLU_FOLDER, help="MMLU-Redux's CSV files")
    parser.add_argument("--env-dir", type=Path, default=default_root())
    parser.add_argument("--results", type=Path, default=common.RESULTS / "peers-cpu.json")
    arguments = parser.parse_args()
    if arguments.write and (arguments.quick or arguments.scale != 1):
        parser.error("--write needs a run at full scale, and not --quick")
    chosen = arguments.only or arguments.engines or arguments.quick or arguments.scale != 1
    arguments.is_full = not chosen and arguments.runs >= NUM_RUNS
    arguments.write |= arguments.is_full
    if arguments.quick:
        arguments.runs = 1
        arguments.engines = arguments.engines or [s.name for s in ENGINES.values() if s.is_sapwood]
    arguments.only = arguments.only or list(WORKLOADS)
    arguments.engines = arguments.engines or list(ENGINES)
    return arguments


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated names that are known."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"{name!r} is unknown; there are {', '.join(known)}"
                )
        return names

    return parse


if __name__ == "__main__":
    main()
