"""What a step costs whatever its rows are, from how long steps took."""

import random

import pytest

from sapwood.runtime.core import StepInFlight
from sapwood.runtime.step_plan import StepPlan
from sapwood.runtime.step_times import MIN_STEPS, StepTimes
from tests.runtime.harness import Harness


def observed(steps: list[tuple[int, float]]) -> StepTimes:
    times = StepTimes()
    for num_rows, seconds in steps:
        times.observe(num_rows, seconds)
    return times


def steps(fixed: float, each: float, num: int = 100, noise: float = 0.0) -> list[tuple[int, float]]:
    draw = random.Random(7)
    rows = [draw.choice([1, 2, 8, 40, 512]) for _ in range(num)]
    return [(n, (fixed + each * n) * (1 + draw.uniform(-noise, noise))) for n in rows]


def test_the_fixed_part_is_told_in_rows() -> None:
    assert observed(steps(0.008, 0.0004)).fixed_rows == pytest.approx(20)
    assert observed(steps(0.010, 0.00002)).fixed_rows == pytest.approx(500)
    assert observed(steps(0.0, 0.001)).fixed_rows == pytest.approx(0, abs=1e-6)


def test_noise_changes_little() -> None:
    assert observed(steps(0.008, 0.0004, 300, noise=0.1)).fixed_rows == pytest.approx(20, rel=0.5)


def test_later_steps_count_more() -> None:
    changed = observed(steps(0.1, 0.0004, 1000) + steps(0.008, 0.0004, 2000))
    assert changed.fixed_rows == pytest.approx(20, rel=0.05)


@pytest.mark.parametrize(
    "known",
    [
        [],
        steps(0.008, 0.0004, MIN_STEPS - 1),
        [(8, 0.01), (8, 0.02)] * 50,  # all of one size
        [(1, 0.02), (512, 0.01)] * 50,  # more rows in less time
    ],
)
def test_nothing_is_said_where_no_line_is_known(known: list[tuple[int, float]]) -> None:
    assert observed(known).fixed_rows is None


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_tells_it_of_its_steps(overlap: bool) -> None:
    harness = Harness(step_seconds=0, overlap=overlap)
    launch = harness.executor.launch

    def launch_in_time(plan: StepPlan) -> StepInFlight:
        harness.waited_seconds += 0.008 + 0.0004 * plan.num_rows
        return launch(plan)

    harness.executor.launch = launch_in_time
    assert harness.core.stats().fixed_rows_per_step is None
    for index in range(20):
        harness.answer(range(1000 * index, 1000 * index + 2 + 40 * (index % 3)), 4)
    told = harness.core.stats().fixed_rows_per_step
    # With overlap a step's time is known when the next one was launched.
    assert told is not None and (overlap or told == pytest.approx(20))
