"""What a sampling option may be for this model and this prompt; the rest is in SamplingParams."""

from collections.abc import Iterable
from dataclasses import dataclass

from sapwood.runtime.errors import RequestError
from sapwood.runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """`vocab_size` counts the model's rows; `max_num_seqs` answers can be worked on at once."""

    vocab_size: int
    max_num_seqs: int

    def check(
        self, sampling: SamplingParams, num_prompt_tokens: int, eos_token_ids: Iterable[int]
    ) -> None:
        """Raise RequestError, with `param`, for what cannot be done. O(ids in the options)."""
        for name, ids in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", [*dict(sampling.logit_bias)]),
            ("allowed_token_ids", sampling.allowed_token_ids or ()),
            ("banned_token_ids", sampling.banned_token_ids),
        ):
            if ids and (highest := max(ids)) >= self.vocab_size:
                raise RequestError(
                    f"{name} has {highest}, the vocabulary {self.vocab_size} tokens", param=name
                )
        for name, num_top in (
            ("top_logprobs", sampling.top_logprobs),
            ("prompt_logprobs", sampling.prompt_logprobs or 0),
        ):
            if num_top > self.vocab_size:
                raise RequestError(
                    f"{name} is {num_top}, and the vocabulary has {self.vocab_size} tokens",
                    param=name,
                )
        if sampling.num_computed_answers > self.max_num_seqs:
            name = "n" if sampling.best_of is None else "best_of"
            raise RequestError(
                f"{name} is {sampling.num_computed_answers}, and the engine works on at most "
                f"{self.max_num_seqs} answers at once; ask for fewer, or raise max_num_seqs",
                param=name,
            )
        if sampling.prompt_logprobs_start >= num_prompt_tokens:
            raise RequestError(
                f"prompt_logprobs_start is {sampling.prompt_logprobs_start}, and the prompt has "
                f"{num_prompt_tokens} tokens; give a position in it",
                param="prompt_logprobs_start",
            )
        self._check_some_token_is_left(sampling, eos_token_ids)

    def _check_some_token_is_left(
        self, sampling: SamplingParams, eos_token_ids: Iterable[int]
    ) -> None:
        """There is always a token to draw, also while end tokens are held off."""
        barred = set(sampling.banned_token_ids)
        if sampling.min_tokens:
            ends = () if sampling.ignore_eos else eos_token_ids
            barred.update(ends, sampling.stop_token_ids)
        allowed = sampling.allowed_token_ids
        num_left = (
            self.vocab_size - len(barred)
            if allowed is None
            else len(set(allowed).difference(barred))
        )
        if num_left <= 0:
            name = "banned_token_ids" if allowed is None else "allowed_token_ids"
            raise RequestError(
                f"{name} leaves no token to draw (end tokens are held off for min_tokens); "
                "allow at least one other",
                param=name,
            )
