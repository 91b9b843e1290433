"""The operations around attention, and drawing tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu.context import Context
from gpu.draws import wrong_rows
from gpu.models import QWEN3_8B, TINY_QWEN3
from gpu.sections import Row
from gpu.steps import BLOCK_SIZE
from sapwood.kernels import load_kernels
from sapwood.kernels.interface import (
    Activation,
    DrawParams,
    HeadNorms,
    Kernels,
    KVCache,
    KVCacheSpec,
    RowCopy,
)
from sapwood.runtime.model_config import ModelConfig

EPS = 1e-6
MAX_ERROR = {torch.bfloat16: 2e-2, torch.float32: 1e-5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Something to time. `num_bytes` are the fewest that it must read and write. `run` is the same
    with any kernels, so that `reference` says what comes out."""

    name: str
    num_bytes: int
    run: Callable[[Kernels], Tensor]


def elementwise(context: Context) -> Iterator[Row]:
    config = context.pick(QWEN3_8B, TINY_QWEN3)
    for num_rows in context.first(context.pick((256, 8192, 1), (3,)), 1):
        for operation in _operations(context, config, num_rows):
            yield _timed(context, operation)
    yield from _cache_writes(context, config)


def _operations(context: Context, config: ModelConfig, num_rows: int) -> Iterator[Operation]:
    dtype = context.pick(torch.bfloat16, torch.float32)
    size, inner = config.hidden_size, config.intermediate_size
    x, residual = (context.random(num_rows, size, dtype=dtype) for _ in range(2))
    gate_up = context.random(num_rows, 2 * inner, dtype=dtype)
    weight = context.random(size, dtype=dtype)
    of_rows = num_rows * size * dtype.itemsize
    yield Operation(
        name=f"norm of {num_rows:,} rows of {size:,}",
        num_bytes=2 * of_rows,
        run=lambda kernels: kernels.rms_norm(x, weight, EPS),
    )
    yield Operation(
        name=f"norm of {num_rows:,} rows of {size:,}, added to a residual",
        num_bytes=3 * of_rows,
        run=lambda kernels: kernels.rms_norm(x, weight, EPS, residual),
    )
    yield Operation(
        name=f"SiLU and product of {num_rows:,} rows of {inner:,}",
        num_bytes=3 * num_rows * inner * dtype.itemsize,
        run=lambda kernels: kernels.activate_and_mul(gate_up, Activation.SILU),
    )


def _timed(context: Context, operation: Operation) -> Row:
    out = operation.run(context.kernels)
    expected = operation.run(load_kernels("reference"))
    error = float((out.double() - expected.double()).abs().max() / expected.double().abs().max())
    return _row(
        context,
        operation.name,
        operation.num_bytes,
        lambda: operation.run(context.kernels),
        is_right=error <= MAX_ERROR[out.dtype],
    )


def _row(
    context: Context, name: str, num_bytes: int, run: Callable[[], object], *, is_right: bool
) -> Row:
    seconds = context.seconds(run)
    rate = num_bytes / seconds
    return Row(
        name=name,
        figures={
            "us": seconds * 1e6,
            "MB": num_bytes / 1e6,
            "TB/s": rate / 1e12,
            "% of copy": rate / context.ceilings.copy_bytes * 100,
        },
        bar="right",
        is_met=is_right,
    )


def _cache_writes(context: Context, config: ModelConfig) -> Iterator[Row]:
    """What writes keys and values: new ones behind the rotation, and copies of blocks."""
    num_layers = config.num_hidden_layers if context.is_full else 2
    num_copies = context.pick(64, 2)
    for num_rows in context.first(context.pick((256, 8192), (3,)), 1):
        num_blocks = max(2 * num_copies, -(-num_rows // BLOCK_SIZE))
        kv = _cache(context, config, num_layers, num_blocks)
        yield _rotary_row(context, config, kv, num_rows)
    yield _copies_row(context, kv, num_copies)


def _cache(context: Context, config: ModelConfig, num_layers: int, num_blocks: int) -> KVCache:
    dtype = context.pick(torch.bfloat16, torch.float32)
    spec = KVCacheSpec(
        num_layers=num_layers,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_key_value_heads,
        group_size=config.num_attention_heads // config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=context.kernels.kv_dtype(dtype, config.head_dim),
        device=context.device,
    )
    kv = context.kernels.make_kv_cache(spec)
    for tensor in kv.tensors:
        tensor.normal_()
    return kv


def _rotary_row(context: Context, config: ModelConfig, kv: KVCache, num_rows: int) -> Row:
    dtype, dim = kv.spec.dtype, config.head_dim
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    heads = context.random(num_rows, num_heads + 2 * num_kv_heads, dim, dtype=dtype)
    angles = context.random(num_rows, 1, dim // 2, dtype=torch.float32)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    slots = torch.randperm(kv.spec.num_slots, device=context.device)[:num_rows]
    norms = HeadNorms(*(context.random(dim, dtype=dtype) for _ in range(2)), EPS)

    def run() -> Tensor:
        return context.kernels.rotary_and_write(
            heads, num_heads, cos, sin, kv, 0, slots, norms=norms
        )

    query = run()
    reference = load_kernels("reference")
    normed = reference.rms_norm(heads[:, :num_heads], norms.query, EPS)
    expected = reference.rotary(normed, cos, sin)
    values = kv.values[0, slots // BLOCK_SIZE, :, slots % BLOCK_SIZE]
    error = (query.double() - expected.double()).abs().max() / expected.double().abs().max()
    is_right = bool(error <= MAX_ERROR[dtype]) and torch.equal(
        values, heads[:, num_heads + num_kv_heads :]
    )
    return _row(
        context,
        f"head norms, rotation and KV write of {num_rows:,} rows",
        2 * heads.nbytes + cos.nbytes + sin.nbytes + slots.nbytes,
        run,
        is_right=is_right,
    )


def _copies_row(context: Context, kv: KVCache, num_copies: int) -> Row:
    rows = np.random.default_rng(3).integers(1, BLOCK_SIZE + 1, num_copies).tolist()
    copies = [RowCopy(2 * i, 2 * i + 1, num_rows) for i, num_rows in enumerate(rows)]
    context.kernels.copy_rows(kv, copies)
    is_right = all(
        torch.equal(
            tensor[:, copy.source, :, : copy.num_rows], tensor[:, copy.target, :, : copy.num_rows]
        )
        for tensor in kv.tensors
        for copy in copies
    )
    return _row(
        context,
        f"{num_copies} copies of 1 to {BLOCK_SIZE} rows in {kv.spec.num_layers} layers",
        2 * sum(rows) * kv.spec.num_bytes_per_token,
        lambda: context.kernels.copy_rows(kv, copies),
        is_right=is_right,
    )


def sampling(context: Context) -> Iterator[Row]:
    yield from _draws(context)
    yield _masking(context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How all rows of a step are drawn from. `top_k` None: all tokens."""

    name: str
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def params(self, num_rows: int, vocab_size: int, device: torch.device) -> DrawParams:
        noise = np.random.default_rng(11).random(num_rows)
        of_all = (self.temperature, self.top_k or vocab_size, self.top_p, self.min_p)
        on_host = np.stack([*(np.full(num_rows, value, np.float64) for value in of_all), noise])
        return DrawParams(on_host, torch.from_numpy(on_host).to(device))


def _draws(context: Context) -> Iterator[Row]:
    num_rows, vocab_size = context.pick((256, QWEN3_8B.vocab_size), (3, 320))
    logits = 3.0 * context.random(num_rows, vocab_size, dtype=torch.float32)
    for draw in (
        Draw(name="the best token", temperature=0.0),
        Draw(name="temperature 0.6", temperature=0.6),
        Draw(name="temperature 0.6, top-p 0.95, top-k 20", temperature=0.6, top_p=0.95, top_k=20),
        Draw(name="top-p 0.9", top_p=0.9),
        Draw(name="min-p 0.05", min_p=0.05),
    ):
        yield _draw_row(context, draw, logits)


def _draw_row(context: Context, draw: Draw, logits: Tensor) -> Row:
    params = draw.params(*logits.shape, context.device)
    got = context.kernels.draw_tokens(logits, params)
    expected = load_kernels("reference").draw_tokens(logits, params).token_ids
    num_wrong = len(wrong_rows(got.token_ids, expected, logits, params))
    seconds = context.seconds(lambda: context.kernels.draw_tokens(logits, params))
    with_sort = context.seconds(lambda: load_kernels("reference").draw_tokens(logits, params))
    return Row(
        name=f"{logits.shape[0]} rows of {logits.shape[1]:,} logits: {draw.name}",
        figures={
            "us": seconds * 1e6,
            "MB": logits.nbytes / 1e6,
            "TB/s": logits.nbytes / seconds / 1e12,
            "% of copy": logits.nbytes / seconds / context.ceilings.copy_bytes * 100,
            "torch us": with_sort * 1e6,
            "x of torch": with_sort / seconds,
            "other tokens": int((got.token_ids != expected).sum()),
        },
        bar="torch's tokens, but for the last places of exponentials",
        is_met=num_wrong == 0 and bool(got.is_sound.all()),
    )


def _masking(context: Context) -> Row:
    num_rows, vocab_size = context.pick((256, QWEN3_8B.vocab_size), (3, 100))
    logits = context.random(num_rows, vocab_size, dtype=torch.float32)
    rows = torch.arange(num_rows, device=context.device)
    words = (num_rows, -(-vocab_size // 32))
    allowed = torch.randint(-(2**31), 2**31, words, dtype=torch.int32, device=context.device)
    expected, out = logits.clone(), logits.clone()
    load_kernels("reference").mask_logits(expected, rows, allowed)
    context.kernels.mask_logits(out, rows, allowed)
    return _row(
        context,
        f"masking half of {num_rows} rows of {vocab_size:,} logits",
        logits.nbytes + allowed.nbytes,
        lambda: context.kernels.mask_logits(out, rows, allowed),
        is_right=torch.equal(out, expected),
    )
