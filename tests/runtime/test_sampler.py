"""Sampling against closed forms."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from sapwood import SamplingParams
from sapwood.kernels import drawing
from sapwood.runtime.logit_edits import edit_logits
from sapwood.runtime.noise import answer_seed, uniform
from sapwood.runtime.sampler import draw, sample
from sapwood.runtime.sampling_row import SamplingRow
from sapwood.runtime.token_logprobs import prompt_logprobs

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.0, -torch.inf])
NO_TOKENS = np.zeros(100_000, np.int32)


def row_of(
    params: SamplingParams,
    *,
    index: int = 0,
    seed: int = 1,
    position: int = 5,
    held_off: tuple[int, ...] = (),
) -> SamplingRow:
    """A row of which no penalty looks at the tokens, drawn for `position`."""
    return SamplingRow(
        params=params,
        seed=seed,
        logits_index=index,
        token_ids=NO_TOKENS[:position],
        num_prompt_tokens=position,
        held_off_token_ids=held_off,
    )


def row_after(
    params: SamplingParams,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    index: int = 0,
    seed: int = 1,
) -> SamplingRow:
    """A row that comes after these tokens."""
    return SamplingRow(
        params=params,
        seed=seed,
        logits_index=index,
        token_ids=np.array([*prompt, *answer], np.int32),
        num_prompt_tokens=len(prompt),
    )


def counts_of(rows: Sequence[SamplingRow]) -> np.ndarray:
    """How often each token is drawn from LOGITS, which the rows share."""
    drawn = sample(LOGITS[None].clone(), rows)
    return np.bincount([token.token_id for token in drawn], minlength=len(LOGITS))


def distribution(num_draws: int = 50_000, **params) -> np.ndarray:
    sampling = SamplingParams(**params)
    return counts_of([row_of(sampling, position=i) for i in range(num_draws)])


def distribution_after(
    prompt: Sequence[int], answer: Sequence[int], num_draws: int = 10_000, **params
) -> np.ndarray:
    row = row_after(SamplingParams(**params), prompt, answer)
    return counts_of([replace(row, seed=seed) for seed in range(num_draws)])


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


@pytest.mark.parametrize("banned", [(0,), (1, 2, 5), (6, 6, 900)])
def test_banned_tokens_are_never_drawn(banned: tuple[int, ...]) -> None:
    expected = np.where(np.isin(np.arange(8), banned), 0, PROBS)
    assert_follows(distribution(10_000, banned_token_ids=banned), expected)


@pytest.mark.parametrize("allowed", [(3,), (1, 4, 6), (5, 5, 0, 900)])
def test_only_allowed_tokens_are_drawn(allowed: tuple[int, ...]) -> None:
    expected = np.where(np.isin(np.arange(8), allowed), PROBS, 0)
    assert_follows(distribution(10_000, allowed_token_ids=allowed), expected)


def test_of_the_allowed_tokens_the_banned_ones_are_not_drawn() -> None:
    expected = np.where(np.isin(np.arange(8), [1, 4]), PROBS, 0)
    assert_follows(
        distribution(10_000, allowed_token_ids=(1, 4, 6), banned_token_ids=(6, 0)), expected
    )


def test_biases_are_added_to_the_logits() -> None:
    logits = LOGITS.numpy().astype(np.float64)
    logits[[0, 3, 5]] += [-2.5, 1.0, 4.0]
    assert_follows(
        distribution(10_000, logit_bias={0: -2.5, 5: 4, 3: 1.0, 900: 7.0}), softmax(logits)
    )


def test_a_bias_of_100_all_but_decides() -> None:
    assert distribution(num_draws=1000, logit_bias={5: 100})[5] == 1000


@pytest.mark.parametrize("penalty", [0.5, 1.3, 10.0])
def test_repetition_penalty_divides_and_multiplies_what_prompt_and_answer_have(
    penalty: float,
) -> None:
    logits = LOGITS.numpy().astype(np.float64)
    logits[[0, 2]] /= penalty
    logits[[4]] *= penalty
    counts = distribution_after([0, 4, 0], [2, 7, 2], repetition_penalty=penalty)
    assert_follows(counts, softmax(logits))


@pytest.mark.parametrize("penalty", [-2.0, 0.3, 2.0])
def test_frequency_penalty_counts_in_the_answer_only(penalty: float) -> None:
    logits = LOGITS.numpy().astype(np.float64)
    logits[[0, 4]] -= [3 * penalty, penalty]
    counts = distribution_after([1, 1, 0], [0, 4, 0, 0], frequency_penalty=penalty)
    assert_follows(counts, softmax(logits))


@pytest.mark.parametrize("penalty", [-2.0, 0.3, 2.0])
def test_presence_penalty_counts_a_token_once(penalty: float) -> None:
    logits = LOGITS.numpy().astype(np.float64)
    logits[[0, 4]] -= penalty
    counts = distribution_after([1, 1, 0], [0, 4, 0, 0], presence_penalty=penalty)
    assert_follows(counts, softmax(logits))


@pytest.mark.parametrize("num_draws", [10_000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_the_order_is_bias_then_repetition_then_frequency_and_presence_then_temperature(
    num_draws: int,
) -> None:
    logits = LOGITS.numpy().astype(np.float64)
    logits[1] = (logits[1] - 2.0) * 1.5  # the bias changes its sign, so the penalty multiplies
    logits[0] = logits[0] / 1.5 - 2 * 0.2 - 0.4
    logits[3] = -torch.inf
    counts = distribution_after(
        [1],
        [0, 0],
        num_draws,
        banned_token_ids=(3,),
        logit_bias={1: -2.0},
        repetition_penalty=1.5,
        frequency_penalty=0.2,
        presence_penalty=0.4,
        temperature=0.8,
    )
    assert_follows(counts, softmax(logits / 0.8))


def test_penalties_are_those_of_a_direct_computation_in_float64() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 5, (20, 300)).astype(np.float32)
    rows, expected = [], logits.astype(np.float64)
    for index in range(20):
        prompt, answer = rng.integers(0, 300, 50), rng.integers(0, 300, index * 10)
        params = SamplingParams(
            repetition_penalty=rng.uniform(0.2, 3) if index % 3 else 1.0,
            frequency_penalty=rng.uniform(-2, 2) if index % 2 else 0.0,
            presence_penalty=rng.uniform(-2, 2) if index % 5 else 0.0,
        )
        rows.append(row_after(params, prompt.tolist(), answer.tolist(), index=index))
        for token in range(300):
            count = int((answer == token).sum())
            if count or token in prompt:
                factor = params.repetition_penalty
                value = expected[index, token]
                expected[index, token] = value / factor if value > 0 else value * factor
            penalty = count * params.frequency_penalty + (count > 0) * params.presence_penalty
            expected[index, token] -= penalty
    edited = torch.from_numpy(logits.copy())
    edit_logits(edited, rows)
    assert np.array_equal(edited.numpy(), expected.astype(np.float32))


def test_a_repetition_penalty_close_to_zero_leaves_the_logits_finite() -> None:
    params = SamplingParams(repetition_penalty=1e-300, temperature=0)
    [token] = sample(LOGITS[None].clone(), [row_after(params, [1, 4], [])])
    assert (token.token_id, token.is_sound) == (1, True)


def test_tokens_beyond_the_logits_are_penalised_nowhere() -> None:
    params = SamplingParams(repetition_penalty=2, frequency_penalty=1, temperature=0)
    assert sample(LOGITS[None].clone(), [row_after(params, [900], [901, 1])])[0].token_id == 0


def test_greedy_takes_the_best_and_a_tiny_temperature_nearly_so() -> None:
    assert sample(LOGITS[None].clone(), [row_of(SamplingParams(temperature=0))])[0].token_id == 0
    for temperature in (1e-6, 5e-324):
        assert distribution(num_draws=50, temperature=temperature)[0] == 50


def varied_rows() -> list[SamplingRow]:
    """32 rows with every option, each on logits of its own."""
    rng = np.random.default_rng(1)
    rows = []
    for i in range(32):
        params = SamplingParams(
            temperature=0 if i % 8 == 7 else 0.5 + i % 3,
            top_k=i % 5 or -1,
            top_p=1 - 0.1 * (i % 4),
            min_p=0.02 * (i % 3),
            logprobs=i % 3 == 0,
            top_logprobs=i % 9 if i % 3 == 0 else 0,
            repetition_penalty=1.2 if i % 4 == 1 else 1.0,
            frequency_penalty=0.5 if i % 6 == 1 else 0.0,
            presence_penalty=-0.5 if i % 7 == 1 else 0.0,
            logit_bias={7: 3.0, 11: -2.0} if i % 5 == 2 else {},
            allowed_token_ids=tuple(range(0, 400)) if i % 6 == 5 else None,
            banned_token_ids=(1, 2, 3) if i % 4 == 3 else (),
        )
        tokens = rng.integers(0, 500, 40 + i).tolist()
        row = row_after(params, tokens[:20], tokens[20:], index=i, seed=i)
        rows.append(replace(row, held_off_token_ids=(0, 5) if i % 10 == 4 else ()))
    return rows


@pytest.mark.parametrize("vocab_size", [503, 4096])
def test_a_row_does_not_depend_on_its_batch(vocab_size: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(32, vocab_size) * 4
    rows = varied_rows()
    together = sample(logits.clone(), rows)
    for i, row in enumerate(rows):
        [alone] = sample(logits[i : i + 1].clone(), [replace(row, logits_index=0)])
        assert alone == together[i]
    reversed_order = sample(logits.clone(), rows[::-1])
    assert reversed_order == together[::-1]


def test_a_row_does_not_depend_on_how_many_are_worked_on_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(32, 503) * 4
    expected = sample(logits.clone(), varied_rows())
    monkeypatch.setattr(drawing, "SLICE_SIZE", 3 * 503)
    assert sample(logits.clone(), varied_rows()) == expected


def test_rows_that_share_logits_do_not_see_each_others_edits() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 503) * 4
    rows = [replace(row, logits_index=i % 2) for i, row in enumerate(varied_rows())]
    together = sample(logits.clone(), rows)
    alone = [sample(logits.clone(), [row])[0] for row in rows]
    assert together == alone


@pytest.mark.parametrize("shares_logits", [False, True])
def test_drawing_reads_nothing_back_from_the_device(shares_logits: bool) -> None:
    """Tensors on `meta` have no elements: whoever asks for one, or how many there are, fails."""
    num_logits = 2 if shares_logits else 32
    rows = [replace(row, logits_index=i % num_logits) for i, row in enumerate(varied_rows())]
    drawn = draw(torch.empty(num_logits, 503, device="meta"), rows)
    assert (drawn.token_ids.shape, drawn.token_ids.dtype) == ((32,), torch.int64)
    assert (drawn.is_sound.shape, drawn.is_sound.dtype) == ((32,), torch.bool)


def test_tokens_on_the_device_are_those_that_are_told() -> None:
    logits = torch.randn(32, 503) * 4
    logits[4] = torch.nan
    drawn = draw(logits, varied_rows())
    told = drawn.told()
    assert drawn.token_ids.tolist() == [token.token_id for token in told]
    assert drawn.is_sound.tolist() == [token.is_sound for token in told]
    assert drawn.told() == told


def test_without_rows_nothing_is_drawn() -> None:
    assert sample(LOGITS[None], []) == []


def test_answers_drawn_from_one_row_follow_its_distribution() -> None:
    params = SamplingParams()
    rows = [row_of(params, seed=answer_seed(1234, i)) for i in range(50_000)]
    assert_follows(counts_of(rows), PROBS)


def test_a_row_without_a_token_left_is_told_and_disturbs_no_other() -> None:
    everything = tuple(range(8))
    rows = [
        row_of(SamplingParams(), position=3),
        row_of(SamplingParams(logprobs=True), held_off=everything),
        row_of(SamplingParams(banned_token_ids=everything, frequency_penalty=1.0)),
        row_of(SamplingParams(allowed_token_ids=(900,), logit_bias={900: 1.0}, temperature=0)),
        row_of(SamplingParams(top_p=0.9, top_k=3, min_p=0.1), position=4),
    ]
    drawn = sample(LOGITS[None].clone(), rows)
    assert [token.is_sound for token in drawn] == [True, False, False, False, True]
    assert drawn[0] == sample(LOGITS[None].clone(), [rows[0]])[0]
    assert drawn[4] == sample(LOGITS[None].clone(), [rows[4]])[0]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_penalty_does_not_hide_a_broken_logit(poison: float) -> None:
    logits = LOGITS[None].clone()
    logits[0, 2] = poison
    [token] = sample(logits, [row_after(SamplingParams(repetition_penalty=2.0), [2], [2])])
    assert not token.is_sound


def test_held_off_tokens_are_not_drawn_and_keep_their_log_probability() -> None:
    params = SamplingParams(logprobs=True, top_logprobs=8)
    rows = [row_of(params, position=i, held_off=(1, 0, 900)) for i in range(20)]
    drawn = sample(LOGITS[None].clone(), rows)
    assert not {0, 1} & {token.token_id for token in drawn}
    for token in drawn:
        assert token.logprobs is not None
        by_id = {top.token_id: top.logprob for top in token.logprobs.top}
        assert by_id[0] == pytest.approx(np.log(PROBS[0]), abs=1e-5)


def test_logprobs_are_before_temperature_filters_biases_and_penalties() -> None:
    params = SamplingParams(
        temperature=5.0,
        top_k=1,
        logprobs=True,
        top_logprobs=3,
        logit_bias={1: 50.0},
        repetition_penalty=3.0,
        banned_token_ids=(0,),
    )
    [token] = sample(LOGITS[None].clone(), [row_after(params, [6], [])])
    assert token.token_id == 1
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(np.log(PROBS[1]), abs=1e-5)
    assert [top.token_id for top in token.logprobs.top] == [0, 1, 6]
    values = [top.logprob for top in token.logprobs.top]
    assert values == pytest.approx(np.log(PROBS[[0, 1, 6]]), abs=1e-5)


def test_rows_of_best_of_get_the_logprobs_that_choose_the_best() -> None:
    rows = [row_of(SamplingParams(best_of=2)), row_of(SamplingParams(n=2, best_of=2))]
    drawn = sample(LOGITS[None].clone(), rows)
    assert [token.logprobs is None for token in drawn] == [False, True]


def test_only_rows_that_ask_get_logprobs() -> None:
    rows = [row_of(SamplingParams(logprobs=True)), row_of(SamplingParams(), index=1)]
    drawn = sample(LOGITS.repeat(2, 1), rows)
    assert drawn[0].logprobs is not None
    assert drawn[0].logprobs.top == ()
    assert drawn[1].logprobs is None


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_prompt_logprobs_are_those_that_sampling_tells_bit_for_bit(
    num_top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, 3001) * 5
    logits[:, 100:200] = logits[:, :1].round()  # ties
    params = SamplingParams(logprobs=True, top_logprobs=num_top)
    drawn = sample(logits.clone(), [row_of(params, index=i, seed=i) for i in range(50)])
    monkeypatch.setattr(drawing, "SLICE_SIZE", 7 * 3001)
    token_ids = np.array([token.token_id for token in drawn], np.int32)
    before = logits.clone()
    told = prompt_logprobs(logits, token_ids, num_top)
    assert torch.equal(logits, before)
    assert (told.logprobs.dtype, told.top_logprobs.shape) == (np.float32, (50, num_top))
    for i, token in enumerate(drawn):
        assert token.logprobs is not None
        assert token.logprobs.logprob == told.logprobs[i]
        assert [top.token_id for top in token.logprobs.top] == told.top_ids[i].tolist()
        assert [top.logprob for top in token.logprobs.top] == told.top_logprobs[i].tolist()


def test_prompt_logprobs_are_log_softmax() -> None:
    told = prompt_logprobs(LOGITS[None].repeat(3, 1), np.array([0, 4, 7], np.int32), 99)
    assert told.logprobs[:2] == pytest.approx(np.log(PROBS[[0, 4]]), abs=1e-5)
    assert told.logprobs[2] == -np.inf
    assert told.top_ids[0].tolist() == [0, 1, 6, 2, 3, 4, 5, 7]
    assert prompt_logprobs(LOGITS[None][:0], np.array([], np.int32), 2).logprobs.shape == (0,)


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


def test_the_first_answer_has_the_seed_of_the_request_and_the_others_their_own() -> None:
    for seed in (0, 7, -1, 2**63 - 1, -(2**63)):
        seeds = [answer_seed(seed, index) for index in range(1000)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 1000
        assert all(-(2**63) <= s < 2**63 for s in seeds)


def test_seeds_of_answers_are_the_same_on_every_machine() -> None:
    assert [answer_seed(42, index) for index in (1, 2, 127)] == [
        -4139896182799658390,
        27668455834413438,
        5091901933721855833,
    ]


def test_answers_of_neighbouring_seeds_share_no_noise() -> None:
    seeds = np.array([answer_seed(seed, index) for seed in range(64) for index in range(64)])
    assert len(set(seeds.tolist())) == 64 * 64
    numbers = uniform(seeds, np.full(64 * 64, 9)).reshape(64, 64)
    counts, _ = np.histogram(numbers, bins=64, range=(0, 1))
    assert ((counts - 64) ** 2 / 64).sum() < 104  # chi-squared, 63 degrees, p = 0.001
    for shifted in (numbers[1:] - numbers[:-1], numbers[:, 1:] - numbers[:, :-1]):
        assert abs(np.var(shifted) - 1 / 6) < 0.01
