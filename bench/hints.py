"""What do a program's hints bring? A replay in virtual time, without a model.

The real scheduler and tree run two traces; a step takes a fixed time and a time for each row.

- flood: agents (a shared system prompt, turns with a tool between them) and trees (a parent,
  branches from it after a pause, then a judgement over all of them), beside unrelated requests that
  flood the cache while the tools run;
- crowd: teams (three rounds of four requests each, of which some are short and some long, that
  share no more than the system prompt) that all begin at once and have to queue for memory and
  seats.

Each runs

- without hints,
- with each kind of hint alone: `more_follows` and `idle_seconds` (a guess of the tool's time, wrong
  by up to a factor of two), `fork_size`; `output_tokens` (the same kind of guess); `program_id`,
- with all of them, and
- with all, where the unrelated requests lie: every one of them says that more follows in ten
  minutes.

A program's time is that of its requests, its tools' left out.

    python bench/hints.py
"""

import argparse
import heapq
import random
import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from common import RESULTS, commit, machine, make_parser, settings, write_json

from sapwood.radix import PrefixCache
from sapwood.runtime.config import SchedulerOptions
from sapwood.runtime.core import EngineCore
from sapwood.runtime.hints import NO_HINTS, Hints
from sapwood.runtime.policy import load_policy
from sapwood.runtime.request import ChunkResult, Request, SampledToken
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.scheduler import Scheduler
from sapwood.runtime.segmenter import Segmenter
from sapwood.runtime.step_plan import Chunk, StepPlan

BLOCK_SIZE = 16
EOS = 0
VOCAB_SIZE = 50_000
MAX_TOKENS = 1024

Tokens: TypeAlias = list[int]
Filter: TypeAlias = Callable[[Hints], Hints]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of a program, the length its answer will have, and what the program says."""

    prompt: Tokens
    answer_len: int
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class Round:
    """Requests that a program makes at the same time, `delay` seconds from now."""

    asks: list[Ask]
    delay: float = 0.0


# Yields rounds, and is sent the answers to each.
Program: TypeAlias = Generator[Round, list[Tokens], None]


@dataclass(slots=True)
class Run:
    """A program under way."""

    kind: str
    program: Program
    due: float = 0.0  # when its open round begins
    served_seconds: float = 0.0  # in its requests, not in its tools
    answers: dict[str, Tokens] = field(default_factory=dict)  # of this round, by request
    num_open: int = 0


@dataclass(slots=True)
class Clock:
    now: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    results: list[ChunkResult]

    def result(self) -> list[ChunkResult]:
        return self.results


class Executor:
    """Draws tokens that depend on the request and the position alone; a step takes its time."""

    def __init__(self, clock: Clock, step_seconds: float, row_seconds: float) -> None:
        self.answer_lens: dict[str, int] = {}
        self._clock = clock
        self._step_seconds, self._row_seconds = step_seconds, row_seconds

    def launch(self, plan: StepPlan) -> "Ended":
        self._clock.now += self._step_seconds + self._row_seconds * plan.num_rows
        return Ended([ChunkResult(sampled=self._sampled(chunk)) for chunk in plan.chunks])

    def _sampled(self, chunk: Chunk) -> tuple[SampledToken, ...]:
        if not chunk.num_samples:
            return ()
        request, position = chunk.sequence.request, chunk.sequence.num_generated
        if position + 1 >= self.answer_lens[request.request_id]:
            return (SampledToken(EOS),)
        return (SampledToken(1 + (request.seed + 7919 * position) % (VOCAB_SIZE - 1)),)


class Replay:
    """Programs and single requests against an engine core, in virtual time."""

    def __init__(
        self, arguments: argparse.Namespace, num_blocks: int, say: Filter, say_single: Filter
    ) -> None:
        self._say, self._say_single = say, say_single
        self._clock = Clock()
        self._executor = Executor(self._clock, arguments.step_seconds, arguments.row_seconds)
        options = SchedulerOptions(
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            max_num_seqs=arguments.max_num_seqs,
        )
        self._scheduler = Scheduler(
            PrefixCache(num_blocks, BLOCK_SIZE),
            load_policy(options.schedule_policy),
            options,
            segmenter=Segmenter(BLOCK_SIZE, 1),
            max_model_len=num_blocks * BLOCK_SIZE,
        )
        self._core = EngineCore(
            self._scheduler,
            self._executor,
            clock=lambda: self._clock.now,
            make_cache=lambda: PrefixCache(num_blocks, BLOCK_SIZE),
        )
        self._due: list[tuple[float, int, Run, list[Ask]]] = []  # a heap
        self._serial = count()
        self._run_by_request: dict[str, Run] = {}
        self._prompts: dict[str, int] = {}
        self.seconds: dict[str, list[float]] = {}  # of finished programs, by kind
        self.num_prompt_tokens: dict[str, int] = {}
        self.num_cached_tokens: dict[str, int] = {}

    def start(self, kind: str, program: Program, at: float) -> None:
        self._advance(Run(kind, program), at)

    def run(self) -> dict[str, Any]:
        """Everything to its end; the figures."""
        while self._due or self._core.has_work:
            if not self._core.has_work:
                self._clock.now = max(self._clock.now, self._due[0][0])
            while self._due and self._due[0][0] <= self._clock.now:
                _, _, run, asks = heapq.heappop(self._due)
                self._submit(run, asks)
            self._step()
        counters = self._scheduler.counters
        return {
            "seconds": self._clock.now,
            "num_steps": counters.num_steps,
            "computed_tokens": counters.computed_tokens,
            "num_preemptions": counters.num_preemptions,
            "requests_back_at_a_warm_prefix": counters.num_taken_up,
            "kinds": {kind: self._figures(kind) for kind in sorted(self.seconds)},
        }

    def _figures(self, kind: str) -> dict[str, float]:
        seconds = self.seconds[kind]
        return {
            "num_finished": len(seconds),
            "hit_rate": self.num_cached_tokens[kind] / self.num_prompt_tokens[kind],
            "seconds_mean": statistics.fmean(seconds),
            "seconds_p90": float(np.quantile(seconds, 0.9)),
        }

    def _advance(self, run: Run, now: float, answers: list[Tokens] | None = None) -> None:
        """Let a program make its next requests; note its time if it has ended."""
        try:
            step = next(run.program) if answers is None else run.program.send(answers)
        except StopIteration:
            self.seconds.setdefault(run.kind, []).append(run.served_seconds)
            return
        run.due = now + step.delay
        heapq.heappush(self._due, (run.due, next(self._serial), run, step.asks))

    def _submit(self, run: Run, asks: list[Ask]) -> None:
        run.answers, run.num_open = {}, len(asks)
        for ask in asks:
            request_id = f"{len(self._prompts)}"
            say = self._say_single if run.kind == "single" else self._say
            self._prompts[request_id] = len(ask.prompt)
            self._run_by_request[request_id] = run
            self._executor.answer_lens[request_id] = ask.answer_len
            run.answers[request_id] = []
            self._core.add(
                Request(
                    request_id=request_id,
                    caller_id=request_id,
                    prompt_token_ids=np.array(ask.prompt, np.int32),
                    sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0),
                    max_tokens=MAX_TOKENS,
                    seed=sum(ask.prompt[-8:]),
                    eos_token_ids=(EOS,),
                    arrival_time=self._clock.now,
                    hints=say(ask.hints),
                )
            )

    def _step(self) -> None:
        for output in self._core.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            run = self._run_by_request[output.request_id]
            run.answers[output.request_id] += output.token_ids
            if output.finished:
                self._note_finished(run, output.request_id, output.num_cached_tokens)

    def _note_finished(self, run: Run, request_id: str, num_cached: int) -> None:
        for counts, number in (
            (self.num_prompt_tokens, self._prompts[request_id]),
            (self.num_cached_tokens, num_cached),
        ):
            counts[run.kind] = counts.get(run.kind, 0) + number
        run.num_open -= 1
        if not run.num_open:
            run.served_seconds += self._clock.now - run.due
            self._advance(run, self._clock.now, list(run.answers.values()))


# -- the trace -------------------------------------------------------------------------------------


def text(rng: random.Random, num_tokens: int) -> Tokens:
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(num_tokens)]


def guess(rng: random.Random, value: float) -> float:
    """What a program believes: wrong by up to a factor of two, either way."""
    return value * 2 ** rng.uniform(-1, 1)


def agent(rng: random.Random, name: str, system: Tokens) -> Program:
    """Turns with a tool between them; each prompt goes on from the answer before."""
    tokens = [*system, *text(rng, 200)]
    num_turns = rng.randint(4, 8)
    tool_seconds = 0.0
    for turn in range(num_turns):
        answer_len = rng.randint(20, 60)
        next_tool_seconds = rng.uniform(2, 15)
        is_last = turn == num_turns - 1
        hints = Hints(
            program_id=name,
            more_follows=not is_last,
            idle_seconds=None if is_last else guess(rng, next_tool_seconds),
            output_tokens=round(guess(rng, answer_len)),
        )
        [answer] = yield Round([Ask(tokens, answer_len, hints)], tool_seconds)
        tokens = [*tokens, *answer, *text(rng, 120)]
        tool_seconds = next_tool_seconds


def tree(rng: random.Random, name: str, system: Tokens) -> Program:
    """A parent, four branches of it, and a judgement over all that they wrote."""
    num_branches = 4
    stem = [*system, *text(rng, 600)]
    said = Hints(program_id=name, fork_size=num_branches, output_tokens=round(guess(rng, 60)))
    [answer] = yield Round([Ask(stem, 60, said)])
    stem = [*stem, *answer]
    asks = []
    for index in range(num_branches):
        length = rng.randint(40, 160)
        said = Hints(
            program_id=name,
            fork_size=num_branches,
            fork_index=index,
            more_follows=True,
            output_tokens=round(guess(rng, length)),
        )
        asks.append(Ask([*stem, *text(rng, 20)], length, said))
    answers = yield Round(asks, rng.uniform(0, 4))
    said = Hints(program_id=name, output_tokens=10)
    yield Round([Ask([*stem, *sum(answers, [])], 10, said)])


def team(rng: random.Random, name: str, system: Tokens) -> Program:
    """Rounds of requests that share the system prompt alone; each round needs the one before."""
    for _ in range(3):
        asks = []
        for index in range(4):
            length = rng.choice([10, 300])
            said = Hints(
                program_id=name,
                fork_size=4,
                fork_index=index,
                output_tokens=round(guess(rng, length)),
            )
            asks.append(Ask([*system, *text(rng, 50)], length, said))
        yield Round(asks)


def single(rng: random.Random) -> Program:
    """A request that has nothing to do with any other."""
    length = rng.randint(20, 200)
    said = Hints(output_tokens=round(guess(rng, length)))
    yield Round([Ask(text(rng, rng.randint(300, 1200)), length, said)])


def arrivals(rng: random.Random, per_second: float, seconds: float) -> Iterator[float]:
    now = rng.expovariate(per_second)
    while now < seconds:
        yield now
        now += rng.expovariate(per_second)


def crowd(replay: Replay, arguments: argparse.Namespace, seed: int) -> None:
    """Teams that all begin at once."""
    rng = random.Random(seed)
    system = text(rng, 400)
    for index in range(arguments.teams):
        own = random.Random(rng.getrandbits(64))
        replay.start("team", team(own, f"team-{index}", system), 0.0)


def flood(replay: Replay, arguments: argparse.Namespace, seed: int) -> None:
    """Programs and unrelated requests that arrive over time."""
    rng = random.Random(seed)
    system = text(rng, 400)
    kinds: tuple[tuple[str, float, Callable[[random.Random, str], Program]], ...] = (
        ("agent", arguments.agents, lambda own, name: agent(own, name, system)),
        ("tree", arguments.trees, lambda own, name: tree(own, name, system)),
        ("single", arguments.singles, lambda own, name: single(own)),
    )
    for kind, per_second, make in kinds:
        for at in arrivals(rng, per_second, arguments.seconds):
            own = random.Random(rng.getrandbits(64))
            replay.start(kind, make(own, f"{kind}-{at}"), at)


# -- what is said ----------------------------------------------------------------------------------


def silent(hints: Hints) -> Hints:
    return NO_HINTS


def everything(hints: Hints) -> Hints:
    return hints


def only(*names: str) -> Filter:
    def say(hints: Hints) -> Hints:
        return Hints(**{name: getattr(hints, name) for name in names})

    return say


def lying(hints: Hints) -> Hints:
    return replace(hints, more_follows=True, idle_seconds=600)


WARMTH = ("program_id", "more_follows", "idle_seconds", "fork_size", "fork_index")
Case: TypeAlias = tuple[str, Filter, Filter]  # what programs say, and unrelated requests
CASES: tuple[Case, ...] = (
    ("no hints", silent, silent),
    ("program_id", only("program_id"), silent),
    ("output_tokens", only("output_tokens"), only("output_tokens")),
    ("what follows", only(*WARMTH), silent),
    ("all hints", everything, everything),
    ("all hints, unrelated requests lie", everything, lying),
)


def main() -> None:
    arguments = _parse()
    traces = {
        "flood": _cases(arguments, flood, arguments.num_blocks, CASES),
        "crowd": _cases(arguments, crowd, arguments.num_crowd_blocks, CASES[:-1]),
    }
    result = {
        "question": "what do a program's hints bring",
        "machine": machine(),
        "commit": commit(),
        "settings": settings(arguments),
        "traces": traces,
    }
    write_json(arguments.out, result)
    for trace, cases in traces.items():
        print(trace)
        for name, case in cases.items():
            print(_line(name, case))


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="traces")
    parser.add_argument("--seconds", type=float, default=120, help="in which programs begin")
    parser.add_argument("--agents", type=float, default=0.4, help="that begin in a second")
    parser.add_argument("--trees", type=float, default=0.6, help="that begin in a second")
    parser.add_argument("--singles", type=float, default=16, help="requests in a second")
    parser.add_argument("--teams", type=int, default=60, help="that begin at once")
    parser.add_argument("--num-blocks", type=int, default=3072, help=f"of {BLOCK_SIZE} tokens")
    parser.add_argument("--num-crowd-blocks", type=int, default=512, help="for the teams")
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--step-seconds", type=float, default=0.008)
    parser.add_argument("--row-seconds", type=float, default=3e-5)
    parser.add_argument("--out", type=Path, default=RESULTS / "hints.json")
    return parser.parse_args()


def _cases(
    arguments: argparse.Namespace,
    fill: Callable[[Replay, argparse.Namespace, int], None],
    num_blocks: int,
    cases: Sequence[Case],
) -> dict[str, Any]:
    """The mean over the traces of all seeds, for each case."""
    results = {}
    for name, say, say_single in cases:
        runs = []
        for seed in range(arguments.seeds):
            replay = Replay(arguments, num_blocks, say, say_single)
            fill(replay, arguments, seed)
            runs.append(replay.run())
        results[name] = _mean(runs)
    return results


def _mean(values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: _mean([value[key] for value in values]) for key in values[0]}
    return statistics.fmean(values)


def _line(name: str, case: dict[str, Any]) -> str:
    kinds = "; ".join(
        f"{kind}: hits {figures['hit_rate']:.1%}, {figures['seconds_mean']:.2f} s "
        f"(p90 {figures['seconds_p90']:.2f})"
        for kind, figures in case["kinds"].items()
    )
    return (
        f"{name:34} {case['computed_tokens']:9.0f} rows, {case['num_preemptions']:.0f} preempted, "
        f"{case['requests_back_at_a_warm_prefix']:.0f} warm | {kinds}"
    )


if __name__ == "__main__":
    main()
