import numpy as np
import torch
from attention_split import FlatAttention

from sapwood.kernels import AttentionPlan, PrivateSegment, SharedSegment, load_kernels
from sapwood.kernels.interface import KVCacheSpec

BLOCK_SIZE = 4


def test_the_flat_kernel_computes_what_the_segments_do() -> None:
    plan = AttentionPlan(
        num_rows=3,
        block_size=BLOCK_SIZE,
        shared=(
            SharedSegment(block_ids=_ids(4, 5), start=0, length=8, rows=_ids(0, 1, 2)),
            SharedSegment(block_ids=_ids(1), start=8, length=4, rows=_ids(0, 2)),
        ),
        private=(
            PrivateSegment(block_ids=_ids(2, 7), start=12, length=6, first_row=0, num_rows=1),
            PrivateSegment(block_ids=_ids(6), start=8, length=3, first_row=1, num_rows=1),
            PrivateSegment(block_ids=_ids(0), start=12, length=1, first_row=2, num_rows=1),
        ),
    )
    plan.check()
    kernels = load_kernels("reference")
    num_heads, num_kv_heads, head_dim, scale = 6, 2, 8, 0.3
    kv = kernels.make_kv_cache(
        KVCacheSpec(
            num_layers=1,
            num_blocks=8,
            block_size=BLOCK_SIZE,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
    )
    generator = torch.Generator().manual_seed(0)
    kv.keys.normal_(generator=generator)
    kv.values.normal_(generator=generator)
    query = torch.randn(3, num_heads, head_dim, generator=generator)
    prepared = kernels.plan_attention(plan, kv.spec)
    expected = kernels.attention(query, kv, 0, prepared, scale)
    grouped = query.view(3, num_kv_heads, -1, head_dim)
    flat = FlatAttention.of(plan)
    for way in (flat.by_request, flat.as_one):
        out = way(grouped, kv.keys[0], kv.values[0], scale)
        torch.testing.assert_close(out.reshape(expected.shape), expected)


def test_contiguous_contexts_are_read_without_a_copy() -> None:
    private = PrivateSegment(block_ids=_ids(3, 4), start=0, length=6, first_row=0, num_rows=1)
    plan = AttentionPlan(num_rows=1, block_size=BLOCK_SIZE, shared=(), private=(private,))
    assert FlatAttention.of(plan).contexts == (slice(12, 18),)


def _ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)
