"""How much do attention's programs read, and does each shared key come from memory once?

Counted, not measured: the tiles of twenty steps (tree_shapes.py), for one layer of a model with 32
query and 8 key-value heads of 128 dimensions in bfloat16, on a device of 132 multiprocessors that
run two programs each. Three plans of each step:

- flat: nothing is shared, every sequence reads its whole context;
- grouped: every shared edge is read apart;
- chosen: what `plan_tiles` makes of it.

`loaded` are the bytes that programs load; `fewest` is what they would be if each tile held as many
rows as it can and no edge were read by others than its own tiles. `memory` are those that come from
memory under a model of the L2 cache: programs take tiles in the order of the launch, each reads its
keys block by block at a rate that is drawn between 0.9 and 1.1 of the mean, and the 24 MiB of
blocks that were read last are in the cache (an H200 has 50 MB in two halves). `balance` is the time
that programs are busy over the time until the last one ends. Costs are reasoned from 4.3 TB/s and
600 TFLOP/s, not measured; they decide what is chosen.

    python bench/traffic.py
"""

from __future__ import annotations

import argparse
import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import RESULTS, commit, make_parser, write_json
from numpy.typing import NDArray
from tree_shapes import (
    BLOCK_SIZE,
    Edge,
    TreeShape,
    attention_plan,
    edges_of,
    flattened,
    num_rows_of,
    tree_shapes,
)

from sapwood.kernels import AttentionPlan
from sapwood.kernels.tiles import (
    TileColumn,
    TileCost,
    TileGroup,
    TilePlan,
    TileShape,
    TileShapes,
    plan_tiles,
)
from sapwood.kernels.windows import seen_private, seen_shared

FloatArray = NDArray[np.float64]
GROUP_SIZE, NUM_KV_HEADS = 4, 8
BYTES_PER_KEY = 2 * 128 * 2  # of one KV head, with its value
NUM_PROGRAMS = 132 * 2
CACHE_BYTES = 24 * 2**20
SHAPES = TileShapes(
    narrow=TileShape(rows=16, keys=64, num_warps=4, num_stages=3),
    wide=TileShape(rows=128, keys=64, num_warps=8, num_stages=3),
    narrow_cost=TileCost(per_tile=3e-6, per_key=31e-9),
    wide_cost=TileCost(per_tile=4e-6, per_key=36e-9),
    per_partial=0.25e-6,
    per_launch=3e-6,
)
EVERY_EDGE_APART = replace(
    SHAPES,
    narrow_cost=replace(SHAPES.narrow_cost, per_tile=0),
    wide_cost=replace(SHAPES.wide_cost, per_tile=0),
    per_partial=0,
)
# An edge is above the threshold if reading it apart saves so many loads of keys.
SAVED_LOADS_PER_TILE, SAVED_LOADS_PER_ROW = 128, 16
RATES = (0.9, 1.1)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one plan reads in one layer, and how evenly."""

    loaded_bytes: int
    memory_bytes: int
    num_tiles: int
    num_partials: int
    balance: float
    seconds: float


def main() -> None:
    arguments = _parse()
    result = {
        "question": "how much do attention's programs read, and does each shared key come once",
        "commit": commit(),
        "settings": {
            "group_size": GROUP_SIZE,
            "num_kv_heads": NUM_KV_HEADS,
            "bytes_per_key": BYTES_PER_KEY,
            "num_programs": NUM_PROGRAMS,
            "cache_bytes": CACHE_BYTES,
        },
        "steps": [count(shape) for shape in tree_shapes()],
    }
    write_json(arguments.out, result)
    print(table(result))


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "traffic.json", help="the result")
    return parser.parse_args()


def count(shape: TreeShape) -> dict[str, Any]:
    """All of one step."""
    plan = attention_plan(shape.forest)
    return {
        "name": shape.name,
        "num_rows": plan.num_rows,
        "num_sequences": len(plan.private),
        "distinct_bytes": distinct_bytes(plan, shape.window),
        "fewest_bytes": fewest_bytes(plan, shape.window),
        "is_above_threshold": is_above_threshold(shape),
        "flat": asdict(traffic(flattened(plan), shape.window)),
        "grouped": asdict(traffic(plan, shape.window, EVERY_EDGE_APART)),
        "chosen": asdict(traffic(plan, shape.window)),
    }


def chosen_tiles(plan: AttentionPlan, window: int | None, shapes: TileShapes = SHAPES) -> TilePlan:
    return plan_tiles(
        plan,
        window=window,
        group_size=GROUP_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        shapes=shapes,
        num_programs=NUM_PROGRAMS,
    )


def distinct_bytes(plan: AttentionPlan, window: int | None) -> int:
    """Each key that some row sees, once."""
    num_keys = sum(len(seen.slots) for seen in seen_shared(plan, window))
    for tail in plan.private:
        num_keys += len(seen_private(tail, plan.block_size, window).slots)
    return num_keys * NUM_KV_HEADS * BYTES_PER_KEY


def fewest_bytes(plan: AttentionPlan, window: int | None) -> int:
    """What tiles load that are as full as can be, each edge in tiles of its own alone."""
    num_keys = 0
    for seen in seen_shared(plan, window):
        order = np.sort(seen.begins)[:: tile_rows(len(seen.rows))]
        num_keys += int((len(seen.slots) - order).sum())
    for tail in plan.private:
        seen = seen_private(tail, plan.block_size, window)
        step = tile_rows(tail.num_rows)
        last = np.minimum(np.arange(step, tail.num_rows + step, step), tail.num_rows) - 1
        num_keys += int((seen.ends[last] - seen.begins[::step]).sum())
    return num_keys * NUM_KV_HEADS * BYTES_PER_KEY


def tile_rows(num_rows: int) -> int:
    """Query rows of a tile of a range with so many: a narrow one takes all, or wide ones do."""
    narrow = SHAPES.narrow.num_query_rows(GROUP_SIZE)
    return narrow if num_rows <= narrow else SHAPES.wide.num_query_rows(GROUP_SIZE)


def is_above_threshold(shape: TreeShape) -> bool:
    """Whether every edge, if it is loaded more often by what is directly below it than by tiles of
    its own, is long enough for those and its rows' partial results."""
    return all(_is_worth_tiles(edge, shape.window) for edge in edges_of(shape.forest))


def _is_worth_tiles(edge: Edge, window: int | None) -> bool:
    num_rows = num_rows_of(edge)
    num_tiles = _num_tiles(num_rows)
    saved = sum(_num_tiles(num_rows_of(child)) for child in edge.below) - num_tiles
    length = edge.length if window is None else min(edge.length, window)
    needed = num_tiles * SAVED_LOADS_PER_TILE + num_rows * SAVED_LOADS_PER_ROW
    return saved == 0 or saved * length >= needed


def _num_tiles(num_rows: int) -> int:
    return -(-num_rows // tile_rows(num_rows))


# -- what a device does with tiles -----------------------------------------------------------------


def traffic(plan: AttentionPlan, window: int | None, shapes: TileShapes = SHAPES) -> Traffic:
    """Whatever costs the tiles were chosen by, they take those of `SHAPES`."""
    tiles = chosen_tiles(plan, window, shapes)
    cache = Cache()
    busy = elapsed = 0.0
    memory_bytes = num_launches = 0
    for group, cost in zip(tiles.groups, (SHAPES.narrow_cost, SHAPES.wide_cost), strict=True):
        if not group.num_tiles:
            continue
        schedule = _schedule(group, cost)
        busy += float(schedule.seconds.sum())
        elapsed += float((schedule.starts + schedule.seconds).max())
        memory_bytes += _num_missed_keys(cache, group, tiles.block_ids, schedule) * BYTES_PER_KEY
        num_launches += 1
    merging = tiles.num_partials * SHAPES.per_partial * NUM_KV_HEADS / NUM_PROGRAMS
    num_launches += tiles.num_partials > 0
    return Traffic(
        loaded_bytes=tiles.num_kv_tokens_read * NUM_KV_HEADS * BYTES_PER_KEY,
        memory_bytes=memory_bytes,
        num_tiles=sum(group.num_tiles for group in tiles.groups),
        num_partials=tiles.num_partials,
        balance=busy / (elapsed * NUM_PROGRAMS),
        seconds=elapsed + merging + num_launches * SHAPES.per_launch,
    )


class _Schedule(NamedTuple):
    """Of each tile of each head: when it starts, what it takes, and a key of it; seconds,
    [num_kv_heads, num_tiles]."""

    starts: FloatArray
    seconds: FloatArray
    per_key: FloatArray


def _schedule(group: TileGroup, cost: TileCost) -> _Schedule:
    """Programs take the tiles of one head after those of another, each the next as it gets free."""
    draw = np.random.default_rng(0)
    per_key = cost.per_key / draw.uniform(*RATES, size=(NUM_KV_HEADS, group.num_tiles))
    seconds = cost.per_tile + group.tiles[:, TileColumn.NUM_KEYS] * per_key
    free_at = [0.0] * NUM_PROGRAMS
    starts = np.empty(seconds.size)
    for index, duration in enumerate(seconds.reshape(-1).tolist()):
        starts[index] = free_at[0]
        heapq.heapreplace(free_at, free_at[0] + duration)
    return _Schedule(starts.reshape(seconds.shape), seconds, per_key)


def _num_missed_keys(
    cache: Cache, group: TileGroup, block_ids: NDArray[np.int32], schedule: _Schedule
) -> int:
    """Keys that come from memory, of all heads, in the order in which programs load blocks."""
    first = group.tiles[:, TileColumn.FIRST_POSITION].astype(np.int64)
    num_keys = group.tiles[:, TileColumn.NUM_KEYS].astype(np.int64)
    first_block, last_block = first // BLOCK_SIZE, (first + num_keys - 1) // BLOCK_SIZE
    num_blocks = last_block - first_block + 1
    tile = np.repeat(np.arange(group.num_tiles), num_blocks)
    step = np.arange(len(tile)) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
    block = block_ids[group.tiles[tile, TileColumn.BLOCK_OFFSET] + step].astype(np.int64)
    begin = np.maximum((first_block[tile] + step) * BLOCK_SIZE, first[tile])
    end = np.minimum((first_block[tile] + step + 1) * BLOCK_SIZE, (first + num_keys)[tile])
    loaded_at = schedule.starts[:, tile] + (begin - first[tile]) * schedule.per_key[:, tile]
    order = np.argsort(loaded_at, axis=None, kind="stable")
    heads = np.arange(NUM_KV_HEADS)[:, None]
    blocks_of_heads = (block * NUM_KV_HEADS + heads).reshape(-1)[order]
    keys = np.tile(end - begin, NUM_KV_HEADS)[order]
    return cache.load(blocks_of_heads.tolist(), keys.tolist())


class Cache:
    """The `num_blocks` blocks of keys that were loaded last."""

    def __init__(self, num_blocks: int = CACHE_BYTES // (BLOCK_SIZE * BYTES_PER_KEY)) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._num_blocks = num_blocks

    def load(self, blocks: Sequence[int], keys: Sequence[int]) -> int:
        """Load `keys[i]` keys of each block, one after the other; how many come from memory."""
        num_missed = 0
        for block, num_keys in zip(blocks, keys, strict=True):
            if block in self._blocks:
                self._blocks.move_to_end(block)
                continue
            num_missed += num_keys
            self._blocks[block] = None
            if len(self._blocks) > self._num_blocks:
                self._blocks.popitem(last=False)
        return num_missed


def table(result: dict[str, Any]) -> str:
    """The result in Markdown, bytes as multiples of the distinct ones."""
    rows = [
        "| step | distinct MB | above the threshold | fewest | loaded: flat, grouped, chosen "
        "| memory: flat, grouped, chosen | tiles | balance: flat, grouped, chosen "
        "| reasoned us: flat, grouped, chosen |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for step in result["steps"]:
        distinct = step["distinct_bytes"]
        plans = [step[name] for name in ("flat", "grouped", "chosen")]

        def three(key: str, unit: float, digits: int, plans: Any = plans) -> str:
            return ", ".join(f"{plan[key] / unit:.{digits}f}" for plan in plans)

        rows.append(
            f"| {step['name']} | {distinct / 1e6:.1f} "
            f"| {'yes' if step['is_above_threshold'] else 'no'} "
            f"| {step['fewest_bytes'] / distinct:.2f} "
            f"| {three('loaded_bytes', distinct, 2)} | {three('memory_bytes', distinct, 2)} "
            f"| {step['chosen']['num_tiles']} | {three('balance', 1, 2)} "
            f"| {three('seconds', 1e-6, 0)} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
