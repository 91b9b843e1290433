"""Every kernel backend against an oracle: dense float64 arithmetic over keys and values that lie
in order, without blocks, segments or merging."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood.kernels import KERNELS, AttentionPlan, PrivateSegment, SharedSegment, load_kernels
from sapwood.kernels.interface import Activation, Kernels, KVCache, KVCacheSpec, RowCopy

NUM_LAYERS = 2
LAYER = 1
SCALE = 0.3
# (relative to the largest value) what each dtype's own rounding allows
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@pytest.fixture(params=sorted(KERNELS))
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_kernels(request.param)


def random_numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    assert actual.shape == expected.shape
    if not actual.numel():
        return
    tolerance = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= tolerance, f"relative error {error:.2e}"


def zeroed(kernels: Kernels, spec: KVCacheSpec) -> KVCache:
    """A cache whose contents can be compared; a new one holds anything."""
    kv = kernels.make_kv_cache(spec)
    kv.keys.zero_()
    kv.values.zero_()
    return kv


@dataclass(frozen=True)
class Edge:
    """An edge of the tree: whole blocks below `parent`."""

    num_blocks: int
    parent: Edge | None = None

    def path(self) -> list[Edge]:
        return [*(self.parent.path() if self.parent else []), self]


@dataclass(frozen=True)
class Tail:
    """What a sequence has below `edge`: `length` tokens, of which the last `num_rows` are rows."""

    length: int
    num_rows: int = 1
    edge: Edge | None = None


@dataclass
class Step:
    """Keys, values and the plan of one step, and the same keys and values in order per row."""

    plan: AttentionPlan
    spec: KVCacheSpec
    keys: Tensor  # [num_slots, Hkv, D], garbage where nothing was written
    values: Tensor
    slots: Tensor  # int64, all slots that hold something
    query: Tensor  # [T, Hq, D]
    slots_of_row: list[np.ndarray] = field(default_factory=list)

    def fill(self, kernels: Kernels, layer: int = LAYER) -> KVCache:
        kv = zeroed(kernels, self.spec)
        kernels.write_kv(kv, layer, self.keys[self.slots], self.values[self.slots], self.slots)
        return kv

    def attend(
        self,
        kernels: Kernels,
        layer: int = LAYER,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        prepared = kernels.plan_attention(self.plan, self.spec)
        kv = self.fill(kernels, layer)
        return kernels.attention(
            self.query, kv, layer, prepared, SCALE, softcap=softcap, sinks=sinks
        )

    def oracle(
        self, layer: int = LAYER, softcap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Row by row: softmax over the last tokens up to the row's own position, in float64."""
        num_groups = self.query.shape[1] // self.keys.shape[1]
        window = self.spec.window(layer)
        rows = []
        for query, all_slots in zip(self.query.double(), self.slots_of_row, strict=True):
            slots = all_slots if window is None else all_slots[-window:]
            key = self.keys[slots].double().repeat_interleave(num_groups, dim=1)
            value = self.values[slots].double().repeat_interleave(num_groups, dim=1)
            scores = torch.einsum("hd,lhd->hl", query, key).mul(SCALE)
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            if sinks is not None:
                scores = torch.cat((scores, sinks.double().unsqueeze(1)), dim=1)
                value = torch.cat((value, torch.zeros_like(value[:1])))
            rows.append(torch.einsum("hl,lhd->hd", scores.softmax(dim=-1), value))
        return torch.stack(rows)


def make_step(
    tails: list[Tail],
    *,
    block_size: int = 16,
    num_kv_heads: int = 2,
    num_groups: int = 3,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    shuffled: bool = True,
    layer_windows: tuple[int | None, ...] = (),
) -> Step:
    edges = {edge: [] for tail in tails if tail.edge for edge in tail.edge.path()}
    num_blocks = sum(e.num_blocks for e in edges) + sum(-(-t.length // block_size) for t in tails)
    free = np.arange(num_blocks + 3, dtype=np.int32)
    if shuffled:
        free = np.random.default_rng(0).permutation(free)
    tables = np.split(free, np.cumsum([e.num_blocks for e in edges]))
    table_of_edge = dict(zip(edges, tables, strict=False))
    free = tables[-1]
    private, slots_of_row, first_row = [], [], 0
    for tail in tails:
        path = tail.edge.path() if tail.edge else []
        shared_table = [table_of_edge[edge] for edge in path]
        for edge in path:
            edges[edge] += range(first_row, first_row + tail.num_rows)
        own, free = np.split(free, [-(-tail.length // block_size)])
        start = sum(edge.num_blocks for edge in path) * block_size
        private.append(
            PrivateSegment(
                block_ids=own,
                start=start,
                length=tail.length,
                first_row=first_row,
                num_rows=tail.num_rows,
            )
        )
        table = np.concatenate([*shared_table, own]).astype(np.int64)
        slots = (table[:, None] * block_size + np.arange(block_size)).reshape(-1)
        end = start + tail.length
        slots_of_row += [slots[: end - tail.num_rows + row + 1] for row in range(tail.num_rows)]
        first_row += tail.num_rows
    shared = [
        SharedSegment(
            block_ids=table_of_edge[edge],
            start=sum(e.num_blocks for e in edge.path()[:-1]) * block_size,
            length=edge.num_blocks * block_size,
            rows=np.array(rows, dtype=np.int32),
        )
        for edge, rows in edges.items()
    ]
    plan = AttentionPlan(
        num_rows=first_row, block_size=block_size, shared=tuple(shared), private=tuple(private)
    )
    plan.check()
    spec = KVCacheSpec(
        num_layers=len(layer_windows) or NUM_LAYERS,
        num_blocks=num_blocks + 3,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
        layer_windows=layer_windows,
    )
    return Step(
        plan=plan,
        spec=spec,
        keys=random_numbers(spec.num_slots, num_kv_heads, head_dim, seed=1, dtype=dtype),
        values=random_numbers(spec.num_slots, num_kv_heads, head_dim, seed=2, dtype=dtype),
        slots=torch.from_numpy(np.unique(np.concatenate(slots_of_row))),
        query=random_numbers(first_row, num_kv_heads * num_groups, head_dim, seed=3, dtype=dtype),
        slots_of_row=slots_of_row,
    )


def forest(block_size: int) -> list[Tail]:
    """Three levels of sharing; decode rows of many lengths, a draft, cold and resumed chunks."""
    system = Edge(num_blocks=4 * (16 // block_size))
    tools = Edge(num_blocks=block_size % 16 + 1, parent=system)
    few_shot = Edge(num_blocks=2, parent=tools)
    other = Edge(num_blocks=3, parent=system)
    return [
        Tail(length=1, edge=few_shot),
        Tail(length=33, edge=few_shot),
        Tail(length=40, num_rows=40),
        Tail(length=5, num_rows=3, edge=other),
        Tail(length=20, num_rows=3, edge=tools),
        Tail(length=70, num_rows=25, edge=other),
        Tail(length=17, num_rows=17, edge=system),
        Tail(length=9),
        Tail(length=600),
        Tail(length=2, edge=system),
    ]


@pytest.mark.parametrize("shuffled", [True, False], ids=["shuffled", "in_order"])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("num_groups", [1, 3, 8])
def test_attention_over_a_forest_equals_dense_attention(
    kernels: Kernels, num_groups: int, head_dim: int, block_size: int, shuffled: bool
) -> None:
    step = make_step(
        forest(block_size),
        block_size=block_size,
        num_groups=num_groups,
        head_dim=head_dim,
        shuffled=shuffled,
    )
    assert_close(step.attend(kernels), step.oracle())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_half_precision_accumulates_in_float32(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    step = make_step(forest(16), dtype=dtype, head_dim=64)
    result = step.attend(kernels)
    assert result.dtype == dtype
    assert_close(result, step.oracle())


def single_steps() -> Iterator[tuple[str, list[Tail]]]:
    shared = Edge(num_blocks=40)
    yield "one_decode_row", [Tail(length=100)]
    yield "one_long_decode_row", [Tail(length=2000)]
    yield "one_cold_chunk", [Tail(length=64, num_rows=64)]
    yield "one_resumed_chunk", [Tail(length=90, num_rows=30)]
    yield "one_draft", [Tail(length=90, num_rows=4)]
    yield "equal_decode_rows", [Tail(length=48)] * 8
    yield "short_decode_rows_not_sorted_by_length", [Tail(length=n) for n in (3, 40, 5, 17)]
    yield "decode_rows_of_all_lengths", [Tail(length=n * n) for n in range(1, 30)]
    yield "decode_rows_below_an_edge", [Tail(length=n, edge=shared) for n in (3, 4, 5, 300, 6)]
    yield "chunks_below_an_edge", [Tail(length=n, num_rows=n, edge=shared) for n in (3, 4, 50)]
    yield "an_edge_with_one_row", [Tail(length=1, edge=shared), Tail(length=1)]


@pytest.mark.parametrize("shuffled", [True, False], ids=["shuffled", "in_order"])
@pytest.mark.parametrize("tails", [pytest.param(tails, id=name) for name, tails in single_steps()])
def test_attention_of_each_kind_of_step_equals_dense_attention(
    kernels: Kernels, tails: list[Tail], shuffled: bool
) -> None:
    step = make_step(tails, shuffled=shuffled)
    assert_close(step.attend(kernels), step.oracle())


# With blocks of 16 the forest's shared edges end at 64, 80, 112 and 112, private tokens after 1 to
# 600 more. Windows within a block; that cut edges and blocks, of which some rows see a part and
# others nothing; and one that cuts nothing.
WINDOWS = (1, 2, 7, 16, 17, 33, 50, 83, 100, 128, 599, 600, 10_000)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("head_dim", [12, 64])
def test_rows_see_no_further_back_than_their_layers_window(
    kernels: Kernels, head_dim: int, block_size: int
) -> None:
    step = make_step(
        forest(block_size),
        block_size=block_size,
        head_dim=head_dim,
        layer_windows=(None, *WINDOWS, None),
    )
    prepared = kernels.plan_attention(step.plan, step.spec)
    kv = zeroed(kernels, step.spec)
    for layer in range(step.spec.num_layers):
        kernels.write_kv(kv, layer, step.keys[step.slots], step.values[step.slots], step.slots)
        result = kernels.attention(step.query, kv, layer, prepared, SCALE)
        assert_close(result, step.oracle(layer))


@pytest.mark.parametrize("tails", [pytest.param(tails, id=name) for name, tails in single_steps()])
@pytest.mark.parametrize("window", [1, 20, 130, 600])
def test_windows_in_each_kind_of_step(kernels: Kernels, tails: list[Tail], window: int) -> None:
    step = make_step(tails, head_dim=16, layer_windows=(window, window))
    assert_close(step.attend(kernels), step.oracle())


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0, 1e4])
@pytest.mark.parametrize("head_dim", [12, 64])
def test_scores_are_capped_softly(
    kernels: Kernels, head_dim: int, softcap: float, window: int | None
) -> None:
    step = make_step(forest(16), head_dim=head_dim, layer_windows=(None, window))
    step.query *= 3.0  # scores of about 50, and 0 of a row without a query
    step.query[5] = 0.0
    assert_close(step.attend(kernels, softcap=softcap), step.oracle(softcap=softcap), 8e-6)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("head_dim", [12, 64])
def test_a_sink_takes_its_share_of_the_weight(
    kernels: Kernels, head_dim: int, softcap: float | None, window: int | None
) -> None:
    step = make_step(forest(16), head_dim=head_dim, layer_windows=(None, window))
    sinks = torch.tensor([-torch.inf, -3.0, 0.7, 8.0, 150.0, 1e4])
    expected = step.oracle(softcap=softcap, sinks=sinks)
    assert_close(step.attend(kernels, softcap=softcap, sinks=sinks), expected)
    assert (expected[:, 4:].abs() < 1e-20).all()
    without = step.attend(kernels, softcap=softcap)
    assert_close(step.attend(kernels, softcap=softcap, sinks=sinks)[:, 0], without[:, 0].double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_windows_caps_and_sinks_in_half_precision(kernels: Kernels, dtype: torch.dtype) -> None:
    step = make_step(forest(16), dtype=dtype, head_dim=64, layer_windows=(None, 40))
    sinks = random_numbers(6, seed=9, dtype=dtype)
    result = step.attend(kernels, softcap=20.0, sinks=sinks)
    assert result.dtype == dtype
    assert_close(result, step.oracle(softcap=20.0, sinks=sinks))


def test_what_is_behind_the_window_is_not_read_by_a_single_row(kernels: Kernels) -> None:
    step = make_step([Tail(length=200, edge=Edge(num_blocks=4))], layer_windows=(None, 70))
    expected = step.oracle()
    hidden = step.slots_of_row[0][:-70]
    step.keys[hidden] = step.values[hidden] = torch.nan
    assert_close(step.attend(kernels), expected)


def test_only_tokens_that_some_row_sees_are_read(kernels: Kernels) -> None:
    shared = Edge(num_blocks=64)
    step = make_step([Tail(length=n, edge=shared) for n in (10, 50)], layer_windows=(40, 20))
    prepared = kernels.plan_attention(step.plan, step.spec)
    assert prepared.num_kv_tokens_read == 30 + 10 + 40  # the edge's last 30 by the first row
    full = replace(step.spec, layer_windows=(40, None))
    assert kernels.plan_attention(step.plan, full).num_kv_tokens_read == 64 * 16 + 10 + 50


def test_a_row_gets_the_same_result_alone_and_among_others(kernels: Kernels) -> None:
    tails = [Tail(length=n) for n in (40, 1, 7, 300, 90)]
    together = make_step(tails, shuffled=False)
    alone = make_step(tails[:1], shuffled=False)
    # The first row, its blocks and so its query, keys and values are the same in both steps.
    alone.query = together.query[:1]
    alone.keys, alone.values = together.keys, together.values
    assert_close(together.attend(kernels)[:1], alone.attend(kernels), tolerance=1e-6)


def test_what_was_never_written_is_never_read(kernels: Kernels) -> None:
    step = make_step(forest(16))
    kv = kernels.make_kv_cache(step.spec)
    everywhere = torch.arange(step.spec.num_slots)
    poison = torch.full_like(step.keys, torch.nan)
    kernels.write_kv(kv, LAYER, poison, poison, everywhere)
    kernels.write_kv(kv, LAYER, step.keys[step.slots], step.values[step.slots], step.slots)
    prepared = kernels.plan_attention(step.plan, step.spec)
    assert_close(kernels.attention(step.query, kv, LAYER, prepared, SCALE), step.oracle())


def test_a_sequence_full_of_nan_changes_no_other(kernels: Kernels) -> None:
    tails = [Tail(length=20), Tail(length=40), Tail(length=9), Tail(length=50, num_rows=3)]
    # In order, so that slot 0, to which careless padding would point, is the broken sequence's.
    step = make_step([*tails, Tail(length=60, num_rows=60)], shuffled=False)
    broken = step.slots[:20]
    assert broken.tolist() == list(range(20))
    expected = step.oracle()[1:]
    step.keys[broken] = step.values[broken] = torch.nan
    assert_close(step.attend(kernels)[1:], expected)


def test_blocks_out_of_order_between_the_first_and_the_last_are_found(kernels: Kernels) -> None:
    step = make_step([Tail(length=64, num_rows=64)], shuffled=False)
    (segment,) = step.plan.private
    swapped = segment.block_ids[[0, 2, 1, 3]]
    step.plan = replace(step.plan, private=(replace(segment, block_ids=swapped),))
    slots = (swapped.astype(np.int64)[:, None] * 16 + np.arange(16)).reshape(-1)
    step.slots_of_row = [slots[: row + 1] for row in range(64)]
    assert_close(step.attend(kernels), step.oracle())


def test_a_shared_edge_is_read_once_however_many_rows_see_it(kernels: Kernels) -> None:
    shared = Edge(num_blocks=64)
    tails = [Tail(length=n, edge=shared) for n in range(1, 33)]
    step = make_step(tails)
    prepared = kernels.plan_attention(step.plan, step.spec)
    assert prepared.num_kv_tokens_read == 64 * 16 + sum(range(1, 33))


def test_a_plan_of_another_backend_is_refused(kernels: Kernels) -> None:
    step = make_step([Tail(length=3)])
    with pytest.raises(TypeError, match="expected a"):
        kernels.attention(step.query, step.fill(kernels), LAYER, object(), SCALE)


def test_writing_changes_the_named_slots_of_one_layer_only(kernels: Kernels) -> None:
    step = make_step([Tail(length=40)])
    kv, before = zeroed(kernels, step.spec), zeroed(kernels, step.spec)
    slots = torch.tensor([3, 17, 30])
    kernels.write_kv(kv, LAYER, step.keys[slots], step.values[slots], slots)
    assert (kv.keys != before.keys).sum() == step.keys[slots].numel()
    assert (kv.keys[0] == before.keys[0]).all()
    assert (kv.values[0] == before.values[0]).all()


@pytest.mark.parametrize("num_rows", [1, 5, 16])
def test_copied_rows_serve_attention_like_their_source(kernels: Kernels, num_rows: int) -> None:
    step = make_step([Tail(length=num_rows)])
    kv = step.fill(kernels)
    source = int(step.plan.private[0].block_ids[0])
    target = (source + 1) % step.spec.num_blocks
    kernels.copy_rows(kv, [RowCopy(source, target, num_rows)])
    moved = PrivateSegment(
        block_ids=np.array([target], dtype=np.int32),
        start=0,
        length=num_rows,
        first_row=0,
        num_rows=1,
    )
    plan = AttentionPlan(num_rows=1, block_size=16, shared=(), private=(moved,))
    prepared = kernels.plan_attention(plan, step.spec)
    assert_close(kernels.attention(step.query, kv, LAYER, prepared, SCALE), step.oracle())


def test_copying_leaves_the_other_rows_of_the_target_alone(kernels: Kernels) -> None:
    step = make_step([Tail(length=64)], shuffled=False)
    kv = step.fill(kernels)
    before_keys, before_values = kv.keys.clone(), kv.values.clone()
    kernels.copy_rows(kv, [RowCopy(0, 2, 7)])
    copied = 7 * step.keys[0].numel()
    assert (kv.keys != before_keys).sum() == copied
    assert (kv.values != before_values).sum() == copied


@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
def test_rms_norm_equals_its_formula(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight = random_numbers(5, 48, seed=1, dtype=dtype), random_numbers(48, seed=2, dtype=dtype)
    exact = x.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    result = kernels.rms_norm(x, weight, 1e-5)
    assert result.dtype == dtype
    assert_close(result, expected)


@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
def test_rms_norm_takes_the_heads_of_a_part_of_each_row(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    wide, weight = random_numbers(5, 9, 16, seed=1, dtype=dtype), random_numbers(16, seed=2)
    heads, before = wide[:, 2:5], wide.clone()
    exact = heads.double()
    scaled = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    result = kernels.rms_norm(heads, weight.to(dtype), 1e-5)
    assert result.dtype == dtype
    assert_close(result, scaled * weight.to(dtype).double())
    assert torch.equal(wide, before)


def test_rms_norm_does_not_overflow_in_float16(kernels: Kernels) -> None:
    x = torch.full((1, 32), 3000.0, dtype=torch.float16)
    assert_close(kernels.rms_norm(x, torch.ones(32, dtype=torch.float16), 1e-5), torch.ones(1, 32))


@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
def test_rotary_turns_the_coordinates_of_each_frequency(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    heads = random_numbers(5, 4, 16, seed=1, dtype=dtype)
    angles = random_numbers(5, 8, seed=2)
    cos, sin = angles.cos(), angles.sin()
    # Complex numbers turned by multiplication are an independent way of writing a rotation.
    numbers = torch.complex(heads[..., :8].double(), heads[..., 8:].double())
    turned = numbers * torch.polar(torch.ones(5, 1, 8).double(), angles.double().unsqueeze(1))
    result = kernels.rotary(
        heads, torch.cat((cos, cos), 1).unsqueeze(1), torch.cat((-sin, sin), 1).unsqueeze(1)
    )
    assert result.dtype == dtype
    assert_close(result, torch.cat((turned.real, turned.imag), dim=-1))


@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
def test_rotary_turns_the_first_dimensions_and_leaves_the_others(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    wide = random_numbers(5, 6, 20, seed=1, dtype=dtype)
    heads, before = wide[:, 1:4], wide.clone()
    angles = random_numbers(5, 1, 4, seed=2)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    result = kernels.rotary(heads, cos, sin)
    assert result.dtype == dtype
    assert torch.equal(result[..., 8:], heads[..., 8:])
    narrow = heads[..., :8].double().contiguous()
    assert_close(
        result[..., :8], narrow * cos + torch.cat((narrow[..., 4:], narrow[..., :4]), -1) * sin
    )
    assert torch.equal(wide, before)


def formula(activation: Activation, gate: Tensor) -> Tensor:
    if activation is Activation.SILU:
        return gate / (1 + (-gate).exp())
    return gate / 2 * (1 + ((gate + 0.044715 * gate**3) * (2 / torch.pi) ** 0.5).tanh())


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
def test_activate_and_mul_equals_its_formula(
    kernels: Kernels, dtype: torch.dtype, activation: Activation
) -> None:
    gate_up = random_numbers(5, 64, seed=1, dtype=dtype)
    before = gate_up.clone()
    gate, up = gate_up.double().chunk(2, dim=-1)
    result = kernels.activate_and_mul(gate_up, activation)
    assert result.dtype == dtype
    assert_close(result, formula(activation, gate) * up)
    assert (gate_up == before).all()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_a_product_with_the_transposed_weight(
    kernels: Kernels, has_bias: bool, num_rows: int, dtype: torch.dtype
) -> None:
    x, weight = (random_numbers(n, 24, seed=n + 1).to(dtype) for n in (num_rows, 40))
    bias = random_numbers(40, seed=3).to(dtype) if has_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    result = kernels.linear(x, kernels.pack_linear(weight, bias))
    assert result.dtype == dtype
    assert_close(result, expected)


@pytest.mark.parametrize("num_rows", [0, 1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_linears_are_their_two_parts(
    kernels: Kernels, num_rows: int, dtype: torch.dtype
) -> None:
    x, gate_up = (random_numbers(num_rows, n, seed=n).to(dtype) for n in (24, 48))
    norm, residual = random_numbers(24, seed=3).to(dtype), random_numbers(num_rows, 40, seed=4)
    residual = residual.to(dtype)
    packed = kernels.pack_linear(random_numbers(40, 24, seed=5).to(dtype))
    normed = kernels.linear(kernels.rms_norm(x, norm, 1e-5), packed)
    assert_close(kernels.norm_linear(x, norm, 1e-5, packed), normed)
    for activation in Activation:
        gated = kernels.activate_and_mul(gate_up, activation)
        for added in (residual, None):
            assert_close(
                kernels.gated_linear(gate_up, packed, added, activation=activation),
                kernels.linear(gated, packed, added),
            )
    silu = kernels.linear(kernels.activate_and_mul(gate_up, Activation.SILU), packed, residual)
    assert_close(kernels.gated_linear(gate_up, packed, residual), silu)


def test_linear_takes_only_what_the_same_backend_packed(kernels: Kernels) -> None:
    with pytest.raises(TypeError, match="Projection"):
        kernels.linear(torch.zeros(1, 4), torch.zeros(3, 4))


def test_an_unknown_backend_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'cuda'; there are reference, cpu"):
        load_kernels("cuda")


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 100, 4096])
def test_masked_logits_keep_their_bits_or_become_minus_infinity(
    kernels: Kernels, vocab_size: int
) -> None:
    logits = random_numbers(5, vocab_size, seed=3)
    logits[1, 0] = torch.nan
    rows = torch.tensor([4, 1, 2])
    num_words = -(-vocab_size // 32) + 1  # a mask may be wider than the vocabulary
    allowed = np.random.default_rng(5).integers(-(2**31), 2**31, (3, num_words)).astype(np.int32)
    allowed[2] = ([-1, 0] * num_words)[:num_words]  # whole words of either
    expected = logits.numpy().copy()
    for row, words in zip(rows.tolist(), allowed, strict=True):
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]
        expected[row, bits == 0] = -np.inf
    kernels.mask_logits(logits, rows, torch.from_numpy(allowed))
    np.testing.assert_array_equal(logits.numpy(), expected)
