"""How far two sequences are the same. Knows numpy only."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def common_length(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Items of the longest common prefix of two one-dimensional arrays. O(items), vectorised."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length
