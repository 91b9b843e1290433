"""What the rows of a step see of each segment through a window: the tokens cut to it.

    positions   0        16        32        48
    segment              [========================)   tokens 0 to 31 of the segment
    row at 50, 24 tokens            (ssssssssssssss)  it sees from position 27 on: begin 11, end 32
    row at 60, 24 tokens                     (sssss)  from position 37 on: begin 21, end 32
    kept                            [==============)  11 tokens that no row sees are cut off: begins
                                                      0 and 10, ends 21

Like segments.py without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sapwood.kernels.segments import AttentionPlan, PrivateSegment, SharedSegment, slots_of

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSegment:
    """A segment without the tokens that no row sees and the rows that see no token.

    Row `rows[i]` of the batch sees `slots[begins[i] : ends[i]]`. All int64, `slots` [num_tokens] in
    the order of positions, the others [num_rows]. `start` is the position of the first token.
    """

    start: int
    slots: Int64Array
    rows: Int64Array
    begins: Int64Array
    ends: Int64Array

    @property
    def visible(self) -> NDArray[np.bool_]:
        """Which row sees which slot, [num_rows, num_tokens]."""
        tokens = np.arange(len(self.slots))
        return (tokens >= self.begins[:, None]) & (tokens < self.ends[:, None])

    @property
    def is_seen_whole(self) -> bool:
        return not self.begins.any() and bool((self.ends == len(self.slots)).all())


def narrowed(plan: AttentionPlan, window: int | None) -> int | None:
    """`window`, or None where it hides nothing from any row of the plan."""
    if window is None:
        return None
    longest = max((p.start + p.length for p in plan.private), default=0)
    return window if window < longest else None


def seen_shared(plan: AttentionPlan, window: int | None) -> Iterator[SeenSegment]:
    """The shared segments of which some row sees a part, by their start. O(rows x depth)."""
    first_positions = None if window is None else _positions(plan) + 1 - window
    for shared in sorted(plan.shared, key=lambda segment: segment.start):
        rows = shared.rows.astype(np.int64)
        begins = np.zeros_like(rows)
        if first_positions is not None:
            begins = np.maximum(first_positions[rows] - shared.start, 0)
            sees_any = begins < shared.length
            rows, begins = rows[sees_any], begins[sees_any]
        if len(rows):
            yield _seen(shared, plan.block_size, rows, begins, np.full_like(rows, shared.length))


def seen_private(segment: PrivateSegment, block_size: int, window: int | None) -> SeenSegment:
    """What a private segment's rows see of it, each at least itself."""
    ends = np.arange(segment.length - segment.num_rows, segment.length) + 1
    begins = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    rows = np.arange(segment.first_row, segment.first_row + segment.num_rows)
    return _seen(segment, block_size, rows, begins, ends)


def _positions(plan: AttentionPlan) -> Int64Array:
    """Where each of the plan's rows stands in its sequence, [num_rows]."""
    positions = np.empty(plan.num_rows, dtype=np.int64)
    for private in plan.private:
        end = private.start + private.length
        rows = slice(private.first_row, private.first_row + private.num_rows)
        positions[rows] = np.arange(end - private.num_rows, end)
    return positions


def _seen(
    segment: SharedSegment | PrivateSegment,
    block_size: int,
    rows: Int64Array,
    begins: Int64Array,
    ends: Int64Array,
) -> SeenSegment:
    num_hidden = int(begins.min())
    return SeenSegment(
        start=segment.start + num_hidden,
        slots=slots_of(segment.block_ids, block_size, segment.length)[num_hidden:],
        rows=rows,
        begins=begins - num_hidden,
        ends=ends - num_hidden,
    )
