"""What one step does: a value, without tensors."""

from dataclasses import dataclass

from sapwood.kernels.segments import AttentionPlan
from sapwood.radix import BlockCopy
from sapwood.runtime.request import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, start + length)` of a sequence, computed in one step.

    `num_logits` of its last rows need logits: 0 inside a prompt, 1 to sample, more where prompt
    tokens are scored; `num_samples` tokens are drawn from the last one: 1, or as many as answers
    begin there. Prefill, a chunk of it, decode and resume after preemption are all this.
    """

    sequence: Sequence
    start: int
    length: int
    num_logits: int
    num_samples: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_scores(self) -> int:
        """Of the rows with logits, the first whose next token is one of the prompt's."""
        last_scored = min(self.end, self.sequence.request.num_prompt_tokens - 1)
        return max(0, last_scored - (self.end - self.num_logits))

    @property
    def first_score(self) -> int:
        """The position of the first token that is scored."""
        return self.end - self.num_logits + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Chunks in the order of their rows, the block copies to make first, and what attends to what.

    A sequence occurs at most once; each chunk starts at its sequence's `num_computed`.
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...]
    attention: AttentionPlan

    @property
    def num_rows(self) -> int:
        return self.attention.num_rows

    @property
    def num_logits(self) -> int:
        """Rows whose logits are needed."""
        return sum(chunk.num_logits for chunk in self.chunks)
