"""The tile shapes of the heads that the figures are of, measured anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from gpu.context import Context
from gpu.sections import Row
from sapwood.kernels.tuner import NARROW_SHAPES, WIDE_SHAPES, Sizes, Tuner, Workload, gpu_name
from sapwood.kernels.tuning import load_table

TINY_SIZES = Sizes(
    decoding=(Workload(num_sequences=1, length=20),),
    prompts=(Workload(num_sequences=1, length=20, num_rows=20),),
    key_counts=(16, 32),
    waves=1,
)


def tune(context: Context) -> Iterator[Row]:
    """Heads of 128 in two bytes. The whole table is what `sapwood tune` writes."""
    entry = next(
        entry
        for entry in load_table(gpu_name()).attention
        if entry.kv_bytes == context.pick(2, 4) and entry.max_head_dim == context.pick(128, 64)
    )
    sizes = context.pick(Sizes(), TINY_SIZES)
    narrow, wide = context.first(NARROW_SHAPES, 1), context.first(WIDE_SHAPES, 1)
    tuned = Tuner(context.device, context.seconds, sizes).tuned(entry, narrow, wide)
    for name, chosen in (("before", entry.shapes), ("measured", tuned.shapes)):
        flat = {
            f"{group} {key}" if isinstance(value, dict) else group: number
            for group, value in asdict(chosen).items()
            for key, number in (value.items() if isinstance(value, dict) else [("", value)])
        }
        yield Row(name=f"heads of {entry.max_head_dim}, {name}", figures=flat)
