"""A row's attention has the same bits however its tokens are cut into segments and its rows into
steps: what keeps answers the same whatever is cached."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from sapwood.kernels.cpu import CpuKernels
from sapwood.kernels.interface import KVCache, KVCacheSpec
from sapwood.kernels.native import Native
from sapwood.kernels.segments import AttentionPlan, PrivateSegment, SharedSegment

NUM_KV_HEADS = 2
# Odd blocks cut between two tokens whose bfloat16 values are multiplied together.
SHAPES = [(16, 3, 64), (1, 1, 40), (3, 2, 80), (5, 5, 8), (16, 4, 256), (64, 9, 64)]


@pytest.fixture
def kernels(native: Native) -> CpuKernels:
    class Kernels(CpuKernels):
        @staticmethod
        def _load() -> Native:
            return native

    return Kernels()


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """A sequence in the cache, and queries of its last `len(query)` positions."""

    kernels: CpuKernels
    kv: KVCache
    blocks: NDArray[np.int32]
    query: Tensor
    length: int
    softcap: float | None = None
    sinks: Tensor | None = None

    def attend(self, cuts: list[int], first: int, end: int) -> Tensor:
        """Query rows [first, end) as one step: shared segments between the cuts, then private."""
        block_size, num_rows = self.kv.spec.block_size, end - first
        before = self.length - len(self.query) + first
        bounds = [0, *(cut for cut in cuts if cut <= before)]
        start, stop = bounds[-1], before + num_rows
        plan = AttentionPlan(
            num_rows=num_rows,
            block_size=block_size,
            shared=tuple(
                SharedSegment(
                    block_ids=self.blocks[low // block_size : high // block_size],
                    start=low,
                    length=high - low,
                    rows=np.arange(num_rows, dtype=np.int32),
                )
                for low, high in zip(bounds, bounds[1:], strict=False)
            ),
            private=(
                PrivateSegment(
                    block_ids=self.blocks[start // block_size : -(-stop // block_size)],
                    start=start,
                    length=stop - start,
                    first_row=0,
                    num_rows=num_rows,
                ),
            ),
        )
        plan.check()
        prepared = self.kernels.plan_attention(plan, self.kv.spec)
        return self.kernels.attention(
            self.query[first:end],
            self.kv,
            0,
            prepared,
            0.125,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def last_tokens(self, row: int, num_tokens: int) -> Tensor:
        """Query row `row` over the last `num_tokens` that it sees, as if there were no others."""
        end = self.length - len(self.query) + row + 1
        alone = replace(
            self,
            kv=replace(self.kv, spec=replace(self.kv.spec, layer_windows=())),
            blocks=self.blocks[max(end - num_tokens, 0) : end],
            query=self.query[row : row + 1],
            length=min(num_tokens, end),
        )
        return alone.attend([], 0, 1)


def sequence(
    kernels: CpuKernels,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    num_rows: int,
    spread: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Sequence:
    block_size, group, head_dim = shape
    length = 330
    num_blocks = -(-length // block_size)
    spec = KVCacheSpec(
        num_layers=1,
        num_blocks=num_blocks + 2,
        block_size=block_size,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
        layer_windows=(window,),
    )
    kv = kernels.make_kv_cache(spec)
    generator = torch.Generator().manual_seed(num_rows)
    kv.keys.copy_(torch.randn(kv.keys.shape, generator=generator))
    kv.values.copy_(torch.randn(kv.values.shape, generator=generator) + 0.5)
    query = torch.randn(num_rows, NUM_KV_HEADS * group, head_dim, generator=generator) * spread
    blocks = np.random.default_rng(num_rows).permutation(num_blocks + 2).astype(np.int32)
    return Sequence(
        kernels=kernels,
        kv=kv,
        blocks=blocks[:num_blocks],
        query=query,
        length=length,
        softcap=softcap,
    )


def skip_unless_native(kernels: CpuKernels, dtype: torch.dtype, head_dim: int) -> None:
    if kernels.kv_dtype(dtype, head_dim) != dtype or not kernels._attends_natively(dtype, head_dim):
        pytest.skip("this processor does not multiply bfloat16")


def check_cuts(whole: Sequence, seed: int) -> None:
    """Cut at random in segments and steps, all rows have the bits that they have uncut."""
    block_size, num_rows = whole.kv.spec.block_size, len(whole.query)
    expected = whole.attend([], 0, num_rows)
    assert expected.isfinite().all()
    random = np.random.default_rng(seed)
    last = (whole.length - num_rows) // block_size
    for num_cuts in (1, 2, 4):
        places = random.integers(1, last + 1, size=num_cuts)
        cuts = sorted({int(place) * block_size for place in places})
        middle = int(random.integers(0, num_rows))
        steps = sorted({0, middle, num_rows})
        parts = [whole.attend(cuts, a, b) for a, b in zip(steps, steps[1:], strict=False)]
        assert torch.equal(torch.cat(parts), expected)
        alone = whole.attend(cuts, num_rows - 1, num_rows)
        assert torch.equal(alone, expected[-1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("num_rows", "spread"), [(1, 1.0), (7, 10.0), (60, 3.0)])
def test_bits_do_not_depend_on_the_cut(
    kernels: CpuKernels,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    num_rows: int,
    spread: float,
) -> None:
    skip_unless_native(kernels, dtype, shape[2])
    whole = sequence(kernels, dtype, shape, num_rows, spread)
    check_cuts(whole, seed=len(shape) + num_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 3, 64), (1, 1, 40), (5, 5, 8)])
@pytest.mark.parametrize(("num_rows", "spread"), [(1, 1.0), (60, 10.0)])
@pytest.mark.parametrize(
    ("window", "softcap"), [(None, 20.0), (1, None), (37, None), (40, 2.0), (280, None)]
)
def test_bits_do_not_depend_on_the_cut_behind_a_window_and_a_cap(
    kernels: CpuKernels,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    num_rows: int,
    spread: float,
    window: int | None,
    softcap: float | None,
) -> None:
    skip_unless_native(kernels, dtype, shape[2])
    whole = sequence(kernels, dtype, shape, num_rows, spread, window, softcap)
    check_cuts(whole, seed=num_rows)
    sinks = torch.randn(whole.query.shape[1], generator=torch.Generator().manual_seed(7))
    check_cuts(replace(whole, sinks=sinks), seed=num_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 2, 37, 128, 275])
def test_bits_are_those_of_the_tokens_in_the_window_alone(
    kernels: CpuKernels, dtype: torch.dtype, window: int
) -> None:
    skip_unless_native(kernels, dtype, 40)
    whole = sequence(kernels, dtype, (1, 3, 40), 60, 10.0, window, softcap=20.0)
    alone = torch.cat([whole.last_tokens(row, window) for row in range(60)])
    assert torch.equal(whole.attend([100, 200, 250], 0, 60), alone)


def test_shared_segments_come_in_any_order(kernels: CpuKernels) -> None:
    whole = sequence(kernels, torch.float32, SHAPES[0], 7, 3.0)
    block_size = whole.kv.spec.block_size
    edges = tuple(
        SharedSegment(
            block_ids=whole.blocks[low // block_size : high // block_size],
            start=low,
            length=high - low,
            rows=np.arange(7, dtype=np.int32),
        )
        for low, high in ((160, 240), (0, 160))
    )
    rest = PrivateSegment(
        block_ids=whole.blocks[240 // block_size :], start=240, length=90, first_row=0, num_rows=7
    )
    plan = AttentionPlan(num_rows=7, block_size=block_size, shared=edges, private=(rest,))
    plan.check()
    prepared = kernels.plan_attention(plan, whole.kv.spec)
    actual = kernels.attention(whole.query, whole.kv, 0, prepared, 0.125)
    assert torch.equal(actual, whole.attend([], 0, 7))


def test_what_is_equal_above_is_not_for_lack_of_difference(kernels: CpuKernels) -> None:
    whole = sequence(kernels, torch.float32, SHAPES[0], 7, 3.0)
    expected = whole.attend([], 0, 7)
    whole.kv.values[0, whole.blocks[3] * 16] += 1e-3
    assert not torch.equal(whole.attend([], 0, 7), expected)
