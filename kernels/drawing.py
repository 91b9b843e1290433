"""A token for each row of logits, in torch.

Every row is computed from its own logits and parameters; what else is in the batch does not matter,
to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sapwood.kernels.interface import DrawnTokens, DrawParams
from sapwood.kernels.staging import send

# How many logits are worked on at once: 32 MiB in float64, whatever the batch and the vocabulary.
SLICE_SIZE = 2**22


def draw_tokens(logits: Tensor, params: DrawParams) -> DrawnTokens:
    """`Kernels.draw_tokens`. A sort of each row that has top_k or top_p."""
    num_rows, vocab_size = logits.shape
    token_ids = _argmax(logits)
    # NaN and infinities show in the maximum, and NaN counts as the highest of all.
    is_sound = logits.gather(1, token_ids[:, None])[:, 0].isfinite()
    drawn = params.drawn_rows
    if not len(drawn):
        return DrawnTokens(token_ids, is_sound)
    if len(drawn) == num_rows and num_rows * vocab_size <= SLICE_SIZE:
        return DrawnTokens(torch.where(is_sound, _draw(logits, params), token_ids), is_sound)
    for part in slices(len(drawn), vocab_size):
        index = _index(drawn[part], logits)
        picked = _draw(logits[index], params.of(drawn[part], index))
        token_ids[index] = torch.where(is_sound[index], picked, token_ids[index])
    return DrawnTokens(token_ids, is_sound)


def slices(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """All rows, a few at a time."""
    num_at_once = max(1, SLICE_SIZE // vocab_size)
    for start in range(0, num_rows, num_at_once):
        yield slice(start, min(start + num_at_once, num_rows))


def _argmax(logits: Tensor) -> Tensor:
    """The first of the highest in each row; int64 [num_rows]."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(axis=-1))  # torch's takes six times as long


def _draw(logits: Tensor, params: DrawParams) -> Tensor:
    """The token at which the cumulative sum, in token-id order, passes a uniform number."""
    noise = params.on_device[4][:, None]
    cumulative = _weights(logits, params).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Rounding must not carry the product up to the total, where no token is left.
    target = torch.minimum((noise * total.double()).long(), total - 1)
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _weights(logits: Tensor, params: DrawParams) -> Tensor:
    """Unnormalised probabilities after temperature, top_k, top_p and min_p, in that order.

    int64 [num_rows, vocab_size]: whole numbers, so that sums over a row are exact in whatever
    order a device takes them; it varies with the batch. A token is kept if it has at least
    2**-43 (with half a million tokens) of the best one's probability. Of equally likely tokens at
    an edge the lower ids stay.
    """
    vocab_size = logits.shape[1]
    temperature, _, _, min_p, _ = params.on_device[:, :, None]
    # In two steps, so that a tiny temperature gives infinities below the best and not NaN.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).double() / temperature
    relative = scaled.exp_()  # to the best token's probability
    weights: Tensor = (relative * 2.0 ** best_bits(vocab_size)).round_().long()
    ranked = params.ranked_rows(vocab_size)
    if len(ranked) == len(logits):
        weights = _best_of(weights, logits, params)
    elif len(ranked):
        index = _index(ranked, logits)
        weights[index] = _best_of(weights[index], logits[index], params.of(ranked, index))
    if params.on_host[3].any():
        weights.masked_fill_(relative < min_p, 0)
    return weights


def best_bits(vocab_size: int) -> int:
    """The best token of a row weighs two to the power of it: then a row's sum is below 2**62."""
    return 62 - vocab_size.bit_length()


def _best_of(weights: Tensor, logits: Tensor, params: DrawParams) -> Tensor:
    """`weights` with zeros where top_k, then top_p, leaves a token out."""
    vocab_size = logits.shape[1]
    _, top_k, top_p, _, _ = params.on_device[:, :, None]
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    ordered = weights.gather(1, ids)
    ordered.masked_fill_(torch.arange(vocab_size, device=logits.device) >= top_k, 0)
    cumulative = ordered.cumsum(dim=-1)
    before, total = cumulative - ordered, cumulative[:, -1:]
    ordered.masked_fill_((before.double() >= top_p * total.double()) & (top_p < 1.0), 0)
    return torch.zeros_like(weights).scatter_(1, ids, ordered)


def _index(rows: NDArray[np.int64], like: Tensor) -> Tensor:
    """The rows as an index on the device of `like`."""
    return send({"rows": rows}, like.device)["rows"]
