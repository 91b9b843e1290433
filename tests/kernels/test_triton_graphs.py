"""Triton's kernels in recorded steps: what is launched is the same, what comes out too, to the bit.

In the interpreter a launch is a call, of which the grid, the numbers and the addresses are noted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from sapwood.kernels.interface import KVCacheSpec
from sapwood.kernels.segments import AttentionPlan, PrivateSegment
from sapwood.kernels.staging import Staging
from sapwood.kernels.triton_kernels import TritonAttention, TritonKernels
from sapwood.runtime.weights import load_model
from tests.runtime.static_kernels import Operations
from tests.runtime.test_cuda_graphs import (
    NUM_BLOCKS,
    GraphedRunner,
    check_equal,
    continue_together,
)
from tests.runtime.tiny_models import Case, Runner, save_random_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for Triton's interpreter")


class RowwiseTritonKernels(TritonKernels):
    """Projections one row at a time: torch's own depend on the number of rows, on a CPU."""

    def linear(self, x: Tensor, packed: object, residual: Tensor | None = None) -> Tensor:
        residuals = [None] * len(x) if residual is None else residual.split(1)
        linear = super().linear
        return torch.cat(
            [linear(*row) for row in zip(x.split(1), [packed] * len(x), residuals, strict=True)]
        )


@pytest.fixture(autouse=True)
def launches_are_noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of all kernels that were launched while operations were noted."""
    from triton.runtime.interpreter import GridExecutor

    launch, names = GridExecutor.__call__, []

    def noted(executor: Any, *args: Any, **kwargs: Any) -> None:
        mode = _get_current_dispatch_mode()
        if isinstance(mode, Operations):
            names.append(executor.fn.__name__)
            mode.note(executor.fn.__name__, (str(executor.grid), args, kwargs))
        with _disable_current_modes():
            launch(executor, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", noted)
    yield names


# Two layers, one of which has a window, with soft caps; small, for the interpreter is slow.
SMALL = Case(
    "small",
    "gemma2",
    {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "hidden_size": 32,
        "sliding_window": 11,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
)


# What padded rows hold is anything, and they are computed with like others.
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_a_replayed_step_has_the_bits_of_a_step_without_graphs(
    tmp_path: Path, launches_are_noted: list[str]
) -> None:
    save_random_model(tmp_path, SMALL)
    model = load_model(tmp_path, kernels=RowwiseTritonKernels()).model
    expected = continue_together(Runner(model, RowwiseTritonKernels(), NUM_BLOCKS), 3, 1)
    runner = GraphedRunner(model, RowwiseTritonKernels(), row_counts=(4,))
    runner.graphed.record_all()  # over a plan of no rows
    check_equal(continue_together(runner, 3, 1), expected)
    assert runner.num_graphed == runner.recorder.num_replays == 1
    assert {"attend_tiles", "merge_partials"} <= set(launches_are_noted)


def test_a_plan_that_a_graph_has_no_room_for_is_planned_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And is then what it is without graphs; the graph's tables stay as they were."""
    spec = KVCacheSpec(
        num_layers=1,
        num_blocks=64,
        block_size=4,
        num_kv_heads=1,
        head_dim=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    kernels = TritonKernels()
    static = kernels.static_attention(spec, 1, spec.block_size, Staging(spec.device))
    fitting, too_long = last_rows(1, 1, spec), last_rows(1, 64, spec)
    too_many_rows = last_rows(2, 1, spec)
    expected = [kernels.plan_attention(plan, spec) for plan in (too_long, too_many_rows)]
    assert static.load(fitting) is static
    tables = static.prepared.tables.clone()

    planned: list[AttentionPlan] = []
    plan_tiles = kernels.plan_tiles

    def noting(plan: AttentionPlan, spec: KVCacheSpec) -> object:
        planned.append(plan)
        return plan_tiles(plan, spec)

    monkeypatch.setattr(kernels, "plan_tiles", noting)
    for plan, alone in zip((too_long, too_many_rows), expected, strict=True):
        prepared = static.load(plan)
        assert isinstance(prepared, TritonAttention)
        assert torch.equal(prepared.tables, alone.tables)
        assert (prepared.sections, prepared.num_kv_tokens_read) == (
            alone.sections,
            alone.num_kv_tokens_read,
        )
    assert planned == [too_long, too_many_rows]
    assert torch.equal(static.prepared.tables, tables)


def last_rows(num_rows: int, num_blocks: int, spec: KVCacheSpec) -> AttentionPlan:
    """Those at the end of one sequence."""
    segment = PrivateSegment(
        block_ids=np.arange(num_blocks, dtype=np.int32),
        start=0,
        length=num_blocks * spec.block_size,
        first_row=0,
        num_rows=num_rows,
    )
    return AttentionPlan(
        num_rows=num_rows, block_size=spec.block_size, shared=(), private=(segment,)
    )
