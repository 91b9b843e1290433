"""Whether tokens were drawn right, where exponentials may differ in their last place.

Torch and Triton take exponentials from different libraries. A weight, a whole number, is then one
more or less, and where a token's part of its row begins and ends moves by as much for each token
before it. So a token other than torch's is right where the random number, or a filter's share, lies
that near to such a border, and wrong anywhere else. Greedy rows have no exponentials.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from sapwood.kernels import load_kernels
from sapwood.kernels.drawing import best_bits
from sapwood.kernels.interface import DrawParams

_BELOW_ONE = 1 - 2.0**-53
_RELATIVE_ERROR = 2.0**-50  # of quotients of sums of exponentials: a few units in the last place


def wrong_rows(token_ids: Tensor, expected: Tensor, logits: Tensor, params: DrawParams) -> Tensor:
    """Rows of `token_ids` int64 [n] that are neither `expected`, which torch draws, nor beside it.

    int64 [*]. Draws again, by torch, what differs.
    """
    rows = (token_ids != expected).nonzero()[:, 0]
    if not len(rows):
        return rows
    token_ids, logits = token_ids[rows], logits[rows]
    is_right = torch.zeros_like(rows, dtype=torch.bool)
    for first, last in _bounds(logits, params.of(rows.cpu().numpy(), rows)):
        is_right |= (first <= token_ids) & (token_ids <= last)
    return rows[~is_right]


def _bounds(logits: Tensor, params: DrawParams) -> Iterator[tuple[Tensor, Tensor]]:
    """First and last token of each row for numbers next to its own, for each shift of filters."""
    draw = load_kernels("reference").draw_tokens
    vocab_size = logits.shape[1]
    # All tokens' units, of a sum that is no less than the best one's weight.
    margin = vocab_size / 2.0 ** best_bits(vocab_size) + _RELATIVE_ERROR
    for shift in (0.0, -margin, margin):
        first, last = (
            draw(logits, _shifted(params, shift, noise)).token_ids for noise in (-margin, margin)
        )
        yield first, last


def _shifted(params: DrawParams, shift: float, noise: float) -> DrawParams:
    """The same with other shares, where they filter anything, and other random numbers."""
    values = params.on_host.copy()
    _, _, top_p, min_p, own_noise = values
    filters = top_p < 1.0
    top_p[filters] = np.clip(top_p[filters] + shift, 2.0**-53, _BELOW_ONE)
    min_p[:] = np.minimum(min_p * (1 + shift), 1.0)
    own_noise[:] = np.clip(own_noise + noise, 0.0, _BELOW_ONE)
    return DrawParams(values, torch.from_numpy(values).to(params.on_device.device))
