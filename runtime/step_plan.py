"""What one step does: a value, without tensors."""

from dataclasses import dataclass

from sapwood.kernels.segments import AttentionPlan
from sapwood.radix import BlockCopy
from sapwood.runtime.request import Sequence, TokenIds


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, start + length)` of a sequence, computed in one step.

    `num_logits` of its last rows need logits: 0 inside a prompt, 1 to sample, more where prompt
    tokens are scored; `num_samples` tokens are drawn from the last one: 1, or as many as answers
    begin there. Prefill, a chunk of it, decode and resume after preemption are all this.

    The last `num_drafts` tokens are drafts: one token is drawn from the row before each of them as
    well, and the first that is another one is the answer's.

    Where `is_pending`, its one token is the one that the step before draws for the same sequence
    and nobody knows yet: it stays on the device.
    """

    sequence: Sequence
    start: int
    length: int
    num_logits: int
    num_samples: int
    num_drafts: int = 0
    is_pending: bool = False

    @property
    def token_ids(self) -> TokenIds:
        """int32 [length]; a view. The value of a pending one means nothing."""
        return self.sequence.tried_token_ids[self.start : self.end]

    @property
    def num_drawn(self) -> int:
        """Tokens that are drawn from its rows."""
        return self.num_drafts + self.num_samples

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_settling(self) -> int:
        """Tokens that are computed for good when the step has ended: all but the drafts."""
        return self.length - self.num_drafts

    @property
    def draws(self) -> bool:
        """Whether the answer gets longer by it."""
        return self.num_samples > 0

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

    A sequence occurs at most once; each chunk starts where what is computed or being computed of
    its sequence ends. Steps are numbered in the order in which they are to be carried out.
    """

    number: int
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
