"""Constraints over token ids that need no grammar: finite automata as matchers."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from sapwood.runtime.constraints.interface import GrammarError, TokenMask
from sapwood.runtime.step_plan import Chunk
from tests.runtime.harness import EOS, VOCAB_SIZE, token_after

MASK_SIZE = -(-VOCAB_SIZE // 32)


@dataclass(frozen=True)
class Automaton:
    """States are numbers, 0 is the first. In the last of a path nothing may follow."""

    edges: Mapping[int, Mapping[int, int]]
    accepting: frozenset[int]

    @classmethod
    def of_path(cls, tokens: Sequence[int]) -> "Automaton":
        """That sequence of tokens and no other."""
        edges = {i: {token: i + 1} for i, token in enumerate(tokens)}
        return cls(edges, frozenset({len(tokens)}))

    @classmethod
    def drawn(cls, draw: random.Random) -> "Automaton":
        """Runs of forced tokens between choices, with loops, and ends here and there."""
        num_states = draw.randint(2, 14)
        edges: dict[int, dict[int, int]] = {}
        for state in range(num_states):
            num_edges = draw.choice((1, 1, 1, 1, 2, 3))
            targets = [min(num_states, draw.randint(0, state + 2)) for _ in range(num_edges - 1)]
            tokens = draw.sample(range(1, VOCAB_SIZE), num_edges)
            edges[state] = dict(zip(tokens, [state + 1, *targets], strict=True))
        loose = [state for state in range(num_states) if draw.random() < 0.15]
        return cls(edges, frozenset((num_states, *loose)))


@dataclass
class AutomatonMatcher:
    automaton: Automaton
    tokens: list[int] = field(default_factory=list)
    fails_at: str = ""  # the name of a method that breaks once `fails_after` tokens are taken in
    fails_after: int = 0
    num_likely: int = 0

    def _state(self) -> int:
        state = 0
        for token in self.tokens:
            state = self.automaton.edges[state][token]
        return state

    def _next(self, state: int) -> Mapping[int, int]:
        return self.automaton.edges.get(state, {})

    def _break(self, method: str) -> None:
        if self.fails_at == method and len(self.tokens) >= self.fails_after:
            raise GrammarError("it is too complex")

    @property
    def is_accepting(self) -> bool:
        return self._state() in self.automaton.accepting

    @property
    def is_complete(self) -> bool:
        self._break("is_complete")
        return self.is_accepting and not self._next(self._state())

    def fill_mask(self, mask: TokenMask) -> bool:
        self._break("fill_mask")
        ends = [EOS] if self.is_accepting else []
        bits = np.zeros(len(mask) * 32, np.uint8)
        bits[[*self._next(self._state()), *ends]] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
        return True

    def advance(self, token_id: int) -> bool:
        self._break("advance")
        if token_id not in self._next(self._state()):
            return False
        self.tokens.append(token_id)
        return True

    def forced_tokens(self) -> list[int]:
        self._break("forced_tokens")
        state, forced = self._state(), []
        while len(self._next(state)) == 1 and state not in self.automaton.accepting:
            [(token, state)] = self._next(state).items()
            forced.append(token)
            if len(forced) == 100:
                break  # a circle without a choice
        return forced

    def likely_tokens(self) -> list[int]:
        """Of several edges that of the highest token, twice: right here and there."""
        self._break("likely_tokens")
        state, likely = self._state(), []
        for _ in range(self.num_likely):
            if choices := self._next(state):
                likely.append(max(choices))
                state = choices[likely[-1]]
        return likely

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]

    def copy(self) -> Self:
        return replace(self, tokens=list(self.tokens))

    def verdict(self, text: bytes) -> str | None:
        return None


def allowed_token_after(chunk: Chunk, prefix_hash: int) -> int:
    """Like `token_after`, among those that the sequence's matcher allows."""
    matcher = chunk.sequence.matcher
    if matcher is None:
        return token_after(chunk, prefix_hash)
    mask = np.zeros(MASK_SIZE, np.int32)
    assert matcher.fill_mask(mask)
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
    return int(allowed[prefix_hash % len(allowed)])
