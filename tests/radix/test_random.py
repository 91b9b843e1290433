"""Random operations on the cache against the naive model, checked after each."""

import os
import random
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.radix.model import OPERATIONS, Choose, World

NUM_RUNS = int(os.environ.get("SAPWOOD_RADIX_RUNS", "150"))
NUM_SLOW_RUNS = int(os.environ.get("SAPWOOD_RADIX_SLOW_RUNS", "15000"))
NUM_OPERATIONS = 70


def run(seed: int) -> None:
    """One run of the weighted driver: a world, operations, and the end of everything."""
    source = random.Random(seed)
    world = World(num_blocks=source.randint(2, 14), block_size=source.randint(1, 3))
    names = source.choices(list(OPERATIONS), list(OPERATIONS.values()), k=NUM_OPERATIONS)
    for name in names:
        before = set(world.entries), world.cache.version
        getattr(world, name)(source.randrange)
        world.check()
        has_changed = set(world.entries) != before[0]
        assert (world.cache.version != before[1]) >= has_changed, "a change went unnoticed"
    world.end()


def test_random_operations_agree_with_the_naive_model() -> None:
    for seed in range(NUM_RUNS):
        run(seed)


@pytest.mark.slow
def test_many_random_operations_agree_with_the_naive_model() -> None:
    for seed in range(NUM_RUNS, NUM_SLOW_RUNS):
        run(seed)
