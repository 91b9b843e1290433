"""Keys and values kept in bfloat16 for float32 activations, which int8 kernels do.

Against float64 arithmetic over the rounded keys and values. What the kernels round besides are the
query and the softmax's weights, each number by a share of 2^-9 at most. One rounding knows nothing
of another, so that their squares add up: with scores scale * <q, k_i>, weights w_i and a result
o = sum_i w_i v_i a result's expected square error is at most

    sum_i (w_i (v_i - o))^2 (1 + scale^2 sum_d (q_d k_id)^2) * 2^-18
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood.kernels import AttentionPlan, PrivateSegment, SharedSegment, load_kernels, native
from sapwood.kernels.cpu import CpuKernels
from sapwood.kernels.interface import KVCache, KVCacheSpec
from sapwood.kernels.native_attention import NativeAttention

BLOCK_SIZE = 16
ROUNDING = 2.0**-9
GROUPS = range(1, 9)
HEAD_DIMS = (64, 80, 96, 128, 256)
LENGTHS = (1, 15, 16, 17, 500, 2000)


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    functions = native.load()
    if functions is None:
        pytest.skip("there is no C compiler")
    if not functions.can_attend(torch.bfloat16, 64):
        pytest.skip("the processor has no AVX512_BF16")
    found = load_kernels("cpu").quantized()
    assert isinstance(found, CpuKernels)
    return found


class Step:
    """Rows behind `shared` tokens of all: sequences of `num_rows` rows whose private tokens number
    `lengths`. Blocks in a random order; what no row sees is NaN."""

    def __init__(
        self,
        lengths: list[int],
        *,
        num_rows: int = 1,
        shared: int = 0,
        num_kv_heads: int = 2,
        num_groups: int = 3,
        head_dim: int = 64,
        seed: int = 0,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        assert shared % BLOCK_SIZE == 0
        self.generator = torch.Generator().manual_seed(seed)
        sizes = [shared // BLOCK_SIZE, *(-(-length // BLOCK_SIZE) for length in lengths)]
        order = np.random.default_rng(seed).permutation(sum(sizes) + 2).astype(np.int32)
        shared_blocks, *tables = np.split(order, np.cumsum(sizes))[: len(sizes)]
        total = num_rows * len(lengths)
        edges: tuple[SharedSegment, ...] = ()
        if shared:
            rows = np.arange(total, dtype=np.int32)
            edges = (SharedSegment(block_ids=shared_blocks, start=0, length=shared, rows=rows),)
        self.plan = AttentionPlan(
            num_rows=total,
            block_size=BLOCK_SIZE,
            shared=edges,
            private=tuple(
                PrivateSegment(
                    block_ids=table,
                    start=shared,
                    length=length,
                    first_row=index * num_rows,
                    num_rows=num_rows,
                )
                for index, (table, length) in enumerate(zip(tables, lengths, strict=True))
            ),
        )
        self.plan.check()
        self.spec = KVCacheSpec(
            num_layers=1,
            num_blocks=len(order),
            block_size=BLOCK_SIZE,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            layer_windows=(window,),
        )
        self.scale, self.softcap = head_dim**-0.5, softcap
        table_of_shared = slots_of(shared_blocks, shared)
        self.slots_of_row = [
            (table_of_shared + slots_of(table, length)[: length - num_rows + row + 1])[
                -(window or len(order) * BLOCK_SIZE) :
            ]
            for table, length in zip(tables, lengths, strict=True)
            for row in range(num_rows)
        ]
        self.slots = sorted({slot for slots in self.slots_of_row for slot in slots})
        shape = (self.spec.num_slots, num_kv_heads, head_dim)
        self.keys, self.values = (torch.full(shape, torch.nan) for _ in range(2))
        self.keys[self.slots] = self.random(len(self.slots), *shape[1:])
        # A mean that is not zero, as values have in models.
        self.values[self.slots] = self.random(len(self.slots), *shape[1:]) + 0.5
        # A slice of something wider, as a model's queries are.
        self.query = self.random(total, num_kv_heads * num_groups + 3, head_dim)[:, :-3]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def fill(self, kernels: CpuKernels) -> KVCache:
        kv = kernels.make_kv_cache(self.spec)
        everywhere = torch.arange(self.spec.num_slots)
        kernels.write_kv(kv, 0, self.keys, self.values, everywhere)
        return kv

    def attend(self, kernels: CpuKernels) -> Tensor:
        prepared = kernels.plan_attention(self.plan, self.spec)
        assert isinstance(prepared, NativeAttention)
        kv = self.fill(kernels)
        return kernels.attention(self.query, kv, 0, prepared, self.scale, softcap=self.softcap)

    def check(self, actual: Tensor) -> None:
        """Every row of `actual` against dense attention: twice what the docstring above expects."""
        assert actual.dtype == torch.float32
        assert actual.shape == self.query.shape
        num_groups = self.query.shape[1] // self.spec.num_kv_heads
        for row, slots in enumerate(self.slots_of_row):
            query = self.query[row].double().view(self.spec.num_kv_heads, num_groups, -1)
            key, value = (t[slots].bfloat16().double() for t in (self.keys, self.values))
            products = torch.einsum("kgd,lkd->kgl", query, key) * self.scale
            if self.softcap is not None:
                products = self.softcap * (products / self.softcap).tanh()
            weights = products.softmax(dim=-1)
            expected = torch.einsum("kgl,lkd->kgd", weights, value)
            squares = torch.einsum("kgd,lkd->kgl", query**2, key**2) * self.scale**2
            parts = weights**2 * (1 + squares)
            allowed = (
                torch.einsum("kgl,lkd->kgd", parts, value**2)
                - 2 * expected * torch.einsum("kgl,lkd->kgd", parts, value)
                + expected**2 * parts.sum(dim=-1, keepdim=True)
            )
            limit = 2 * ROUNDING * allowed.mean().clamp(min=0.0).sqrt() + 1e-6
            error = (actual[row].double() - expected.flatten(0, 1)).square().mean().sqrt()
            assert error <= limit, f"row {row}: error {error:.1e}, limit {limit:.1e}"


def slots_of(block_ids: np.ndarray, length: int) -> list[int]:
    slots = [
        int(block) * BLOCK_SIZE + offset for block in block_ids for offset in range(BLOCK_SIZE)
    ]
    return slots[:length]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels allocate starts as NaN, so that what they leave out shows."""
    allocate = Tensor.new_empty

    def new_empty(self: Tensor, *shape: int) -> Tensor:
        return allocate(self, *shape).fill_(torch.nan)

    monkeypatch.setattr(Tensor, "new_empty", new_empty)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("num_groups", GROUPS)
def test_single_rows_attend_to_their_own_tokens(
    kernels: CpuKernels, num_groups: int, length: int, head_dim: int
) -> None:
    step = Step([length, 3], num_groups=num_groups, head_dim=head_dim, seed=num_groups)
    step.check(step.attend(kernels))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("num_rows", "length"), [(2, 2), (15, 15), (17, 40), (40, 500), (5, 2000)])
@pytest.mark.parametrize("num_groups", GROUPS)
def test_chunks_attend_causally(
    kernels: CpuKernels, num_groups: int, num_rows: int, length: int, head_dim: int
) -> None:
    step = Step([length], num_rows=num_rows, num_groups=num_groups, head_dim=head_dim)
    step.check(step.attend(kernels))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("shared", [16, 496, 2000])
@pytest.mark.parametrize("num_groups", GROUPS)
def test_shared_tokens_and_tails_are_merged(
    kernels: CpuKernels, num_groups: int, shared: int, head_dim: int
) -> None:
    step = Step([1, 16, 17, 70, 5], shared=shared, num_groups=num_groups, head_dim=head_dim)
    step.check(step.attend(kernels))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [1, 2, 17, 90, 130, 600])
@pytest.mark.parametrize("num_rows", [1, 30])
def test_windows_and_caps_over_shared_tokens_and_tails(
    kernels: CpuKernels, num_rows: int, window: int, softcap: float | None
) -> None:
    lengths = [num_rows, num_rows + 16, num_rows + 150]
    step = Step(lengths, num_rows=num_rows, shared=496, window=window, softcap=softcap)
    step.check(step.attend(kernels))


def test_a_group_of_many_heads_and_the_least_head_dim_are_served(kernels: CpuKernels) -> None:
    for num_rows in (1, 6):
        step = Step([90, 33], num_rows=num_rows, num_groups=21, num_kv_heads=1, head_dim=8)
        step.check(step.attend(kernels))


def test_a_constant_value_comes_back_as_it_was(kernels: CpuKernels) -> None:
    # Weights add up to 1 after they were rounded: their sum is that of the rounded ones.
    for num_rows in (1, 20):
        step = Step([700], num_rows=num_rows)
        step.values[step.slots] = 1.5
        torch.testing.assert_close(
            step.attend(kernels), torch.full(step.query.shape, 1.5), atol=0.0, rtol=2e-6
        )


@pytest.mark.parametrize("shared", [0, 1024])
def test_a_rows_attention_has_the_same_bits_in_every_batch(
    kernels: CpuKernels, shared: int
) -> None:
    together = Step([40] * 24, shared=shared)
    kv = together.fill(kernels)

    def attend(num_rows: int) -> Tensor:
        edges = tuple(
            SharedSegment(block_ids=s.block_ids, start=0, length=s.length, rows=s.rows[:num_rows])
            for s in together.plan.shared
        )
        plan = AttentionPlan(
            num_rows=num_rows,
            block_size=BLOCK_SIZE,
            shared=edges,
            private=together.plan.private[:num_rows],
        )
        prepared = kernels.plan_attention(plan, together.spec)
        return kernels.attention(together.query[:num_rows], kv, 0, prepared, together.scale)

    everything = attend(24)
    for num_rows in (1, 2, 7, 11):
        assert torch.equal(attend(num_rows), everything[:num_rows])


def test_a_causal_row_has_the_same_bits_beside_fewer_rows(kernels: CpuKernels) -> None:
    step = Step([300], num_rows=300)
    kv = step.fill(kernels)
    (segment,) = step.plan.private

    def attend(first_row: int, num_rows: int) -> Tensor:
        rows = slice(first_row, first_row + num_rows)
        length = first_row + num_rows
        chunk = PrivateSegment(
            block_ids=segment.block_ids[: -(-length // BLOCK_SIZE)],
            start=0,
            length=length,
            first_row=0,
            num_rows=num_rows,
        )
        plan = AttentionPlan(num_rows=num_rows, block_size=BLOCK_SIZE, shared=(), private=(chunk,))
        prepared = kernels.plan_attention(plan, step.spec)
        return kernels.attention(step.query[rows], kv, 0, prepared, step.scale)

    everything = attend(0, 300)
    for first_row, num_rows in ((0, 2), (126, 3), (127, 5), (200, 21), (298, 2)):
        assert torch.equal(attend(first_row, num_rows), everything[first_row:][:num_rows])


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_what_is_broken_shows_in_its_own_rows_only(
    kernels: CpuKernels, broken: float, num_rows: int
) -> None:
    step = Step([40, 33, 150], num_rows=num_rows, shared=32)
    expected = step.attend(kernels)
    step.query[num_rows] = broken
    actual = step.attend(kernels)
    assert not actual[num_rows].isfinite().any()
    assert torch.equal(actual[:num_rows], expected[:num_rows])
    assert torch.equal(actual[num_rows + 1 :], expected[num_rows + 1 :])


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("length", [40, 41])
def test_an_infinite_value_stays_infinite(kernels: CpuKernels, num_rows: int, length: int) -> None:
    # The last token is the one beside which an odd number of tokens is padded.
    step = Step([length], num_rows=num_rows)
    step.values[step.slots_of_row[-1][-1]] = torch.inf
    assert (step.attend(kernels)[-1] == torch.inf).all()


def test_scores_far_below_the_highest_count_for_nothing(kernels: CpuKernels) -> None:
    for num_rows in (1, 5):
        step = Step([200], num_rows=num_rows)
        step.scale = 1e4
        slots = step.slots_of_row[-1]
        key, value = step.keys[slots].bfloat16().float(), step.values[slots].bfloat16().float()
        step.query = step.query.bfloat16().float()
        num_groups = step.query.shape[1] // step.spec.num_kv_heads
        query = step.query[-1].view(step.spec.num_kv_heads, num_groups, -1)
        best = torch.einsum("kgd,lkd->kgl", query.double(), key.double()).argmax(dim=-1)
        heads = torch.arange(step.spec.num_kv_heads).unsqueeze(1)
        actual = step.attend(kernels)[-1].view(query.shape)
        # The best token's weight is divided by itself, which rounds twice.
        torch.testing.assert_close(actual, value[best, heads], atol=0.0, rtol=3e-7)


def test_written_keys_are_rounded_as_torch_rounds(kernels: CpuKernels) -> None:
    step = Step([64], num_kv_heads=2, head_dim=64)
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3.4e38, 2.0**-130])
    ties = torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 1.0 + 2.0**-8 + 2.0**-20])
    numbers = torch.cat((edges, ties, step.random(2 * 3 * 64 - 11)))
    key = numbers.view(3, 2, 64)
    kv = kernels.make_kv_cache(step.spec)
    slots = torch.tensor([5, 0, 40])
    kernels.write_kv(kv, 0, key, -key, slots)
    for kept, written in ((kv.keys, key), (kv.values, -key)):
        expected = written.bfloat16()
        actual = kept[0, slots]
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


def test_queries_in_bfloat16_attend_to_the_same_cache(kernels: CpuKernels) -> None:
    step = Step([70, 5], shared=32)
    step.query = step.query.bfloat16()
    result = step.attend(kernels)
    assert result.dtype == torch.bfloat16
    step.query = step.query.float()
    assert torch.equal(result, step.attend(kernels).bfloat16())


def test_int8_kernels_keep_keys_and_values_of_float32_in_bfloat16(kernels: CpuKernels) -> None:
    assert kernels.kv_dtype(torch.float32, 64) == torch.bfloat16
    assert kernels.kv_dtype(torch.float32, 12) == torch.float32  # which native code does not take
    assert kernels.kv_dtype(torch.float16, 64) == torch.float16


@pytest.mark.parametrize("name", ["reference", "cpu", "cpu-torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_int8_keys_and_values_are_kept_as_they_are(name: str, dtype: torch.dtype) -> None:
    assert load_kernels(name).kv_dtype(dtype, 64) == dtype


@pytest.mark.parametrize("name", ["cpu", "cpu-torch"])
@pytest.mark.parametrize(
    ("kept", "asked"),
    [
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
)
def test_a_cache_that_cannot_be_attended_to_is_refused(
    name: str, kept: torch.dtype, asked: torch.dtype
) -> None:
    refusing = load_kernels(name)
    block = np.zeros(1, dtype=np.int32)
    own = PrivateSegment(block_ids=block, start=0, length=3, first_row=0, num_rows=1)
    plan = AttentionPlan(num_rows=1, block_size=BLOCK_SIZE, shared=(), private=(own,))
    spec = KVCacheSpec(
        num_layers=1,
        num_blocks=1,
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        head_dim=64,
        dtype=kept,
        device=torch.device("cpu"),
    )
    kv = refusing.make_kv_cache(spec)
    kv.keys.zero_()
    kv.values.zero_()
    prepared = refusing.plan_attention(plan, spec)
    with pytest.raises(TypeError, match="cannot attend"):
        refusing.attention(torch.zeros(1, 1, 64, dtype=asked), kv, 0, prepared, 1.0)
