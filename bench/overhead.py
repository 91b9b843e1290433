"""What does the tree cost where it cannot help?

Requests with nothing in common run through two engines that differ in `prefix_caching` only, the
baseline being the one without. Two answers:

- the ratio of wall times (and of CPU times, which other load on the machine disturbs less) over
  interleaved pairs of batches, each pair with fresh prompts that both engines get, the order
  alternating. Nothing is flushed and the pool is small, so the tree also has to evict;
- the share of wall time spent in the verbs of `sapwood.radix`, from batches of their own, since
  the timers cost something too.

    python bench/overhead.py [--data gsm8k/test.jsonl]

Without `--data` (JSON lines with a "question") prompts are random token ids of such lengths.
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    commit,
    machine,
    read_json_lines,
    self_times,
    settings,
    spread,
    write_json,
)

from sapwood import Engine, SamplingParams
from sapwood.radix import Lease, PrefixCache

VERBS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (PrefixCache, ("match", "acquire", "evict", "flush")),
    (Lease, ("copied", "extend", "publish", "fork", "release")),
)
Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Timing:
    """One batch in one engine, in seconds."""

    wall: float
    cpu: float


def main() -> None:
    arguments = _parse()
    options = {"num_kv_blocks": arguments.num_kv_blocks}
    with (
        Engine(arguments.model, prefix_caching=True, **options) as tree,
        Engine(arguments.model, prefix_caching=False, **options) as no_tree,
    ):
        batches = _batches(arguments, tree.info.vocab_size)
        sampling = SamplingParams(
            max_tokens=arguments.answer_tokens, temperature=0.0, ignore_eos=True
        )
        for _ in range(arguments.warm_up):
            prompts = next(batches)
            for engine in (tree, no_tree):
                _time(engine, prompts, sampling)
        before = tree.stats()
        pairs = [
            _time_pair(tree, no_tree, next(batches), sampling, tree_first=i % 2 == 0)
            for i in range(arguments.pairs)
        ]
        after = tree.stats()
        shares = {
            name: _radix_shares(engine, batches, sampling, arguments.instrumented)
            for name, engine in (("tree", tree), ("no_tree", no_tree))
        }
        info = asdict(tree.info)
    wall_ratios = [with_tree.wall / without.wall for with_tree, without in pairs]
    cpu_ratios = [with_tree.cpu / without.cpu for with_tree, without in pairs]
    result = {
        "question": "what does the tree cost where nothing is shared",
        "machine": machine(),
        "commit": commit(),
        "engine": info,
        "settings": settings(arguments),
        "prompt_tokens": after.prompt_tokens - before.prompt_tokens,
        "cached_tokens": after.cached_tokens - before.cached_tokens,
        "wall_ratio": spread(wall_ratios),
        "cpu_ratio": spread(cpu_ratios),
        "radix_share_of_wall": {name: spread(values) for name, values in shares.items()},
        "pairs": [{"tree": asdict(one), "no_tree": asdict(other)} for one, other in pairs],
    }
    write_json(arguments.out, result)
    print(_line(result))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, help="JSON lines with a 'question' each")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--instrumented", type=int, default=4, help="batches with timers, each")
    parser.add_argument("--warm-up", type=int, default=2, help="pairs that are not counted")
    parser.add_argument("--num-requests", type=int, default=16, help="requests in a batch")
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--num-kv-blocks", type=int, default=256, help="small, so that it evicts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "overhead.json")
    return parser.parse_args()


def _batches(arguments: argparse.Namespace, vocab_size: int) -> Iterator[list[Prompt]]:
    """Batches of prompts, no two of which begin with the same token or text."""
    count = arguments.num_requests
    if arguments.data is not None:
        questions = [row["question"] for row in read_json_lines(arguments.data)]
        for start in range(0, len(questions) - count + 1, count):
            yield questions[start : start + count]
        raise SystemExit(f"{arguments.data} has too few questions for that many batches")
    draw = random.Random(arguments.seed)
    first_tokens = iter(draw.sample(range(vocab_size), vocab_size))
    while True:
        lengths = [draw.randint(40, 90) for _ in range(count)]
        yield [
            [next(first_tokens), *(draw.randrange(vocab_size) for _ in range(length - 1))]
            for length in lengths
        ]


def _time(engine: Engine, prompts: list[Prompt], sampling: SamplingParams) -> Timing:
    wall, cpu = time.perf_counter(), time.process_time()
    engine.generate(prompts, sampling)
    return Timing(time.perf_counter() - wall, time.process_time() - cpu)


def _time_pair(
    tree: Engine,
    no_tree: Engine,
    prompts: list[Prompt],
    sampling: SamplingParams,
    *,
    tree_first: bool,
) -> tuple[Timing, Timing]:
    """Timings with and without the tree, in this order whichever ran first."""
    if tree_first:
        return _time(tree, prompts, sampling), _time(no_tree, prompts, sampling)
    without = _time(no_tree, prompts, sampling)
    return _time(tree, prompts, sampling), without


def _radix_shares(
    engine: Engine, batches: Iterator[list[Prompt]], sampling: SamplingParams, count: int
) -> list[float]:
    shares = []
    with self_times((owner, name) for owner, names in VERBS for name in names) as seconds:
        for _ in range(count):
            before = sum(seconds.values())
            timing = _time(engine, next(batches), sampling)
            shares.append((sum(seconds.values()) - before) / timing.wall)
    return shares


def _line(result: dict[str, Any]) -> str:
    wall, cpu = result["wall_ratio"], result["cpu_ratio"]
    share, bare = (result["radix_share_of_wall"][name] for name in ("tree", "no_tree"))
    return (
        f"nothing shared ({result['cached_tokens']} of {result['prompt_tokens']} prompt tokens "
        f"cached), {wall['n']} pairs: wall time with the tree / without {wall['median']:.4f} "
        f"(quartiles {wall['first_quartile']:.4f} to {wall['third_quartile']:.4f}), "
        f"CPU time {cpu['median']:.4f} "
        f"({cpu['first_quartile']:.4f} to {cpu['third_quartile']:.4f}); "
        f"in radix/ {share['median']:.3%} of wall time, {bare['median']:.3%} without the tree"
    )


if __name__ == "__main__":
    main()
