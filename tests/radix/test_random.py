"""Random operations on the cache against the naive model, everything compared after each.

Tiny blocks, pools and alphabets make the rare cases common. The number of runs is in
SAPWOOD_RADIX_RUNS, for the slow test in SAPWOOD_RADIX_SLOW_RUNS.
"""

import os
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.radix.model import OPERATIONS, World

NUM_RUNS = int(os.environ.get("SAPWOOD_RADIX_RUNS", "150"))
NUM_SLOW_RUNS = int(os.environ.get("SAPWOOD_RADIX_SLOW_RUNS", "15000"))
NUM_OPERATIONS = 70


def run(seed: int) -> None:
    """One run of the weighted driver: a world, operations, and the end of everything.

    Each run has weights of its own, so that some let copies wait or hardly ever evict.
    """
    source = random.Random(seed)
    world = World(num_blocks=source.randint(2, 14), block_size=source.randint(1, 3))
    weights = [weight * source.choice((0.3, 1, 2)) for weight in OPERATIONS.values()]
    names = source.choices(list(OPERATIONS), weights, k=NUM_OPERATIONS)
    for name in names:
        world.operate(name, source.randrange)
    world.end()


def test_random_operations_agree_with_the_naive_model() -> None:
    for seed in range(NUM_RUNS):
        run(seed)


@pytest.mark.slow
def test_many_random_operations_agree_with_the_naive_model() -> None:
    for seed in range(NUM_RUNS, NUM_SLOW_RUNS):
        run(seed)


def operation(name: str, needs: str = "") -> Callable[..., None]:
    """The rule that does one operation of the world, if it has sequences of a kind."""

    def operate(machine: "CacheMachine", data: st.DataObject) -> None:
        machine.world.operate(name, lambda n: data.draw(st.integers(0, n - 1)))

    made: Callable[..., None] = rule(data=st.data())(operate)
    return precondition(lambda machine: getattr(machine.world, needs))(made) if needs else made


class CacheMachine(RuleBasedStateMachine):
    """The same operations, chosen and shrunk by hypothesis."""

    world: World

    @initialize(num_blocks=st.integers(2, 14), block_size=st.integers(1, 3))
    def begin(self, num_blocks: int, block_size: int) -> None:
        self.world = World(num_blocks, block_size)

    start = operation("start")
    copied = operation("copied", needs="running")
    launch = operation("launch")
    land = operation("land")
    chunk = operation("chunk", needs="running")
    decode = operation("decode", needs="running")
    draft = operation("draft", needs="running")
    publish = operation("publish", needs="running")
    fork = operation("fork", needs="running")
    finish = operation("finish", needs="running")
    preempt = operation("preempt", needs="running")
    resume = operation("resume", needs="waiting")
    abort = operation("abort", needs="running")
    warm = operation("warm")
    cool = operation("cool", needs="warmed")
    evict = operation("evict", needs="entries")
    flush = operation("flush", needs="entries")

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=NUM_RUNS,
    stateful_step_count=NUM_OPERATIONS,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
