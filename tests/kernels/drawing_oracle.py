"""The token that `Kernels.draw_tokens` draws, written with a sort and Python's whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sapwood.kernels.interface import NUM_DRAW_PARAMS, DrawParams
from sapwood.kernels.staging import send

LARGEST_NOISE = 1 - 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How one row is drawn from."""

    temperature: float = 1.0
    top_k: float = np.inf
    top_p: float = 1.0
    min_p: float = 0.0
    noise: float = 0.5


def params_of(draws: Sequence[Draw], device: torch.device) -> DrawParams:
    """Those of a row for each draw."""
    rows = [[d.temperature, d.top_k, d.top_p, d.min_p, d.noise] for d in draws]
    values = np.array(rows, np.float64).reshape(-1, NUM_DRAW_PARAMS).T.copy()
    return DrawParams(values, send({"params": values}, device)["params"])


def random_draw(rng: np.random.Generator, vocab_size: int) -> Draw:
    """With any of the options, at their limits too."""
    return Draw(
        temperature=rng.choice([0.0, 0.3, 1.0, 2.0, 100.0, 1e-6, 5e-324]),
        top_k=rng.choice([np.inf, 1, int(rng.integers(1, vocab_size + 3))], p=[0.5, 0.1, 0.4]),
        top_p=rng.choice([1.0, 0.1, 0.5, 0.9, 0.99, 1e-9], p=[0.5, 0.1, 0.1, 0.1, 0.1, 0.1]),
        min_p=rng.choice([0.0, 0.01, 0.3, 1.0], p=[0.6, 0.2, 0.1, 0.1]),
        noise=rng.choice([0.0, LARGEST_NOISE, rng.random()], p=[0.1, 0.1, 0.8]),
    )


def random_logits(rng: np.random.Generator, num_rows: int, vocab_size: int) -> Tensor:
    """Flat rows and steep ones, some with many equal logits, some with tokens taken out."""
    logits = rng.normal(0, rng.choice([0.1, 1, 5], (num_rows, 1)), (num_rows, vocab_size))
    logits[::3] = np.round(logits[::3] * 2) / 2
    logits[::4, rng.integers(0, vocab_size, vocab_size // 2)] = -np.inf
    return torch.from_numpy(logits.astype(np.float32))


def drawn_from(logits: NDArray[np.float32], draw: Draw) -> int:
    """The token of one row whose highest logit is finite."""
    if draw.temperature == 0:
        return int(logits.argmax())
    weights = kept_weights(logits, draw)
    total = sum(weights)
    target = min(int(draw.noise * float(total)), total - 1)
    reached = 0
    for token, weight in enumerate(weights):
        reached += weight
        if reached > target:
            return token
    raise AssertionError("the sum of the weights does not reach itself")


def kept_weights(logits: NDArray[np.float32], draw: Draw) -> list[int]:
    """The weight of each token, 0 of those that are left out."""
    with np.errstate(over="ignore"):
        scaled = (logits - logits.max()).astype(np.float64) / draw.temperature
    relative = np.exp(scaled)
    best = 2.0 ** (62 - len(logits).bit_length())
    weights = [int(weight) for weight in np.rint(relative * best)]
    ranked = np.argsort(-logits, kind="stable").tolist()
    ranked = ranked[: int(min(draw.top_k, len(logits)))]
    if draw.top_p < 1:
        ranked = ranked[: _num_to_reach([weights[token] for token in ranked], draw.top_p)]
    kept = np.zeros(len(logits), bool)
    kept[ranked] = True
    kept &= relative >= draw.min_p
    return [weight if is_kept else 0 for weight, is_kept in zip(weights, kept, strict=True)]


def _num_to_reach(weights: list[int], share: float) -> int:
    """How many of the first weights it takes for that share of all."""
    wanted = share * float(sum(weights))
    reached = 0
    for index, weight in enumerate(weights):
        if float(reached) >= wanted:
            return index
        reached += weight
    return len(weights)
