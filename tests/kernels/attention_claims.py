"""Claims about attention and the KV cache.

The oracle is dense float64 arithmetic over keys and values that lie in order, without blocks,
segments or merging.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from sapwood.kernels import AttentionPlan, PrivateSegment
from sapwood.kernels.interface import RowCopy
from tests.kernels.claims import TOLERANCE, Subject, assert_close, claim
from tests.kernels.steps import LAYER, SCALE, Edge, Tail, forest, make_step, write, zeroed


@claim(num_groups=[1, 3, 8], head_dim=[16, 64], block_size=[1, 16], shuffled=[True, False])
def attention_over_a_forest_equals_dense_attention(
    subject: Subject, num_groups: int, head_dim: int, block_size: int, shuffled: bool
) -> None:
    step = make_step(
        subject,
        forest(block_size),
        block_size=block_size,
        num_groups=num_groups,
        head_dim=head_dim,
        shuffled=shuffled,
    )
    assert_close(step.attend(subject.kernels), step.oracle())


@claim(dtype=[torch.bfloat16, torch.float16])
def attention_in_half_precision_accumulates_in_float32(
    subject: Subject, dtype: torch.dtype
) -> None:
    step = make_step(subject, forest(16), dtype=dtype, head_dim=64)
    result = step.attend(subject.kernels)
    assert result.dtype == dtype
    assert_close(result, step.oracle())


def around_a_block() -> list[Tail]:
    """Decode rows, drafts and chunks that end just before, at and just behind a block's end."""
    shared = Edge(num_blocks=2)
    lengths = (1, 15, 16, 17, 31, 33)
    decode = [Tail(length=n, edge=edge) for n in lengths for edge in (None, shared)]
    return [*decode, Tail(length=17, num_rows=4), Tail(length=16, num_rows=16, edge=shared)]


@claim(
    head_dim=[64, 80, 96, 128, 256],
    num_groups=[1, 2, 4, 7, 8],
    dtype=[torch.bfloat16, torch.float32, torch.float16],
)
def attention_with_heads_and_groups_of_every_size(
    subject: Subject, head_dim: int, num_groups: int, dtype: torch.dtype
) -> None:
    step = make_step(
        subject,
        around_a_block(),
        head_dim=head_dim,
        num_groups=num_groups,
        num_kv_heads=1,
        dtype=dtype,
    )
    # Scores of long heads are large, and their own rounding shows in their exponentials.
    tolerance = max(TOLERANCE[dtype], 1e-5)
    assert_close(step.attend(subject.kernels), step.oracle(), tolerance)


def single_steps() -> dict[str, list[Tail]]:
    """Steps of one kind each, by name."""
    shared = Edge(num_blocks=40)
    return {
        "one_decode_row": [Tail(length=100)],
        "one_long_decode_row": [Tail(length=2000)],
        "one_cold_chunk": [Tail(length=64, num_rows=64)],
        "one_resumed_chunk": [Tail(length=90, num_rows=30)],
        "one_draft": [Tail(length=90, num_rows=4)],
        "equal_decode_rows": [Tail(length=48)] * 8,
        "short_decode_rows_not_sorted_by_length": [Tail(length=n) for n in (3, 40, 5, 17)],
        "decode_rows_of_all_lengths": [Tail(length=n * n) for n in range(1, 30)],
        "decode_rows_below_an_edge": [Tail(length=n, edge=shared) for n in (3, 4, 5, 300, 6)],
        "chunks_below_an_edge": [Tail(length=n, num_rows=n, edge=shared) for n in (3, 4, 50)],
        "rows_around_a_block": around_a_block(),
        "an_edge_with_one_row": [Tail(length=1, edge=shared), Tail(length=1)],
    }


@claim(kind=tuple(single_steps()), shuffled=[True, False])
def attention_of_each_kind_of_step_equals_dense_attention(
    subject: Subject, kind: str, shuffled: bool
) -> None:
    step = make_step(subject, single_steps()[kind], shuffled=shuffled)
    assert_close(step.attend(subject.kernels), step.oracle())


# With blocks of 16 the forest's shared edges end at 64, 80, 112 and 112, private tokens after 1 to
# 600 more. Windows within a block; that cut edges and blocks, of which some rows see a part and
# others nothing; and one that cuts nothing.
WINDOWS = (
    (1, 17, 83, 600),
    (2, 33, None, 100, 10_000),
    (7, 16, 50, 128, 599),
)


@claim(windows=WINDOWS, head_dim=[12, 64], block_size=[1, 16])
def rows_see_no_further_back_than_their_layers_window(
    subject: Subject, windows: tuple[int | None, ...], head_dim: int, block_size: int
) -> None:
    step = make_step(
        subject,
        forest(block_size),
        block_size=block_size,
        head_dim=head_dim,
        layer_windows=windows,
    )
    prepared = subject.kernels.plan_attention(step.plan, step.spec)
    kv = zeroed(subject.kernels, step.spec)
    for layer in range(step.spec.num_layers):
        step.write(subject.kernels, kv, layer)
        result = subject.kernels.attention(step.query, kv, layer, prepared, SCALE)
        assert_close(result, step.oracle(layer))


@claim(window=[1, 20, 130, 600], kind=tuple(single_steps()))
def windows_in_each_kind_of_step(subject: Subject, kind: str, window: int) -> None:
    step = make_step(subject, single_steps()[kind], head_dim=16, layer_windows=(window, window))
    assert_close(step.attend(subject.kernels), step.oracle())


@claim(head_dim=[12, 64], softcap=[0.5, 5.0, 50.0, 1e4], window=[None, 40])
def scores_are_capped_softly(
    subject: Subject, head_dim: int, softcap: float, window: int | None
) -> None:
    step = make_step(subject, forest(16), head_dim=head_dim, layer_windows=(None, window))
    step.query *= 3.0  # scores of about 50, and 0 of a row without a query
    step.query[5] = 0.0
    assert_close(step.attend(subject.kernels, softcap=softcap), step.oracle(softcap=softcap), 8e-6)


@claim(head_dim=[12, 64], softcap=[None, 5.0], window=[None, 40])
def a_sink_takes_its_share_of_the_weight(
    subject: Subject, head_dim: int, softcap: float | None, window: int | None
) -> None:
    step = make_step(subject, forest(16), head_dim=head_dim, layer_windows=(None, window))
    sinks = torch.tensor([-torch.inf, -3.0, 0.7, 8.0, 150.0, 1e4], device=subject.device)
    expected = step.oracle(softcap=softcap, sinks=sinks)
    result = step.attend(subject.kernels, softcap=softcap, sinks=sinks)
    assert_close(result, expected)
    assert (expected[:, 4:].abs() < 1e-20).all()
    without = step.attend(subject.kernels, softcap=softcap)
    assert_close(result[:, 0], without[:, 0].double())


@claim(dtype=[torch.bfloat16, torch.float16])
def windows_caps_and_sinks_in_half_precision(subject: Subject, dtype: torch.dtype) -> None:
    step = make_step(subject, forest(16), dtype=dtype, head_dim=64, layer_windows=(None, 40))
    sinks = subject.random(6, dtype=dtype)
    result = step.attend(subject.kernels, softcap=20.0, sinks=sinks)
    assert result.dtype == dtype
    assert_close(result, step.oracle(softcap=20.0, sinks=sinks))


@claim()
def what_is_behind_the_window_is_not_read_by_a_single_row(subject: Subject) -> None:
    step = make_step(subject, [Tail(length=200, edge=Edge(num_blocks=4))], layer_windows=(None, 70))
    expected = step.oracle()
    hidden = step.slots_of_row[0][:-70]
    step.keys[hidden] = step.values[hidden] = torch.nan
    assert_close(step.attend(subject.kernels), expected)


@claim()
def only_tokens_that_some_row_sees_are_read(subject: Subject) -> None:
    shared = Edge(num_blocks=64)
    step = make_step(
        subject, [Tail(length=n, edge=shared) for n in (10, 50)], layer_windows=(40, 20)
    )
    prepared = subject.kernels.plan_attention(step.plan, step.spec)
    assert prepared.num_kv_tokens_read == 30 + 10 + 40  # the edge's last 30 by the first row
    full = replace(step.spec, layer_windows=(40, None))
    assert subject.kernels.plan_attention(step.plan, full).num_kv_tokens_read == 64 * 16 + 10 + 50


@claim()
def a_row_gets_the_same_result_alone_and_among_others(subject: Subject) -> None:
    tails = [Tail(length=n) for n in (40, 1, 7, 300, 90)]
    together = make_step(subject, tails, shuffled=False)
    alone = make_step(subject, tails[:1], shuffled=False)
    # The first row, its blocks and so its query, keys and values are the same in both steps.
    alone.query = together.query[:1]
    alone.keys, alone.values = together.keys, together.values
    assert_close(
        together.attend(subject.kernels)[:1], alone.attend(subject.kernels), tolerance=1e-6
    )


@claim()
def what_was_never_written_is_never_read(subject: Subject) -> None:
    step = make_step(subject, forest(16))
    kv = subject.kernels.make_kv_cache(step.spec)
    everywhere = torch.arange(step.spec.num_slots, device=subject.device)
    poison = torch.full_like(step.keys, torch.nan)
    write(subject.kernels, kv, LAYER, poison, poison, everywhere)
    step.write(subject.kernels, kv, LAYER)
    prepared = subject.kernels.plan_attention(step.plan, step.spec)
    assert_close(subject.kernels.attention(step.query, kv, LAYER, prepared, SCALE), step.oracle())


@claim()
def a_sequence_full_of_nan_changes_no_other(subject: Subject) -> None:
    tails = [Tail(length=20), Tail(length=40), Tail(length=9), Tail(length=50, num_rows=3)]
    # In order, so that slot 0, to which careless padding would point, is the broken sequence's.
    step = make_step(subject, [*tails, Tail(length=60, num_rows=60)], shuffled=False)
    broken = step.slots[:20]
    assert broken.tolist() == list(range(20))
    expected = step.oracle()[1:]
    step.keys[broken] = step.values[broken] = torch.nan
    assert_close(step.attend(subject.kernels)[1:], expected)


@claim()
def blocks_out_of_order_between_the_first_and_the_last_are_found(subject: Subject) -> None:
    step = make_step(subject, [Tail(length=64, num_rows=64)], shuffled=False)
    (segment,) = step.plan.private
    swapped = segment.block_ids[[0, 2, 1, 3]]
    step.plan = replace(step.plan, private=(replace(segment, block_ids=swapped),))
    slots = (swapped.astype(np.int64)[:, None] * 16 + np.arange(16)).reshape(-1)
    step.slots_of_row = [slots[: row + 1] for row in range(64)]
    assert_close(step.attend(subject.kernels), step.oracle())


@claim()
def a_shared_edge_is_read_once_for_all_rows_of_a_tile(subject: Subject) -> None:
    shared = Edge(num_blocks=64)
    tails = [Tail(length=n, edge=shared) for n in range(1, 17)]
    step = make_step(subject, tails)
    prepared = subject.kernels.plan_attention(step.plan, step.spec)
    assert prepared.num_kv_tokens_read == 64 * 16 + sum(range(1, 17))


@claim()
def writing_changes_the_named_slots_of_one_layer_only(subject: Subject) -> None:
    step = make_step(subject, [Tail(length=40)])
    kv, before = zeroed(subject.kernels, step.spec), zeroed(subject.kernels, step.spec)
    slots = torch.tensor([3, 17, 30], device=subject.device)
    subject.kernels.write_kv(kv, LAYER, step.keys[slots], step.values[slots], slots)
    assert (kv.keys != before.keys).sum() == step.keys[slots].numel()
    assert (kv.keys[0] == before.keys[0]).all()
    assert (kv.values[0] == before.values[0]).all()


@claim(num_rows=[1, 5, 16])
def copied_rows_serve_attention_like_their_source(subject: Subject, num_rows: int) -> None:
    step = make_step(subject, [Tail(length=num_rows)])
    kv = step.fill(subject.kernels)
    source = int(step.plan.private[0].block_ids[0])
    target = (source + 1) % step.spec.num_blocks
    subject.kernels.copy_rows(kv, [RowCopy(source, target, num_rows)])
    moved = PrivateSegment(
        block_ids=np.array([target], dtype=np.int32),
        start=0,
        length=num_rows,
        first_row=0,
        num_rows=1,
    )
    plan = AttentionPlan(num_rows=1, block_size=16, shared=(), private=(moved,))
    prepared = subject.kernels.plan_attention(plan, step.spec)
    assert_close(subject.kernels.attention(step.query, kv, LAYER, prepared, SCALE), step.oracle())


@claim()
def copying_leaves_the_other_rows_of_the_target_alone(subject: Subject) -> None:
    step = make_step(subject, [Tail(length=64)], shuffled=False)
    kv = step.fill(subject.kernels)
    before_keys, before_values = kv.keys.clone(), kv.values.clone()
    subject.kernels.copy_rows(kv, [RowCopy(0, 2, 7)])
    copied = 7 * step.keys[0].numel()
    assert (kv.keys != before_keys).sum() == copied
    assert (kv.values != before_values).sum() == copied
