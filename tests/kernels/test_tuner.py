"""Tuning without a GPU: which shapes are chosen and what costs are read off, from given times."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from sapwood.kernels.tile_shapes import TileShape
from sapwood.kernels.tuner import Sizes, Tuner, Workload, fitted_cost
from sapwood.kernels.tuning import AttentionTuning, load_table

SMALL = Sizes(
    decoding=(Workload(num_sequences=1, length=3),),
    prompts=(Workload(num_sequences=1, length=3, num_rows=3),),
    key_counts=(1, 2),
    waves=1,
)


def shape(keys: int, rows: int = 16) -> TileShape:
    return TileShape(rows=rows, keys=keys, num_warps=4, num_stages=2)


def entry() -> AttentionTuning:
    (found,) = [e for e in load_table(None).attention if e.kv_bytes == 4 and e.max_head_dim == 64]
    return replace(found, max_head_dim=16)


class GivenTimes:
    """A timer that does not run what it times; one second for whatever has no time given."""

    def __init__(self, *seconds: float | Exception) -> None:
        self._seconds = list(seconds)

    def __call__(self, function: Callable[[], object]) -> float:
        found = self._seconds.pop(0) if self._seconds else 1.0
        if isinstance(found, Exception):
            raise found
        return found


def test_the_fastest_shape_that_fits_is_taken() -> None:
    too_large = OutOfResources(2, 1, "shared memory")
    timer = GivenTimes(3.0, too_large, 1.0, 2.0, 7.0, 5.0)
    narrow = [shape(16), shape(32), shape(64), shape(128)]
    wide = [shape(16, 32), shape(32, 32)]
    tuned = Tuner(torch.device("cpu"), timer, SMALL).tuned(entry(), narrow, wide)
    assert tuned.shapes.narrow == shape(64)
    assert tuned.shapes.wide == shape(32, 32)


def test_a_gpu_that_runs_no_shape_is_told() -> None:
    timer = GivenTimes(OutOfResources(2, 1, "shared memory"))
    with pytest.raises(RuntimeError, match="none of the shapes"):
        Tuner(torch.device("cpu"), timer, SMALL).tuned(entry(), [shape(16)], [shape(16)])


def test_costs_are_the_line_through_the_samples_and_never_negative() -> None:
    cost = fitted_cost([(100, 1.2e-5), (200, 2.2e-5), (400, 4.2e-5)])
    assert cost.per_tile == pytest.approx(2e-6)
    assert cost.per_key == pytest.approx(1e-7)
    steep = fitted_cost([(100, 1e-5), (200, 3e-5)])
    assert steep.per_tile == 0
    assert steep.per_key > 0


def test_a_table_that_was_measured_can_be_written_and_read_back() -> None:
    tuned = Tuner(torch.device("cpu"), GivenTimes(), SMALL).tuned(
        entry(), [shape(16)], [shape(16, 32)]
    )
    assert tuned.shapes.per_launch > 0
    assert tuned.shapes.per_partial > 0
