"""The rules of the game of 24, against all ways to put brackets and signs."""

from fractions import Fraction
from itertools import product

import pytest

from sapwood.frontend_lang.examples.game24 import (
    Numbers,
    is_solved,
    moves,
    numbers_of,
    written,
)
from sapwood.frontend_lang.examples.material import puzzles


def can_be_solved(numbers: Numbers) -> bool:
    if len(numbers) == 1:
        return is_solved(numbers)
    return any(can_be_solved(left) for left in moves(numbers).values())


def can_be_reached(numbers: tuple[Fraction, ...]) -> bool:
    """By every pair in either order with every sign, also through negative numbers."""
    if len(numbers) == 1:
        return numbers[0] == 24
    for i, j in product(range(len(numbers)), repeat=2):
        if i == j:
            continue
        others = tuple(n for k, n in enumerate(numbers) if k not in (i, j))
        a, b = numbers[i], numbers[j]
        results = [a + b, a - b, a * b, *([a / b] if b else [])]
        if any(can_be_reached((*others, result)) for result in results):
            return True
    return False


def test_a_step_says_what_it_leaves() -> None:
    found = moves(numbers_of([4, 6, 5]))
    assert found["4 + 6 = 10 (left: 5 10)"] == numbers_of([5, 10])
    assert found["4 / 6 = 2/3 (left: 2/3 5)"] == (Fraction(2, 3), Fraction(5))
    for text, left in found.items():
        step, _, rest = text.partition(" (left: ")
        expression, _, value = step.partition(" = ")
        low, operation, high = expression.split()
        a, b = Fraction(low), Fraction(high)
        assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[operation] == Fraction(value)
        assert rest == written(left) + ")"


def test_nothing_is_divided_by_zero() -> None:
    assert set(moves(numbers_of([0, 0]))) == {
        "0 + 0 = 0 (left: 0)",
        "0 * 0 = 0 (left: 0)",
        "0 - 0 = 0 (left: 0)",
    }


@pytest.mark.parametrize("numbers", [*puzzles()[:4], (1, 1, 1, 1), (3, 3, 8, 8), (1, 5, 5, 5)])
def test_leaving_out_negative_numbers_loses_no_solution(numbers: tuple[int, ...]) -> None:
    assert can_be_solved(numbers_of(numbers)) == can_be_reached(numbers_of(numbers))


@pytest.mark.parametrize("numbers", puzzles())
def test_every_puzzle_has_a_solution(numbers: tuple[int, ...]) -> None:
    assert can_be_solved(numbers_of(numbers))
