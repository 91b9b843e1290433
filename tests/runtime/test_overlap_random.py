"""Random operations on an engine whose device is late.

The number of runs is in SAPWOOD_OVERLAP_RUNS, for the slow test in SAPWOOD_OVERLAP_SLOW_RUNS.
"""

import os
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.runtime.overlap_world import OPERATIONS, World

NUM_RUNS = int(os.environ.get("SAPWOOD_OVERLAP_RUNS", "50"))
NUM_SLOW_RUNS = int(os.environ.get("SAPWOOD_OVERLAP_SLOW_RUNS", "5000"))
NUM_OPERATIONS = 60


def run(seed: int) -> None:
    """One run of the weighted driver, with weights of its own."""
    source = random.Random(seed)
    world = World(source.randrange)
    weights = [weight * source.choice((0.3, 1, 2)) for weight in OPERATIONS.values()]
    for name in source.choices(list(OPERATIONS), weights, k=NUM_OPERATIONS):
        world.operate(name, source.randrange)
    world.end()


def test_random_operations_answer_as_without_overlap_and_reuse_no_block_too_early() -> None:
    for seed in range(NUM_RUNS):
        run(seed)


@pytest.mark.slow
def test_many_random_operations_answer_as_without_overlap() -> None:
    for seed in range(NUM_RUNS, NUM_SLOW_RUNS):
        run(seed)


def operation(name: str) -> Callable[..., None]:
    """The rule that does one operation of the world."""

    def operate(machine: "OverlapMachine", data: st.DataObject) -> None:
        machine.world.operate(name, lambda n: data.draw(st.integers(0, n - 1)))

    made: Callable[..., None] = rule(data=st.data())(operate)
    return made


class OverlapMachine(RuleBasedStateMachine):
    """The same operations, chosen and shrunk by hypothesis."""

    world: World

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.world = World(lambda n: data.draw(st.integers(0, n - 1)))

    add = operation("add")
    step = operation("step")
    step_again = operation("step")
    work = operation("work")
    abort = operation("abort")
    preempt = operation("preempt")
    flush = operation("flush")
    settle = operation("settle")
    break_launch = operation("break_launch")
    break_result = operation("break_result")

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


TestOverlapMachine = OverlapMachine.TestCase
TestOverlapMachine.settings = settings(
    max_examples=NUM_RUNS,
    stateful_step_count=NUM_OPERATIONS,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
