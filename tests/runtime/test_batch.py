"""A batch's arrays say for every row what its chunk says."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood.kernels.segments import AttentionPlan
from sapwood.runtime.batch import BatchArrays
from sapwood.runtime.step_plan import Chunk, StepPlan


def chunk_of(start: int, length: int, num_logits: int, block_size: int, seed: int) -> Chunk:
    """A chunk of a sequence that has tokens behind it as well, over scattered blocks."""
    random = np.random.default_rng(seed)
    num_tokens = start + length + 3
    lease = SimpleNamespace(
        block_table=random.permutation(1000)[: -(-num_tokens // block_size)].astype(np.int32)
    )
    sequence = SimpleNamespace(
        tried_token_ids=random.integers(0, 5000, num_tokens).astype(np.int32), held_lease=lease
    )
    return Chunk(cast(Any, sequence), start, length, num_logits, num_samples=1)


def plan_of(chunks: list[Chunk], block_size: int) -> StepPlan:
    attention = SimpleNamespace(num_rows=sum(chunk.length for chunk in chunks))
    return StepPlan(
        number=1, chunks=tuple(chunks), copies=(), attention=cast(AttentionPlan, attention)
    )


def rows_of(chunk: Chunk, block_size: int) -> list[tuple[int, int, int]]:
    """Token, position and slot of each row, one at a time."""
    table = chunk.sequence.held_lease.block_table
    return [
        (
            int(chunk.sequence.tried_token_ids[position]),
            position,
            int(table[position // block_size]) * block_size + position % block_size,
        )
        for position in range(chunk.start, chunk.end)
    ]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@given(
    st.lists(
        st.tuples(st.integers(0, 70), st.integers(1, 40), st.integers(0, 40)),
        min_size=1,
        max_size=8,
    )
)
def test_a_batch_has_the_rows_of_its_chunks_behind_each_other(
    block_size: int, shapes: list[tuple[int, int, int]]
) -> None:
    chunks = [
        chunk_of(start, length, min(length, num_logits), block_size, seed)
        for seed, (start, length, num_logits) in enumerate(shapes)
    ]
    arrays = BatchArrays.of(plan_of(chunks, block_size), block_size)
    rows = [row for chunk in chunks for row in rows_of(chunk, block_size)]
    assert list(zip(*(array.tolist() for array in arrays[:3]), strict=True)) == rows
    expected, end = [], 0
    for chunk in chunks:
        end += chunk.length
        expected += range(end - chunk.num_logits, end)
    assert arrays.logits_rows.tolist() == expected
    assert all(array.dtype == np.int64 for array in arrays)
