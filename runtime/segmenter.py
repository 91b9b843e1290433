"""Turns the block tables of a step into shared and private segments.

Leases share blocks only through the tree, so two tables that hold the same block at an index hold
the same blocks before it: the common leading blocks of the tables *are* the tree's edges, as far as
this step is concerned. Reading them off the tables needs no tree and no locks.

    tables    A  1 2 3 4 5 9        shared  [1 2 3]  rows of A, B, C
              B  1 2 3 4 5 8                [4 5]    rows of A, B
              C  1 2 3 7            private [9] A, [8] B, [7] C

Attention reads each segment once for all its rows (Yao et al. 2024, DeFT; Juravsky et al. 2024,
Hydragen). Splitting costs a call and a merge, so an edge becomes a segment of its own only where it
saves enough reads; else it stays in the private ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sapwood.kernels.segments import AttentionPlan, PrivateSegment, SharedSegment
from sapwood.runtime.common_prefix import common_length
from sapwood.runtime.step_plan import Chunk

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Edge:
    """Blocks `[first, last)` of the tables `low .. high - 1` in sorted order are the same."""

    low: int
    high: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Segmenter:
    """`min_saved_tokens`: token reads that an edge must save to be read apart. Measured per
    backend."""

    block_size: int
    min_saved_tokens: int

    def plan(self, chunks: Sequence[Chunk]) -> AttentionPlan:
        """The segments of one step. O(n log n) in chunks, and O(blocks) comparisons in numpy."""
        first_rows = np.cumsum([0, *(chunk.length for chunk in chunks)])
        depths = [0] * len(chunks)  # leading blocks that shared segments cover, by chunk
        shared = []
        for members, first, last in self._shared_edges(chunks):
            rows = [np.arange(first_rows[m], first_rows[m + 1], dtype=np.int32) for m in members]
            table = chunks[members[0]].sequence.held_lease.block_table
            shared.append(
                SharedSegment(
                    block_ids=table[first:last].copy(),
                    start=first * self.block_size,
                    length=(last - first) * self.block_size,
                    rows=np.concatenate(rows),
                )
            )
            for member in members:
                depths[member] = last
        private = tuple(
            self._private(chunk, depth, int(first_row))
            for chunk, depth, first_row in zip(chunks, depths, first_rows[:-1], strict=True)
        )
        return AttentionPlan(
            num_rows=int(first_rows[-1]),
            block_size=self.block_size,
            shared=tuple(shared),
            private=private,
        )

    def _private(self, chunk: Chunk, depth: int, first_row: int) -> PrivateSegment:
        num_blocks = -(-chunk.end // self.block_size)
        return PrivateSegment(
            block_ids=chunk.sequence.held_lease.block_table[depth:num_blocks].copy(),
            start=depth * self.block_size,
            length=chunk.end - depth * self.block_size,
            first_row=first_row,
            num_rows=chunk.length,
        )

    def _shared_edges(self, chunks: Sequence[Chunk]) -> Iterator[tuple[list[int], int, int]]:
        """(members in row order, first block, last block) of each edge worth a segment, upper
        edges before lower ones."""
        tables = [
            chunk.sequence.held_lease.block_table[: self._num_shareable_blocks(chunk)]
            for chunk in chunks
        ]
        order = sorted(range(len(chunks)), key=lambda i: tables[i].tobytes())
        for edge in self._edges([tables[i] for i in order]):
            yield sorted(order[edge.low : edge.high]), edge.first, edge.last

    def _num_shareable_blocks(self, chunk: Chunk) -> int:
        """Whole blocks that lie before the chunk and in the tree."""
        return min(chunk.sequence.held_lease.num_shared_blocks, chunk.start // self.block_size)

    def _edges(self, tables: list[Int32Array]) -> Iterator[_Edge]:
        """Edges over sorted tables, parents first. Explicit stack: the tree may be deep."""
        common = [common_length(a, b) for a, b in zip(tables, tables[1:], strict=False)]
        stack = [(0, len(tables), 0)]  # tables low .. high - 1 have `covered` blocks in segments
        while stack:
            low, high, covered = stack.pop()
            if high - low < 2:
                continue
            depth = min(common[low : high - 1])
            if (depth - covered) * (high - low - 1) * self.block_size >= self.min_saved_tokens:
                yield _Edge(low, high, covered, depth)
                covered = depth
            splits = [i + 1 for i in range(low, high - 1) if common[i] == depth]
            bounds = [low, *splits, high]
            stack.extend((a, b, covered) for a, b in zip(bounds, bounds[1:], strict=False))
