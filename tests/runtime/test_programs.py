"""The order of programs' requests: depth first, within the bound on every wait."""

import random
from collections.abc import Iterable

import pytest

from sapwood.runtime import programs
from sapwood.runtime.hints import MAX_SECONDS, Hints
from tests.runtime.harness import Harness

STEM = range(1, 41)  # that every prompt begins with


def one_seat(**options: object) -> Harness:
    """Runs one request at a time; the stem is cached."""
    harness = Harness(step_seconds=0.001, options={"max_num_seqs": 1, **options})
    harness.answer(STEM, 1)
    return harness


def add(harness: Harness, name: str, hints: Hints, common: Iterable[int] = ()) -> None:
    """A request behind the stem and what more it has in common with others."""
    harness.add([*STEM, *common, own(name)], 1, request_id=name, hints=hints)


def own(name: str) -> int:
    """The token of that name alone."""
    return int.from_bytes(name.encode(), "big")


def order(harness: Harness) -> list[str]:
    harness.run()
    ids = [c.sequence.request_id for plan in harness.executor.plans for c in plan.chunks]
    return list(dict.fromkeys(ids))[1:]


def of(program: str) -> Hints:
    return Hints(program_id=program)


def test_programs_whose_requests_come_in_turns_are_taken_one_after_the_other() -> None:
    names = ["A1", "B1", "C1", "A2", "B2", "C2", "A3", "B3", "C3"]
    for told in (False, True):
        harness = one_seat()
        for name in names:
            add(harness, name, of(name[0]) if told else Hints())
        assert order(harness) == (sorted(names) if told else names)


def test_a_program_that_has_begun_goes_before_one_that_has_not() -> None:
    harness = one_seat()
    add(harness, "A1", of("A"))
    harness.run()
    for name in ("B1", "x", "A2"):
        add(harness, name, Hints() if name == "x" else of(name[0]))
    assert order(harness) == ["A1", "A2", "B1", "x"]


def test_the_last_missing_branch_goes_before_a_fork_with_more_to_come() -> None:
    harness = one_seat()
    for name in ("A0", "B0"):
        add(harness, name, of(name[0]))
    harness.run()
    for name in ("A1", "A2", "A3", "B3"):
        add(harness, name, of(name[0]))
    assert order(harness)[2:] == ["B3", "A1", "A2", "A3"]


def test_a_longer_cached_prefix_goes_first_whatever_the_program() -> None:
    harness = one_seat()
    add(harness, "A1", of("A"))
    harness.run()
    harness.answer([*STEM, *range(100, 132)], 1)
    add(harness, "A2", of("A"))
    add(harness, "x", Hints(), common=range(100, 132))
    assert order(harness)[-2:] == ["x", "A2"]


@pytest.mark.parametrize(("told", "expected"), [(True, ["A2", "B1"]), (False, ["B1", "A2"])])
def test_a_token_in_common_by_chance_does_not_break_up_a_program(
    told: bool, expected: list[str]
) -> None:
    harness = one_seat()
    harness.answer([*STEM, 7, 8], 1)
    add(harness, "A1", of("A"))
    harness.run()
    add(harness, "A2", of("A") if told else Hints())
    add(harness, "B1", of("B") if told else Hints(), common=[7])
    assert order(harness)[-2:] == expected


def test_arrival_order_is_kept_by_fcfs() -> None:
    harness = one_seat(schedule_policy="fcfs")
    names = ["A1", "B1", "A2"]
    for name in names:
        add(harness, name, of(name[0]))
    assert order(harness) == names


@pytest.mark.parametrize("max_overtakes", [1, 5])
def test_programs_overtake_a_request_so_often_and_no_more(max_overtakes: int) -> None:
    harness = one_seat(max_overtakes=max_overtakes)
    add(harness, "A0", of("A"))
    harness.run()
    add(harness, "x", Hints())
    for i in range(3 * max_overtakes):
        add(harness, f"A{i + 1}", of("A"))
    assert order(harness).index("x") == 1 + max_overtakes


@pytest.mark.parametrize("seed", range(3))
def test_no_wait_grows_beyond_its_bound_under_random_hints(seed: int) -> None:
    """One that was overtaken `max_overtakes` times goes before all but those as old."""
    rng = random.Random(seed)
    harness = Harness(step_seconds=0.01, options={"max_num_seqs": 2, "max_overtakes": 4})
    stems = [[rng.randint(1, 999) for _ in range(n)] for n in (0, 20, 40)]
    for _ in range(60):
        program = rng.choice([None, "a", "b", "c"])
        hints = Hints(program_id=program, more_follows=rng.random() < 0.5)
        prompt = [*rng.choice(stems), *(rng.randint(1, 999) for _ in range(4))]
        harness.add(prompt, rng.randint(1, 4), hints=hints)
        for sequence in harness.scheduler.waiting:
            # Counted once a plan, so by as many more as there are seats.
            assert sequence.num_overtaken <= 4 + 2
        if rng.random() < 0.7:
            harness.step()
    harness.run()
    assert len(harness.finished) == 60


def test_programs_are_forgotten_when_they_are_many_or_long_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 3)
    harness = one_seat()
    for i in range(8):
        add(harness, chr(65 + i), of(chr(65 + i)))
    harness.run()
    assert len(harness.scheduler._programs) == 3
    harness.wait(MAX_SECONDS - 1)
    assert len(harness.scheduler._programs) == 3
    harness.wait(2)
    assert len(harness.scheduler._programs) == 0
