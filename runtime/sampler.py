"""Logits to tokens.

Every row is computed from its own logits, parameters, seed and position; what else is in the batch
does not matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sapwood.runtime.noise import uniform
from sapwood.runtime.outputs import Logprob, TokenLogprobs
from sapwood.runtime.request import SampledToken
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.step_plan import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """What to do with one row of logits. `position` is that of the token to draw."""

    params: SamplingParams
    seed: int
    position: int
    banned_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, chunk: Chunk) -> "SamplingRow":
        sequence = chunk.sequence
        params = sequence.request.sampling
        hold_off_end = sequence.num_generated < params.min_tokens
        return cls(
            params=params,
            seed=sequence.request.seed,
            position=sequence.num_tokens,
            banned_token_ids=tuple(sequence.end_token_ids) if hold_off_end else (),
        )


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Draw one token for each row of `logits` float32 [num_rows, vocab_size]; may overwrite them.

    A row without a finite maximum (a broken checkpoint, float16 beyond its range) is told as not
    sound and disturbs no other.

    O(num_rows * vocab_size), and a sort of each row that has top_k or top_p.
    """
    if not rows:
        return []
    logprobs = _logprobs_of(logits, rows)
    for index, row in enumerate(rows):
        if row.banned_token_ids:
            banned = [i for i in row.banned_token_ids if i < logits.shape[1]]
            logits[index, banned] = -torch.inf
    token_ids = _argmax(logits)
    # NaN and infinities show in the maximum.
    is_sound: list[bool] = logits.amax(dim=-1).isfinite().tolist()
    drawn = [i for i, row in enumerate(rows) if is_sound[i] and not row.params.is_greedy]
    if drawn:
        chosen = [rows[i] for i in drawn]
        token_ids[drawn] = _draw(_filtered(logits[drawn], chosen), chosen)
    tokens: list[int] = token_ids.tolist()
    return [
        SampledToken(token, None if row_logprobs is None else row_logprobs.at(token), sound)
        for token, row_logprobs, sound in zip(tokens, logprobs, is_sound, strict=True)
    ]


def _argmax(logits: Tensor) -> Tensor:
    """The first of the highest in each row; int64 [num_rows]."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(axis=-1))  # torch's takes six times as long


def _filtered(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Unnormalised probabilities after temperature, top_k, top_p and min_p, in that order.

    float64 [num_rows, vocab_size]. Of equally likely tokens at an edge the lower ids stay.
    """
    params = [row.params for row in rows]
    temperature = _column([p.temperature for p in params], logits)
    # In two steps, so that a tiny temperature gives infinities below the best and not NaN.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).double() / temperature
    probs = torch.softmax(scaled, dim=-1)
    if any(p.top_k > 0 or p.top_p < 1.0 for p in params):
        ordered, ids = torch.sort(probs, dim=-1, descending=True, stable=True)
        vocab_size = logits.shape[1]
        top_k = _column([p.top_k if p.top_k > 0 else vocab_size for p in params], logits)
        ordered[torch.arange(vocab_size, device=logits.device) >= top_k] = 0.0
        before = ordered.cumsum(dim=-1) - ordered
        top_p = _column([p.top_p for p in params], logits)
        ordered[(before >= top_p * ordered.sum(dim=-1, keepdim=True)) & (top_p < 1.0)] = 0.0
        probs = torch.zeros_like(probs).scatter_(1, ids, ordered)
    if any(p.min_p > 0.0 for p in params):
        floor = _column([p.min_p for p in params], logits) * probs.amax(dim=-1, keepdim=True)
        probs[probs < floor] = 0.0
    return probs


def _draw(probs: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The token at which the cumulative sum, in token-id order, passes a uniform number."""
    seeds = np.array([row.seed for row in rows], np.int64)
    positions = np.array([row.position for row in rows], np.int64)
    noise = torch.from_numpy(uniform(seeds, positions)).to(probs.device)
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Rounding must not carry the product up to the total, where no token is left.
    target = torch.minimum(noise[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


@dataclass(frozen=True, slots=True)
class _RowLogprobs:
    """Log-probabilities of one row, taken before anything was masked."""

    of_all: Tensor  # [vocab_size]
    top: tuple[Logprob, ...]

    def at(self, token_id: int) -> TokenLogprobs:
        return TokenLogprobs(token_id=token_id, logprob=float(self.of_all[token_id]), top=self.top)


def _logprobs_of(logits: Tensor, rows: Sequence[SamplingRow]) -> list[_RowLogprobs | None]:
    """For each row that asks, the model's own log-probabilities and the most likely tokens."""
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs]
    found: list[_RowLogprobs | None] = [None] * len(rows)
    if not wanted:
        return found
    of_all = torch.log_softmax(logits[wanted].float(), dim=-1)
    num_top = max(rows[i].params.top_logprobs for i in wanted)
    best = of_all.topk(min(num_top, of_all.shape[1]), dim=-1)
    for j, i in enumerate(wanted):
        ids = best.indices[j].tolist()
        values = best.values[j].tolist()
        pairs = zip(ids, values, strict=True)
        top = tuple(Logprob(*pair) for pair in pairs)[: rows[i].params.top_logprobs]
        found[i] = _RowLogprobs(of_all[j], top)
    return found
