"""Log-probabilities of a sequence's tokens: which are wanted, which are known, which are missing.

The first token has none. Knows no tensors and no text.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenScores:
    """Log-probabilities of tokens that follow each other, each given those before it.

    `logprobs` float32 [n]; the likeliest alternatives, best first, in `top_ids` int32 [n, k] and
    `top_logprobs` float32 [n, k].
    """

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptScores:
    """The scores of the prompt's tokens from position `start` on."""

    start: int
    scores: TokenScores


class SequenceScores:
    """What is known of one sequence, and which positions of its prompt are wanted.

    What the cache remembers of a token (its own log-probability) is taken from there; alternatives
    are not remembered, so where they are wanted nothing is.
    """

    __slots__ = ("_num_prompt_tokens", "_own", "_top_ids", "_top_logprobs", "wanted")

    def __init__(self, num_prompt_tokens: int, wanted: range, num_top: int) -> None:
        self.wanted = wanted
        self._num_prompt_tokens = num_prompt_tokens
        self._own = np.full(num_prompt_tokens, np.nan, np.float32)  # grows with the answer
        self._top_ids = np.full((len(wanted), num_top), -1, np.int32)
        self._top_logprobs = np.empty((len(wanted), num_top), np.float32)

    @property
    def num_top(self) -> int:
        return self._top_ids.shape[1]

    @property
    def first_missing(self) -> int:
        """The first wanted position that is still to score, the end of the prompt if none is.

        O(prompt), vectorised.
        """
        own = self._own[self.wanted.start : self.wanted.stop]
        is_missing = np.isnan(own) if not self.num_top else self._top_ids[:, 0] < 0
        missing = np.flatnonzero(is_missing)
        return self.wanted.start + int(missing[0]) if len(missing) else self._num_prompt_tokens

    @property
    def may_use_cached(self) -> bool:
        return not self.num_top

    def take_cached(self, notes: NDArray[np.float32]) -> None:
        """Take in what the cache remembers of the first tokens, NaN where nothing."""
        own = self._own[: len(notes)]
        np.copyto(own, notes[: len(own)], where=np.isnan(own))

    def take_computed(self, first_position: int, scores: TokenScores) -> None:
        """Take in the scores of the prompt's tokens from `first_position` on."""
        self._own[first_position : first_position + len(scores)] = scores.logprobs
        if self.num_top:
            first = first_position - self.wanted.start
            assert first >= 0, "alternatives of a position that nobody wants"
            self._top_ids[first : first + len(scores)] = scores.top_ids
            self._top_logprobs[first : first + len(scores)] = scores.top_logprobs

    def append(self, position: int, logprob: float | None) -> None:
        """Note a generated token. Amortised O(1)."""
        if position >= len(self._own):
            room = np.full(max(64, len(self._own)), np.nan, np.float32)
            self._own = np.concatenate([self._own, room])
        self._own[position] = np.nan if logprob is None else logprob

    def notes(self, num_tokens: int) -> NDArray[np.float32]:
        """Log-probabilities of the first tokens, NaN where not known: float32 [num_tokens]."""
        return self._own[:num_tokens]

    def prompt(self) -> PromptScores:
        """All that was wanted; nothing may be missing."""
        own = self._own[self.wanted.start : self.wanted.stop].copy()
        scores = TokenScores(logprobs=own, top_ids=self._top_ids, top_logprobs=self._top_logprobs)
        return PromptScores(start=self.wanted.start, scores=scores)
