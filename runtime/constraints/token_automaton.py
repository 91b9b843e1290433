"""A finite automaton over tokens, as flat arrays that travel as bytes.

The masks of a regular language are rows of a table; nothing has to be computed of text any more.
States are numbered from 0, the initial one, in the order in which they are found.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from sapwood.runtime.constraints.interface import GrammarError, TokenMask
from sapwood.runtime.constraints.mask_bits import mask_of
from sapwood.runtime.constraints.messages import pack, unpack

MAX_TRANSITIONS = 2**23  # 64 MiB of arrays
ENDED = -1  # where a matcher is after an end token


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAutomaton:
    """The transitions of state s are entries `starts[s] : starts[s + 1]` of `token_ids` (sorted)
    and `next_states`. From every state a final one is reached.

    `starts` int64 [num_states + 1], `token_ids` and `next_states` int32 [num_transitions],
    `is_final` bool [num_states].
    """

    starts: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    next_states: NDArray[np.int32]
    is_final: NDArray[np.bool_]

    @property
    def num_bytes(self) -> int:
        arrays = (self.starts, self.token_ids, self.next_states, self.is_final)
        return sum(array.nbytes for array in arrays)

    def tokens_of(self, state: int) -> NDArray[np.int32]:
        """The tokens that lead on from a state, sorted."""
        return self.token_ids[self.starts[state] : self.starts[state + 1]]

    def step(self, state: int, token_id: int) -> int | None:
        """Where a token leads, None if nowhere. O(log tokens of the state)."""
        tokens = self.tokens_of(state)
        place = int(np.searchsorted(tokens, token_id))
        if place == len(tokens) or tokens[place] != token_id:
            return None
        return int(self.next_states[self.starts[state] + place])

    def to_bytes(self) -> bytes:
        arrays = (self.starts, self.token_ids, self.next_states, self.is_final)
        return pack({}, *(array.tobytes() for array in arrays))

    @classmethod
    def from_bytes(cls, content: bytes) -> "TokenAutomaton":
        _, (starts, token_ids, next_states, is_final) = unpack(content)
        return cls(
            starts=np.frombuffer(starts, dtype=np.int64),
            token_ids=np.frombuffer(token_ids, dtype=np.int32),
            next_states=np.frombuffer(next_states, dtype=np.int32),
            is_final=np.frombuffer(is_final, dtype=np.bool_),
        )


def explore(
    initial: int,
    tokens_of: Callable[[int], Sequence[int]],
    next_state: Callable[[int, int], int],
    is_final: Callable[[int], bool],
) -> TokenAutomaton:
    """The automaton of all that is reached from `initial`, without what leads to no final state.

    Raises GrammarError where it has more than `MAX_TRANSITIONS`, or accepts nothing. One call of
    `next_state` for each transition.
    """
    numbers = {initial: 0}
    waiting = deque([initial])
    rows: list[tuple[NDArray[np.int32], NDArray[np.int32]]] = []
    finals: list[bool] = []
    num_transitions = 0
    while waiting:
        state = waiting.popleft()
        tokens = np.sort(np.asarray(tokens_of(state), dtype=np.int32))
        num_transitions += len(tokens)
        if num_transitions > MAX_TRANSITIONS:
            raise GrammarError(
                f"the constraint's table has more than {MAX_TRANSITIONS} transitions, which is the "
                "limit; bound its repetitions more tightly or choose another backend"
            )
        targets = [next_state(state, token) for token in tokens.tolist()]
        for target in targets:
            if target not in numbers:
                numbers[target] = len(numbers)
                waiting.append(target)
        rows.append((tokens, np.array([numbers[target] for target in targets], dtype=np.int32)))
        finals.append(is_final(state))
    return _without_dead_ends(rows, np.array(finals, dtype=np.bool_))


def _without_dead_ends(
    rows: list[tuple[NDArray[np.int32], NDArray[np.int32]]], is_final: NDArray[np.bool_]
) -> TokenAutomaton:
    """Transitions into states from which no final one is reached are left out.

    A vocabulary without a token for every byte has such states. They keep their numbers, and are
    reached no more.
    """
    alive = _reaching_final([np.unique(targets) for _, targets in rows], is_final)
    if not alive[0]:
        raise GrammarError(
            "no answer satisfies the constraint with this model's vocabulary; check that it does "
            "not contradict itself"
        )
    kept = [
        alive[targets] if alive[state] else np.zeros(len(targets), dtype=np.bool_)
        for state, (_, targets) in enumerate(rows)
    ]
    counts = [int(np.count_nonzero(keep)) for keep in kept]
    return TokenAutomaton(
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        token_ids=np.concatenate([row[keep] for (row, _), keep in zip(rows, kept, strict=True)]),
        next_states=np.concatenate([row[keep] for (_, row), keep in zip(rows, kept, strict=True)]),
        is_final=is_final,
    )


def _reaching_final(
    targets_of: list[NDArray[np.int32]], is_final: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """From which states a final one is reached: a search backwards. O(states and edges)."""
    sources_of: list[list[int]] = [[] for _ in targets_of]
    for source, targets in enumerate(targets_of):
        for target in targets.tolist():
            sources_of[target].append(source)
    alive = is_final.copy()
    waiting = np.flatnonzero(is_final).tolist()
    while waiting:
        for source in sources_of[waiting.pop()]:
            if not alive[source]:
                alive[source] = True
                waiting.append(source)
    return alive


class AutomatonMatcher:
    """A `Matcher` (see interface.py) that walks a token automaton.

    It keeps every state on its way, so that any number of tokens can be taken back. After an end
    token only end tokens are allowed.
    """

    def __init__(
        self, automaton: TokenAutomaton, *, eos_token_ids: tuple[int, ...], mask_size: int
    ) -> None:
        self._automaton = automaton
        self._eos_token_ids = eos_token_ids
        self._mask_size = mask_size
        self._states = [0]

    @property
    def is_complete(self) -> bool:
        state = self._states[-1]
        return state == ENDED or (
            bool(self._automaton.is_final[state]) and not len(self._automaton.tokens_of(state))
        )

    @property
    def is_accepting(self) -> bool:
        state = self._states[-1]
        return state == ENDED or bool(self._automaton.is_final[state])

    def fill_mask(self, mask: TokenMask) -> bool:
        """Some 50 us for a state that allows most tokens."""
        state = self._states[-1]
        tokens = np.empty(0, np.int32) if state == ENDED else self._automaton.tokens_of(state)
        if self.is_accepting:
            tokens = np.append(tokens, np.array(self._eos_token_ids, dtype=np.int32))
        mask[:] = mask_of(tokens, self._mask_size)
        return True

    def advance(self, token_id: int) -> bool:
        state = self._states[-1]
        if token_id in self._eos_token_ids:
            following = ENDED if self.is_accepting else None
        else:
            following = None if state == ENDED else self._automaton.step(state, token_id)
        if following is None:
            return False
        self._states.append(following)
        return True

    def forced_tokens(self) -> list[int]:
        """It ends: every state leads to a final one, where an end token may come as well."""
        tokens: list[int] = []
        state = self._states[-1]
        while state != ENDED and not self._automaton.is_final[state]:
            choices = self._automaton.tokens_of(state)
            if len(choices) != 1:
                break
            tokens.append(int(choices[0]))
            state = int(self._automaton.next_states[self._automaton.starts[state]])
        return tokens

    def likely_tokens(self) -> Sequence[int]:
        """None: what is not forced is not known."""
        return ()

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens < len(self._states), "only tokens that were taken in"
        del self._states[len(self._states) - num_tokens :]

    def copy(self) -> Self:
        other = type(self)(
            self._automaton, eos_token_ids=self._eos_token_ids, mask_size=self._mask_size
        )
        other._states = self._states.copy()
        return other

    def verdict(self, text: bytes) -> str | None:
        """The table is the whole constraint."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AutomatonGrammar:
    """A `Grammar` (see interface.py) whose masks are read off a table."""

    automaton: TokenAutomaton
    eos_token_ids: tuple[int, ...]
    mask_size: int

    @property
    def num_bytes(self) -> int:
        return self.automaton.num_bytes

    def matcher(self) -> AutomatonMatcher:
        return AutomatonMatcher(
            self.automaton, eos_token_ids=self.eos_token_ids, mask_size=self.mask_size
        )
