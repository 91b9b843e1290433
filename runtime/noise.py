"""Uniform numbers that are a function of (seed, position), and of nothing else.

A counter-based generator (Salmon et al. 2011): no state to advance, so an answer draws the same
numbers alone, in a batch, after a preemption and from a warm cache.
"""

import numpy as np
from numpy.typing import NDArray

_WEYL = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: spreads consecutive counters
_ANSWERS = np.uint64(0xD1B54A32D192ED03)  # keeps the seeds of answers apart from those of positions


def uniform(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each pair, with 53 random bits. O(n), vectorised."""
    with np.errstate(over="ignore"):
        key = _mix(seeds.astype(np.uint64) + _WEYL)
        bits = _mix(key ^ _mix((positions.astype(np.uint64) + np.uint64(1)) * _WEYL))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def answer_seed(seed: int, index: int) -> int:
    """The seed of answer `index` to a request with `seed`; both within 64 bits, signed.

    Answer 0 has the request's own, so that it is the answer that is given alone. The others are as
    good as independent of it and of each other, the same on every machine.
    """
    if index == 0:
        return seed
    with np.errstate(over="ignore"):
        key = _mix(np.array([seed]).astype(np.uint64) ^ _ANSWERS)
        mixed = _mix(key + np.array([index], np.uint64) * _WEYL)
    return int(mixed.view(np.int64)[0])


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele et al. 2014): a bijection on 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
