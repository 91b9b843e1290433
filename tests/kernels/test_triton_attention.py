"""What is Triton's own about attention: shapes of tiles, ranges that are split, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sapwood.kernels.interface import Kernels
from sapwood.kernels.tile_shapes import TileShape, TileShapes
from sapwood.kernels.triton_kernels import TritonKernels
from sapwood.runtime.weights import load_model
from tests.kernels.backends import INTERPRETED_SHAPES, device_of, load, table_of
from tests.kernels.claims import Subject, assert_close
from tests.kernels.steps import LAYER, SCALE, Edge, Tail, make_step
from tests.runtime.tiny_models import (
    Case,
    Chunk,
    PagedSequence,
    Runner,
    random_tokens,
    reference_logits,
    save_random_model,
)


def subject_with(shapes: TileShapes) -> Subject:
    return Subject(TritonKernels(table=table_of(shapes)), device_of("triton"))


@pytest.fixture
def kernels() -> Kernels:
    return load("triton")


def few_of_each() -> list[Tail]:
    """An edge, a decode row, a draft and a chunk below it, and a chunk of its own."""
    shared = Edge(num_blocks=5)
    return [
        Tail(length=50, edge=shared),
        Tail(length=9, num_rows=3, edge=shared),
        Tail(length=30, num_rows=20, edge=shared),
        Tail(length=70, num_rows=33),
    ]


# Keys within a block, of one block and of several; one query row of a tile and many; groups that
# fill a tile and that do not.
@pytest.mark.parametrize(
    ("rows", "keys", "num_groups", "window"),
    [(16, 16, 16, 37), (32, 128, 5, None), (64, 16, 3, 37), (128, 128, 8, None)],
)
def test_tiles_of_every_shape_give_the_same(
    rows: int, keys: int, num_groups: int, window: int | None
) -> None:
    shape = TileShape(rows=rows, keys=keys, num_warps=4, num_stages=2)
    subject = subject_with(replace(INTERPRETED_SHAPES, narrow=shape, wide=shape))
    step = make_step(
        subject,
        few_of_each(),
        num_kv_heads=1,
        num_groups=num_groups,
        layer_windows=(None, window),
    )
    assert_close(step.attend(subject.kernels), step.oracle())


def test_a_row_that_is_split_into_many_ranges_is_merged_of_all() -> None:
    cost = replace(INTERPRETED_SHAPES.narrow_cost, per_tile=0.0)
    subject = subject_with(
        replace(INTERPRETED_SHAPES, narrow_cost=cost, per_partial=0.0, per_launch=0.0)
    )
    step = make_step(subject, [Tail(length=1500)], num_kv_heads=1)
    prepared = subject.kernels.plan_attention(step.plan, step.spec)
    assert isinstance(subject.kernels, TritonKernels)
    plan = subject.kernels.plan_tiles(step.plan, step.spec)[None]
    assert plan.num_partials > 8  # more than are merged at once
    result = subject.kernels.attention(
        step.query, step.fill(subject.kernels), LAYER, prepared, SCALE
    )
    assert_close(result, step.oracle())


def test_a_group_larger_than_was_planned_for_is_refused(kernels: Kernels) -> None:
    step = make_step(Subject(kernels, device_of("triton")), [Tail(length=3)])
    spec = replace(step.spec, group_size=2)
    prepared = kernels.plan_attention(step.plan, spec)
    kv = kernels.make_kv_cache(spec)
    with pytest.raises(ValueError, match="6 query heads for 2 .* groups of 2; set group_size"):
        kernels.attention(step.query, kv, LAYER, prepared, SCALE)


def test_a_smaller_group_than_was_planned_for_is_attended_to(kernels: Kernels) -> None:
    subject = Subject(kernels, device_of("triton"))
    step = make_step(subject, few_of_each())
    step.spec = replace(step.spec, group_size=5)
    assert_close(step.attend(kernels), step.oracle())


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_scale_that_is_not_positive_is_refused(kernels: Kernels, scale: float) -> None:
    step = make_step(Subject(kernels, device_of("triton")), [Tail(length=3)])
    prepared, kv = kernels.plan_attention(step.plan, step.spec), step.fill(kernels)
    with pytest.raises(ValueError, match="must be positive"):
        kernels.attention(step.query, kv, LAYER, prepared, scale)


def test_a_cache_with_more_rows_than_kernels_count_is_refused(kernels: Kernels) -> None:
    step = make_step(Subject(kernels, device_of("triton")), [Tail(length=3)])
    with pytest.raises(ValueError, match="use fewer blocks"):
        kernels.make_kv_cache(replace(step.spec, num_blocks=2**27))


@pytest.mark.skipif(torch.cuda.is_available(), reason="its model is on a CPU")
def test_a_models_logits_are_those_of_transformers(kernels: Kernels, tmp_path: Path) -> None:
    case = Case("small", "qwen3", {"num_hidden_layers": 2, "head_dim": 16})
    reference = save_random_model(tmp_path, case)
    runner = Runner(load_model(tmp_path, kernels=kernels).model, kernels)
    sequence, tokens = PagedSequence(), random_tokens(15)
    (prompt,) = runner.step(Chunk(sequence, tokens[:11], num_logits=11))
    (draft,) = runner.step(Chunk(sequence, tokens[11:14], num_logits=3))
    (decoded,) = runner.step(Chunk(sequence, tokens[14:]))
    expected = reference_logits(reference, tokens)
    distance = (torch.cat((prompt, draft, decoded)) - expected).abs().max()
    assert distance <= 1e-3 * expected.std()
