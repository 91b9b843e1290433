"""Steps of attention to time: a cache full of random keys, and plans over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gpu.context import Context
from sapwood.kernels import AttentionPlan, PrivateSegment, SharedSegment
from sapwood.kernels.interface import Kernels, KVCache, KVCacheSpec

BLOCK_SIZE = 16
WRITE_ROWS = 65_536  # tokens written to the cache at once, which bounds the memory for it


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Heads of a model's attention."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def num_kv_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a token's keys and values in one layer, with their scales."""
        scale_bytes = 4 if dtype.itemsize == 1 else 0
        return 2 * self.num_kv_heads * (self.head_dim * dtype.itemsize + scale_bytes)


GROUP_4 = HeadShape(name="Qwen3-8B", num_heads=32, num_kv_heads=8, head_dim=128)
GROUP_2 = HeadShape(name="Qwen3-0.6B", num_heads=16, num_kv_heads=8, head_dim=128)
GROUP_7 = HeadShape(name="Qwen2.5-7B", num_heads=28, num_kv_heads=4, head_dim=128)
HEAD_64 = HeadShape(name="Llama-3.2-1B", num_heads=32, num_kv_heads=8, head_dim=64)
HEAD_256 = HeadShape(name="Gemma-2-9B", num_heads=16, num_kv_heads=8, head_dim=256)
TINY = HeadShape(name="tiny", num_heads=4, num_kv_heads=2, head_dim=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Sequences below the tokens `shared` with each other: `tails` are their own tokens, of which
    the last `num_rows` are the rows of the step."""

    shared: int
    tails: tuple[int, ...]
    num_rows: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A plan that reads each shared prefix once, the same with all of a row's tokens private, and
    what row `i` sees: `tables[i]` are its sequence's blocks, `lengths[i]` its tokens."""

    tree: AttentionPlan
    flat: AttentionPlan
    num_blocks: int
    tables: tuple[np.ndarray, ...]
    lengths: tuple[int, ...]

    @property
    def num_flat_tokens(self) -> int:
        return self.flat.num_kv_tokens


def make_step(branches: Sequence[Branch], seed: int = 0) -> Step:
    """A step over branches, their blocks anywhere in the pool. `shared` is in whole blocks."""
    needed = [branch.shared // BLOCK_SIZE for branch in branches]
    tails = [-(-tail // BLOCK_SIZE) for branch in branches for tail in branch.tails]
    ids = np.random.default_rng(seed).permutation(sum(needed) + sum(tails)).astype(np.int32)
    cuts = np.split(ids, np.cumsum([*needed, *tails])[:-1])
    edges, own = cuts[: len(needed)], iter(cuts[len(needed) :])
    shared, tree, flat, tables, lengths = [], [], [], [], []
    first_row = 0
    for branch, edge in zip(branches, edges, strict=True):
        assert branch.shared % BLOCK_SIZE == 0
        num_rows = branch.num_rows * len(branch.tails)
        if branch.shared:
            rows = np.arange(first_row, first_row + num_rows, dtype=np.int32)
            shared.append(SharedSegment(block_ids=edge, start=0, length=branch.shared, rows=rows))
        for tail in branch.tails:
            block_ids = next(own)
            private = PrivateSegment(
                block_ids=block_ids,
                start=branch.shared,
                length=tail,
                first_row=first_row,
                num_rows=branch.num_rows,
            )
            table = np.concatenate([edge, block_ids])
            length = branch.shared + tail
            tree.append(private)
            flat.append(replace(private, block_ids=table, start=0, length=length))
            tables += [table] * branch.num_rows
            lengths += [length - branch.num_rows + i + 1 for i in range(branch.num_rows)]
            first_row += branch.num_rows
    return Step(
        tree=_plan(first_row, shared, tree),
        flat=_plan(first_row, [], flat),
        num_blocks=len(ids),
        tables=tuple(tables),
        lengths=tuple(lengths),
    )


def _plan(
    num_rows: int, shared: list[SharedSegment], private: list[PrivateSegment]
) -> AttentionPlan:
    return AttentionPlan(
        num_rows=num_rows, block_size=BLOCK_SIZE, shared=tuple(shared), private=tuple(private)
    )


def rows_apart(*lengths: int) -> Step:
    """Single rows of sequences that share nothing."""
    return make_step([Branch(shared=0, tails=lengths)])


def filled_cache(
    context: Context,
    kernels: Kernels,
    shape: HeadShape,
    num_blocks: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_layers: int = 1,
) -> KVCache:
    """A cache of random keys and values in its last layer. `dtype` is of the activations."""
    spec = KVCacheSpec(
        num_layers=num_layers,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=shape.num_kv_heads,
        group_size=shape.num_heads // shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=kernels.kv_dtype(dtype, shape.head_dim),
        device=context.device,
    )
    kv = kernels.make_kv_cache(spec)
    for start in range(0, spec.num_slots, WRITE_ROWS):
        slots = torch.arange(start, min(start + WRITE_ROWS, spec.num_slots), device=context.device)
        size = (len(slots), shape.num_kv_heads, shape.head_dim)
        key, value = (context.random(*size, dtype=dtype) for _ in range(2))
        kernels.write_kv(kv, num_layers - 1, key, value, slots)
    return kv


def row_error(
    kv: KVCache, shape: HeadShape, step: Step, row: int, query: Tensor, out: Tensor
) -> float:
    """How far row `row` of `out` is from float64 arithmetic over the cache's own numbers, relative
    to its largest value. Reads the layout of TritonKernels; for caches that are not quantized."""
    layer, length = kv.spec.num_layers - 1, step.lengths[row]
    table = step.tables[row][: -(-length // BLOCK_SIZE)]
    blocks = torch.from_numpy(table.astype(np.int64)).to(query.device)
    key, value = (
        tensor[layer, blocks].transpose(1, 2).flatten(0, 1)[:length].double()
        for tensor in (kv.keys, kv.values)
    )
    grouped = query[row].double().view(shape.num_kv_heads, -1, shape.head_dim)
    scores = torch.einsum("kgd,lkd->kgl", grouped, key) * shape.scale
    exact = torch.einsum("kgl,lkd->kgd", scores.softmax(dim=-1), value).flatten(0, 1)
    error = (out[row].double() - exact).abs().max() / exact.abs().max()
    return float(error)
