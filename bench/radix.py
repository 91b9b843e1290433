"""What does a request cost in the prefix cache, and does that grow with the tree?

Prompts of 8,192 tokens meet trees of 10^2 to 10^6 nodes. The baseline is the smallest tree of the
same run. The pool is full, so every request evicts as many blocks as it adds; the filling nodes
are last in the order of eviction, so that a tree keeps its size. A request is `match`, `acquire`
with its share of eviction, `copied`, `publish` and `release`, of three kinds:

- warm: all but the last 512 tokens are in the tree, in one of 32 edges;
- cold: nothing is;
- chunked: cold, published after every 2,048 tokens.

Times are CPU times of the thread, which other load disturbs less than the clock on the wall.

Besides: one eviction among 50,000 leaves, a match that hits 8,191 tokens, and the memory of nodes
and tokens.

    python bench/radix.py [--max-nodes 1000000]
"""

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, commit, machine, settings, spread, write_json

from sapwood.radix import LRU, Node, PrefixCache

BLOCK_SIZE = 16
PROMPT_LEN = 8192
SUFFIX_LEN = 512
CHUNK_LEN = 2048
NUM_GROUPS = 32
NODES_PER_BRANCH = 100
PROMPT_BLOCKS = PROMPT_LEN // BLOCK_SIZE
VOCAB_SIZE = 150_000
Samples = dict[str, list[float]]


class LongestFirst:
    """Evicts requests before the short edges that make up the tree's size; then as LRU does."""

    def __call__(self, node: Node) -> tuple[bool, int]:
        return len(node.blocks) <= 1, node.last_used


def main() -> None:
    arguments = _parse()
    draw = np.random.default_rng(arguments.seed)
    sizes = [10**n for n in range(2, 7) if 10**n <= arguments.max_nodes]
    request = {str(size): _requests(size, arguments, draw) for size in sizes}
    result = {
        "question": "what does a request cost in the prefix cache, and does it grow with the tree",
        "machine": machine(),
        "commit": commit(),
        "settings": {
            "prompt_len": PROMPT_LEN,
            "suffix_len": SUFFIX_LEN,
            "chunk_len": CHUNK_LEN,
            "block_size": BLOCK_SIZE,
            "num_groups": NUM_GROUPS,
            **settings(arguments),
        },
        "unit": "microseconds of CPU time, bytes",
        "request_by_num_nodes": request,
        "evict_one_of_50000_leaves": _evictions(50_000, arguments, draw),
        "memory": _memory(draw),
    }
    write_json(arguments.out, result)
    _print_table(result)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-nodes", type=int, default=10**6)
    parser.add_argument("--requests", type=int, default=300, help="of each kind, after warm-up")
    parser.add_argument("--warm-up", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "radix.json")
    return parser.parse_args()


def _tokens(draw: np.random.Generator, count: int) -> np.ndarray:
    return draw.integers(0, VOCAB_SIZE, count, dtype=np.int32)


def _serve(cache: PrefixCache, prompt: np.ndarray) -> None:
    lease = cache.acquire(prompt, len(prompt))
    if lease is None:
        raise RuntimeError("the pool is too small for one prompt")
    lease.copied()
    lease.publish(prompt)
    lease.release()


def _fill(cache: PrefixCache, num_nodes: int, draw: np.random.Generator) -> None:
    """Make a tree of about `num_nodes` edges of one block, two to a path."""
    for start in range(0, num_nodes, NODES_PER_BRANCH):
        branch = _tokens(draw, BLOCK_SIZE)
        for _ in range(min(NODES_PER_BRANCH, num_nodes - start) - 1):
            _serve(cache, np.concatenate((branch, _tokens(draw, BLOCK_SIZE))))


def _requests(num_nodes: int, arguments: argparse.Namespace, draw: np.random.Generator) -> object:
    """Requests of each kind on a full pool over a tree of `num_nodes` and some."""
    num_blocks = num_nodes + (NUM_GROUPS + 32) * PROMPT_BLOCKS
    cache = PrefixCache(num_blocks, BLOCK_SIZE, policy=LongestFirst)
    _fill(cache, num_nodes, draw)
    shared = [_tokens(draw, PROMPT_LEN - SUFFIX_LEN) for _ in range(NUM_GROUPS)]
    for prompt in shared:
        _serve(cache, prompt)
    gc.collect()

    def warm() -> Iterator[np.ndarray]:
        while True:
            for prefix in shared:
                yield np.concatenate((prefix, _tokens(draw, SUFFIX_LEN)))

    def cold() -> Iterator[np.ndarray]:
        while True:
            yield _tokens(draw, PROMPT_LEN)

    kinds: dict[str, tuple[Iterator[np.ndarray], int]] = {
        "warm": (warm(), PROMPT_LEN),
        "cold": (cold(), PROMPT_LEN),
        "chunked": (cold(), CHUNK_LEN),
    }
    times: dict[str, Samples] = {}
    for kind, (prompts, chunk_len) in kinds.items():
        while cache.num_free_blocks:
            _serve(cache, _tokens(draw, min(PROMPT_LEN, cache.num_free_blocks * BLOCK_SIZE)))
        times[kind] = {}
        for number in range(arguments.warm_up + arguments.requests):
            sample = _time_request(cache, next(prompts), chunk_len)
            if number >= arguments.warm_up:
                for verb, value in sample.items():
                    times[kind].setdefault(verb, []).append(value)
    hit = _tokens(draw, PROMPT_LEN)
    _serve(cache, hit)
    times["hit"] = {"match": _time_each(lambda: cache.match(hit), arguments.requests)}
    num_actual = sum(1 for _ in cache.walk())
    spreads = {
        kind: {verb: spread(values) for verb, values in samples.items()}
        for kind, samples in times.items()
    }
    return {"num_nodes": num_actual, **spreads}


def _time_request(cache: PrefixCache, prompt: np.ndarray, chunk_len: int) -> dict[str, float]:
    """The time of each verb and of all, in microseconds."""
    clock = time.thread_time_ns
    started = clock()
    cache.match(prompt)
    matched = clock()
    lease = cache.acquire(prompt, len(prompt))
    acquired = clock()
    if lease is None:
        raise RuntimeError("the pool is too small for one prompt")
    lease.copied()
    for end in range(chunk_len, len(prompt) + 1, chunk_len):
        lease.publish(prompt[:end])
    published = clock()
    lease.release()
    released = clock()
    return {
        "match": (matched - started) / 1000,
        "acquire": (acquired - matched) / 1000,
        "publish": (published - acquired) / 1000,
        "release": (released - published) / 1000,
        "all": (released - started) / 1000,
    }


def _evictions(num_leaves: int, arguments: argparse.Namespace, draw: np.random.Generator) -> object:
    """Evictions of one block, each a leaf of its own."""
    cache = PrefixCache(2 * num_leaves, BLOCK_SIZE, policy=LRU)
    _fill(cache, num_leaves, draw)
    gc.collect()
    return spread(_time_each(lambda: cache.evict(1), arguments.requests))


def _time_each(call: Callable[[], object], count: int) -> list[float]:
    """The time of each of `count` calls, in microseconds."""
    times = []
    for _ in range(count):
        started = time.thread_time_ns()
        call()
        times.append((time.thread_time_ns() - started) / 1000)
    return times


def _memory(draw: np.random.Generator) -> dict[str, float]:
    """Bytes of a node of one block, and of each token on a long edge."""
    num_nodes, num_prompts = 20_000, 100
    cache = PrefixCache(num_nodes + num_prompts * PROMPT_BLOCKS, BLOCK_SIZE)
    tracemalloc.start()
    _fill(cache, num_nodes, draw)
    gc.collect()
    of_nodes = tracemalloc.get_traced_memory()[0]
    for _ in range(num_prompts):
        _serve(cache, _tokens(draw, PROMPT_LEN))
    gc.collect()
    of_tokens = tracemalloc.get_traced_memory()[0] - of_nodes
    tracemalloc.stop()
    return {
        "bytes_per_node": of_nodes / num_nodes,
        "bytes_per_token": of_tokens / (num_prompts * PROMPT_LEN),
    }


def _print_table(result: dict[str, Any]) -> None:
    print("microseconds of CPU time a request, median (first to third quartile)")
    print(f"{'nodes':>9}" + "".join(f"{k:>20}" for k in ("warm", "cold", "chunked", "match hit")))
    for size, kinds in result["request_by_num_nodes"].items():
        cells = [kinds[kind]["all"] for kind in ("warm", "cold", "chunked")]
        cells.append(kinds["hit"]["match"])
        print(f"{size:>9}" + "".join(f"{_cell(cell):>20}" for cell in cells))
    print("warm, by verb, and the same for cold:")
    for size, kinds in result["request_by_num_nodes"].items():
        for kind in ("warm", "cold"):
            verbs = {name: spread["median"] for name, spread in kinds[kind].items()}
            print(f"{size:>9} {kind} " + "  ".join(f"{k} {v:.1f}" for k, v in verbs.items()))
    print(f"evict one of 50,000 leaves: {_cell(result['evict_one_of_50000_leaves'])}")
    memory = result["memory"]
    print(
        f"memory: {memory['bytes_per_node']:.0f} bytes a node of one block, "
        f"{memory['bytes_per_token']:.2f} bytes a token on a long edge"
    )


def _cell(spread: dict[str, float]) -> str:
    return f"{spread['median']:.1f} ({spread['first_quartile']:.1f}-{spread['third_quartile']:.1f})"


if __name__ == "__main__":
    main()
