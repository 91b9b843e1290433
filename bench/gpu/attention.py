"""Attention: single rows, whole prompts, and the tree against the flat plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from gpu.context import Context
from gpu.sections import Row
from gpu.steps import (
    GROUP_2,
    GROUP_4,
    GROUP_7,
    HEAD_64,
    HEAD_256,
    TINY,
    Branch,
    HeadShape,
    filled_cache,
    make_step,
    row_error,
    rows_apart,
)
from gpu.timing import host_seconds
from sapwood.kernels import AttentionPlan
from sapwood.kernels.interface import Kernels, KVCache

MIN_SHARE_OF_COPY = 0.8  # of decode attention, from 64k tokens of context on
MIN_PREFILL_OPERATIONS = 400e12
MIN_TREE_RATIO = 10.0
MIN_RATIO_WITHOUT_SHARING = 0.95
MAX_ERROR = {torch.bfloat16: 2e-2, torch.float32: 1e-5}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCase:
    """Rows to attend with, in a cache of `kv_dtype`; `num_layers` above one tries places beyond
    2**31 numbers into the cache."""

    name: str
    shape: HeadShape
    lengths: tuple[int, ...]
    kv_dtype: torch.dtype = torch.bfloat16
    num_layers: int = 1
    has_bar: bool = False


def decode(context: Context) -> Iterator[Row]:
    for case in context.first(context.pick(_decode_cases(), _dry_decode_cases()), 7):
        yield _decode_row(context, case)


def _decode_cases() -> list[DecodeCase]:
    mixed = tuple(np.random.default_rng(1).integers(32, 4096, 256).tolist())
    asked = {"shape": GROUP_4, "has_bar": True}
    return [
        DecodeCase(name="64 x 1,024", lengths=(1024,) * 64, **asked),
        # One of each kernel first: a rehearsal goes no further.
        DecodeCase(name="64 x 1,024", shape=GROUP_2, lengths=(1024,) * 64),
        DecodeCase(name="64 x 1,024", shape=GROUP_7, lengths=(1024,) * 64),
        DecodeCase(name="64 x 1,024", shape=HEAD_64, lengths=(1024,) * 64),
        DecodeCase(name="64 x 1,024", shape=HEAD_256, lengths=(1024,) * 64),
        DecodeCase(
            name="64 x 1,024 int8", shape=GROUP_4, lengths=(1024,) * 64, kv_dtype=torch.int8
        ),
        DecodeCase(
            name="64 x 1,024 fp8",
            shape=GROUP_4,
            lengths=(1024,) * 64,
            kv_dtype=torch.float8_e4m3fn,
        ),
        DecodeCase(name="256 x 256", lengths=(256,) * 256, **asked),
        DecodeCase(name="8 x 8,192", lengths=(8192,) * 8, **asked),
        DecodeCase(name="1 x 65,536", lengths=(65_536,), **asked),
        DecodeCase(name="256 x 1,024", lengths=(1024,) * 256, **asked),
        DecodeCase(name="256 of 32 to 4,096", lengths=mixed, **asked),
        DecodeCase(name="64 x 16,384", lengths=(16_384,) * 64, **asked),
        DecodeCase(
            name="256 x 1,024, last of 16 layers", lengths=(1024,) * 256, num_layers=16, **asked
        ),
        DecodeCase(name="256 x 1,024", shape=GROUP_2, lengths=(1024,) * 256),
        DecodeCase(name="256 x 2,048", shape=HEAD_64, lengths=(2048,) * 256),
        DecodeCase(
            name="256 x 1,024 int8", shape=GROUP_4, lengths=(1024,) * 256, kv_dtype=torch.int8
        ),
        DecodeCase(
            name="256 x 1,024 fp8",
            shape=GROUP_4,
            lengths=(1024,) * 256,
            kv_dtype=torch.float8_e4m3fn,
        ),
        DecodeCase(name="1 x 1,024", shape=GROUP_4, lengths=(1024,)),
        DecodeCase(name="8 x 1,024", shape=GROUP_4, lengths=(1024,) * 8),
    ]


def _dry_decode_cases() -> list[DecodeCase]:
    return [
        DecodeCase(name="3 x 40", shape=TINY, lengths=(40, 17, 1), num_layers=2),
        DecodeCase(name="2 x 40 int8", shape=TINY, lengths=(40, 40), kv_dtype=torch.int8),
    ]


def _decode_row(context: Context, case: DecodeCase) -> Row:
    step = rows_apart(*case.lengths)
    kernels = _with_kv_dtype(context, case.kv_dtype)
    dtype = context.pick(torch.bfloat16, torch.float32)
    kv = filled_cache(
        context, kernels, case.shape, step.num_blocks, dtype=dtype, num_layers=case.num_layers
    )
    query = context.random(
        len(case.lengths), case.shape.num_heads, case.shape.head_dim, dtype=dtype
    )
    seconds = _seconds(context, kernels, kv, case.shape, step.flat, query)
    num_bytes = step.num_flat_tokens * case.shape.num_kv_bytes(kv.spec.dtype)
    share = num_bytes / seconds / context.ceilings.copy_bytes
    figures: dict[str, Any] = {
        "tokens": step.num_flat_tokens,
        "us": seconds * 1e6,
        "TB/s": num_bytes / seconds / 1e12,
        "% of copy": share * 100,
        "plan us": host_seconds(lambda: kernels.plan_attention(step.flat, kv.spec)) * 1e6,
    }
    is_right = True
    if not kv.spec.is_quantized:
        out = _attend(kernels, kv, case.shape, step.flat, query)
        longest = int(np.argmax(step.lengths))
        figures["error"] = row_error(kv, case.shape, step, longest, query, out)
        is_right = figures["error"] <= MAX_ERROR[dtype]
    is_judged = case.has_bar and context.is_full
    return Row(
        name=f"{case.shape.name}: {case.name}",
        figures=figures,
        bar=f">= {MIN_SHARE_OF_COPY:.0%} of the copy's rate" if is_judged else "right",
        is_met=is_right and (share >= MIN_SHARE_OF_COPY or not is_judged),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCase:
    """`num_sequences` sequences whose last `num_rows` of `length` tokens are rows."""

    shape: HeadShape
    num_sequences: int
    length: int
    num_rows: int
    has_bar: bool = False

    @property
    def name(self) -> str:
        past = f" of {self.length:,}" if self.length > self.num_rows else ""
        return f"{self.shape.name}: {self.num_sequences} x {self.num_rows:,}{past}"

    @property
    def num_operations(self) -> int:
        """Of the two products, for the keys that each row sees."""
        seen = self.num_rows * (2 * self.length - self.num_rows + 1) // 2
        return 4 * self.num_sequences * self.shape.num_heads * self.shape.head_dim * seen


def prefill(context: Context) -> Iterator[Row]:
    cases = [
        PrefillCase(shape=GROUP_4, num_sequences=1, length=8192, num_rows=8192, has_bar=True),
        PrefillCase(shape=HEAD_64, num_sequences=1, length=8192, num_rows=8192),
        PrefillCase(shape=HEAD_256, num_sequences=1, length=8192, num_rows=8192),
        PrefillCase(shape=GROUP_2, num_sequences=1, length=8192, num_rows=8192),
        PrefillCase(shape=GROUP_4, num_sequences=8, length=1024, num_rows=1024),
        PrefillCase(shape=GROUP_4, num_sequences=1, length=8192, num_rows=2048),
        PrefillCase(shape=GROUP_4, num_sequences=1, length=32_768, num_rows=2048),
    ]
    dry = [PrefillCase(shape=TINY, num_sequences=2, length=40, num_rows=24)]
    for case in context.first(context.pick(cases, dry), 4):
        yield _prefill_row(context, case)


def _prefill_row(context: Context, case: PrefillCase) -> Row:
    shape, kernels = case.shape, context.kernels
    dtype = context.pick(torch.bfloat16, torch.float32)
    tails = (case.length,) * case.num_sequences
    step = make_step([Branch(shared=0, tails=tails, num_rows=case.num_rows)])
    kv = filled_cache(context, kernels, shape, step.num_blocks, dtype=dtype)
    query = context.random(step.flat.num_rows, shape.num_heads, shape.head_dim, dtype=dtype)
    seconds = _seconds(context, kernels, kv, shape, step.flat, query)
    rate = case.num_operations / seconds
    out = _attend(kernels, kv, shape, step.flat, query)
    error = max(
        row_error(kv, shape, step, row, query, out)
        for row in (0, step.flat.num_rows // 2, step.flat.num_rows - 1)
    )
    sdpa = _sdpa_seconds(context, case, dtype)
    is_judged = case.has_bar and context.is_full
    is_right = error <= MAX_ERROR[dtype]
    return Row(
        name=case.name,
        figures={
            "ms": seconds * 1e3,
            "TFLOP/s": rate / 1e12,
            "% of product": rate / context.ceilings.bf16_operations * 100,
            "torch SDPA ms": sdpa * 1e3 if sdpa else None,
            "x of SDPA": sdpa / seconds if sdpa else None,
            "error": error,
        },
        bar=f">= {MIN_PREFILL_OPERATIONS / 1e12:.0f} TFLOP/s" if is_judged else "right",
        is_met=is_right and (rate >= MIN_PREFILL_OPERATIONS or not is_judged),
    )


def _sdpa_seconds(context: Context, case: PrefillCase, dtype: torch.dtype) -> float | None:
    """torch's attention over keys that lie together; None where rows have a past, for which its
    causal mask is another one."""
    if case.num_rows < case.length:
        return None
    shape = case.shape
    size = (case.num_sequences, case.length, shape.head_dim)
    query = context.random(size[0], shape.num_heads, *size[1:], dtype=dtype)
    key, value = (
        context.random(size[0], shape.num_kv_heads, *size[1:], dtype=dtype) for _ in range(2)
    )
    return context.seconds(
        lambda: functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCase:
    """Branches of sequences; the tree's plan must be `min_ratio` times as fast as the flat one."""

    name: str
    branches: tuple[Branch, ...]
    min_ratio: float | None = None
    shape: HeadShape = GROUP_4


def tree(context: Context) -> Iterator[Row]:
    def apart(low: int, high: int, count: int) -> tuple[int, ...]:
        return tuple(np.random.default_rng(2).integers(low, high, count).tolist())

    cases = [
        TreeCase(
            name="32,768 shared by 256 rows, 64 to 192 own",
            branches=(Branch(shared=32_768, tails=apart(64, 192, 256)),),
            min_ratio=MIN_TREE_RATIO,
        ),
        TreeCase(
            name="nothing shared by 256 rows of 512 to 2,048",
            branches=(Branch(shared=0, tails=apart(512, 2048, 256)),),
            min_ratio=MIN_RATIO_WITHOUT_SHARING,
        ),
        TreeCase(
            name="16 shared by 256 rows of 512 to 2,048",
            branches=(Branch(shared=16, tails=apart(512, 2048, 256)),),
            min_ratio=MIN_RATIO_WITHOUT_SHARING,
        ),
        TreeCase(
            name="128 pairs of rows that share 64 of 512 to 2,048",
            branches=tuple(Branch(shared=64, tails=apart(512, 2048, 2)) for _ in range(128)),
            min_ratio=MIN_RATIO_WITHOUT_SHARING,
        ),
        TreeCase(
            name="2,048 shared by 256 rows, 128 to 384 own",
            branches=(Branch(shared=2048, tails=apart(128, 384, 256)),),
        ),
        TreeCase(
            name="16 groups of 16 rows: 2,048 shared, 128 to 384 own",
            branches=tuple(Branch(shared=2048, tails=apart(128, 384, 16)) for _ in range(16)),
        ),
        TreeCase(
            name="8,192 shared by 64 rows, 1,024 own",
            branches=(Branch(shared=8192, tails=(1024,) * 64),),
        ),
        TreeCase(
            name="32,768 shared by 4 rows, 128 own",
            branches=(Branch(shared=32_768, tails=(128,) * 4),),
        ),
        TreeCase(
            name="4 chunks of 512 rows below 8,192",
            branches=(Branch(shared=8192, tails=(512,) * 4, num_rows=512),),
        ),
    ]
    dry = [
        TreeCase(name="tiny", branches=(Branch(shared=64, tails=(5, 20, 33)),), shape=TINY),
    ]
    for case in context.first(context.pick(cases, dry), 2):
        yield _tree_row(context, case)


def _tree_row(context: Context, case: TreeCase) -> Row:
    kernels, shape = context.kernels, case.shape
    dtype = context.pick(torch.bfloat16, torch.float32)
    step = make_step(case.branches)
    kv = filled_cache(context, kernels, shape, step.num_blocks, dtype=dtype)
    query = context.random(step.tree.num_rows, shape.num_heads, shape.head_dim, dtype=dtype)
    by_tree = _seconds(context, kernels, kv, shape, step.tree, query)
    by_flat = _seconds(context, kernels, kv, shape, step.flat, query)
    out = _attend(kernels, kv, shape, step.tree, query)
    error = max(row_error(kv, shape, step, row, query, out) for row in (0, step.tree.num_rows - 1))
    ratio = by_flat / by_tree
    bar = case.min_ratio if context.is_full else None
    prepared = kernels.plan_attention(step.tree, kv.spec)
    is_right = error <= MAX_ERROR[dtype]
    return Row(
        name=case.name,
        figures={
            "flat us": by_flat * 1e6,
            "tree us": by_tree * 1e6,
            "x of flat": ratio,
            "flat tokens": step.flat.num_kv_tokens,
            "tree tokens": step.tree.num_kv_tokens,
            "tokens read": prepared.num_kv_tokens_read,
            "plan us": host_seconds(lambda: kernels.plan_attention(step.tree, kv.spec)) * 1e6,
            "error": error,
        },
        bar=f">= {bar:g} times the flat plan" if bar else "right",
        is_met=is_right and (bar is None or ratio >= bar),
    )


def _with_kv_dtype(context: Context, dtype: torch.dtype) -> Kernels:
    if dtype.itemsize > 1:
        return context.kernels
    kernels = context.kernels.with_kv_dtype(dtype)
    assert kernels is not None, f"the Triton kernels keep no keys and values in {dtype}"
    return kernels


def _attend(
    kernels: Kernels, kv: KVCache, shape: HeadShape, plan: AttentionPlan, query: torch.Tensor
) -> torch.Tensor:
    prepared = kernels.plan_attention(plan, kv.spec)
    return kernels.attention(query, kv, kv.spec.num_layers - 1, prepared, shape.scale)


def _seconds(
    context: Context,
    kernels: Kernels,
    kv: KVCache,
    shape: HeadShape,
    plan: AttentionPlan,
    query: torch.Tensor,
) -> float:
    """Of one layer's attention, its plan made before."""
    prepared = kernels.plan_attention(plan, kv.spec)
    layer = kv.spec.num_layers - 1
    return context.seconds(lambda: kernels.attention(query, kv, layer, prepared, shape.scale))
