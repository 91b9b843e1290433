"""What the sampler needs to know of a sequence to draw its next token."""

from contextlib import suppress
from dataclasses import dataclass

from sapwood.runtime.constraints.interface import GrammarError, Matcher
from sapwood.runtime.noise import answer_seed
from sapwood.runtime.request import Sequence, TokenIds
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.step_plan import Chunk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingRow:
    """One token to draw, from row `logits_index` of the logits. Several may draw from one row.

    `token_ids` are the prompt and the answer so far, int32 [position]: a view, read at once. The
    last one means nothing where it is pending, which it never is where penalties look at it.
    `held_off_token_ids` may not be drawn: those that would end the answer too early. `matcher`,
    where the answer is constrained, says what else may not.
    """

    params: SamplingParams
    seed: int
    logits_index: int
    token_ids: TokenIds
    num_prompt_tokens: int
    held_off_token_ids: tuple[int, ...] = ()
    matcher: Matcher | None = None

    @classmethod
    def of(
        cls, chunk: Chunk, logits_index: int, num_forks: int = 0, num_tried: int = 0
    ) -> "SamplingRow":
        """For the token after a chunk, or that of the `num_forks`-th sequence forked there.

        With `num_tried`, for the one after that many of its drafts.
        """
        sequence = chunk.sequence
        params = sequence.request.sampling
        num_known = chunk.end - chunk.num_drafts + num_tried
        num_generated = num_known - sequence.request.num_prompt_tokens
        hold_off_end = num_generated < params.min_tokens
        held_off = sequence.end_token_ids if hold_off_end else frozenset[int]()
        if sequence.matcher is not None and params.ignore_eos:
            held_off |= frozenset(sequence.request.eos_token_ids)  # its mask may have them
        return cls(
            params=params,
            seed=answer_seed(sequence.request.seed, sequence.answer_index + num_forks),
            logits_index=logits_index,
            token_ids=sequence.tried_token_ids[:num_known],
            num_prompt_tokens=sequence.request.num_prompt_tokens,
            held_off_token_ids=tuple(held_off),
            matcher=_matcher_after(sequence, num_tried),
        )

    @property
    def position(self) -> int:
        """Of the token to draw."""
        return len(self.token_ids)


def _matcher_after(sequence: Sequence, num_tried: int) -> Matcher | None:
    """What constrains the token after that many drafts.

    Where it does not take a draft, that one is not drawn, and what comes after does not count.
    """
    if sequence.matcher is None or not num_tried:
        return sequence.matcher
    matcher = sequence.matcher.copy()
    drafts = sequence.tried_token_ids[sequence.num_tokens :][:num_tried].tolist()
    with suppress(GrammarError):
        all(map(matcher.advance, drafts))
    return matcher
