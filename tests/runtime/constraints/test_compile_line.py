"""Small ones first, and an end to every wait."""

from hypothesis import given
from hypothesis import strategies as st

from sapwood.runtime.constraints.compile_line import TURNS, CompileLine


def line_of(*sizes: int) -> CompileLine[int]:
    line: CompileLine[int] = CompileLine()
    for item, size in enumerate(sizes):
        line.add(item, size)
    return line


def test_small_ones_come_first_and_equal_ones_in_their_order() -> None:
    line = line_of(5, 1, 3, 1)
    assert [line.take() for _ in range(3)] == [1, 3, 2]


def test_a_quick_one_does_not_wait_behind_five_hundred_slow_ones() -> None:
    line = line_of(*[10_000] * 500)
    line.add(500, 10)
    assert 500 in (line.take(), line.take())


def test_a_large_one_is_taken_although_small_ones_keep_coming() -> None:
    line = line_of(1_000_000)
    for turn in range(1, TURNS + 1):
        line.add(turn, 1)
        if line.take() == 0:
            break
    assert turn == TURNS


def test_what_leaves_the_line_is_not_taken() -> None:
    line = line_of(1, 2)
    assert line.discard(0)
    assert not line.discard(0)
    assert (len(line), line.take(), len(line)) == (1, 1, 0)


@given(st.lists(st.integers(0, 3), max_size=60))
def test_no_item_waits_longer_than_the_bound(sizes: list[int]) -> None:
    line: CompileLine[int] = CompileLine()
    waited: dict[int, tuple[int, int]] = {}  # turn of arrival, items that were there
    for turn, size in enumerate(sizes):
        waited[2 * turn] = turn, len(line)
        line.add(2 * turn, size)
        waited[2 * turn + 1] = turn, len(line)
        line.add(2 * turn + 1, 9 - size)
        arrival, num_before = waited.pop(line.take())
        assert turn - arrival < TURNS * (num_before + 1)
    for turn in range(len(sizes), 2 * len(sizes)):
        arrival, num_before = waited.pop(line.take())
        assert turn - arrival < TURNS * (num_before + 1)
    assert not waited
