"""Log-probabilities of prompt tokens: what is computed for them, and what the cache remembers."""

import random

import numpy as np
import pytest

from sapwood.runtime.outputs import FinishReason
from tests.runtime.harness import Harness, logprob_of

PROMPT = list(range(1, 41))


def expected_scores(prompt: list[int], namespace: tuple = ()) -> list[float]:
    """Of every token of a prompt but the first."""
    scores, last = [], hash(namespace)
    for token in prompt:
        last = hash((last, token))
        scores.append(logprob_of(last))
    return scores[1:]


def scores_of(harness: Harness, request_id: str, start: int = 1) -> list[float]:
    told = harness.prompt_scores[request_id]
    assert told.start == start
    return told.scores.logprobs.tolist()


def num_rows(harness: Harness) -> int:
    return sum(plan.num_rows for plan in harness.executor.plans)


def score(harness: Harness, prompt: list[int], *, max_tokens: int = 1, **sampling: object) -> str:
    """Run one request alone, noting its plans only."""
    harness.executor.plans.clear()
    request_id = harness.add(prompt, max_tokens, prompt_logprobs=0, **sampling)
    harness.run()
    return request_id


@pytest.mark.parametrize("budget", [7, 10_000])
@pytest.mark.parametrize("block_size", [1, 16])
def test_every_token_but_the_first_is_scored(budget: int, block_size: int) -> None:
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 4}
    harness = Harness(block_size=block_size, options=options)
    request_id = score(harness, PROMPT)
    assert scores_of(harness, request_id) == expected_scores(PROMPT)
    assert num_rows(harness) == len(PROMPT)


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_scoring_a_cached_prompt_computes_its_last_token_only(block_size: int) -> None:
    harness = Harness(block_size=block_size)
    score(harness, PROMPT)
    again = score(harness, PROMPT)
    assert scores_of(harness, again) == expected_scores(PROMPT)
    assert num_rows(harness) == 1
    assert harness.finished[again].num_cached_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("num_shared", [1, 15, 16, 17, 32, 33])
def test_a_shared_prefix_is_not_scored_again(num_shared: int) -> None:
    harness = Harness()
    score(harness, PROMPT)
    other = [*PROMPT[:num_shared], *range(500, 510)]
    request_id = score(harness, other)
    assert scores_of(harness, request_id) == expected_scores(other)
    # The ten that differ, and the row before them, which tells the first one's score.
    assert num_rows(harness) == 11


def test_a_prefix_that_was_cached_without_scores_is_computed_once_more_and_then_known() -> None:
    harness = Harness()
    harness.answer(PROMPT, max_tokens=1)
    first = score(harness, PROMPT)
    assert num_rows(harness) == len(PROMPT)
    second = score(harness, PROMPT)
    assert num_rows(harness) == 1
    assert scores_of(harness, first) == scores_of(harness, second) == expected_scores(PROMPT)


@pytest.mark.parametrize("num_prefix_tokens", [5, 16, 37, 1000])
def test_scoring_continuations_computes_them_and_one_token_of_the_prefix_each(
    num_prefix_tokens: int,
) -> None:
    prefix = list(range(1, num_prefix_tokens + 1))
    harness = Harness()
    harness.answer([*prefix, 999], max_tokens=1)
    harness.executor.plans.clear()
    choices = [[700 + i, 710 + i, 720 + i][: 1 + i % 3] for i in range(4)]
    ids = [
        harness.add(
            [*prefix, *choice],
            max_tokens=0,
            prompt_logprobs=0,
            prompt_logprobs_start=num_prefix_tokens,
        )
        for choice in choices
    ]
    harness.run()
    assert num_rows(harness) <= sum(len(choice) + 1 for choice in choices)
    for request_id, choice in zip(ids, choices, strict=True):
        expected = expected_scores([*prefix, *choice])[num_prefix_tokens - 1 :]
        assert scores_of(harness, request_id, num_prefix_tokens) == expected
        assert harness.finished[request_id].token_ids == []
        assert harness.finished[request_id].finish_reason is FinishReason.LENGTH
    harness.assert_nothing_held()


def test_generated_tokens_whose_logprobs_were_asked_for_are_known_later() -> None:
    harness = Harness()
    first = harness.add(PROMPT, max_tokens=9, logprobs=True, prompt_logprobs=0)
    harness.run()
    longer = [*PROMPT, *harness.answers[first]]
    again = score(harness, longer)
    assert scores_of(harness, again) == expected_scores(longer)
    # The answer's last token was drawn and not computed, so the tree does not have it.
    assert num_rows(harness) == 2


def test_alternatives_are_computed_anew_from_the_first_wanted_position() -> None:
    harness = Harness()
    score(harness, PROMPT)
    harness.executor.plans.clear()
    request_id = harness.add(PROMPT, 1, prompt_logprobs=2, prompt_logprobs_start=30)
    harness.run()
    assert num_rows(harness) == len(PROMPT) - 29
    assert harness.prompt_scores[request_id].scores.top_ids.shape == (10, 2)
    assert scores_of(harness, request_id, 30) == expected_scores(PROMPT)[29:]


def test_scores_survive_preemptions_chunks_and_eviction() -> None:
    draw = random.Random(5)
    options = {"max_num_batched_tokens": 16, "max_num_seqs": 6}
    harness = Harness(block_size=4, num_blocks=40, options=options)
    wanted: dict[str, tuple[list[int], int]] = {}
    for _ in range(400):
        if draw.random() < 0.25:
            shared = list(range(1, draw.randint(2, 40)))
            prompt = [*shared, *(draw.randint(1, 5) for _ in range(draw.randint(1, 6)))]
            start = draw.choice([0, draw.randrange(len(prompt))])
            num_top = draw.choice([0, 0, 1])
            request_id = harness.add(
                prompt,
                max_tokens=draw.randint(0, 4),
                prompt_logprobs=num_top,
                prompt_logprobs_start=start,
                logprobs=draw.random() < 0.5,
            )
            wanted[request_id] = prompt, max(1, start)
        if draw.random() < 0.2:
            harness.preempt(draw.randint(1, 3))
        harness.step()
    harness.run()
    assert wanted
    for request_id, (prompt, start) in wanted.items():
        if start < len(prompt):
            expected = expected_scores(prompt)[start - 1 :]
            np.testing.assert_array_equal(scores_of(harness, request_id, start), expected)
    harness.assert_nothing_held()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_an_abort_does_not_tell_scores_again(num_steps: int) -> None:
    harness = Harness()
    request_id = harness.add(PROMPT, max_tokens=10, n=2, prompt_logprobs=0)
    told = [output for _ in range(num_steps) for output in harness.step()]
    told += harness.core.abort(request_id)
    assert sum(output.prompt_scores is not None for output in told) == min(num_steps, 1)
