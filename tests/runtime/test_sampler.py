"""Sampling against closed forms."""

import numpy as np
import pytest
import torch

from sapwood import RequestError, SamplingParams
from sapwood.runtime.noise import uniform
from sapwood.runtime.sampler import SamplingRow, sample

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.0, -torch.inf])


def row(position: int = 5, banned: tuple[int, ...] = (), seed: int = 1, **params) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(**params), seed=seed, position=position, banned_token_ids=banned
    )


def distribution(num_draws: int = 50_000, **params) -> np.ndarray:
    rows = [row(position=i, **params) for i in range(num_draws)]
    drawn = sample(LOGITS.repeat(num_draws, 1), rows)
    return np.bincount([token.token_id for token in drawn], minlength=len(LOGITS))


def assert_follows(counts: np.ndarray, expected: np.ndarray) -> None:
    """Chi-squared at p = 0.001, for up to 7 degrees of freedom, and nothing outside the support."""
    expected = expected / expected.sum() * counts.sum()
    support = expected > 0
    assert counts[~support].sum() == 0
    statistic = ((counts[support] - expected[support]) ** 2 / expected[support]).sum()
    assert statistic < 24.3


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


PROBS = softmax(LOGITS.numpy().astype(np.float64))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_temperature_scales_the_logits(temperature: float) -> None:
    logits = LOGITS.numpy().astype(np.float64)
    assert_follows(distribution(temperature=temperature), softmax(logits / temperature))


@pytest.mark.parametrize(("top_k", "kept"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 6]), (99, range(7))])
def test_top_k_keeps_the_most_likely_lower_ids_first(top_k: int, kept: list[int]) -> None:
    expected = np.zeros_like(PROBS)
    expected[list(kept)] = PROBS[list(kept)]
    assert_follows(distribution(top_k=top_k), expected)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.7, 0.95, 1.0])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float) -> None:
    order = np.argsort(-PROBS, kind="stable")
    reached = np.cumsum(PROBS[order])
    num_kept = int(np.searchsorted(reached, top_p)) + 1
    expected = np.zeros_like(PROBS)
    expected[order[:num_kept]] = PROBS[order[:num_kept]]
    assert_follows(distribution(top_p=top_p), expected)


@pytest.mark.parametrize("min_p", [0.0, 0.1, 0.3, 1.0])
def test_min_p_is_a_share_of_the_best(min_p: float) -> None:
    assert_follows(distribution(min_p=min_p), np.where(PROBS >= min_p * PROBS.max(), PROBS, 0))


def test_filters_apply_in_their_order() -> None:
    probs = np.where(np.isin(np.arange(8), [0, 1, 6]), softmax(LOGITS.numpy() / 2.0), 0)
    probs /= probs.sum()
    # Of top_k's three, top_p 0.6 keeps two: 0.45 is short of it, 0.73 is not.
    probs[6] = 0
    assert_follows(distribution(temperature=2.0, top_k=3, top_p=0.6), probs)


def test_greedy_takes_the_best_and_a_tiny_temperature_nearly_so() -> None:
    assert sample(LOGITS[None].clone(), [row(temperature=0)])[0].token_id == 0
    drawn = sample(LOGITS.repeat(50, 1), [row(position=i, temperature=1e-6) for i in range(50)])
    assert {token.token_id for token in drawn} == {0}


def test_a_row_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 500)
    rows = [
        row(position=i, seed=i, temperature=0.5 + i % 3, top_k=i % 5 or -1, top_p=1 - 0.1 * (i % 4))
        for i in range(40)
    ]
    together = [token.token_id for token in sample(logits.clone(), rows)]
    alone = [sample(logits[i : i + 1].clone(), [rows[i]])[0].token_id for i in range(40)]
    assert together == alone


def test_banned_tokens_are_not_drawn_and_keep_their_log_probability() -> None:
    drawn = sample(
        LOGITS.repeat(20, 1),
        [row(position=i, banned=(0, 1), logprobs=True, top_logprobs=8) for i in range(20)],
    )
    assert not {0, 1} & {token.token_id for token in drawn}
    for token in drawn:
        assert token.logprobs is not None
        by_id = {top.token_id: top.logprob for top in token.logprobs.top}
        assert by_id[0] == pytest.approx(np.log(PROBS[0]), abs=1e-5)


def test_logprobs_are_before_temperature_and_filters() -> None:
    [token] = sample(
        LOGITS[None].clone(), [row(temperature=5.0, top_k=1, logprobs=True, top_logprobs=3)]
    )
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(np.log(PROBS[0]), abs=1e-5)
    values = [top.logprob for top in token.logprobs.top]
    assert values == pytest.approx(np.log(PROBS[[0, 1, 6]]), abs=1e-5)


def test_only_rows_that_ask_get_logprobs() -> None:
    drawn = sample(LOGITS.repeat(2, 1), [row(logprobs=True), row()])
    assert drawn[0].logprobs is not None
    assert drawn[0].logprobs.top == ()
    assert drawn[1].logprobs is None


def test_noise_is_uniform_and_a_function_of_seed_and_position() -> None:
    positions = np.arange(100_000)
    numbers = uniform(np.full(100_000, 7), positions)
    assert ((numbers >= 0) & (numbers < 1)).all()
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 149  # chi-squared, 99 degrees, p = 0.001
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert np.array_equal(numbers, uniform(np.full(100_000, 7), positions))
    other = uniform(np.full(100_000, 8), positions)
    assert abs(np.corrcoef(numbers, other)[0, 1]) < 0.02


def test_negative_and_huge_seeds_work() -> None:
    seeds = np.array([-(2**63), 2**63 - 1, -1, 0], np.int64)
    assert len(set(uniform(seeds, np.zeros(4, np.int64)).tolist())) == 4


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"stop": ["ok", ""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": "\ud800"}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": "7"}, "stop_token_ids"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(params: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as info:
        SamplingParams(**params)  # type: ignore[arg-type]
    assert info.value.param == param
