"""What one step does: a value, without tensors."""

from dataclasses import dataclass

from sapwood.kernels.segments import AttentionPlan
from sapwood.radix import BlockCopy
from sapwood.runtime.request import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, start + length)` of a sequence, computed in one step.

    `num_logits` of its last rows need logits: 0 inside a prompt, 1 to sample. Prefill, a chunk of
    it, decode and resume after preemption are all this.
    """

    sequence: Sequence
    start: int
    length: int
    num_logits: int

    @property
    def end(self) -> int:
        return self.start + self.length


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
    def sampling_chunks(self) -> list[Chunk]:
        """The chunks that end in a token to draw."""
        return [chunk for chunk in self.chunks if chunk.num_logits]
