"""The rules of the game of 24: make 24 of four numbers with + - * /, each number once."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

TARGET = 24
Numbers = tuple[Fraction, ...]  # those left, ascending


def numbers_of(values: Sequence[int]) -> Numbers:
    return tuple(sorted(map(Fraction, values)))


def moves(numbers: Numbers) -> dict[str, Numbers]:
    """What each step that the rules allow leaves, by how it is written: `4 + 6 = 10 (left: 5 10)`.

    Steps to a negative number are left out: whatever they lead to, another step leads to as well.
    """
    found = {}
    for i, j in combinations(range(len(numbers)), 2):
        low, high = numbers[i], numbers[j]
        others = [number for k, number in enumerate(numbers) if k not in (i, j)]
        for text, value in _results(low, high):
            left = tuple(sorted([*others, value]))
            found[f"{text} = {value} (left: {written(left)})"] = left
    return found


def written(numbers: Numbers) -> str:
    return " ".join(map(str, numbers))


def is_solved(numbers: Numbers) -> bool:
    return numbers == (Fraction(TARGET),)


def _results(low: Fraction, high: Fraction) -> list[tuple[str, Fraction]]:
    results = [
        (f"{low} + {high}", low + high),
        (f"{low} * {high}", low * high),
        (f"{high} - {low}", high - low),
    ]
    if low:
        results.append((f"{high} / {low}", high / low))
    if high:
        results.append((f"{low} / {high}", low / high))
    return results
