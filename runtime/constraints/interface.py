"""The seam between the engine and whoever enforces a constraint.

The sampler calls `fill_mask`, the scheduler's commit `advance` and `forced_tokens`; nothing else
of a running request is constrained anywhere else.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from sapwood.runtime.constraints.spec import ConstraintSpec

TokenMask = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a backend has to know of the tokenizer.

    `token_bytes` has the raw bytes of each token id, special ones spelled; `encode` gives the ids
    of a text without adding or recognising special tokens. `logits_size` is what masks cover:
    the model's rows, at least as many as there are tokens.
    """

    token_bytes: tuple[bytes, ...]
    special_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    logits_size: int
    encode: "Encode"

    @property
    def mask_size(self) -> int:
        """Words of a mask."""
        return -(-self.logits_size // 32)


class Encode(Protocol):
    def __call__(self, text: str) -> Sequence[int]: ...


class GrammarError(Exception):
    """A constraint that cannot be enforced; the message names what in it, the limit, the way out.

    `keyword` is the JSON-schema keyword at fault, where it is one.
    """

    def __init__(self, message: str, *, keyword: str | None = None) -> None:
        super().__init__(message)
        self.keyword = keyword


class Matcher(Protocol):
    """How far one answer has come in its grammar. One owner; not thread-safe.

    Raises GrammarError where the grammar outgrows the backend's limits of work; the matcher is of
    no use after that.
    """

    @property
    def is_complete(self) -> bool:
        """Whether the answer satisfies the constraint and nothing may follow but its end."""
        ...

    @property
    def is_accepting(self) -> bool:
        """Whether the answer satisfies the constraint as it stands."""
        ...

    def fill_mask(self, mask: TokenMask) -> bool:
        """Write which tokens may come next into `mask` int32 [mask_size], bit i % 32 of word
        i // 32 for token i; every word is written. False, and nothing written, if all may.

        End tokens are in it where `is_accepting`. Special tokens are not, but for those that the
        grammar itself names. Where tokens are forced, only the first of them is in it.
        """
        ...

    def advance(self, token_id: int) -> bool:
        """Take in the next token; False if the constraint does not allow it."""
        ...

    def forced_tokens(self) -> Sequence[int]:
        """The tokens that must come next whatever is drawn: each would be alone in its mask.

        Changes nothing. Never an end token.
        """
        ...

    def likely_tokens(self) -> Sequence[int]:
        """Tokens to try where none is forced: the next text is known, but not how it is cut.

        They are drafts, each of which the mask allows after those before it, and count only where
        they are drawn. Changes nothing. Never an end token.
        """
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        ...

    def copy(self) -> Self:
        """Another one in the same state, for an answer that is forked."""
        ...

    def verdict(self, text: bytes) -> str | None:
        """What is wrong with a finished answer, None if nothing is.

        For backends whose masks do not enforce all of a constraint.
        """
        ...


class Grammar(Protocol):
    """A compiled constraint, warm: its first mask has been computed. Thread-safe."""

    @property
    def num_bytes(self) -> int:
        """An estimate of the memory it takes."""
        ...

    def matcher(self) -> Matcher:
        """At the start of an answer. Microseconds: it is a copy."""
        ...


class ConstraintBackend(Protocol):
    """Compiles constraints for one vocabulary. Thread-safe."""

    name: str

    def turn(self, spec: ConstraintSpec) -> AbstractContextManager[object]:
        """To be held while `spec` is compiled. Where one constraint is compiled at a time, the
        others wait here, on no deadline's cost."""
        ...

    def compile(self, spec: ConstraintSpec, *, deadline: float) -> Grammar:
        """Raises GrammarError for what it cannot enforce, or not within `deadline` seconds."""
        ...

    def close(self) -> None:
        """End what runs for it."""
        ...
