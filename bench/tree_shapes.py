"""Twenty steps whose sequences share prefixes in different ways, as attention plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sapwood.kernels import AttentionPlan, PrivateSegment, SharedSegment

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Tail:
    """A sequence's own last tokens, of which the last `num_rows` are computed."""

    length: int
    num_rows: int = 1


@dataclass(frozen=True, slots=True)
class Edge:
    """Tokens (whole blocks) that everything below shares."""

    length: int
    below: tuple[Edge | Tail, ...]


Forest = Sequence[Edge | Tail]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """A step: its sequences, and the window of the layers that are looked at."""

    name: str
    forest: Forest
    window: int | None = None


@dataclass
class _Planner:
    shared: list[SharedSegment] = field(default_factory=list)
    private: list[PrivateSegment] = field(default_factory=list)
    num_rows: int = 0
    num_blocks: int = 0

    def add(self, node: Edge | Tail, start: int) -> None:
        blocks = self._blocks(-(-node.length // BLOCK_SIZE))
        if isinstance(node, Tail):
            self.private.append(
                PrivateSegment(
                    block_ids=blocks,
                    start=start,
                    length=node.length,
                    first_row=self.num_rows,
                    num_rows=node.num_rows,
                )
            )
            self.num_rows += node.num_rows
            return
        first_row = self.num_rows
        for child in node.below:
            self.add(child, start + node.length)
        rows = np.arange(first_row, self.num_rows, dtype=np.int32)
        self.shared.append(
            SharedSegment(block_ids=blocks, start=start, length=node.length, rows=rows)
        )

    def _blocks(self, count: int) -> np.ndarray:
        self.num_blocks += count
        return np.arange(self.num_blocks - count, self.num_blocks, dtype=np.int32)


def attention_plan(forest: Forest) -> AttentionPlan:
    """Every edge a shared segment, rows in the order of the trees."""
    planner = _Planner()
    for node in forest:
        planner.add(node, 0)
    plan = AttentionPlan(
        num_rows=planner.num_rows,
        block_size=BLOCK_SIZE,
        shared=tuple(planner.shared),
        private=tuple(planner.private),
    )
    plan.check()
    return plan


def edges_of(forest: Forest) -> Iterator[Edge]:
    """All edges, those above first."""
    for node in forest:
        if isinstance(node, Edge):
            yield node
            yield from edges_of(node.below)


def num_rows_of(node: Edge | Tail) -> int:
    """Rows of all tails below."""
    if isinstance(node, Tail):
        return node.num_rows
    return sum(num_rows_of(child) for child in node.below)


def flattened(plan: AttentionPlan) -> AttentionPlan:
    """The same keys with nothing shared: every sequence reads its whole context itself."""
    above: list[list[SharedSegment]] = [[] for _ in range(plan.num_rows)]
    for segment in sorted(plan.shared, key=lambda segment: segment.start):
        for row in segment.rows:
            above[row].append(segment)
    private = tuple(
        replace(
            tail,
            block_ids=np.concatenate(
                [*(edge.block_ids for edge in above[tail.first_row]), tail.block_ids]
            ),
            start=0,
            length=tail.start + tail.length,
        )
        for tail in plan.private
    )
    return replace(plan, shared=(), private=private)


def tree_shapes() -> tuple[TreeShape, ...]:
    """Decoding is one row a sequence; a draft or a chunk has more."""
    chat = _tree([1024, 512, 256], [8, 4, 8], Tail(200))
    thoughts = _tree([1024, 208, 208, 208], [4, 4, 4, 4], Tail(100))
    return (
        _below("decode 256 below 32k", 32768, 256, Tail(128)),
        _below("decode 256 below 2k", 2048, 256, Tail(128)),
        _below("decode 64 below 8k", 8192, 64, Tail(512)),
        _below("decode 8 below 64k", 65536, 8, Tail(64)),
        _below("decode 2 below 4k", 4096, 2, Tail(100)),
        _below("decode 256 below 64", 64, 256, Tail(1000)),
        _below("decode 4 below 32", 32, 4, Tail(500)),
        TreeShape(
            name="decode 64 groups of 4 below 2k", forest=[Edge(2048, (Tail(200),) * 4)] * 64
        ),
        TreeShape(name="decode 256, 3 levels", forest=[chat]),
        TreeShape(name="decode 256, 4 levels of thoughts", forest=[thoughts]),
        TreeShape(
            name="decode 256, binary tree of 8 levels", forest=[_tree([512] * 8, [2] * 8, Tail(64))]
        ),
        TreeShape(name="decode 64, one leaves every 128 tokens", forest=[_comb(64, 128)]),
        TreeShape(
            name="decode 255 in 8 uneven groups",
            forest=[Edge(1024 * (8 - i), (Tail(50 + 90 * i),) * 2**i) for i in range(8)],
        ),
        TreeShape(name="decode 256, nothing shared", forest=[Tail(1024)] * 256),
        TreeShape(
            name="decode 67 uneven, nothing shared",
            forest=[*[Tail(200 + 37 * i) for i in range(64)], *[Tail(40000)] * 3],
        ),
        _below("32 x 6 drafts below 4k", 4096, 32, Tail(300, 6)),
        _below("prefill 16 x 128 rows below 8k", 8192, 16, Tail(128, 128)),
        TreeShape(name="prefill 2,048 rows behind 8k, nothing shared", forest=[Tail(10240, 2048)]),
        TreeShape(
            name="decode 128 and prefill 2 x 512 below 4k",
            forest=[Edge(4096, (*[Tail(200)] * 128, *[Tail(512, 512)] * 2))],
        ),
        TreeShape(
            name="decode 64 below 8k, window 1,024",
            forest=_below("", 8192, 64, Tail(512)).forest,
            window=1024,
        ),
    )


def _below(name: str, prefix_len: int, num_sequences: int, tail: Tail) -> TreeShape:
    return TreeShape(name=name, forest=[Edge(prefix_len, (tail,) * num_sequences)])


def _tree(lengths: Sequence[int], branching: Sequence[int], tail: Tail) -> Edge:
    """Edges of `lengths` from the root down, each with so many of the next below it."""
    node: Edge | Tail = tail
    for length, count in zip(reversed(lengths), reversed(branching), strict=True):
        node = Edge(length, (node,) * count)
    assert isinstance(node, Edge)
    return node


def _comb(num_sequences: int, edge_len: int) -> Edge:
    """One path that a sequence leaves after each edge."""
    node = Edge(edge_len, (Tail(64), Tail(64)))
    for _ in range(num_sequences - 2):
        node = Edge(edge_len, (Tail(64), node))
    return node
