"""Is constrained text faster than free text, and what does a constraint cost?

Functions of the Berkeley Function Calling Leaderboard, asked of one engine:

- **tool calls** (`tool_choice` required) and **strict JSON** (a closed schema, no whitespace), each
  beside free text of the same length after the same prompt, computed before in both: forward
  passes for each token, and wall time, alone and 16 at a time (all requests in 16 seats, twice).
  Free and constrained text take turns at being first. Answers are greedy; those that the model
  does not end within 256 tokens are left out.
- **masks**: microseconds for each token that is drawn, its mask and its advance, the look for
  forced tokens, and setting logits; replayed on the very answers.
- **new schemas**: milliseconds that a request waits for a schema nobody has sent before, and for
  one that was.

    python bench/structured.py [--data tests/data/bfcl/functions.jsonl]
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    RESULTS,
    ROOT,
    commit,
    machine,
    make_parser,
    read_json_lines,
    settings,
    spread,
    write_json,
)

from sapwood import ConstraintSpec, Engine, FinishReason, SamplingParams
from sapwood.kernels import load_kernels
from sapwood.runtime.chat import Chat, ChatOptions
from sapwood.runtime.config import ConstraintOptions
from sapwood.runtime.constraints.backends import Backends
from sapwood.runtime.constraints.compiler import ConstraintCompiler
from sapwood.runtime.constraints.interface import Matcher, Vocabulary
from sapwood.runtime.constraints.llguidance_backend import LlguidanceBackend
from sapwood.runtime.constraints.spec import Whitespace
from sapwood.runtime.constraints.vocabulary import vocabulary_of
from sapwood.runtime.request import TokenIds

MAX_TOKENS = 256
Function = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """An input of the engine, and what its answer must satisfy besides."""

    input: Any
    constraint: ConstraintSpec | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """One batch both ways; seconds, forward passes, tokens of all its answers."""

    seconds: float
    passes: int
    tokens: int
    free_seconds: float
    free_passes: int


def main() -> None:
    arguments = _parse()
    functions = read_json_lines(arguments.data)
    # Room for all prompts, which are to be computed when the clock starts.
    with Engine(arguments.model, max_num_seqs=16, kv_cache_memory=2**31) as engine:
        result: dict[str, Any] = {
            "question": "is constrained text faster than free text",
            "machine": machine(),
            "commit": commit(),
            "engine": asdict(engine.info),
            "settings": settings(arguments),
            "workloads": {},
        }
        for name, make in (("tool calls", _tool_call), ("strict JSON", _strict_json)):
            tasks = [make(function) for function in functions[: arguments.num_together]]
            whole = _whole(engine, tasks)
            result["workloads"][name] = {
                "num_cut_off": len(tasks) - len(whole),
                "alone": _compare(engine, whole[:: max(1, len(whole) // arguments.num_alone)], 1),
                "16 at a time": _compare(engine, [*whole, *whole], len(whole)),
            }
        vocabulary = vocabulary_of(engine.tokenizer, engine.info.vocab_size)
        answers = _answers(engine, functions[: arguments.num_alone])
    # The engine's threads are gone: nothing else runs beside what is timed from here on.
    result["masks"] = _mask_costs(vocabulary, answers)
    result["new_schemas"] = _waits(vocabulary, functions)
    write_json(arguments.out, result)
    for line in _lines(result):
        print(line)


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2")
    data = ROOT / "tests" / "data" / "bfcl" / "functions.jsonl"
    parser.add_argument("--data", type=Path, default=data, help="JSON lines of functions")
    parser.add_argument("--num-alone", type=int, default=40, help="requests that run alone")
    parser.add_argument(
        "--num-together", type=int, default=96, help="requests of a batch, which runs twice"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "structured.json")
    return parser.parse_args()


# -- tasks -------------------------------------------------------------------------------------


def _tool_call(function: Function) -> Task:
    """The model is to call one tool, in its own format."""
    name = "".join(c if c.isalnum() or c in "_-" else "_" for c in function["name"])[:64]
    described = {
        "name": name,
        "description": function["description"],
        "parameters": _closed(function["parameters"]),
        "strict": True,
    }
    options = ChatOptions(
        tools=[{"type": "function", "function": described}],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    return Task(Chat([{"role": "user", "content": function["question"]}], options))


def _strict_json(function: Function) -> Task:
    """The arguments alone, as the text of the answer."""
    schema = _closed(function["parameters"])
    question = f"{function['question']}\nAnswer in JSON by this schema: {json.dumps(schema)}"
    spec = ConstraintSpec.json_schema(schema, whitespace=Whitespace.COMPACT)
    return Task(Chat([{"role": "user", "content": question}]), spec)


def _closed(schema: Any) -> Any:
    """What OpenAI's strict mode takes: all properties are required, and there are no others."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: value if key == "enum" else _closed(value) for key, value in schema.items()}
    if isinstance(closed.get("properties"), dict) and closed.get("type") == "object":
        closed |= {"required": list(closed["properties"]), "additionalProperties": False}
    return closed


# -- passes and time ---------------------------------------------------------------------------


def _whole(engine: Engine, tasks: Sequence[Task]) -> list[Task]:
    """Those that the model answers whole.

    In the others it repeats itself within a string, where nothing is forced, up to the limit: up
    to half of all tokens would be theirs.
    """
    answers = engine.generate([task.input for task in tasks], [_sampling(task) for task in tasks])
    ended = (output.outputs[0].finish_reason is FinishReason.STOP for output in answers)
    return [task for task, is_whole in zip(tasks, ended, strict=True) if is_whole]


def _compare(engine: Engine, tasks: Sequence[Task], batch_size: int) -> dict[str, Any]:
    batches = [tasks[i : i + batch_size] for i in range(0, len(tasks), batch_size)]
    pairs = [_pair(engine, batch, free_first=i % 2 == 0) for i, batch in enumerate(batches)]
    seconds, free_seconds = (sum(p.seconds for p in pairs), sum(p.free_seconds for p in pairs))
    passes, free_passes = (sum(p.passes for p in pairs), sum(p.free_passes for p in pairs))
    tokens = sum(p.tokens for p in pairs)
    return {
        "tokens": tokens,
        "passes_per_token": passes / tokens,
        "fewer_passes": free_passes / passes,
        "time_ratio": seconds / free_seconds,
        "time_ratios": spread([p.seconds / p.free_seconds for p in pairs]),
        "tokens_per_second": tokens / seconds,
        "free_tokens_per_second": tokens / free_seconds,
        "pairs": [asdict(pair) for pair in pairs],
    }


def _pair(engine: Engine, tasks: Sequence[Task], *, free_first: bool) -> Pair:
    """The lengths of free answers are those of the constrained ones, so they are found first, by
    a run that is not counted; from then on all prompts are computed."""
    prompts, sampling = _prepared(engine, tasks)
    engine.flush_cache()
    answers = engine.generate(prompts, sampling)
    lengths = [len(output.outputs[0].token_ids) for output in answers]
    free = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]

    def constrained_run() -> tuple[float, int]:
        return _run(engine, prompts, sampling)

    def free_run() -> tuple[float, int]:
        return _run(engine, prompts, free)

    runs = (free_run, constrained_run) if free_first else (constrained_run, free_run)
    timed = {run: run() for run in runs}
    (seconds, passes), (free_seconds, free_passes) = timed[constrained_run], timed[free_run]
    return Pair(seconds, passes, sum(lengths), free_seconds, free_passes)


def _sampling(task: Task) -> SamplingParams:
    return SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, constraint=task.constraint)


def _prepared(engine: Engine, tasks: Sequence[Task]) -> tuple[list[TokenIds], list[SamplingParams]]:
    """Prompts as tokens and what constrains their answers, also where tools do: so that both runs
    begin at the same point."""
    requests = engine._requests([task.input for task in tasks], [_sampling(task) for task in tasks])
    return [r.prompt_token_ids for r in requests], [r.sampling for r in requests]


def _run(
    engine: Engine, prompts: Sequence[TokenIds], sampling: Sequence[SamplingParams]
) -> tuple[float, int]:
    """Seconds and forward passes of a batch whose prompts are computed, and nothing after them."""
    engine.flush_cache()
    engine.generate(prompts, SamplingParams(max_tokens=1))
    num_steps, started = engine.stats().num_steps, time.perf_counter()
    engine.generate(prompts, sampling)
    seconds = time.perf_counter() - started
    return seconds, engine.stats().num_steps - num_steps


# -- masks and schemas -------------------------------------------------------------------------


def _answers(
    engine: Engine, functions: Sequence[Function]
) -> list[tuple[ConstraintSpec, list[int]]]:
    """Whole answers in strict JSON: their constraints and tokens."""
    tasks = _whole(engine, [_strict_json(function) for function in functions])
    outputs = engine.generate([task.input for task in tasks], [_sampling(task) for task in tasks])
    return [
        (task.constraint, list(output.outputs[0].token_ids))
        for task, output in zip(tasks, outputs, strict=True)
        if task.constraint is not None
    ]


def _mask_costs(
    vocabulary: Vocabulary, answers: Sequence[tuple[ConstraintSpec, list[int]]]
) -> dict[str, Any]:
    """Microseconds of a row, each schema compiled just before."""
    backend = LlguidanceBackend(vocabulary)
    mask = np.zeros(vocabulary.mask_size, np.int32)
    drawn: list[float] = []
    searches: list[float] = []
    num_forced = 0
    for constraint, tokens in answers:
        matcher = backend.compile(constraint, deadline=5.0).matcher()
        at = _take_forced(matcher)
        num_forced += at
        while at < len(tokens):
            started = time.perf_counter()
            matcher.fill_mask(mask)
            matcher.advance(tokens[at])
            advanced = time.perf_counter()
            matcher.forced_tokens()
            searches.append(1e6 * (time.perf_counter() - advanced))
            drawn.append(1e6 * (advanced - started))
            num_taken = _take_forced(matcher)
            num_forced += num_taken
            at += 1 + num_taken
    return {
        "mask_and_advance": _with_tail(drawn),
        "search_for_forced": _with_tail(searches),
        "applied_to_logits": spread(_application_costs(vocabulary.logits_size)),
        "forced_share": num_forced / (num_forced + len(drawn)),
    }


def _application_costs(vocab_size: int, num_rows: int = 16) -> list[float]:
    """Microseconds for each of the rows to set logits by masks that are there."""
    kernels = load_kernels("cpu")
    logits, rows = torch.zeros(num_rows, vocab_size), torch.arange(num_rows)
    allowed = torch.zeros(num_rows, -(-vocab_size // 32), dtype=torch.int32)
    found = []
    for _ in range(200):
        started = time.perf_counter()
        kernels.mask_logits(logits, rows, allowed)
        found.append(1e6 * (time.perf_counter() - started) / num_rows)
    return found


def _with_tail(values: Sequence[float]) -> dict[str, float]:
    p90, p99 = np.percentile(values, [90, 99]).tolist()
    return spread(values) | {"p90": p90, "p99": p99}


def _take_forced(matcher: Matcher) -> int:
    """Advance over what is forced; how many tokens."""
    forced = matcher.forced_tokens()
    for token in forced:
        matcher.advance(token)
    return len(forced)


def _waits(vocabulary: Vocabulary, functions: Sequence[Function]) -> dict[str, Any]:
    """Milliseconds until a constraint's matcher is there: first asked for, and asked for again."""
    specs = {_strict_json(function).constraint for function in functions}
    backends = Backends(lambda: vocabulary)
    compiler = ConstraintCompiler(backends, ConstraintOptions(), clock=time.monotonic)
    try:
        compiler.matchers([ConstraintSpec.choice(["a", "b"])]).result()
        found = {}
        for name in ("new", "known"):
            milliseconds = []
            for spec in specs:
                started = time.perf_counter()
                compiler.matchers([spec]).result()
                milliseconds.append(1e3 * (time.perf_counter() - started))
            found[name] = _with_tail(milliseconds)
        return found
    finally:
        compiler.close()


def _lines(result: dict[str, Any]) -> Iterator[str]:
    info = result["engine"]
    yield f"{info['model_name']}, {info['dtype']}, quantize {info['quantize']}"
    for name, by_batch in result["workloads"].items():
        for batch, figures in by_batch.items():
            if batch == "num_cut_off":
                continue
            yield (
                f"{name}, {batch}: {figures['fewer_passes']:.2f} times fewer passes "
                f"({figures['passes_per_token']:.2f} a token), {figures['time_ratio']:.2f} of the "
                f"time of free text ({figures['tokens_per_second']:.0f} and "
                f"{figures['free_tokens_per_second']:.0f} tokens/s)"
            )
    for name in ("mask_and_advance", "search_for_forced", "applied_to_logits"):
        figures = result["masks"][name]
        tail = f", p99 {figures['p99']:.0f}" if "p99" in figures else ""
        yield (
            f"{name.replace('_', ' ')}: median {figures['median']:.1f}, "
            f"mean {figures['mean']:.1f}{tail} us a row"
        )
    yield f"{result['masks']['forced_share']:.0%} of tokens are forced"
    for name, figures in result["new_schemas"].items():
        yield f"{name} schema: median {figures['median']:.2f}, p99 {figures['p99']:.2f} ms"


if __name__ == "__main__":
    main()
