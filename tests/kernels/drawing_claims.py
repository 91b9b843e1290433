"""Claims about drawing tokens, against a sort and Python's whole numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sapwood.kernels.interface import DrawnTokens
from tests.kernels.claims import Subject, claim
from tests.kernels.drawing_oracle import (
    LARGEST_NOISE,
    Draw,
    drawn_from,
    kept_weights,
    params_of,
    random_draw,
    random_logits,
)

# An exponential may be another one in its last place; this is many times what comes of it.
NOISE_MARGIN = 2.0**-30


def draw_tokens(subject: Subject, logits: Tensor, draws: list[Draw]) -> DrawnTokens:
    with np.errstate(over="ignore"):  # of a tiny temperature, where kernels are interpreted
        return subject.kernels.draw_tokens(logits, params_of(draws, subject.device))


def assert_draws(subject: Subject, logits: Tensor, draws: list[Draw]) -> None:
    """Each row's token is the oracle's, or that of a number hardly different from its noise."""
    before = logits.clone()
    drawn = draw_tokens(subject, logits, draws)
    assert torch.equal(logits, before)
    assert (drawn.token_ids.dtype, drawn.is_sound.dtype) == (torch.int64, torch.bool)
    assert drawn.is_sound.tolist() == [True] * len(draws)
    rows = logits.cpu().numpy()
    for row, token, draw in zip(rows, drawn.token_ids.tolist(), draws, strict=True):
        if token != drawn_from(row, draw):
            noises = (draw.noise - NOISE_MARGIN, draw.noise + NOISE_MARGIN)
            near = [replace(draw, noise=min(max(noise, 0.0), LARGEST_NOISE)) for noise in noises]
            assert token in [drawn_from(row, other) for other in near], draw


def generator(subject: Subject) -> np.random.Generator:
    return np.random.default_rng(int(subject.random(1).cpu().view(torch.int32)) & 0x7FFFFFFF)


@claim(
    temperature=[0.7, 1.0, 2.5, 100.0],
    top_k=[np.inf, 40, 1, 5],
    top_p=[0.9, 1.0, 0.3, 1e-9],
    min_p=[0.05, 0.0, 1.0],
)
def a_token_is_drawn_of_those_that_filters_leave(
    subject: Subject, temperature: float, top_k: float, top_p: float, min_p: float
) -> None:
    noises = [0.0, LARGEST_NOISE, *generator(subject).random(2).tolist()]
    draws = [
        Draw(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, noise=noise)
        for noise in noises
    ]
    assert_draws(subject, subject.random(4, 300) * 3, draws)


@claim(top_k=[12, np.inf, 25], top_p=[1.0, 0.6, 0.4])
def each_token_that_filters_leave_is_drawn_for_its_noise(
    subject: Subject, top_k: float, top_p: float
) -> None:
    row = subject.random(200).cpu() * 2
    draw = Draw(temperature=0.9, top_k=top_k, top_p=top_p)
    weights = np.array(kept_weights(row.numpy(), draw), float)
    middles = (weights.cumsum() - weights / 2) / weights.sum()
    kept = np.flatnonzero(weights)
    draws = [replace(draw, noise=float(noise)) for noise in middles[kept]]
    logits = row.to(subject.device).expand(len(kept), 200)
    assert draw_tokens(subject, logits, draws).token_ids.tolist() == kept.tolist()


@claim()
def top_p_is_a_share_of_all_and_min_p_comes_after_it(subject: Subject) -> None:
    shares = torch.tensor([0.4, 0.35, *[0.025] * 10], device=subject.device)
    # Half of all is more than the first; of what min_p leaves it would be less.
    draw = Draw(top_p=0.5, min_p=0.5, noise=LARGEST_NOISE)
    assert draw_tokens(subject, shares.log()[None], [draw]).token_ids.tolist() == [1]


@claim(num_rows=[0, 1, 12])
def rows_of_a_step_have_parameters_of_their_own(subject: Subject, num_rows: int) -> None:
    rng = generator(subject)
    draws = [random_draw(rng, 200) for _ in range(num_rows)]
    assert_draws(subject, random_logits(rng, num_rows, 200).to(subject.device), draws)


@claim(vocab_size=[1, 2, 1023, 1024, 1025, 5000])
def vocabularies_of_any_size_are_drawn_from(subject: Subject, vocab_size: int) -> None:
    wide = subject.random(2, vocab_size + 3) * 2
    [noise] = generator(subject).random(1).tolist()
    draws = [Draw(noise=noise), Draw(noise=noise, top_k=30, top_p=0.9)]
    assert_draws(subject, wide[:, 1 : vocab_size + 1], draws)


@claim(top_k=[np.inf, 8500], top_p=[0.95, 0.5])
def filters_may_leave_nearly_all_tokens(subject: Subject, top_k: float, top_p: float) -> None:
    [noise] = generator(subject).random(1).tolist()
    draw = Draw(temperature=30.0, top_k=top_k, top_p=top_p, noise=noise)
    assert_draws(subject, subject.random(1, 9000), [draw])


@claim(top_k=[9, np.inf, 10, 60], top_p=[1.0, 0.125, 0.5, 0.25])
def of_equal_tokens_at_an_edge_the_lower_ids_stay(
    subject: Subject, top_k: float, top_p: float
) -> None:
    logits = torch.full((2, 64), -0.0, device=subject.device)
    logits[:, ::2] = 0.0  # no less than that
    draws = [Draw(top_k=top_k, top_p=top_p, noise=noise) for noise in (0.0, LARGEST_NOISE)]
    num_kept = int(np.ceil(top_p * min(top_k, 64)))
    assert draw_tokens(subject, logits, draws).token_ids.tolist() == [0, num_kept - 1]


@claim()
def greedy_rows_take_the_first_of_the_best(subject: Subject) -> None:
    logits = subject.random(4, 3000)
    logits[0, [2999, 77, 1500]] = 9.0
    logits[1] = -torch.inf
    logits[1, 2048] = -3e38
    logits[2] = logits[2].abs().neg()
    logits[2, [5, 1030]] = torch.tensor([-0.0, 0.0], device=subject.device)
    logits[3, 2999] = 3e38
    greedy = Draw(temperature=0.0, top_k=0, top_p=0.0)
    assert draw_tokens(subject, logits, [greedy] * 4).token_ids.tolist() == [77, 2048, 5, 2999]


@claim()
def a_tiny_temperature_takes_the_best(subject: Subject) -> None:
    logits = subject.random(4, 100)
    draws = [Draw(temperature=t, top_k=k) for t in (5e-324, 1e-30) for k in (np.inf, 50)]
    tokens = draw_tokens(subject, logits, draws).token_ids
    assert torch.equal(tokens, logits.argmax(dim=-1))


@claim(top_p=[1.0, 0.9])
def a_row_without_a_finite_maximum_is_told_and_disturbs_no_other(
    subject: Subject, top_p: float
) -> None:
    logits = subject.random(8, 300)
    draws = [Draw(temperature=float(i % 5), top_p=top_p) for i in range(8)]
    expected = draw_tokens(subject, logits, draws).token_ids
    logits[1, 290], logits[3, 7], logits[4, 0] = torch.nan, torch.inf, -torch.nan
    logits[5], logits[6, expected[6] - 1] = -torch.inf, -torch.inf
    logits[6, expected[6]] = 9.0
    drawn = draw_tokens(subject, logits, draws)
    sound = [True, False, True, False, False, False, True, True]
    assert drawn.is_sound.tolist() == sound
    assert torch.equal(drawn.token_ids[sound], expected[sound])
    assert 0 <= int(drawn.token_ids.min()) <= int(drawn.token_ids.max()) < 300


@claim(num_rows=[6])
def a_token_does_not_depend_on_other_rows(subject: Subject, num_rows: int) -> None:
    rng = generator(subject)
    draws = [random_draw(rng, 1100) for _ in range(num_rows)]
    logits = random_logits(rng, num_rows, 1100).to(subject.device)
    together = draw_tokens(subject, logits, draws).token_ids
    reversed_order = draw_tokens(subject, logits.flip(0), draws[::-1]).token_ids
    assert torch.equal(reversed_order, together.flip(0))
    for row in range(num_rows):
        alone = draw_tokens(subject, logits[row : row + 1], draws[row : row + 1]).token_ids
        assert torch.equal(alone, together[row : row + 1])
