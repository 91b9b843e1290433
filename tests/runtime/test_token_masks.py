"""Masks of constrained rows, on their way from matchers to logits."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sapwood.kernels import load_kernels
from sapwood.runtime.sampler import sample
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.sampling_row import SamplingRow
from sapwood.runtime.token_masks import TokenMasks
from tests.runtime.automata import Automaton, AutomatonMatcher
from tests.runtime.harness import EOS, VOCAB_SIZE

LOGITS = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
CHOICE = Automaton({0: {7: 1, 300: 1, 999: 1}}, frozenset({1}))


@pytest.fixture(params=["cpu", "reference"])
def masks(request: pytest.FixtureRequest) -> TokenMasks:
    return TokenMasks(load_kernels(request.param), num_rows=8, vocab_size=VOCAB_SIZE)


def row(index: int, matcher: AutomatonMatcher | None = None, **options: object) -> SamplingRow:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    tokens = np.array([1, 2, 3], np.int32)
    return SamplingRow(
        params=params, seed=index, logits_index=index, token_ids=tokens, num_prompt_tokens=3,
        matcher=matcher,
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_only_what_is_allowed_is_drawn_and_free_rows_are_as_without(
    masks: TokenMasks, temperature: float
) -> None:
    rows = [row(i, temperature=temperature) for i in range(6)]
    free = sample(LOGITS.clone(), rows)
    constrained = [
        replace(r, matcher=AutomatonMatcher(CHOICE)) if i % 2 else r for i, r in enumerate(rows)
    ]
    drawn = sample(LOGITS.clone(), constrained, masks)
    assert drawn[::2] == free[::2]
    assert all(token.token_id in (7, 300, 999) and token.is_sound for token in drawn[1::2])


def test_the_best_allowed_token_wins(masks: TokenMasks) -> None:
    drawn = sample(LOGITS.clone(), [row(2, AutomatonMatcher(CHOICE), temperature=0.0)], masks)
    assert drawn[0].token_id == max((7, 300, 999), key=lambda token: LOGITS[2, token])


def test_a_matcher_that_breaks_fails_its_own_row_only(masks: TokenMasks) -> None:
    class Broken(AutomatonMatcher):
        def fill_mask(self, mask: np.ndarray) -> bool:
            mask[:] = -1
            raise RuntimeError("out of fuel")

    rows = [
        row(0, AutomatonMatcher(CHOICE)),
        row(1, Broken(CHOICE)),
        row(2),
        row(3, AutomatonMatcher(CHOICE, fails_at="fill_mask")),
        row(4, AutomatonMatcher(CHOICE)),
    ]
    drawn = sample(LOGITS.clone(), rows, masks)
    assert [token.is_sound for token in drawn] == [True, False, True, False, True]
    assert "out of fuel" in str(drawn[1].fault) and "too complex" in str(drawn[3].fault)
    assert drawn[0].token_id in (7, 300, 999) and drawn[4].token_id in (7, 300, 999)
    assert drawn[2] == sample(LOGITS.clone(), [row(2)])[0]


def test_log_probabilities_are_those_before_the_mask(masks: TokenMasks) -> None:
    options = {"logprobs": True, "top_logprobs": 3}
    [token] = sample(LOGITS.clone(), [row(0, AutomatonMatcher(CHOICE), **options)], masks)
    expected = torch.log_softmax(LOGITS[0], dim=-1)
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(expected[token.token_id]))
    assert token.logprobs.top[0].token_id == int(LOGITS[0].argmax())


def test_a_row_of_which_no_token_is_left_is_not_sound(masks: TokenMasks) -> None:
    banned = row(0, AutomatonMatcher(CHOICE), banned_token_ids=(7, 300, 999))
    [token] = sample(LOGITS.clone(), [banned], masks)
    assert not token.is_sound


def test_end_tokens_that_are_held_off_stay_out(masks: TokenMasks) -> None:
    loose = Automaton({0: {7: 0}}, frozenset({0}))
    ended = sample(LOGITS.clone().index_fill_(1, torch.tensor([EOS]), 90.0),
                   [row(0, AutomatonMatcher(loose), temperature=0.0)], masks)  # fmt: skip
    assert ended[0].token_id == EOS
    held = replace(row(0, AutomatonMatcher(loose), temperature=0.0), held_off_token_ids=(EOS,))
    assert sample(LOGITS.clone(), [held], masks)[0].token_id == 7


def test_every_step_for_a_device_fills_the_same_memory_and_sends_the_rows_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of one row costs no more where there is room for a thousand."""
    sent: list[torch.Size] = []
    filled: set[int] = set()

    class Noting(AutomatonMatcher):
        def fill_mask(self, mask: np.ndarray) -> bool:
            filled.add(mask.ctypes.data)
            return super().fill_mask(mask)

    kernels = load_kernels("reference")
    monkeypatch.setattr(kernels, "mask_logits", lambda _, rows, allowed: sent.append(allowed.shape))
    masks = TokenMasks(kernels, num_rows=1000, vocab_size=VOCAB_SIZE)
    for _ in range(3):
        assert not masks.apply(torch.empty_like(LOGITS, device="meta"), {2: Noting(CHOICE)})
    assert len(filled) == 1
    assert sent == [(1, -(-VOCAB_SIZE // 32))] * 3
