"""Constrained sequences in the scheduler: what is forced is not drawn, and nothing else changes."""

import random

import pytest

from sapwood.runtime.outputs import FinishReason
from tests.runtime.automata import Automaton, AutomatonMatcher, allowed_token_after
from tests.runtime.harness import EOS, Harness, answer_key

PROMPT = range(1, 41)


def harness_of(*, jump_forward: bool = True, **options: object) -> Harness:
    scheduling = options.pop("options", {})
    return Harness(
        next_token=allowed_token_after,
        options={"jump_forward": jump_forward, **scheduling},  # type: ignore[dict-item]
        **options,  # type: ignore[arg-type]
    )


def path(tokens: list[int]) -> AutomatonMatcher:
    return AutomatonMatcher(Automaton.of_path(tokens))


CHOICE_THEN_RUN = Automaton(
    {0: {5: 1, 6: 1}, 1: {7: 2}, 2: {8: 3}, 3: {9: 4}, 4: {10: 5, 11: 5}}, frozenset({5})
)


def test_forced_tokens_come_with_the_drawn_one_and_are_computed_in_one_chunk() -> None:
    harness = harness_of()
    request_id = harness.add(PROMPT, 20, matcher=AutomatonMatcher(CHOICE_THEN_RUN))
    told = [output.token_ids for output in [*harness.step(), *harness.step()]]
    assert [len(tokens) for tokens in told] == [4, 1]
    assert told[0][1:] == (7, 8, 9)
    assert [plan.num_rows for plan in harness.executor.plans] == [40, 4]
    assert harness.finished[request_id].finish_reason is FinishReason.STOP
    harness.assert_nothing_held()


def test_without_jump_forward_every_token_is_drawn_and_is_the_same() -> None:
    together, apart = harness_of(), harness_of(jump_forward=False)
    for harness in (together, apart):
        harness.answer(PROMPT, 20, matcher=AutomatonMatcher(CHOICE_THEN_RUN))
    assert together.answers == apart.answers
    assert (together.num_steps, apart.num_steps) == (2, 5)


def test_an_answer_that_its_constraint_completes_ends_without_an_end_token() -> None:
    done = harness_of().answer(PROMPT, 5, matcher=AutomatonMatcher(CHOICE_THEN_RUN))
    assert EOS not in done.token_ids
    assert (len(done.token_ids), done.finish_reason) == (5, FinishReason.STOP)


def test_an_answer_cut_off_by_its_length_says_so() -> None:
    for max_tokens in range(1, 5):
        done = harness_of().answer(PROMPT, max_tokens, matcher=AutomatonMatcher(CHOICE_THEN_RUN))
        assert (len(done.token_ids), done.finish_reason) == (max_tokens, FinishReason.LENGTH)


def test_a_run_right_after_the_prompt_joins_the_prefill_and_is_shared() -> None:
    head = list(range(500, 530))
    automaton = Automaton.of_path([*head, 5])
    edges = {**automaton.edges, 30: {5: 31, 6: 31}}
    harness = harness_of()
    for _ in range(2):
        harness.answer(PROMPT, 60, matcher=AutomatonMatcher(Automaton(edges, frozenset({31}))))
    first, second = harness.executor.plans
    assert first.num_rows == len(PROMPT) + len(head)
    # All of it is a hit but the last token, and hits count within the prompt only.
    assert second.num_rows == 1
    assert harness.finished["r1"].num_cached_tokens == len(PROMPT) - 1
    assert harness.finished["r0"].token_ids[:30] == head


@pytest.mark.parametrize("n", [1, 3])
def test_an_answer_of_forced_tokens_only_draws_nothing(n: int) -> None:
    harness = harness_of()
    request_id = harness.add(PROMPT, 20, n=n, matcher=path([7, 8, 9]))
    harness.run()
    assert harness.num_steps == 1
    for index in range(n):
        done = harness.finished[answer_key(request_id, index)]
        assert (done.token_ids, done.finish_reason) == ([7, 8, 9], FinishReason.STOP)
    harness.assert_nothing_held()


def test_a_constraint_that_nothing_can_satisfy_but_the_empty_answer_gives_it() -> None:
    done = harness_of().answer(PROMPT, 20, matcher=path([]))
    assert (done.token_ids, done.finish_reason) == ([], FinishReason.STOP)


def test_a_stop_string_ends_the_answer_inside_a_run() -> None:
    token_bytes = tuple(b"%d," % i for i in range(1000))
    done = harness_of(token_bytes=token_bytes).answer(
        PROMPT, 20, stop="8,", matcher=AutomatonMatcher(CHOICE_THEN_RUN)
    )
    assert done.token_ids[1:] == [7, 8]
    assert done.stop_reason == "8,"
    early = harness_of(token_bytes=token_bytes).answer(
        PROMPT, 20, stop="8,", matcher=path([7, 8, 9])
    )
    assert (early.token_ids, early.stop_reason) == ([7, 8], "8,")


def test_a_stop_token_ends_the_answer_inside_a_run() -> None:
    done = harness_of().answer(
        PROMPT, 20, stop_token_ids=(9,), matcher=AutomatonMatcher(CHOICE_THEN_RUN)
    )
    assert done.token_ids[1:] == [7, 8, 9]
    assert done.stop_reason == 9


def test_answers_are_forked_with_matchers_of_their_own() -> None:
    draws = [random.Random(seed) for seed in range(40)]
    for draw in draws:
        automaton, n = Automaton.drawn(draw), draw.randint(2, 6)
        answers = []
        for jump_forward in (True, False):
            harness = harness_of(jump_forward=jump_forward)
            # The executor draws for each fork the token after the one before: keep to the mask.
            harness.executor._next_token = _spread(allowed_token_after)
            request_id = harness.add(PROMPT, 12, n=n, matcher=AutomatonMatcher(automaton))
            harness.run()
            answers.append([harness.answers[answer_key(request_id, i)] for i in range(n)])
            harness.assert_nothing_held()
        assert answers[0] == answers[1]


def _spread(next_token):  # type: ignore[no-untyped-def]
    """Forks draw the same token where others would not be allowed."""

    def draw(chunk, prefix_hash):  # type: ignore[no-untyped-def]
        return _Same(next_token(chunk, prefix_hash))

    return draw


class _Same(int):
    def __add__(self, other: int) -> int:
        return int(self)


def test_log_probabilities_are_told_for_every_token() -> None:
    harness = harness_of()
    request_id = harness.add(PROMPT, 20, logprobs=True, matcher=AutomatonMatcher(CHOICE_THEN_RUN))
    told = []
    while harness.core.has_work:
        told += harness.step()
    assert sum(len(output.logprobs) for output in told) == len(harness.answers[request_id]) == 5


@pytest.mark.parametrize("method", ["is_complete", "advance", "forced_tokens", "likely_tokens"])
@pytest.mark.parametrize("fails_after", [0, 1, 3])
def test_a_constraint_that_breaks_ends_its_own_answer_only(method: str, fails_after: int) -> None:
    edges = {i: {10 + i: i + 1, 50 + i: i + 1} for i in range(9)}
    automaton = Automaton(edges, frozenset({9}))
    harness = harness_of()
    sick = AutomatonMatcher(automaton, fails_at=method, fails_after=fails_after, num_likely=2)
    sound = harness.add(range(100, 120), 9, matcher=AutomatonMatcher(automaton, num_likely=2))
    free = harness.add(range(200, 220), 9)
    failing = harness.add(PROMPT, 9, matcher=sick)
    while harness.core.has_work:
        harness.step()
    assert set(harness.errors) == {failing}
    assert "too complex" in harness.errors[failing]
    assert len(harness.answers[sound]) == len(harness.answers[free]) == 9
    assert harness.core.stats().num_quarantines == 0
    harness.assert_nothing_held()


def test_a_token_that_the_constraint_does_not_take_ends_the_answer_with_an_error() -> None:
    harness = Harness(next_token=lambda chunk, _: 999)
    request_id = harness.add(PROMPT, 9, matcher=AutomatonMatcher(CHOICE_THEN_RUN))
    while harness.core.has_work:
        harness.step()
    assert "does not allow token 999" in harness.errors[request_id]


def test_a_run_of_forced_tokens_does_not_wait_behind_prompts() -> None:
    edges = {0: {5: 1, 6: 1}, **{i: {10 + i: i + 1} for i in range(1, 9)}, 9: {30: 10, 31: 10}}
    automaton = Automaton(edges, frozenset({10}))
    harness = harness_of(options={"max_num_batched_tokens": 32, "max_num_seqs": 4})
    harness.add(PROMPT, 20, matcher=AutomatonMatcher(automaton))
    harness.step()
    harness.step()
    harness.add(range(100, 300), 4)
    harness.step()
    chunk = harness.executor.plans[-1].chunks[0]
    assert (chunk.sequence.request_id, chunk.length) == ("r0", 9)


def mixed_run(seed: int, *, jump_forward: bool) -> Harness:
    """Constrained and free requests, cut into chunks, preempted, aborted; drawn from `seed`."""
    draw = random.Random(seed)
    block_size = draw.choice((1, 4, 16))
    # The longest request is 30 + 24 tokens; it must fit alone.
    num_blocks = draw.choice((64, 80, 200)) // block_size + 1
    budget = draw.choice((4, 9, 40))
    harness = harness_of(
        jump_forward=jump_forward,
        block_size=block_size,
        num_blocks=num_blocks,
        options={"max_num_batched_tokens": budget, "max_num_seqs": draw.randint(1, 4)},
    )
    base = [draw.randint(1, 30) for _ in range(20)]
    automata = [Automaton.drawn(draw) for _ in range(3)]
    for _ in range(8):
        prompt = base[: draw.randint(1, 20)] + [draw.randint(1, 30)] * draw.randint(0, 10)
        automaton = draw.choice([None, *automata])
        num_likely = draw.choice((0, 1, 3))
        matcher = automaton and AutomatonMatcher(automaton, num_likely=num_likely)
        stop_token_ids = (draw.randint(1, 999),) if draw.random() < 0.2 else ()
        harness.add(prompt, draw.randint(1, 24), matcher=matcher, stop_token_ids=stop_token_ids)
    while harness.core.has_work:
        harness.step()
        if draw.random() < 0.05:
            harness.preempt(draw.randint(1, 3))
    assert not harness.errors
    harness.assert_nothing_held()
    return harness


@pytest.mark.parametrize("seed", range(125))
def test_jump_forward_changes_no_token_under_preemption_and_chunking(seed: int) -> None:
    """125 runs of 8 requests."""
    on, off = (mixed_run(seed, jump_forward=jump_forward) for jump_forward in (True, False))
    assert on.answers == off.answers
    reasons = [
        {key: (done.finish_reason, done.stop_reason) for key, done in harness.finished.items()}
        for harness in (on, off)
    ]
    assert reasons[0] == reasons[1]


@pytest.mark.parametrize("num_steps", range(6))
def test_an_abort_at_any_step_leaves_nothing_held(num_steps: int) -> None:
    harness = harness_of(options={"max_num_batched_tokens": 16, "max_num_seqs": 4})
    head = Automaton.of_path(list(range(600, 620)))
    edges = {**head.edges, 20: {5: 21, 6: 21}, **{21 + i: {7: 22 + i, 8: 22 + i} for i in range(9)}}
    matcher = AutomatonMatcher(Automaton(edges, frozenset({30})))
    request_id = harness.add(PROMPT, 40, matcher=matcher)
    for _ in range(num_steps):
        harness.step()
    harness.abort(request_id)
    assert harness.finished[request_id].finish_reason is FinishReason.ABORT
    harness.assert_nothing_held()


def test_drafts_that_are_drawn_come_with_the_token_after_them_and_others_are_forgotten() -> None:
    edges = {i: {10 + i: i + 1, 50 + i: i + 1} for i in range(8)}
    matcher = AutomatonMatcher(Automaton(edges, frozenset({8})), num_likely=2)
    for drawn in (max, min):  # the drafts are the highest
        harness = Harness(
            next_token=lambda chunk, _, drawn=drawn: drawn(
                chunk.sequence.matcher._next(chunk.sequence.matcher._state()) or [EOS]
            )
        )
        done = harness.answer(PROMPT, 20, matcher=matcher)
        assert done.token_ids == [drawn(edges[i]) for i in range(8)]
        rows = [plan.num_rows for plan in harness.executor.plans]
        assert rows == ([42, 3, 3] if drawn is max else [42, *[3] * 6, 2])
        harness.assert_nothing_held()


def test_drafts_that_do_not_fit_are_not_tried() -> None:
    """Neither into the rest of a step, nor where the answer may not go on."""
    edges = {i: {10 + i: i + 1, 50 + i: i + 1} for i in range(8)}
    automaton = Automaton(edges, frozenset({8}))
    harness = harness_of(options={"max_num_batched_tokens": 40, "max_num_seqs": 4})
    harness.answer(PROMPT, 8, matcher=AutomatonMatcher(automaton, num_likely=3))
    assert harness.executor.plans[0].num_rows == 40
    short = harness_of()
    short.answer(PROMPT, 2, matcher=AutomatonMatcher(automaton, num_likely=3))
    assert short.executor.plans[0].num_rows == 41
