"""Several answers to one prompt: the scheduler forks them from one lease."""

import random

import pytest

from tests.runtime.harness import EOS, Harness, answer_key, token_after

PROMPT = range(1, 41)


def answers_of(harness: Harness, request_id: str, n: int) -> list[list[int]]:
    return [harness.answers[answer_key(request_id, index)] for index in range(n)]


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("n", [2, 4, 9])
def test_the_prompt_is_computed_once_for_all_answers(n: int, block_size: int) -> None:
    harness = Harness(block_size=block_size)
    request_id = harness.add(PROMPT, max_tokens=5, n=n)
    harness.run()
    first, *others = harness.executor.plans
    assert first.num_rows == len(PROMPT)
    assert first.chunks[0].num_samples == n
    assert [plan.num_rows for plan in others] == [n] * 4
    answers = answers_of(harness, request_id, n)
    assert all(len(answer) == 5 for answer in answers)
    assert [answer[0] - answers[0][0] for answer in answers] == list(range(n))
    harness.assert_nothing_held()


def test_every_answer_is_the_one_of_its_own_prefix() -> None:
    harness = Harness()
    request_id = harness.add(PROMPT, max_tokens=6, n=3)
    harness.run()
    for answer in answers_of(harness, request_id, 3):
        alone = Harness().answer([*PROMPT, answer[0]], max_tokens=5)
        assert answer[1:] == alone.token_ids


def test_answers_that_do_not_fit_yet_wait_and_are_the_same() -> None:
    # 40 tokens and 8 answers of 12: 3 shared blocks and 8 times 2 of 16; there are 8.
    roomy, tight = Harness(), Harness(num_blocks=8)
    for harness in (roomy, tight):
        harness.add(PROMPT, max_tokens=12, n=8)
        harness.run()
    assert tight.answers == roomy.answers
    assert tight.scheduler.counters.num_preemptions > 0
    tight.assert_nothing_held()


def test_a_request_takes_as_many_seats_as_it_has_answers() -> None:
    harness = Harness(options={"max_num_seqs": 4})
    harness.add(PROMPT, max_tokens=3, n=3)
    harness.add(range(100, 110), max_tokens=3, n=2)
    harness.add(range(200, 210), max_tokens=3)
    harness.step()
    assert harness.scheduler.num_running == 3
    # The second does not fit, and nobody behind it goes first.
    assert harness.scheduler.num_waiting == 2
    harness.run()
    assert len(harness.finished) == 6


def test_an_answer_may_end_with_its_first_token() -> None:
    harness = Harness(next_token=lambda chunk, _: EOS if chunk.start == 0 else 7)
    request_id = harness.add(PROMPT, max_tokens=3, n=3)
    harness.run()
    # The second and third are drawn one and two tokens further.
    assert answers_of(harness, request_id, 3) == [[EOS], [1, 7, 7], [2, 7, 7]]
    harness.assert_nothing_held()


@pytest.mark.parametrize("num_steps", range(5))
def test_an_abort_ends_every_answer(num_steps: int) -> None:
    harness = Harness(options={"max_num_batched_tokens": 20, "max_num_seqs": 8})
    request_id = harness.add(PROMPT, max_tokens=10, n=4)
    other = harness.add(range(100, 110), max_tokens=10)
    for _ in range(num_steps):
        harness.step()
    harness.abort(request_id)
    ended = [harness.finished[answer_key(request_id, index)] for index in range(4)]
    assert {answer.finish_reason for answer in ended} == {"abort"}
    harness.run()
    assert len(harness.answers[other]) == 10
    harness.assert_nothing_held()


def test_preempting_forks_does_not_change_them() -> None:
    expected, disturbed = Harness(), Harness()
    for harness in (expected, disturbed):
        harness.add(PROMPT, max_tokens=8, n=4)
    expected.run()
    while disturbed.core.has_work:
        disturbed.preempt(disturbed.scheduler.num_running)
        disturbed.step()
    assert disturbed.answers == expected.answers
    disturbed.assert_nothing_held()


def test_without_a_tree_forks_compute_the_prompt_anew_and_answer_the_same() -> None:
    expected, actual = Harness(), Harness(prefix_caching=False)
    for harness in (expected, actual):
        harness.add(PROMPT, max_tokens=4, n=3)
        harness.run()
    assert actual.answers == expected.answers
    actual.assert_nothing_held()


def test_the_prompt_counts_once_and_every_answers_tokens() -> None:
    harness = Harness()
    harness.add(PROMPT, max_tokens=5, n=4)
    harness.run()
    counters = harness.scheduler.counters
    assert counters.prompt_tokens == len(PROMPT)
    assert counters.generated_tokens == 20


def test_random_requests_of_several_answers_leave_nothing() -> None:
    draw = random.Random(3)
    harness = Harness(
        block_size=4,
        num_blocks=40,
        next_token=lambda chunk, h: EOS if h % 13 == 0 else token_after(chunk, h),
        options={"max_num_batched_tokens": 24, "max_num_seqs": 12},
    )
    unfinished: list[str] = []
    for _ in range(300):
        if draw.random() < 0.3:
            start = draw.choice([1, 300, 600])
            prompt = [*range(start, start + draw.randint(1, 30)), draw.randint(1, 9)]
            n = draw.randint(1, 12)
            unfinished.append(harness.add(prompt, max_tokens=draw.randint(1, 20), n=n))
        if draw.random() < 0.1 and unfinished:
            harness.abort(draw.choice(unfinished))
        if draw.random() < 0.2:
            harness.preempt(draw.randint(1, 3))
        harness.step()
    harness.run()
    harness.assert_nothing_held()
