"""Does attention read each shared key once, and what does the split cost where nothing is shared?

- Workloads c and t (workloads.py) run through an engine. For every step the tokens whose keys and
  values the kernel says it reads are compared with those that are there to read: the distinct
  blocks of all block tables, counted without segments or tree.
- The attention calls of workload d's decode steps, in which nothing is shared, run again in
  interleaved pairs with a flat kernel: the same torch attention over each request's own context
  and nothing else, as one padded call or as one call a request, whichever is faster. The same for
  workload c shows what the split brings.

    python bench/attention_split.py
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import (
    RESULTS,
    Step,
    SteppedEngine,
    commit,
    machine,
    make_parser,
    settings,
    spread,
    write_json,
)
from torch import Tensor
from torch.nn import functional
from workloads import WorkloadBuilder

from sapwood.kernels import AttentionPlan, load_kernels
from sapwood.kernels.interface import Kernels, KVCache, KVCacheSpec, PreparedAttention
from sapwood.runtime.model_config import ModelConfig, read_model_config
from sapwood.runtime.weights import find_model

SHARING, NOT_SHARING = ("c", "t"), "d"
PAIRED = ("d", "c")
MAX_COST = 1.03
NUM_KV_BLOCKS = 640  # enough for each workload; the copy of the cache is as large


class PlannedStep(NamedTuple):
    """A step, the plan that its attention followed, and what the kernel made of it."""

    step: Step
    plan: AttentionPlan
    prepared: PreparedAttention


def main() -> None:
    arguments = _parse()
    started = time.perf_counter()
    config = read_model_config(find_model(arguments.model))
    engine = SteppedEngine(arguments.model, quantize="none", num_kv_blocks=NUM_KV_BLOCKS)
    kernels = load_kernels(engine.info.kernels)
    builder = WorkloadBuilder(engine.tokenizer, scale=arguments.scale)
    steps = {name: _run(engine, builder, kernels, name) for name in (*SHARING, NOT_SHARING)}
    kv = _random_kv(config, kernels, engine.info.block_size)
    pairs = {name: _pairs(steps[name], kernels, kv, config, arguments.pairs) for name in PAIRED}
    result = {
        "question": "does attention read each shared key once, and what does the split cost",
        "machine": machine(),
        "commit": commit(),
        "dtype": "float32",
        "settings": settings(arguments),
        "bytes_per_token": kv.spec.num_bytes_per_token,
        "reads": {
            name: _reads(steps[name], kv.spec.num_bytes_per_token)
            for name in (*SHARING, NOT_SHARING)
        },
        "time_against_flat_kernel": pairs,
        "bar_where_nothing_is_shared": MAX_COST,
        "seconds": time.perf_counter() - started,
    }
    write_json(arguments.out, result)
    print(table(result))


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="a known name or a folder")
    parser.add_argument("--pairs", type=int, default=60, help="of attention calls, a workload")
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks the workloads")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "attention_split.json", help="the result"
    )
    return parser.parse_args()


# -- what is read --------------------------------------------------------------------------------


def _run(
    engine: SteppedEngine, builder: WorkloadBuilder, kernels: Kernels, name: str
) -> list[PlannedStep]:
    engine.clear()
    for request in builder.build(name, 1).requests:
        engine.submit(request.prompt_ids, request.max_tokens)
    with _noted_plans(type(kernels)) as noted:
        steps = engine.run()
    return [PlannedStep(step, *planned) for step, planned in zip(steps, noted, strict=True)]


@contextmanager
def _noted_plans(
    kernels: type[Kernels],
) -> Iterator[list[tuple[AttentionPlan, PreparedAttention]]]:
    """A list of the plans that the kernels prepare meanwhile, with what they return."""
    noted: list[tuple[AttentionPlan, PreparedAttention]] = []
    original = kernels.plan_attention

    def plan_attention(self: Kernels, plan: AttentionPlan, spec: KVCacheSpec) -> PreparedAttention:
        prepared = original(self, plan, spec)
        noted.append((plan, prepared))
        return prepared

    kernels.plan_attention = plan_attention  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        kernels.plan_attention = original  # type: ignore[method-assign]


def _reads(steps: Sequence[PlannedStep], bytes_per_token: int) -> dict[str, Any]:
    """Bytes of keys and values, over all steps and in the step that differs most."""
    read = [one.prepared.num_kv_tokens_read for one in steps]
    distinct = [one.step.num_distinct_kv_tokens for one in steps]
    ratios = [r / d for r, d in zip(read, distinct, strict=True)]
    return {
        "num_steps": len(steps),
        "num_steps_equal": sum(r == d for r, d in zip(read, distinct, strict=True)),
        "bytes_read": sum(read) * bytes_per_token,
        "bytes_distinct": sum(distinct) * bytes_per_token,
        "bytes_by_request": sum(one.step.num_kv_tokens for one in steps) * bytes_per_token,
        "max_read_to_distinct": max(ratios),
        "min_read_to_distinct": min(ratios),
    }


# -- what it costs -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FlatAttention:
    """Attention of one row a request over its own context, in ways that know no segments.

    `contexts` are the slots of each request: a slice where they are contiguous, which torch takes
    without a copy, else int64 indices. `padded` int64 [num_requests, longest] repeats a slot of
    the same request behind its end, where `mask` float32 [num_requests, 1, 1, longest] is -inf.
    """

    contexts: tuple[slice | Tensor, ...]
    padded: Tensor
    mask: Tensor

    @classmethod
    def of(cls, plan: AttentionPlan) -> "FlatAttention":
        contexts = [_context_slots(plan, row) for row in range(plan.num_rows)]
        longest = max(len(slots) for slots in contexts)
        padded = np.stack([np.resize(slots, longest) for slots in contexts])
        lengths = np.array([len(slots) for slots in contexts])
        hidden = torch.from_numpy(np.arange(longest) >= lengths[:, None])
        return cls(
            contexts=tuple(_index(slots) for slots in contexts),
            padded=torch.from_numpy(padded),
            mask=torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None],
        )

    def by_request(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """One call a request. query [num_requests, Hkv, G, D]; key and value [slots, Hkv, D]."""
        outs = [
            functional.scaled_dot_product_attention(
                query[row : row + 1],
                key[slots].transpose(0, 1).unsqueeze(0),
                value[slots].transpose(0, 1).unsqueeze(0),
                scale=scale,
            )
            for row, slots in enumerate(self.contexts)
        ]
        return torch.cat(outs)

    def as_one(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """One padded call, shapes as above."""
        slots = self.padded.view(-1)
        shape = (*self.padded.shape, *key.shape[1:])
        return functional.scaled_dot_product_attention(
            query,
            key.index_select(0, slots).view(shape).transpose(1, 2),
            value.index_select(0, slots).view(shape).transpose(1, 2),
            attn_mask=self.mask,
            scale=scale,
        )


def _context_slots(plan: AttentionPlan, row: int) -> np.ndarray:
    """The slots that a row sees, in the order of positions, put together from its segments."""
    [private] = [one for one in plan.private if one.first_row == row]
    shared = sorted((one for one in plan.shared if row in one.rows), key=lambda one: one.start)
    blocks = np.concatenate([*(one.block_ids for one in shared), private.block_ids])
    first_slots = blocks.astype(np.int64)[:, None] * plan.block_size
    slots: np.ndarray = (first_slots + np.arange(plan.block_size)).reshape(-1)
    return slots[: private.start + private.length]


def _index(slots: np.ndarray) -> slice | Tensor:
    if (np.diff(slots) == 1).all():
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return torch.from_numpy(slots)


def _random_kv(config: ModelConfig, kernels: Kernels, block_size: int) -> KVCache:
    """A cache of the engine's shape, so that all layers come from memory as in a step."""
    spec = KVCacheSpec(
        num_layers=config.num_hidden_layers,
        num_blocks=NUM_KV_BLOCKS,
        block_size=block_size,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    kv = kernels.make_kv_cache(spec)
    kv.keys.normal_()
    kv.values.normal_()
    return kv


@torch.inference_mode()
def _pairs(
    steps: Sequence[PlannedStep], kernels: Kernels, kv: KVCache, config: ModelConfig, count: int
) -> dict[str, Any]:
    """The split against the flat kernel, all layers of a step a call, in turns."""
    decode = [one for one in steps if one.step.is_decode]
    most = max(one.step.num_rows for one in decode)
    full = [one for one in decode if one.step.num_rows == most]
    seconds: dict[str, list[float]] = {"split": [], "by_request": [], "as_one": []}
    max_difference = 0.0
    for index in range(count + 1):
        one = full[index % len(full)]
        ways = _ways(one, kernels, kv, config)
        if not index:  # warm-up, and the same results
            expected = ways["split"](0)
            max_difference = max(
                float((way(0).reshape(expected.shape) - expected).abs().max())
                for way in ways.values()
            )
            continue
        names = list(ways)
        for name in names[index % 3 :] + names[: index % 3]:
            started = time.perf_counter()
            for layer in range(kv.spec.num_layers):
                ways[name](layer)
            seconds[name].append(time.perf_counter() - started)
    flat = min("by_request", "as_one", key=lambda name: statistics.median(seconds[name]))
    ratios = [s / f for s, f in zip(seconds["split"], seconds[flat], strict=True)]
    return {
        "num_requests": most,
        "num_layers": kv.spec.num_layers,
        "flat_kernel": flat,
        "ratio": spread(ratios),
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "max_difference": max_difference,
    }


def _ways(
    one: PlannedStep, kernels: Kernels, kv: KVCache, config: ModelConfig
) -> dict[str, Callable[[int], Tensor]]:
    """The attention of one layer of a step, by way of computing it."""
    flat = FlatAttention.of(one.plan)
    heads = (config.num_attention_heads, config.head_dim)
    query = torch.randn(one.plan.num_rows, *heads)
    grouped = query.view(len(query), config.num_key_value_heads, -1, config.head_dim)
    scale = config.head_dim**-0.5
    # The cache's layout is the backend's: seen as slots, which suits those there are.
    keys, values = (
        tensor.view(kv.spec.num_layers, kv.spec.num_slots, kv.spec.num_kv_heads, -1)
        for tensor in (kv.keys, kv.values)
    )
    return {
        "split": lambda layer: kernels.attention(query, kv, layer, one.prepared, scale),
        "by_request": lambda layer: flat.by_request(grouped, keys[layer], values[layer], scale),
        "as_one": lambda layer: flat.as_one(grouped, keys[layer], values[layer], scale),
    }


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    rows = [
        "| workload | steps | KV read, GB | distinct KV, GB | by request, GB | steps in which "
        "both are equal |",
        "|---|---|---|---|---|---|",
    ]
    for name, reads in result["reads"].items():
        sizes = " | ".join(
            f"{reads[key] / 1e9:.3f}"
            for key in ("bytes_read", "bytes_distinct", "bytes_by_request")
        )
        rows.append(
            f"| {name} | {reads['num_steps']} | {sizes} | {reads['num_steps_equal']} "
            f"(ratio {reads['min_read_to_distinct']:.4f} to {reads['max_read_to_distinct']:.4f}) |"
        )
    rows.append("")
    for name, pairs in result["time_against_flat_kernel"].items():
        ratio = pairs["ratio"]
        rows.append(
            f"- Attention of {pairs['num_requests']} requests of workload {name}: time of the "
            f"split against the flat kernel ({pairs['flat_kernel'].replace('_', ' ')}) "
            f"{ratio['median']:.3f}, quartiles {ratio['first_quartile']:.3f} to "
            f"{ratio['third_quartile']:.3f}, {ratio['n']} interleaved pairs."
        )
    rows.append(
        f"- Where nothing is shared (d) the bar is {result['bar_where_nothing_is_shared']}."
    )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
