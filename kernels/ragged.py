"""Runs of different lengths behind each other, in numpy calls rather than Python loops."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


def offsets_of(counts: Int64Array) -> Int64Array:
    """Where runs of these lengths begin behind each other, and where the last ends, [n + 1]."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def ranges(firsts: Int64Array, counts: Int64Array) -> Int64Array:
    """`firsts[i], firsts[i] + 1, ...`, `counts[i]` of them, for all `i` behind each other."""
    offsets = offsets_of(counts)
    return np.repeat(firsts - offsets[:-1], counts) + np.arange(offsets[-1])
