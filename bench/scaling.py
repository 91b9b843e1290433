"""How does the time of a step grow with the work?

Decode steps of an engine, all requests generating one token each, as three things grow:

    requests   1 to 128 of them below a shared prefix of 1,024 tokens
    prefix     0 to 6,144 shared tokens above 32 requests
    tree       32 requests while the pool fills with other cached prefixes, one node a block, until
               every new block has to be evicted first

The baseline of each curve is its first point. Tokens are random: no cost depends on which they are.
Writes a JSON and a chart of each curve; with `--write-docs` nothing is measured, and the figures of
docs/performance.md are brought up to date from the results that are there.

    python bench/scaling.py [--modes none int8]
    python bench/scaling.py --write-docs
"""

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attention_split
import limits
import numpy as np
import quality
from common import (
    RESULTS,
    ROOT,
    SteppedEngine,
    commit,
    fill,
    machine,
    make_parser,
    self_times,
    settings,
    spread,
    write_json,
)

from sapwood.runtime.scheduler import Scheduler

DOCUMENT = ROOT / "docs" / "performance.md"
NUM_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)
PREFIX_LENS = (0, 512, 1024, 2048, 4096, 6144)
TREE_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
OWN_LEN = 16
REQUESTS_PREFIX_LEN = 1024
TREE_PREFIX_LEN = 256
FEW = 32  # requests where their number does not grow
NUM_KV_BLOCKS = 4096  # memory is touched only where something is computed
AXES: Mapping[str, str] = MappingProxyType(
    {
        "requests": "number of requests",
        "prefix": "shared prefix, tokens",
        "tree": "cached nodes that no request uses",
    }
)
Point = dict[str, Any]


def main() -> None:
    arguments = _parse()
    if arguments.write_docs:
        write_docs(DOCUMENT, RESULTS)
        return
    started = time.perf_counter()
    curves = {limits.dtype_of(mode): _curves(arguments, mode) for mode in arguments.modes}
    result: dict[str, Any] = {
        "question": "how does the time of a step grow with the work",
        "machine": machine(),
        "commit": commit(),
        "settings": {
            **settings(arguments),
            "own_len": OWN_LEN,
            "requests_prefix_len": REQUESTS_PREFIX_LEN,
            "tree_prefix_len": TREE_PREFIX_LEN,
            "num_kv_blocks": NUM_KV_BLOCKS,
        },
        "unit": "seconds a step",
        "curves": {
            name: {dtype: curves[dtype][name] for dtype in curves} for name in arguments.curves
        },
        "seconds": time.perf_counter() - started,
    }
    write_json(arguments.out, result)
    for name, by_dtype in result["curves"].items():
        chart = arguments.out.with_name(f"{arguments.out.stem}_{name}.svg")
        chart.write_text(_chart(name, by_dtype), encoding="utf-8")
        print(f"{AXES[name]}\n\n{_table(name, by_dtype)}\n")


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="a known name or a folder")
    parser.add_argument(
        "--modes", nargs="+", choices=("none", "int8"), default=["none", "int8"], help="of quantize"
    )
    parser.add_argument("--curves", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument("--steps", type=int, default=10, help="timed at each point")
    parser.add_argument("--points", type=int, help="only the first few of each curve")
    parser.add_argument("--seed", type=int, default=0, help="of the tokens")
    parser.add_argument("--out", type=Path, default=RESULTS / "scaling.json", help="the result")
    parser.add_argument(
        "--write-docs", action="store_true", help="only fill docs/performance.md from the results"
    )
    return parser.parse_args()


# -- measuring -----------------------------------------------------------------------------------


def _curves(arguments: argparse.Namespace, quantize: str) -> dict[str, list[Point]]:
    engine = SteppedEngine(arguments.model, quantize=quantize, num_kv_blocks=NUM_KV_BLOCKS)
    draw = np.random.default_rng(arguments.seed)
    measure: dict[str, Callable[[SteppedEngine, argparse.Namespace, Any], Iterator[Point]]] = {
        "requests": _requests_curve,
        "prefix": _prefix_curve,
        "tree": _tree_curve,
    }
    curves = {}
    for name in arguments.curves:
        engine.clear()
        curves[name] = list(measure[name](engine, arguments, draw))
    del engine
    gc.collect()
    return curves


def _requests_curve(
    engine: SteppedEngine, arguments: argparse.Namespace, draw: np.random.Generator
) -> Iterator[Point]:
    prefix = _tokens(engine, draw, REQUESTS_PREFIX_LEN)
    for num_requests in NUM_REQUESTS[: arguments.points]:
        _start(engine, draw, prefix, num_requests, arguments.steps)
        yield _point(engine, num_requests, arguments.steps)
        engine.abort_all()


def _prefix_curve(
    engine: SteppedEngine, arguments: argparse.Namespace, draw: np.random.Generator
) -> Iterator[Point]:
    """Each prefix extends the one before, so that what is cached of it is not computed again."""
    prefix = _tokens(engine, draw, max(PREFIX_LENS))
    for prefix_len in PREFIX_LENS[: arguments.points]:
        _start(engine, draw, prefix[:prefix_len], FEW, arguments.steps)
        yield _point(engine, prefix_len, arguments.steps)
        engine.abort_all()


def _tree_curve(
    engine: SteppedEngine, arguments: argparse.Namespace, draw: np.random.Generator
) -> Iterator[Point]:
    # Long enough for every request to need a new block while steps are timed.
    num_steps = max(arguments.steps, engine.info.block_size + 1)
    prefix = _tokens(engine, draw, TREE_PREFIX_LEN)
    for share in TREE_SHARES[: arguments.points]:
        engine.clear()
        _start(engine, draw, prefix, FEW, num_steps)
        num_nodes = round(share * engine.core.scheduler.cache.num_free_blocks)
        _fill_tree(engine, draw, num_nodes)
        yield _point(engine, num_nodes, num_steps)


def _fill_tree(engine: SteppedEngine, draw: np.random.Generator, num_nodes: int) -> None:
    """Put nodes of one block into the tree that nothing was computed for and nobody asks for."""
    cache = engine.core.scheduler.cache
    for _ in range(num_nodes):
        tokens = np.array(_tokens(engine, draw, cache.block_size), np.int32)
        lease = cache.acquire(tokens, len(tokens), engine.namespace)
        if lease is None:
            raise RuntimeError(f"the pool has no room for {num_nodes} nodes")
        lease.copied()
        lease.publish(tokens)
        lease.release()


def _tokens(engine: SteppedEngine, draw: np.random.Generator, count: int) -> list[int]:
    token_ids: list[int] = draw.integers(0, engine.info.vocab_size, count).tolist()
    return token_ids


def _start(
    engine: SteppedEngine,
    draw: np.random.Generator,
    prefix: Sequence[int],
    num_requests: int,
    num_steps: int,
) -> None:
    """Bring requests to where all of them decode, with `num_steps` and more left to do."""
    for _ in range(num_requests):
        # The first to be admitted has generated tokens when the last one begins.
        num_tokens = 2 * num_steps + 2 * num_requests
        engine.submit([*prefix, *_tokens(engine, draw, OWN_LEN)], num_tokens)
    while True:
        step = engine.step()
        if step.is_decode and step.num_rows == num_requests:
            return


def _point(engine: SteppedEngine, x: int, num_steps: int) -> Point:
    """`num_steps` steps at one point of a curve."""
    with self_times(((Scheduler, "plan"), (Scheduler, "commit"))) as seconds:
        steps = [engine.step() for _ in range(num_steps)]
    if len({step.num_rows for step in steps}) != 1:
        raise RuntimeError("a request ended, or was preempted, while steps were timed")
    return {
        "x": x,
        "step_seconds": spread([step.seconds for step in steps]),
        "scheduler_seconds": sum(seconds.values()) / num_steps,
        "kv_tokens_distinct": steps[0].num_distinct_kv_tokens,
        "kv_tokens_by_request": steps[0].num_kv_tokens,
    }


# -- figures -------------------------------------------------------------------------------------


def _table(name: str, by_dtype: Mapping[str, Sequence[Point]]) -> str:
    """Milliseconds by x, and the tokens that attention has to read."""
    dtypes = list(by_dtype)
    rows = [
        f"| {AXES[name]} | {' | '.join(f'{dtype}, ms (quartiles)' for dtype in dtypes)} "
        f"| {' | '.join(f'scheduler, {dtype}, ms' for dtype in dtypes)} "
        "| distinct KV tokens | by request |",
        "|" + "---|" * (2 * len(dtypes) + 3),
    ]
    for points in zip(*by_dtype.values(), strict=True):
        cells = [f"{points[0]['x']:,}"]
        for point in points:
            step = {key: value * 1e3 for key, value in point["step_seconds"].items()}
            cells.append(
                f"{step['median']:.1f} ({step['first_quartile']:.1f} to "
                f"{step['third_quartile']:.1f})"
            )
        cells += [f"{point['scheduler_seconds'] * 1e3:.2f}" for point in points]
        cells += [f"{points[0][f'kv_tokens_{kind}']:,}" for kind in ("distinct", "by_request")]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _chart(name: str, by_dtype: Mapping[str, Sequence[Point]]) -> str:
    """Step time over x as an SVG, one line for each dtype."""
    width, height, left, bottom, top = 640, 320, 60, 50, 20
    all_x = [point["x"] for points in by_dtype.values() for point in points]
    max_y = max(p["step_seconds"]["median"] for points in by_dtype.values() for p in points) * 1e3
    step_y = _round_step(max_y)
    top_y = step_y * math.ceil(max_y / step_y)

    def at(x: float, milliseconds: float) -> tuple[float, float]:
        across = (width - left - 20) * x / max(1, *all_x)
        return left + across, height - bottom - (height - bottom - top) * milliseconds / top_y

    def text(x: float, y: float, content: str, anchor: str = "middle") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{content}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(width / 2, height - 10, AXES[name]),
        text(left, top - 6, "ms a step"),
    ]
    for index in range(round(top_y / step_y) + 1):
        x, y = at(0, index * step_y)
        parts.append(f'<path d="M{x} {y:.1f}H{width - 20}" stroke="#ddd"/>')
        parts.append(text(x - 6, y + 4, f"{index * step_y:g}", "end"))
    step_x = _round_step(max(1, *all_x))
    for index in range(int(max(all_x) / step_x) + 1):
        x, y = at(index * step_x, 0)
        parts.append(text(x, y + 18, f"{index * step_x:,.0f}"))
    for (dtype, points), color in zip(by_dtype.items(), ("#1b6", "#26c", "#c62"), strict=False):
        places = [at(point["x"], point["step_seconds"]["median"] * 1e3) for point in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]
        x, y = places[-1]
        parts.append(f'<g fill="{color}">{text(x, y - 8, dtype, "end")}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _round_step(largest: float) -> float:
    """A round distance of grid lines: four to eight of them up to `largest`."""
    power: float = 10 ** math.floor(math.log10(largest / 4))
    return next(power * n for n in (1, 2, 5, 10) if largest / (power * n) <= 8)


def _growth(name: str, by_dtype: Mapping[str, Sequence[Point]]) -> str:
    """How far each curve goes from its first point to its last, in a sentence each."""
    sentences = []
    for dtype, points in by_dtype.items():
        first, last = points[0], points[-1]
        before, after = (point["step_seconds"]["median"] * 1e3 for point in (first, last))
        sentence = f"{dtype}: {before:.1f} ms at {first['x']:,}, {after:.1f} ms at {last['x']:,}"
        if name == "requests":
            ratio = last["x"] / first["x"]
            sentence += f", {after / before:.1f} times the time for {ratio:.0f} times the tokens."
        elif name == "prefix":
            slope = (after - before) / (last["x"] - first["x"]) * 1024
            sentence += f", {slope:.2f} ms for every 1,024 tokens more."
        else:
            scheduler = [point["scheduler_seconds"] * 1e3 for point in (first, last)]
            sentence += f"; of these in the scheduler {scheduler[0]:.2f} and {scheduler[1]:.2f} ms."
        sentences.append(sentence)
    return " ".join(sentences)


# -- the document --------------------------------------------------------------------------------


def write_docs(document: Path, results: Path) -> None:
    """Replace what stands between the marks of `document` by figures from the results there are."""
    text = document.read_text(encoding="utf-8")
    for name, figures in _figures(results):
        text = fill(text, name, figures)
        print(f"{document.name}: {name}")
    document.write_text(text, encoding="utf-8")


def _figures(results: Path) -> Iterator[tuple[str, str]]:
    """(name of the marks, figures) of every result that has been measured."""
    tables: dict[str, Callable[[dict[str, Any]], str]] = {
        "limits": limits.table,
        "attention_split": attention_split.table,
        "quality": lambda result: "\n".join(f"- {line}" for line in quality.lines(result)),
    }
    for name, table in tables.items():
        if (path := results / f"{name}.json").exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            yield name, f"{table(result)}\n\n{_source(path, result)}"
    if (path := results / "scaling.json").exists():
        result = json.loads(path.read_text(encoding="utf-8"))
        for name, by_dtype in result["curves"].items():
            chart = f"![{AXES[name]}](../bench/results/scaling_{name}.svg)"
            parts = [chart, _growth(name, by_dtype), _table(name, by_dtype), _source(path, result)]
            yield f"scaling_{name}", "\n\n".join(parts)


def _source(path: Path, result: dict[str, Any]) -> str:
    facts = result["machine"]
    return (
        f"From `bench/results/{path.name}`: {facts['processor']}, threads: {facts['num_threads']}, "
        f"torch {facts['torch']}, commit {(result['commit'] or 'unknown')[:12]}."
    )


if __name__ == "__main__":
    main()
