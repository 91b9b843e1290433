"""Launches what models of the project's shapes launch, and prints the forms that are not listed.

    python -m tests.kernels.launch_everything

Run in a process without TRITON_INTERPRET; no kernel computes anything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import torch

from sapwood.kernels.ahead_of_time import specializations
from sapwood.kernels.interface import (
    QUANTIZED_KV_DTYPES,
    Activation,
    DrawParams,
    HeadNorms,
    Kernels,
    KVCache,
    KVCacheSpec,
    RowCopy,
)
from sapwood.kernels.model_shapes import MODEL_SHAPES, ModelShape
from sapwood.kernels.segments import AttentionPlan, PrivateSegment, SharedSegment
from sapwood.kernels.triton_kernels import TritonKernels
from tests.kernels.recorded_launches import Form, recorded_launches

BLOCK_SIZE = 16
NUM_ROWS = 200  # of the step that attends
ROW_COUNTS = (1, 16, 17, NUM_ROWS)
VOCAB_SIZE = 151_936


def main() -> int:
    listed = {Form.of(specialization) for specialization in specializations()}
    kernels = TritonKernels()
    num_forms = 0
    unlisted: dict[Form, str] = {}
    for shape, dtype, backend in cases(kernels):
        with recorded_launches() as forms:
            launch(backend, shape, dtype)
        num_forms += len(forms)
        for form in forms:
            if form not in listed:
                unlisted.setdefault(form, f"{shape.name} in {dtype}")
    for form, where in unlisted.items():
        print(f"{where}: {form}")
    print(f"{num_forms} launches, {len(unlisted)} forms are not listed")
    return 1 if unlisted or not num_forms else 0


def cases(kernels: TritonKernels) -> Iterator[tuple[ModelShape, torch.dtype, Kernels]]:
    """Every shape in both dtypes, with keys and values kept in each of theirs."""
    quantized = [kernels.with_kv_dtype(dtype) for dtype in QUANTIZED_KV_DTYPES]
    backends: list[Kernels] = [kernels, *(found for found in quantized if found is not None)]
    for shape in MODEL_SHAPES:
        for dtype in (torch.bfloat16, torch.float16):
            for backend in backends:
                yield shape, dtype, backend


def launch(kernels: Kernels, shape: ModelShape, dtype: torch.dtype) -> None:
    """What a layer and the sampler launch, for steps of several sizes: a size that is a multiple
    of 16 or one is no reason to compile again."""
    plan, num_blocks = attention_step()
    spec = KVCacheSpec(
        num_layers=2,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=shape.num_kv_heads,
        group_size=shape.num_heads // shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=kernels.kv_dtype(dtype, shape.head_dim),
        device=torch.device("cpu"),
        layer_windows=(None, 40) if shape.has_score_cap else (),
    )
    kv = kernels.make_kv_cache(spec)
    for num_rows in ROW_COUNTS:
        launch_around_attention(kernels, shape, dtype, num_rows)
        for layer in range(spec.num_layers):
            query = launch_writes(kernels, shape, dtype, kv, layer, num_rows)
    kernels.copy_rows(kv, [RowCopy(0, 1, 5), RowCopy(2, 3, 16)])
    prepared = kernels.plan_attention(plan, spec)
    softcap = 50.0 if shape.has_score_cap else None
    for layer in range(spec.num_layers):
        kernels.attention(query, kv, layer, prepared, shape.head_dim**-0.5, softcap=softcap)
    launch_draws(kernels)


def launch_around_attention(
    kernels: Kernels, shape: ModelShape, dtype: torch.dtype, num_rows: int
) -> None:
    x, residual = (torch.randn(num_rows, shape.hidden_size).to(dtype) for _ in range(2))
    kernels.rms_norm(x, x[0], 1e-6)
    if shape.has_post_norms:
        kernels.rms_norm(x, x[0], 1e-6, residual)
    activation = Activation.GELU_TANH if shape.is_gelu else Activation.SILU
    kernels.activate_and_mul(
        torch.randn(num_rows, 2 * shape.intermediate_size).to(dtype), activation
    )


def launch_writes(
    kernels: Kernels,
    shape: ModelShape,
    dtype: torch.dtype,
    kv: KVCache,
    layer: int,
    num_rows: int,
) -> torch.Tensor:
    """Of a step's keys and values; the queries."""
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    heads = torch.randn(num_rows, num_heads, shape.head_dim).to(dtype)
    angles = torch.randn(num_rows, 1, shape.rotary_dim)
    slots = torch.arange(num_rows)
    weights = torch.randn(2, shape.head_dim).to(dtype).unbind()
    norms = HeadNorms(*(weight.clone() for weight in weights), 1e-6)
    key, value = heads[:, shape.num_heads :].split(shape.num_kv_heads, dim=1)
    kernels.write_kv(kv, layer, key, value, slots)
    return kernels.rotary_and_write(
        *(heads, shape.num_heads, angles, angles, kv, layer, slots),
        norms=norms if shape.has_head_norms else None,
    )


def attention_step() -> tuple[AttentionPlan, int]:
    """`NUM_ROWS` rows: a chunk, and single rows below an edge that is long enough to be split."""
    shared_blocks, num_decoding = 64, NUM_ROWS - 100
    blocks = np.arange(shared_blocks + num_decoding + 7, dtype=np.int32)
    edge, tails = blocks[:shared_blocks], blocks[shared_blocks:]
    start = shared_blocks * BLOCK_SIZE
    decoding = tuple(
        PrivateSegment(block_ids=tails[i : i + 1], start=start, length=5, first_row=i, num_rows=1)
        for i in range(num_decoding)
    )
    chunk = PrivateSegment(
        block_ids=tails[num_decoding:], start=0, length=100, first_row=num_decoding, num_rows=100
    )
    rows = np.arange(num_decoding, dtype=np.int32)
    shared = SharedSegment(block_ids=edge, start=0, length=start, rows=rows)
    plan = AttentionPlan(
        num_rows=NUM_ROWS, block_size=BLOCK_SIZE, shared=(shared,), private=(*decoding, chunk)
    )
    return plan, len(blocks)


def launch_draws(kernels: Kernels) -> None:
    logits = torch.randn(6, VOCAB_SIZE)
    allowed = torch.zeros(2, VOCAB_SIZE // 32, dtype=torch.int32)
    kernels.mask_logits(logits, torch.tensor([1, 4]), allowed)
    ranked = np.array([[0.0, 1, 1, 1, 1, 1], [9, 9, 9, 9, VOCAB_SIZE, VOCAB_SIZE]])
    rest = np.array([[1, 1, 0.9, 1, 0.9, 1], [0, 0, 0, 0.1, 0, 0], [0.5] * 6])
    for params in (
        np.concatenate([ranked, rest]),
        np.array([[1.0], [VOCAB_SIZE], [1], [0], [0.5]]),
    ):
        kernels.draw_tokens(logits[: params.shape[1]], DrawParams(params, torch.from_numpy(params)))


if __name__ == "__main__":
    sys.exit(main())
