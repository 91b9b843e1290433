"""Which of several texts a model prefers, by the log-probabilities of their tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Logprobs = Sequence[float]  # of the tokens of one choice, natural logarithms


@dataclass(frozen=True, slots=True)
class Decision:
    """The index of the choice that was taken, and what `get_meta_info` tells of it."""

    index: int
    meta: Mapping[str, Any] = field(default_factory=dict)


class ChoicesMethod(Protocol):
    """How to choose. Ties go to the first."""

    needs_unconditional: bool  # also asks for the choices' scores without the prompt

    def __call__(
        self,
        choices: Sequence[str],
        logprobs: Sequence[Logprobs],
        token_ids: Sequence[Sequence[int]],
        unconditional: Sequence[Logprobs] | None,
    ) -> Decision:
        """`token_ids` are those of the choices, empty for a backend that tells none."""
        ...
