"""The predicted peak against stepping through it, and the length estimate."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sapwood.runtime.admission import LengthEstimator, peak_blocks

REQUESTS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 50)), min_size=0, max_size=8)


def peak_by_stepping(requests: list[tuple[int, int]]) -> int:
    """Blocks of one token: run all answers to their end and note the most that was held."""
    most = 0
    for step in range(1, 51):
        alive = [held for held, remaining in requests if remaining >= step]
        most = max(most, sum(alive) + step * len(alive))
    return max(most, 0)


@given(REQUESTS)
def test_the_peak_is_what_stepping_finds(requests: list[tuple[int, int]]) -> None:
    held = np.array([h for h, _ in requests], np.int64)
    remaining = np.array([r for _, r in requests], np.int64)
    assert peak_blocks(held, remaining, block_size=1) == peak_by_stepping(requests)


@given(REQUESTS, st.integers(2, 16))
def test_larger_blocks_never_hide_a_peak(requests: list[tuple[int, int]], block_size: int) -> None:
    """Growth is rounded up to whole blocks, so the estimate errs to the safe side."""
    held = np.array([h for h, _ in requests], np.int64)
    remaining = np.array([r for _, r in requests], np.int64)
    tokens = peak_by_stepping([(h * block_size, r) for h, r in requests])
    assert peak_blocks(held, remaining, block_size) * block_size >= tokens


def test_an_estimate_never_exceeds_what_is_left() -> None:
    estimator = LengthEstimator()
    assert estimator.remaining(0, 50) == 50
    assert estimator.remaining(0, 10_000) == 256
    for length in range(100, 200):
        estimator.observe(length)
    assert estimator.remaining(0, 50) == 50
    assert estimator.remaining(49, 50) == 1
    assert estimator.remaining(60, 50) == 1


def test_an_estimate_follows_the_answers_that_got_longer() -> None:
    estimator = LengthEstimator()
    for length in (10, 20, 30, 40):
        estimator.observe(length)
    assert estimator.remaining(0, 1000) == 40
    assert estimator.remaining(25, 1000) == 15
    assert estimator.remaining(80, 1000) == 80  # longer than any seen: as long again


def test_old_answers_are_forgotten() -> None:
    estimator = LengthEstimator(window=4)
    for length in (500, 500, 500, 500, 8, 8, 8, 8):
        estimator.observe(length)
    assert estimator.remaining(0, 1000) == 8


def test_a_guess_counts_until_the_answer_is_longer() -> None:
    estimator = LengthEstimator()
    assert estimator.remaining(0, 1000, guess=12) == 12
    assert estimator.remaining(10, 1000, guess=12) == 2
    for length in (10, 20, 30, 40):
        estimator.observe(length)
    assert estimator.remaining(0, 1000, guess=12) == 12
    assert estimator.remaining(0, 8, guess=12) == 8
    assert estimator.remaining(25, 1000, guess=12) == estimator.remaining(25, 1000)
    assert estimator.remaining(0, 1000, guess=0) == 1


def test_a_guess_above_every_answer_seen_counts_as_the_longest() -> None:
    estimator = LengthEstimator(first_guess=256)
    assert estimator.remaining(0, 10**6, guess=2**31 - 1) == 256
    for length in (10, 20, 30, 400):
        estimator.observe(length)
    assert estimator.remaining(0, 10**6, guess=2**31 - 1) == 400
    assert estimator.remaining(100, 10**6, guess=2**31 - 1) == 300
    assert estimator.remaining(500, 10**6, guess=2**31 - 1) == 500
