"""What does the frontend language bring, and what does it cost?

- **programs and plain calls**: tree of thought (2 branches, 4 stages), a judge in six dimensions
  and self-consistency (8 chains that reason, then conclude), each about a long text of its own, as
  programs over HTTP, beside the same conversations as plain concurrent chat calls, to one server
  in a process of its own. Interleaved pairs, the cache empty before each side; with a cache that
  holds all programs, where both sides compute the same tokens, with one that holds two of them, and
  with one that holds little more than one.
- **batch order**: 200 few-shot programs of ten groups, shuffled, in an engine whose cache is twice
  the longest request: the hit rate over the best possible, where each distinct token of all
  prompts is computed once (Zheng et al. 2024, theorem 3.1). Beside it the same prompts, all given
  to such an engine at once.
- **overhead**: microseconds of a `gen` where the backend answers at once, milliseconds of
  `fork(1000)`, and seconds until the language is imported in a fresh process.

    python bench/dsl.py [--programs 8] [--pairs 3]
"""

import argparse
import asyncio
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
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
from dsl_backend import InstantBackend
from dsl_programs import CHAINS, JUDGE, TREE, ChatClient, Work

import sapwood as sgl
from sapwood.runtime.tokenizer import Tokenizer
from sapwood.runtime.weights import find_model

GSM8K = ROOT / "bench" / "data" / "gsm8k" / "test_200.jsonl"
NUM_GROUPS = 10  # of few-shot programs, each with worked examples of its own
NUM_SHOTS = 5
ANSWER_LEN = 8  # tokens
BLOCK_SIZE = 16
TEXT_LEN = 8000  # characters, some 2,000 tokens
POOLS = {"two": 2.0, "tight": 1.25}  # what a cache holds, in programs
LONG_TIMEOUT = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a pair: seconds, and the server's counts of it."""

    seconds: float
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int


def main() -> None:
    arguments = _parse()
    result: dict[str, Any] = {
        "question": "what does the frontend language bring, and what does it cost",
        "machine": machine(),
        "commit": commit(),
        "settings": settings(arguments),
        "works": {},
    }
    texts = long_texts()
    for work in (TREE, JUDGE, CHAINS):
        result["works"][work.name] = _compare_work(work, texts, arguments)
    result["batch"] = _batch_order(arguments)
    result["overhead"] = _overhead(arguments)
    for line in _lines(result):
        print(line)
    write_json(arguments.out, result)


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--programs", type=int, default=8, help="programs that run at once")
    parser.add_argument("--pairs", type=int, default=3, help="of both sides, for each work")
    parser.add_argument("--num-tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--batch-programs", type=int, default=200)
    parser.add_argument("--overhead-programs", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=10, help="of each overhead")
    parser.add_argument("--out", type=Path, default=RESULTS / "dsl.json")
    return parser.parse_args()


# -- programs and plain calls ------------------------------------------------------------------


def long_texts() -> list[str]:
    """Python's language reference, cut into texts of equal length: none begins like another."""
    whole = "\n\n".join(text for _, text in sorted(topics.items()))
    return [whole[i : i + TEXT_LEN] for i in range(0, len(whole) - TEXT_LEN, TEXT_LEN)]


def _compare_work(
    work: Work, texts: Sequence[str], arguments: argparse.Namespace
) -> dict[str, Any]:
    """In a cache with room for all programs, and in smaller ones."""
    with sgl.Runtime(arguments.model) as server:
        one = _measured(
            server.url,
            lambda: work.program.run(texts[0], arguments.num_tokens, backend=server),
        )
        result: dict[str, Any] = {"ample": _compare(server, work, texts, arguments)}
    # Each answer ends within a block of its own.
    num_blocks = -(-one.computed_tokens // BLOCK_SIZE) + work.num_answers
    for pool, num_programs in POOLS.items():
        num_kv_blocks = int(num_programs * num_blocks)
        with sgl.Runtime(arguments.model, num_kv_blocks=num_kv_blocks) as server:
            compared = _compare(server, work, texts, arguments)
        result[pool] = {"num_kv_blocks": num_kv_blocks} | compared
    return result


def _compare(
    server: sgl.Runtime, work: Work, texts: Sequence[str], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Pairs with texts of their own; who is first alternates. The first pair is not counted."""
    num, num_tokens = arguments.programs, arguments.num_tokens
    pairs = []
    for i in range(arguments.pairs + 1):
        asked = [texts[(i * num + k) % len(texts)] for k in range(num)]

        def programs(asked: Sequence[str] = asked) -> None:
            batch = [{"text": text, "num_tokens": num_tokens} for text in asked]
            work.program.run_batch(batch, backend=server)

        def plain(asked: Sequence[str] = asked) -> None:
            asyncio.run(_all_plain(server.url, work, asked, num_tokens))

        order = (programs, plain) if i % 2 else (plain, programs)
        timed = {side: _measured(server.url, side) for side in order}
        pairs.append((timed[programs], timed[plain]))
    counted = pairs[1:]
    return {
        "num_answers": num * work.num_answers,
        "time_ratio": spread([ours.seconds / theirs.seconds for ours, theirs in counted]),
        "pairs": [{"programs": asdict(o), "plain": asdict(t)} for o, t in counted],
    }


async def _all_plain(url: str, work: Work, texts: Sequence[str], num_tokens: int) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=LONG_TIMEOUT, limits=limits) as http:
        client = ChatClient(http, num_tokens)
        await asyncio.gather(*(work.plain(client, text) for text in texts))


def _measured(url: str, run: Callable[[], None]) -> Side:
    """From an empty cache. Counts are the server's own."""
    httpx.post(f"{url}/flush_cache").raise_for_status()
    before, started = _counts(url), time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    counts = {name: value - before[name] for name, value in _counts(url).items()}
    return Side(seconds=seconds, **counts)


def _counts(url: str) -> dict[str, int]:
    text = httpx.get(f"{url}/metrics").text

    def count(name: str) -> int:
        found = re.search(rf"^sapwood:{name}_total{{.*}} (\S+)$", text, re.MULTILINE)
        assert found is not None, f"the server does not count {name}"
        return int(float(found[1]))

    return {
        "prompt_tokens": count("prompt_tokens"),
        "computed_tokens": count("computed_tokens"),
        "generated_tokens": count("generation_tokens"),
    }


# -- order of a batch --------------------------------------------------------------------------


@sgl.function
def few_shot(s: sgl.ProgramState, examples: str, question: str) -> None:
    s += "Solve these problems.\n\n" + examples
    s += "Question: " + question + "\nAnswer:"
    s += sgl.gen("answer", max_tokens=ANSWER_LEN, temperature=0)


def few_shot_arguments(num_programs: int) -> list[dict[str, str]]:
    """Shuffled; each group has worked examples of its own, which no question repeats."""
    rows = read_json_lines(GSM8K)
    shots, asked = rows[: NUM_GROUPS * NUM_SHOTS], rows[NUM_GROUPS * NUM_SHOTS :]
    examples = [
        "".join(
            f"Question: {row['question']}\nAnswer: {row['answer']}\n\n"
            for row in shots[group * NUM_SHOTS :][:NUM_SHOTS]
        )
        for group in range(NUM_GROUPS)
    ]
    arguments = [
        {"examples": examples[i % NUM_GROUPS], "question": asked[i % len(asked)]["question"]}
        for i in range(num_programs)
    ]
    random.Random(7).shuffle(arguments)
    return arguments


def _batch_order(arguments: argparse.Namespace) -> dict[str, Any]:
    batch = few_shot_arguments(arguments.batch_programs)
    prompts = _prompts(Tokenizer.from_folder(find_model(arguments.model)), batch)
    longest = max(map(len, prompts)) + ANSWER_LEN
    num_blocks = 2 * -(-longest // BLOCK_SIZE)
    options = {"num_kv_blocks": num_blocks, "block_size": BLOCK_SIZE}
    with sgl.Engine(arguments.model, **options) as engine:
        started = time.perf_counter()
        states = few_shot.run_batch(batch, backend=engine)
        seconds = time.perf_counter() - started
    with sgl.Engine(arguments.model, **options) as engine:
        greedy = sgl.SamplingParams(temperature=0, max_tokens=ANSWER_LEN)
        started = time.perf_counter()
        outputs = engine.generate(prompts, greedy)
        plain_seconds = time.perf_counter() - started
    told = [state.get_meta_info("answer") for state in states]
    num_prompt_tokens = sum(map(len, prompts))
    best = 1 - num_necessary(prompts) / num_prompt_tokens
    hit_rate = sum(meta["cached_tokens"] for meta in told) / num_prompt_tokens
    plain = sum(output.num_cached_tokens for output in outputs) / num_prompt_tokens
    return {
        "num_programs": len(batch),
        "longest_request": longest,
        "num_kv_blocks": num_blocks,
        "prompt_tokens": num_prompt_tokens,
        "best_hit_rate": best,
        "run_batch": {"seconds": seconds, "hit_rate": hit_rate, "share_of_best": hit_rate / best},
        "requests_at_once": {
            "seconds": plain_seconds,
            "hit_rate": plain,
            "share_of_best": plain / best,
        },
    }


def _prompts(tokenizer: Tokenizer, batch: Sequence[Mapping[str, str]]) -> list[Sequence[int]]:
    """The tokens of each program's one request."""
    head = "Solve these problems.\n\n"
    return [
        tokenizer.encode(f"{head}{row['examples']}Question: {row['question']}\nAnswer:").tolist()
        for row in batch
    ]


def num_necessary(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that must be computed: those of the prompts' tree, each once, and at least the last of
    each prompt."""
    ordered = sorted(map(tuple, prompts))
    num = len(ordered[0])
    for last, prompt in pairwise(ordered):
        num += len(prompt) - min(len(os.path.commonprefix([last, prompt])), len(prompt) - 1)
    return num


# -- overhead ----------------------------------------------------------------------------------


@sgl.function
def five_gens(s: sgl.ProgramState, text: str) -> None:
    for i in range(5):
        s += text + sgl.gen(f"answer_{i}")


@sgl.function
def wide_fork(s: sgl.ProgramState, seconds: list[float]) -> None:
    s += "Common."
    started = time.perf_counter()
    s.fork(1000)
    seconds.append(time.perf_counter() - started)


def _overhead(arguments: argparse.Namespace) -> dict[str, Any]:
    backend, num = InstantBackend(), arguments.overhead_programs
    batch: list[Mapping[str, Any]] = [{"text": f"Program {i}. "} for i in range(num)]
    gen_seconds, fork_seconds = [], []  # type: list[float], list[float]
    for _ in range(arguments.repeats):
        started = time.perf_counter()
        five_gens.run_batch(batch, backend=backend)
        gen_seconds.append((time.perf_counter() - started) / (5 * num))
        wide_fork.run(fork_seconds, backend=backend)
    return {
        "microseconds_of_a_gen": spread([1e6 * seconds for seconds in gen_seconds]),
        "milliseconds_of_fork_1000": spread([1e3 * seconds for seconds in fork_seconds]),
        "seconds_of_import": spread([_import_seconds() for _ in range(arguments.repeats)]),
    }


def _import_seconds() -> float:
    """All of the language that a program against a server needs, in a process of its own."""
    code = (
        "import time; started = time.perf_counter(); import sapwood as sgl; "
        "sgl.function, sgl.gen, sgl.select, sgl.user, sgl.ProgramState, sgl.RuntimeEndpoint; "
        "print(time.perf_counter() - started)"
    )
    command = [sys.executable, "-c", code]
    return float(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)


def _lines(result: dict[str, Any]) -> Iterator[str]:
    for name, by_pool in result["works"].items():
        for pool, figures in by_pool.items():
            ratio = figures["time_ratio"]
            yield (
                f"{name}, {pool} pool: {ratio['median']:.2f} of the time of plain calls "
                f"({ratio['min']:.2f} to {ratio['max']:.2f}), {figures['num_answers']} answers"
            )
    batch, overhead = result["batch"], result["overhead"]
    yield (
        f"batch: {batch['run_batch']['share_of_best']:.1%} of the best possible hit rate, "
        f"{batch['best_hit_rate']:.3f}, in {batch['num_kv_blocks']} blocks; the requests at once "
        f"reach {batch['requests_at_once']['share_of_best']:.1%}"
    )
    for name, unit in (
        ("microseconds_of_a_gen", "us a gen"),
        ("milliseconds_of_fork_1000", "ms for fork(1000)"),
        ("seconds_of_import", "s of import"),
    ):
        yield f"{overhead[name]['median']:.3g} {unit}"


if __name__ == "__main__":
    main()
