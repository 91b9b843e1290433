"""What one attention pass reads: token ranges of paged keys and values, and the query rows on each.

Pure values of numpy arrays; nothing here imports torch, and nothing here knows what a sequence, a
tree or a model is. Rows are the query positions of one step, numbered in the order of the batch.

    positions   0        16        32        48    53
    shared      [========================)              seen whole by rows 0, 1, 2, 3
    private                               [=======xxx)  rows 2, 3 and 4 of the batch are the last
                                                        three positions, each sees up to itself
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSegment:
    """Positions `[start, start + length)`, a whole number of blocks, seen whole by each of `rows`.

    `block_ids` int32 `[length / block_size]` in the order of the positions; `rows` int32
    `[num_rows]`, ascending and without repetition.
    """

    block_ids: Int32Array
    start: int
    length: int
    rows: Int32Array

    def __post_init__(self) -> None:
        if self.start < 0 or self.length <= 0:
            raise ValueError(f"a segment is not empty: start {self.start}, length {self.length}")
        if len(self.rows) == 0:
            raise ValueError("a shared segment needs at least one query row")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateSegment:
    """Positions `[start, start + length)` of one sequence, seen causally by its own query rows.

    The rows are `first_row .. first_row + num_rows - 1` of the batch; row `j` (from 0) stands at
    position `start + length - num_rows + j` and sees the segment up to and including itself.
    `block_ids` int32 `[ceil(length / block_size)]`; `start` is a multiple of the block size, the
    end need not be.
    """

    block_ids: Int32Array
    start: int
    length: int
    first_row: int
    num_rows: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.first_row < 0:
            raise ValueError(f"negative start {self.start} or first row {self.first_row}")
        if not 0 < self.num_rows <= self.length:
            raise ValueError(
                f"{self.num_rows} query rows do not fit a private segment of {self.length} tokens: "
                "it holds at least the rows' own positions"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """All segments of one step.

    Each of the `num_rows` rows lies in exactly one private segment and in any number of shared
    ones; together they cover the positions from 0 to the row's own exactly once. Building one
    checks what costs O(segments); `check` checks the whole statement.
    """

    num_rows: int
    block_size: int
    shared: tuple[SharedSegment, ...]
    private: tuple[PrivateSegment, ...]

    def __post_init__(self) -> None:
        if self.block_size <= 0:
            raise ValueError(f"block_size is {self.block_size}, it must be positive")
        for segment in self.shared:
            if segment.start % self.block_size or (
                len(segment.block_ids) * self.block_size != segment.length
            ):
                raise ValueError(
                    f"shared segment [{segment.start}, +{segment.length}) is not made of "
                    f"{len(segment.block_ids)} whole blocks of {self.block_size} tokens"
                )
        covered = 0
        for private in self.private:
            num_blocks = -(-private.length // self.block_size)
            if private.start % self.block_size or len(private.block_ids) != num_blocks:
                raise ValueError(
                    f"private segment [{private.start}, +{private.length}) needs {num_blocks} "
                    f"blocks of {self.block_size} tokens from a block boundary, "
                    f"it names {len(private.block_ids)}"
                )
            covered += private.num_rows
        if covered != self.num_rows:
            raise ValueError(
                f"{covered} rows lie in private segments, the step has {self.num_rows}"
            )

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of all segments, each counted once: what one pass over the plan has to read."""
        return sum(s.length for s in self.shared) + sum(p.length for p in self.private)

    def check(self) -> None:
        """Assert that every row's segments cover its positions exactly once. O(rows x depth)."""
        start_of_row = np.full(self.num_rows, -1, dtype=np.int64)
        for private in self.private:
            start_of_row[private.first_row : private.first_row + private.num_rows] = private.start
        # As many rows as the step has were named, so that none is missing means none came twice.
        assert (start_of_row >= 0).all(), "a row lies in no private segment"
        # Shared ranges of a row that are disjoint and end where its private one begins.
        reached = np.zeros(self.num_rows, dtype=np.int64)
        for segment in sorted(self.shared, key=lambda s: s.start):
            assert (reached[segment.rows] == segment.start).all(), "a row's segments leave a gap"
            assert len(np.unique(segment.rows)) == len(segment.rows), "a row is named twice"
            reached[segment.rows] += segment.length
        assert (reached == start_of_row).all(), "shared segments do not reach the private one"


def slots_of(block_ids: NDArray[np.int32], block_size: int, length: int) -> NDArray[np.int64]:
    """The slots of the first `length` tokens of a block table, int64 `[length]`."""
    first_slots = block_ids.astype(np.int64)[:, None] * block_size
    return (first_slots + np.arange(block_size)).reshape(-1)[:length]
