"""Segments are read off block tables: what is read, and how often."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sapwood.runtime.segmenter import Segmenter
from sapwood.runtime.step_plan import Chunk

BLOCK_SIZE = 4


@dataclass
class TableLease:
    """As much of a lease as the segmenter looks at."""

    block_table: np.ndarray
    num_shared_blocks: int


@dataclass
class TableSequence:
    held_lease: TableLease


def chunk(table: list[int], num_shared: int, start: int, length: int = 1) -> Chunk:
    lease = TableLease(np.array(table, np.int32), num_shared)
    return Chunk(TableSequence(lease), start, length, 1, 1)  # type: ignore[arg-type]


def decode(path: list[int], own: int) -> Chunk:
    """One token behind shared blocks `path`, in a block of its own."""
    return chunk([*path, own], len(path), len(path) * BLOCK_SIZE)


def ranges(segmenter: Segmenter, chunks: list[Chunk]) -> list[tuple[list[int], list[int]]]:
    plan = segmenter.plan(chunks)
    plan.check()
    return [(s.block_ids.tolist(), s.rows.tolist()) for s in plan.shared]


def test_the_drawing_in_the_module_is_what_it_does() -> None:
    chunks = [decode([1, 2, 3, 4, 5], 9), decode([1, 2, 3, 4, 5], 8), decode([1, 2, 3], 7)]
    assert ranges(Segmenter(BLOCK_SIZE, 1), chunks) == [
        ([1, 2, 3], [0, 1, 2]),
        ([4, 5], [0, 1]),
    ]


def test_rows_of_a_chunk_all_see_the_shared_edge() -> None:
    chunks = [chunk([1, 2, 8, 9], 2, 8, length=6), decode([1, 2], 7)]
    assert ranges(Segmenter(BLOCK_SIZE, 1), chunks) == [([1, 2], list(range(7)))]


def test_blocks_that_a_chunk_is_about_to_write_are_not_shared() -> None:
    chunks = [chunk([1, 2, 3], 3, 4, length=8), decode([1, 2, 3], 7)]
    assert ranges(Segmenter(BLOCK_SIZE, 1), chunks) == [([1], list(range(9)))]


def test_a_short_edge_is_folded_into_the_longer_ones_below_it() -> None:
    group_a = [decode([1, *range(20, 30)], i) for i in (51, 52)]
    group_b = [decode([1, *range(30, 40)], i) for i in (53, 54)]
    # The common block saves 3 x 4 tokens, each group's edge 10 x 4 and, with it, 11 x 4.
    assert ranges(Segmenter(BLOCK_SIZE, 20), [*group_a, *group_b]) == [
        ([1, *range(30, 40)], [2, 3]),
        ([1, *range(20, 30)], [0, 1]),
    ]


def test_a_lone_sequence_shares_nothing() -> None:
    assert ranges(Segmenter(BLOCK_SIZE, 1), [decode([1, 2, 3], 9)]) == []


PATHS = st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=1, max_size=9)


@given(PATHS, st.sampled_from([1, 8, 30]), st.randoms())
def test_every_row_is_covered_once_and_shared_blocks_are_read_once(
    paths: list[list[int]], min_saved: int, rng
) -> None:
    # A path of bits names the blocks of a tree: block ids are unique to their prefix.
    ids: dict[tuple[int, ...], int] = {}
    chunks = []
    for index, path in enumerate(paths):
        blocks = [ids.setdefault(tuple(path[: i + 1]), len(ids)) for i in range(len(path))]
        length = rng.randint(1, 2 * BLOCK_SIZE)
        own = [1000 + 10 * index + i for i in range(3)]
        chunks.append(chunk([*blocks, *own], len(path), len(path) * BLOCK_SIZE, length))
    plan = Segmenter(BLOCK_SIZE, min_saved).plan(chunks)
    plan.check()
    if min_saved == 1:
        read = [b for s in plan.shared for b in s.block_ids.tolist()]
        read += [b for p in plan.private for b in p.block_ids.tolist()]
        assert len(read) == len(set(read)), "a block is read twice"
