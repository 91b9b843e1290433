"""Stop strings and stop regular expressions, matched on the bytes of tokens as they arrive.

Bytes, because a token may end inside a character and a stop may begin inside a token. The
scheduler uses it to end an answer, the detokenizer to know what it may already show; both see the
same rule here. Knows nothing of tokenizers, tensors or time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.stop_regex import RegexScanner, StopRegex


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`reason` is the string or the pattern that matched; the answer's text is its first
    `text_len` bytes."""

    reason: str
    text_len: int


class StopMatcher:
    """Finds the first place where one of `stops`, or a match of `regexes`, ends in the bytes fed.

    Of several that end at the same byte the longest wins, so that no part of it stays in the text;
    of several as long as each other the first given, strings before patterns. The first
    `min_tokens` tokens cannot be part of a match.

    One automaton per string (Knuth, Morris and Pratt 1977), whose state is the length of the
    longest prefix of the string that the bytes fed so far end with, and one scanner per pattern.
    Feeding costs amortised O(bytes * (stops + size of the regexes)), whatever has been fed before;
    building costs O(stops * total length of the stops).

    Raises ValueError for an empty string, which would match everywhere.
    """

    def __init__(
        self,
        stops: Iterable[str] = (),
        regexes: Iterable[StopRegex] = (),
        *,
        min_tokens: int = 0,
    ) -> None:
        strings = {stop: stop.encode() for stop in stops}
        if "" in strings:
            raise ValueError("a stop string is empty")
        # A string in which another one ends earlier can never match, so it holds nothing back.
        automata = [
            _Automaton(reason, stop)
            for reason, stop in strings.items()
            if not any(other in stop[:-1] for other in strings.values())
        ]
        self._searches: list[_Automaton | RegexScanner] = [
            *automata,
            *(RegexScanner(regex) for regex in regexes),
        ]
        self._num_bytes = 0
        self._num_tokens_to_skip = min_tokens
        self._matched = False

    @classmethod
    def of(cls, sampling: SamplingParams) -> "StopMatcher | None":
        """What these parameters ask to stop at; None if nothing."""
        if not sampling.stop and not sampling.stop_regex:
            return None
        return cls(sampling.stop, sampling.compiled_stop_regexes, min_tokens=sampling.min_tokens)

    @property
    def num_held(self) -> int:
        """How many trailing bytes may still turn out to be the beginning of a stop.

        The longest suffix of the bytes fed that is a proper prefix of some stop string, or of some
        text that a pattern matches.
        """
        return max((search.num_held for search in self._searches), default=0)

    def feed(self, token: bytes) -> StopMatch | None:
        """Take in one token's bytes. Nothing may be fed after a match."""
        assert not self._matched, "fed after the match"
        start = self._num_bytes
        self._num_bytes += len(token)
        if self._num_tokens_to_skip:
            self._num_tokens_to_skip -= 1
            return None
        if not self._searches:
            return None
        for end, byte in enumerate(token, start + 1):
            lengths = [search.advance(byte) for search in self._searches]
            longest = max(lengths)
            if longest:
                self._matched = True
                reason = self._searches[lengths.index(longest)].reason
                return StopMatch(reason, end - longest)
        return None


class _Automaton:
    """Knuth, Morris and Pratt 1977, for one string. Mutated by `advance` only."""

    __slots__ = ("_failure", "_stop", "num_held", "reason")

    def __init__(self, reason: str, stop: bytes) -> None:
        self.reason = reason
        self.num_held = 0  # the state: how much of the string the bytes fed end with
        self._stop = stop
        self._failure = _failure_table(stop)

    def advance(self, byte: int) -> int:
        """Take in one byte; the string's length if it is now complete, else 0.

        Not to be called after that.
        """
        stop, state = self._stop, self.num_held
        while state and stop[state] != byte:
            state = self._failure[state - 1]
        if stop[state] == byte:
            state += 1
        self.num_held = state
        return state if state == len(stop) else 0


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
