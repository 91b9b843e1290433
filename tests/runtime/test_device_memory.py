"""The KV cache's share of a GPU, over made-up numbers of one."""

from dataclasses import replace

import pytest

from sapwood import ConfigError
from sapwood.runtime.config import CacheOptions
from sapwood.runtime.device_memory import DeviceUse, cache_bytes, check_cache_fits, graph_bytes
from sapwood.runtime.kv_sizing import num_blocks_on_cpu, num_blocks_on_gpu

GIB = 2**30
# A GPU of 80 GiB with a model of 15: 1 GiB is the driver's.
USE = DeviceUse(total=80 * GIB, free=64 * GIB, engine=15 * GIB, step=2 * GIB, graphs=GIB)
BLOCK = 2 * 2**20  # bytes


def test_the_cache_gets_what_the_share_leaves() -> None:
    assert cache_bytes(USE, 0.9) == int(80 * GIB * 0.9) - 18 * GIB
    assert cache_bytes(USE, 0.5) == 22 * GIB


def test_all_that_the_engine_takes_stays_within_the_share() -> None:
    for fraction in (0.3, 0.5, 0.77, 0.9):
        taken = cache_bytes(USE, fraction) + USE.engine + USE.step + USE.graphs
        assert taken <= fraction * USE.total


def test_the_cache_never_gets_more_than_is_free_beside_a_step() -> None:
    """Another program has most of the GPU."""
    shared = replace(USE, free=20 * GIB)
    assert cache_bytes(shared, 0.9) == 17 * GIB
    assert cache_bytes(USE, 1.0) == 61 * GIB


def test_a_share_that_leaves_nothing_is_told_with_all_its_parts() -> None:
    with pytest.raises(ConfigError, match=r"memory_fraction 0.2 is 16.00 GiB.*15.00 GiB.*raise it"):
        cache_bytes(USE, 0.2)


def test_a_gpu_that_others_have_filled_is_told_as_that() -> None:
    with pytest.raises(ConfigError, match="end other programs"):
        cache_bytes(replace(USE, free=3 * GIB), 0.9)


def test_an_exact_size_may_take_what_the_default_share_would_leave() -> None:
    check_cache_fits(USE, 61 * GIB)
    with pytest.raises(ConfigError, match=r"takes 61.00 GiB, and 61.00 GiB can be had.*kv_dtype"):
        check_cache_fits(USE, 61 * GIB + 1)


def test_further_graphs_are_counted_as_the_second() -> None:
    assert graph_bytes(first=300, two=340, num_graphs=1) == 300
    assert graph_bytes(first=300, two=340, num_graphs=35) == 300 + 34 * 40
    assert graph_bytes(first=300, two=290, num_graphs=35) == 300  # as if it took nothing


@pytest.mark.parametrize(
    ("options", "num_blocks"),
    [
        ({}, (int(80 * GIB * 0.9) - 18 * GIB) // BLOCK - 1),
        ({"memory_fraction": 0.5}, 22 * GIB // BLOCK - 1),
        ({"kv_tokens": 1600}, 100),
        ({"kv_tokens": 1601}, 101),
        ({"kv_cache_memory": 3 * BLOCK + 1}, 3),
        ({"num_kv_blocks": 7}, 7),
    ],
)
def test_a_size_on_a_gpu_is_said_in_one_of_four_ways(
    options: dict[str, object], num_blocks: int
) -> None:
    assert num_blocks_on_gpu(CacheOptions(**options), BLOCK, USE) == num_blocks


def test_a_size_that_does_not_fit_a_gpu_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(ConfigError, match="can be had"):
        num_blocks_on_gpu(CacheOptions(kv_tokens=10**7), BLOCK, USE)


@pytest.mark.parametrize(
    ("options", "num_blocks"),
    [({"kv_tokens": 33}, 3), ({"num_kv_blocks": 7}, 7), ({"kv_cache_memory": 5 * BLOCK}, 5)],
)
def test_a_size_on_a_cpu_is_what_was_asked_for(options: dict[str, object], num_blocks: int) -> None:
    assert num_blocks_on_cpu(CacheOptions(**options), BLOCK) == num_blocks


def test_less_than_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="one block takes"):
        num_blocks_on_cpu(CacheOptions(kv_cache_memory=BLOCK - 1), BLOCK)
