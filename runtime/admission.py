"""How many blocks the running requests will need at their worst moment.

Reserving `max_tokens` for everybody leaves most of the pool idle; reserving nothing makes requests
preempt each other. Between them lies a prediction: how long will each answer still get, and when
is the sum highest (Gong et al. 2024, Past-Future scheduler).
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedList


class LengthEstimator:
    """Guesses how long an answer still gets, from the lengths of the last `window` answers."""

    def __init__(self, window: int = 256, first_guess: int = 256) -> None:
        self._recent: deque[int] = deque()
        self._sorted: SortedList[int] = SortedList()
        self._window = window
        self._first_guess = first_guess

    def observe(self, num_generated: int) -> None:
        """Note the length of an answer that ended by itself. O(log window)."""
        self._recent.append(num_generated)
        self._sorted.add(num_generated)
        if len(self._recent) > self._window:
            self._sorted.remove(self._recent.popleft())

    def remaining(self, num_generated: int, max_tokens: int, guess: int | None = None) -> int:
        """Tokens that an answer of `num_generated` so far is still expected to get, at least 1.

        The third quartile of the answers that got longer than this one; where there is none, as
        many as it already has. `guess` is the caller's, of the whole answer. One that is too low
        is believed until the answer is longer, one above the longest answer seen counts as that:
        nobody can claim more room than an answer took. O(log window).
        """
        left = max(1, max_tokens - num_generated)
        if guess is not None:
            guess = min(max(1, guess), self._longest_credible)
            if guess > num_generated:
                return min(left, guess - num_generated)
        longer = len(self._sorted) - (rank := self._sorted.bisect_right(num_generated))
        if longer:
            expected = self._sorted[rank + (3 * longer) // 4] - num_generated
        elif self._sorted:
            expected = num_generated
        else:
            expected = self._first_guess
        return int(min(left, max(1, expected)))

    @property
    def _longest_credible(self) -> int:
        return int(self._sorted[-1]) if self._sorted else self._first_guess


def peak_blocks(held: NDArray[np.int64], remaining: NDArray[np.int64], block_size: int) -> int:
    """Blocks held at the worst moment, from what each request holds alone and its tokens to come.

    Sorted by remaining tokens, longest first, the moment at which the i-th ends finds the first i
    still there, each grown by what the i-th had left: the peak is the largest of these sums.
    O(n log n).
    """
    order = np.argsort(-remaining, kind="stable")
    growth = -(-remaining[order] // block_size) * np.arange(1, len(order) + 1)
    return int((np.cumsum(held[order]) + growth).max(initial=0))


class PeakBudget:
    """Admission while the predicted peak fits the pool; made anew for every plan.

    `num_shared` blocks are held by several requests; they are counted apart and for good, the
    others leave with their only holder.
    """

    def __init__(self, num_blocks: int, num_shared: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._num_shared = num_shared
        self._block_size = block_size
        self._held: list[int] = []
        self._remaining: list[int] = []

    def add(self, num_held: int, num_remaining: int, num_forks: int = 0) -> None:
        """Count a sequence that runs: the blocks that it alone holds, and its tokens to come.

        As many more will be forked from it, each with a block of its own for what is not shared.
        """
        self._held += [num_held] + [1] * num_forks
        self._remaining += [num_remaining] * (1 + num_forks)

    def fits(self, num_held: int, num_remaining: int, num_forks: int = 0) -> bool:
        """Whether one more fits, with its forks. O(n log n) in the sequences counted."""
        held = np.array([*self._held, num_held, *[1] * num_forks])
        remaining = np.array([*self._remaining, *[num_remaining] * (1 + num_forks)])
        peak = peak_blocks(held, remaining, self._block_size)
        return self._num_shared + peak <= self._num_blocks
