"""Prefixes that programs come back to: kept for them, within bounds, at nobody's cost."""

import random
from collections.abc import Iterable, Iterator
from itertools import count

import pytest

from sapwood.radix import NamespaceKind, NamespacePart
from sapwood.runtime import warm_prefixes
from sapwood.runtime.hints import Hints
from sapwood.runtime.step_plan import Chunk
from sapwood.runtime.warm_prefixes import GRACE_SECONDS
from tests.runtime.harness import EOS, Finished, Harness, token_after, tokens

FOLLOWED = Hints(program_id="p", more_follows=True, idle_seconds=100)
SAME_PROGRAM = Hints(program_id="p")
PROMPT = range(1, 41)


@pytest.fixture
def fresh() -> Iterator[int]:
    """Tokens that no other prompt has."""
    return count(100)


def small(**options: object) -> Harness:
    """A pool of 40 blocks of 4 tokens, 10 of which may be warm."""
    return Harness(block_size=4, num_blocks=40, step_seconds=0.001, options=options)


def flood(harness: Harness, fresh: Iterator[int]) -> None:
    """Twelve unrelated requests, each of 8 blocks."""
    for _ in range(12):
        harness.answer([next(fresh) for _ in range(29)], 3)


def turn(harness: Harness, prompt: Iterable[int], hints: Hints, max_tokens: int = 4) -> list[int]:
    """A request and its answer: what the next turn's prompt begins with."""
    prompt = list(prompt)
    request_id = harness.add(prompt, max_tokens, hints=hints)
    harness.run()
    return [*prompt, *harness.answers[request_id]]


def come_back(harness: Harness, prompt: Iterable[int], hints: Hints = SAME_PROGRAM) -> Finished:
    request_id = harness.add(prompt, 2, hints=hints)
    harness.run()
    return harness.finished[request_id]


# -- what it brings --------------------------------------------------------------------------------


def test_a_second_turn_hits_after_a_flood_only_if_it_was_announced(fresh: Iterator[int]) -> None:
    cached = {}
    for hints in (FOLLOWED, SAME_PROGRAM):
        harness = small()
        first = turn(harness, range(1, 33), hints)  # 36 tokens, of which 35 are settled
        flood(harness, fresh)
        cached[hints] = come_back(harness, [*first, 7]).num_cached_tokens
        assert harness.scheduler.counters.num_taken_up == (hints is FOLLOWED)
    assert cached == {FOLLOWED: 32, SAME_PROGRAM: 0}


def test_a_parents_prefix_outlasts_a_flood_until_all_its_branches_came(
    fresh: Iterator[int],
) -> None:
    harness = small()
    parent = turn(harness, range(1, 33), Hints(program_id="p", fork_size=3))
    for index in range(3):
        assert harness.core.stats().num_warm_blocks == 8
        flood(harness, fresh)
        branch = Hints(program_id="p", fork_size=3, fork_index=index)
        assert come_back(harness, [*parent, 7 + index], branch).num_cached_tokens >= 32
    assert harness.core.stats().num_warm_blocks == 0


def test_a_branch_that_comes_twice_is_counted_once() -> None:
    harness = small()
    parent = turn(harness, range(1, 33), Hints(program_id="p", fork_size=2, more_follows=True))
    again = Hints(program_id="p", fork_size=2, fork_index=0)
    for _ in range(2):
        come_back(harness, [*parent, 7], again)
        assert harness.core.stats().num_warm_blocks == 8


# -- its bounds ------------------------------------------------------------------------------------


def test_a_prefix_cools_when_its_follower_runs() -> None:
    harness = small()
    first = turn(harness, range(1, 33), FOLLOWED)
    assert harness.core.stats().num_warm_blocks == 8
    come_back(harness, [*first, 7])
    assert harness.core.stats().num_warm_blocks == 0


@pytest.mark.parametrize("other", [Hints(program_id="q"), Hints()])
def test_a_request_of_another_program_leaves_it_warm(other: Hints) -> None:
    harness = small()
    first = turn(harness, range(1, 33), FOLLOWED)
    come_back(harness, [*first, 7], other)
    assert harness.core.stats().num_warm_blocks == 8


def test_another_tenants_program_of_the_same_name_leaves_it_warm() -> None:
    harness = small()
    first = turn(harness, range(1, 33), FOLLOWED)
    tenant = (NamespacePart(NamespaceKind.TENANT, "t"),)
    harness.add([*first, 7], 2, hints=SAME_PROGRAM, namespace=tenant)
    harness.run()
    assert harness.core.stats().num_warm_blocks == 8


def test_a_follower_needs_no_program_id() -> None:
    harness = small()
    first = turn(harness, range(1, 33), Hints(more_follows=True, idle_seconds=100))
    come_back(harness, [*first, 7], Hints())
    assert harness.core.stats().num_warm_blocks == 0


@pytest.mark.parametrize(
    ("hints", "seconds"),
    [
        (Hints(more_follows=True), GRACE_SECONDS),
        (Hints(more_follows=True, idle_seconds=0), GRACE_SECONDS),
        (Hints(more_follows=True, idle_seconds=30), 30 + GRACE_SECONDS),
        (Hints(more_follows=True, idle_seconds=600), 600),
        (Hints(fork_size=2), GRACE_SECONDS),
    ],
)
def test_a_prefix_cools_when_its_time_is_over(hints: Hints, seconds: float) -> None:
    harness = small()
    turn(harness, range(1, 33), hints)
    harness.wait(seconds - 0.5)
    assert harness.core.stats().num_warm_blocks == 8
    harness.wait(0.5)
    assert harness.core.stats().num_warm_blocks == 0


def test_a_quarter_of_the_pool_is_warm_at_most_and_what_is_needed_last_cools_first() -> None:
    harness = small()
    turns = {}
    for seconds in (50, 200, 100):
        hints = Hints(program_id=str(seconds), more_follows=True, idle_seconds=seconds)
        turns[seconds] = turn(harness, range(seconds, seconds + 16), hints, 1)  # 4 blocks
    assert harness.core.stats().num_warm_blocks == 8
    harness.scheduler.check()
    kept = {s for s, ids in turns.items() if harness.cache.warm_prefixes(tokens(ids))}
    assert kept == {50, 100}


def test_of_a_prefix_longer_than_may_be_warm_the_beginning_is() -> None:
    harness = small()
    turn(harness, range(1, 101), FOLLOWED)
    assert harness.core.stats().num_warm_blocks == 10


def test_so_many_prefixes_are_warm_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_prefixes, "MAX_PREFIXES", 3)
    harness = small()
    for i in range(8):
        turn(harness, range(1, 9), Hints(program_id=f"{i}", more_follows=True))
        harness.scheduler.check()
    assert len(harness.scheduler._warm) == 3


def test_what_was_aborted_or_failed_is_not_kept() -> None:
    harness = small()
    request_id = harness.add(range(1, 33), 8, hints=FOLLOWED)
    for _ in range(3):
        harness.step()
    harness.abort(request_id)
    assert harness.core.stats().num_warm_blocks == 0


def test_a_dropped_cache_leaves_nothing_warm() -> None:
    harness = small()
    turn(harness, range(1, 33), FOLLOWED)
    harness.core._quarantine(RuntimeError("in doubt"))
    assert harness.core.stats().num_warm_blocks == 0
    turn(harness, range(1, 33), FOLLOWED)
    assert harness.core.stats().num_warm_blocks == 8


def test_without_a_tree_nothing_is_kept() -> None:
    harness = Harness(prefix_caching=False)
    turn(harness, PROMPT, FOLLOWED)
    assert harness.core.stats().num_warm_blocks == 0
    harness.wait(1000)


# -- at nobody's cost ------------------------------------------------------------------------------


def test_a_request_that_needs_the_whole_pool_runs_at_once_beside_warm_prefixes() -> None:
    harness = small()
    turn(harness, range(1, 33), FOLLOWED)
    before = harness.num_steps
    done = come_back(harness, range(200, 358))
    assert done.step == before + 2
    assert harness.core.stats().num_warm_blocks == 0
    harness.wait(1000)
    harness.assert_nothing_held()


def num_steps(hints: Hints) -> int:
    """Of prompts over shared stems, and unrelated ones, arriving over time in a small pool."""

    def ends_by_itself(chunk: Chunk, prefix_hash: int) -> int:
        return token_after(chunk, prefix_hash) if prefix_hash % 15 else EOS

    total = 0
    for seed in range(4):
        rng = random.Random(seed)
        harness = small(max_num_seqs=6, max_num_batched_tokens=32)
        harness.core._check_invariants = False  # the test is long enough without
        harness.executor._check_attention = lambda plan: None
        harness.executor._next_token = ends_by_itself
        stems = [[rng.randint(1, 999) for _ in range(20)] for _ in range(3)]
        for _ in range(40):
            stem = rng.choice(stems) if rng.random() < 0.5 else []
            prompt = [*stem, *(rng.randint(1, 999) for _ in range(rng.randint(4, 40)))]
            harness.add(prompt, 60, hints=hints)
            for _ in range(rng.randint(0, 3)):
                harness.step()
        harness.run()
        total += harness.num_steps
    return total


def test_where_all_requests_lie_the_work_takes_about_as_long_as_without_hints() -> None:
    honest = num_steps(Hints())
    assert num_steps(Hints(more_follows=True, idle_seconds=600)) <= 1.03 * honest
    assert num_steps(Hints(fork_size=1000)) <= 1.03 * honest
    assert num_steps(Hints(output_tokens=1)) <= 1.03 * honest
    assert num_steps(Hints(output_tokens=2**31 - 1)) <= 1.15 * honest


def said_at_random(rng: random.Random) -> Hints:
    """Any hints, sensible or not."""
    more_follows = rng.random() < 0.5
    fork_size = rng.choice([None, 1, 3, 1000])
    return Hints(
        program_id=rng.choice([None, "a", "b", "c"]),
        fork_size=fork_size,
        fork_index=rng.randrange(fork_size) if fork_size and rng.random() < 0.5 else None,
        more_follows=more_follows,
        idle_seconds=rng.choice([None, 0, 3, 600]) if more_follows else None,
        output_tokens=rng.choice([None, 0, 1, 8, 2**31 - 1]),
    )


@pytest.mark.parametrize("seed", range(6))
def test_random_hints_change_no_answer_keep_every_bound_and_leave_nothing(seed: int) -> None:
    """The harness checks every invariant after every step, and that rows see their own prefix."""
    rng = random.Random(seed)
    asked, answers = [], []
    for _ in range(40):
        prompt = [rng.randint(1, 2) for _ in range(rng.randint(1, 60))]
        asked.append((prompt, rng.randint(1, 20), rng.randint(0, 3), said_at_random(rng)))
    for with_hints in (False, True):
        harness = small(max_num_batched_tokens=32, max_num_seqs=6, max_overtakes=3)
        ids = []
        for prompt, max_tokens, num_steps, said in asked:
            hints = said if with_hints else Hints()
            ids.append(harness.add(prompt, max_tokens, hints=hints))
            for _ in range(num_steps):
                harness.step()
            assert not harness.errors, harness.errors
        harness.run(limit=5000)
        answers.append([harness.finished[i].token_ids for i in ids])
        harness.wait(601)
        assert harness.core.stats().num_warm_blocks == 0
        assert len(harness.scheduler._warm) == len(harness.scheduler._programs) == 0
        harness.assert_nothing_held()
    assert answers[0] == answers[1]
