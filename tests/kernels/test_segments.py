"""The values that describe a step's attention refuse what would read the wrong tokens."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from sapwood.kernels import AttentionPlan, PrivateSegment, SharedSegment


def shared(**changes: Any) -> SharedSegment:
    fields: dict[str, Any] = {
        "block_ids": np.array([3, 4], dtype=np.int32),
        "start": 0,
        "length": 8,
        "rows": np.array([0, 1], dtype=np.int32),
    }
    return SharedSegment(**(fields | changes))


def private(**changes: Any) -> PrivateSegment:
    fields: dict[str, Any] = {
        "block_ids": np.array([7], dtype=np.int32),
        "start": 8,
        "length": 3,
        "first_row": 0,
        "num_rows": 1,
    }
    return PrivateSegment(**(fields | changes))


def plan(**changes: Any) -> AttentionPlan:
    fields: dict[str, Any] = {
        "num_rows": 2,
        "block_size": 4,
        "shared": (shared(),),
        "private": (private(), private(first_row=1)),
    }
    return AttentionPlan(**(fields | changes))


def test_a_plan_counts_each_segments_tokens_once() -> None:
    complete = plan()
    complete.check()
    assert complete.num_kv_tokens == 8 + 3 + 3


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 0},
        {"shared": (shared(length=7),)},
        {"shared": (shared(length=12),)},
        {"shared": (shared(start=2),)},
        {"private": (private(num_rows=2), private(first_row=1))},
        {"private": (private(),)},
        {"private": (private(length=5), private(first_row=1))},
        {"private": (private(start=9), private(first_row=1))},
    ],
)
def test_a_plan_with_wrong_blocks_or_rows_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"block|rows"):
        plan(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"shared": ()},
        {"shared": (shared(rows=np.array([0], dtype=np.int32)),)},
        {"shared": (shared(rows=np.array([1, 1], dtype=np.int32)),)},
        {"shared": (shared(), shared())},
        {"private": (private(), private())},
    ],
)
def test_check_finds_positions_that_are_missing_or_seen_twice(changes: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        plan(**changes).check()


@pytest.mark.parametrize("changes", [{"length": 0}, {"start": -4}, {"rows": np.zeros(0, np.int32)}])
def test_an_empty_shared_segment_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="segment"):
        shared(**changes)


@pytest.mark.parametrize("changes", [{"num_rows": 0}, {"num_rows": 4}, {"first_row": -1}])
def test_a_private_segment_that_lacks_its_rows_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="row"):
        private(**changes)


def test_the_package_is_imported_without_torch() -> None:
    code = "import sys, sapwood.kernels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
