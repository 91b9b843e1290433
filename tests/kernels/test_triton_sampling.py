"""What of drawing in Triton is not seen from `Kernels`: how the work is cut."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood.kernels.drawing import best_bits
from sapwood.kernels.triton_sampling import SamplingShape, draw_tokens, specializations
from tests.kernels.drawing_oracle import (
    Draw,
    drawn_from,
    params_of,
    random_draw,
    random_logits,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = SamplingShape(block=64, pick_block=64, max_spans=4, capacity=64, num_programs=64)
SHAPES = {
    "one span": SamplingShape(block=128, pick_block=64, max_spans=1, capacity=256),
    "spans and little room": SMALL,
    "no room": SamplingShape(block=64, pick_block=128, max_spans=8, capacity=1),
    "few bins": SamplingShape(block=64, pick_block=64, max_spans=2, num_bins=8, capacity=128),
    "rows in parts": SamplingShape(block=256, pick_block=256, max_rows=3),
}


def tokens_of(logits: Tensor, draws: list[Draw], shape: SamplingShape) -> list[int]:
    with np.errstate(over="ignore"):  # of a tiny temperature, where kernels are interpreted
        drawn = draw_tokens(logits.to(DEVICE), params_of(draws, DEVICE), shape)
    return drawn.token_ids.tolist()


def check(seed: int, num_rows: int, shape: SamplingShape) -> None:
    """Where kernels are interpreted, exponentials are numpy's as well, and all is exact."""
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.integers(1, 600))
    logits = random_logits(rng, num_rows, vocab_size)
    draws = [random_draw(rng, vocab_size) for _ in range(num_rows)]
    expected = [drawn_from(row, draw) for row, draw in zip(logits.numpy(), draws, strict=True)]
    assert tokens_of(logits, draws, shape) == expected


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_are_the_same_however_the_work_is_cut(name: str) -> None:
    check(len(name), 5, SHAPES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_the_oracles_to_the_bit(name: str, seed: int) -> None:
    check(seed, 16, SHAPES[name])


@pytest.mark.parametrize("capacity", [64, 512])
def test_equal_tokens_are_counted_across_blocks(capacity: int) -> None:
    shape = replace(SMALL, capacity=capacity)
    logits = torch.zeros(3, 300)
    logits[:, 299] = 1.0  # in a block of which no other token is kept
    total = 150 + math.e
    draws = [Draw(top_k=151, noise=noise) for noise in (100.5 / total, 149.5 / total, 0.999)]
    assert tokens_of(logits, draws, shape) == [100, 149, 299]


def test_bins_that_fall_short_are_not_believed() -> None:
    """Weights that are rounded up have more mass than their bins tell: top_p's edge is beyond them.

    Of 1,000 tokens the best has 2**52; 400 have 0.6, which rounds to 1. top_p allows 300 to be
    left out, and the bins tell of about 0.6 * 400 beyond the first.
    """
    vocab_size, num_tail = 1000, 400
    best = 2 ** best_bits(vocab_size)
    logits = torch.full((2, vocab_size), -torch.inf)
    logits[:, 700] = 0.0
    logits[:, 100 : 100 + num_tail] = math.log(0.6 / best)
    total = best + num_tail
    kept = num_tail - 300
    top_p = (total - 300) / total
    draws = [Draw(top_p=top_p, noise=0.0), Draw(top_p=top_p, noise=(kept - 0.5) / total)]
    shape = SamplingShape(block=256, pick_block=256, capacity=1024)
    expected = [drawn_from(row, draw) for row, draw in zip(logits.numpy(), draws, strict=True)]
    assert expected == [100, 100 + kept - 1]
    assert tokens_of(logits, draws, shape) == expected


@pytest.mark.slow
def test_draws_follow_the_distribution() -> None:
    """Chi-squared at p = 0.001, 5 degrees of freedom. The interpreter takes 0.1 s for a draw."""
    num_draws = 1000 if DEVICE.type == "cpu" else 20_000
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.0, -torch.inf])
    noises = np.random.default_rng(5).random(num_draws).tolist()
    draws = [Draw(temperature=2.0, top_k=6, noise=noise) for noise in noises]
    counts = np.bincount(tokens_of(logits.expand(num_draws, 8), draws, SMALL), minlength=8)
    kept = np.array([0, 1, 2, 3, 4, 6])
    weights = np.exp(logits[kept].double().numpy() / 2)
    expected = weights / weights.sum() * num_draws
    assert counts[kept].sum() == num_draws
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 20.5


def test_every_form_has_a_name_of_its_own() -> None:
    names = [specialization.name for specialization in specializations()]
    assert len(set(names)) == len(names) == 20
