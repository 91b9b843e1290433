"""Stop strings, matched on the bytes of tokens as they arrive.

Bytes, because a token may end inside a character and a stop string may begin inside a token. The
scheduler uses it to end an answer, the detokenizer to know what it may already show; both see the
same rule here. Knows nothing of tokenizers, tensors or time.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`stop_index` says which string matched; the answer's text is its first `text_len` bytes."""

    stop_index: int
    text_len: int


class StopMatcher:
    """Finds the first place where one of `stops` ends in the bytes fed so far.

    Of several that end at the same byte the longest wins, so that no part of it stays in the text.
    The first `min_tokens` tokens cannot be part of a match.

    One Knuth-Morris-Pratt automaton per string: its state is the length of the longest prefix of
    the string that the bytes fed so far end with. Feeding costs amortised O(bytes * stops),
    whatever has been fed before; building costs O(stops * total length of the stops).

    Raises ValueError for an empty string, which would match everywhere.
    """

    def __init__(self, stops: Iterable[bytes], *, min_tokens: int = 0) -> None:
        self.stops = tuple(stops)
        if b"" in self.stops:
            raise ValueError("a stop string is empty")
        # A string in which another one ends earlier can never match, so it holds nothing back.
        self._automata = [
            _Automaton(index, stop)
            for index, stop in enumerate(self.stops)
            if not any(other in stop[:-1] for other in self.stops)
        ]
        self._num_bytes = 0
        self._num_tokens_to_skip = min_tokens
        self._matched = False

    @property
    def num_held(self) -> int:
        """How many trailing bytes may still turn out to be the beginning of a stop string.

        The longest suffix of the bytes fed that is a proper prefix of some stop string.
        """
        return max((automaton.state for automaton in self._automata), default=0)

    def feed(self, token: bytes) -> StopMatch | None:
        """Take in one token's bytes. Nothing may be fed after a match."""
        assert not self._matched, "fed after the match"
        start = self._num_bytes
        self._num_bytes += len(token)
        if self._num_tokens_to_skip:
            self._num_tokens_to_skip -= 1
            return None
        if not self._automata:
            return None
        for end, byte in enumerate(token, start + 1):
            complete = [automaton for automaton in self._automata if automaton.advance(byte)]
            if complete:
                self._matched = True
                longest = max(complete, key=lambda automaton: automaton.state)
                return StopMatch(longest.index, end - longest.state)
        return None


class _Automaton:
    """Knuth, Morris and Pratt 1977, for one string. Mutated by `advance` only."""

    __slots__ = ("_failure", "_stop", "index", "state")

    def __init__(self, index: int, stop: bytes) -> None:
        self.index = index
        self.state = 0
        self._stop = stop
        self._failure = _failure_table(stop)

    def advance(self, byte: int) -> bool:
        """Take in one byte; whether the string is now complete. Not to be called after that."""
        stop, state = self._stop, self.state
        while state and stop[state] != byte:
            state = self._failure[state - 1]
        if stop[state] == byte:
            state += 1
        self.state = state
        return state == len(stop)


def _failure_table(stop: bytes) -> list[int]:
    """For each prefix of `stop`, its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        if stop[i] == stop[length]:
            length += 1
        table[i] = length
    return table
