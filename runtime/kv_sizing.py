"""How many blocks the KV cache has, and the cache itself."""

from __future__ import annotations

from sapwood.kernels.interface import Kernels, KVCache, KVCacheSpec
from sapwood.runtime.config import DEFAULT_MEMORY_FRACTION, CacheOptions
from sapwood.runtime.device_memory import DeviceUse, cache_bytes, check_cache_fits, gib
from sapwood.runtime.errors import ConfigError
from sapwood.runtime.memory import available_bytes

CPU_KV_BYTES = 3 * 2**28
MAX_SHARE_OF_FREE_MEMORY = 0.5
# What a backend may allocate beside the blocks that it is asked for.
NUM_SCRATCH_BLOCKS = 1


def num_blocks_on_cpu(cache: CacheOptions, block_bytes: int) -> int:
    """As asked, or what a share of the free memory holds. Raises ConfigError."""
    asked = _asked_blocks(cache, block_bytes)
    if asked is not None:
        return asked
    free = int(available_bytes() * MAX_SHARE_OF_FREE_MEMORY)
    return _blocks_within(min(CPU_KV_BYTES, free), block_bytes)


def num_blocks_on_gpu(cache: CacheOptions, block_bytes: int, use: DeviceUse) -> int:
    """As asked, or what is left of a share of the GPU. Raises ConfigError."""
    asked = _asked_blocks(cache, block_bytes)
    if asked is not None:
        check_cache_fits(use, (asked + NUM_SCRATCH_BLOCKS) * block_bytes)
        return asked
    num_bytes = cache_bytes(use, cache.memory_fraction or DEFAULT_MEMORY_FRACTION)
    return _blocks_within(num_bytes - NUM_SCRATCH_BLOCKS * block_bytes, block_bytes)


def make_kv_cache(kernels: Kernels, spec: KVCacheSpec) -> KVCache:
    """Allocate it. Raises ConfigError where that cannot be."""
    takes = f"the KV cache of {spec.num_blocks} blocks takes {gib(spec.num_bytes)}"
    way_out = "lower kv_tokens, num_kv_blocks or kv_cache_memory"
    if spec.device.type == "cpu" and spec.num_bytes > (available := available_bytes()):
        raise ConfigError(f"{takes}, {gib(available)} are free; {way_out}")
    try:
        return kernels.make_kv_cache(spec)
    except (RuntimeError, MemoryError) as error:  # torch raises the first where memory lacks
        if spec.device.type == "cuda":
            way_out = f"lower memory_fraction, or {way_out}"
        raise ConfigError(f"{takes}, which cannot be had; {way_out}") from error
    except ValueError as error:  # a backend's own limit
        raise ConfigError(f"{takes}: {error}") from error


def _asked_blocks(cache: CacheOptions, block_bytes: int) -> int | None:
    """What the options name; None where they leave it to what is there."""
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks
    if cache.kv_tokens is not None:
        return -(-cache.kv_tokens // cache.block_size)
    if cache.kv_cache_memory is not None:
        return _blocks_within(cache.kv_cache_memory, block_bytes)
    return None


def _blocks_within(num_bytes: int, block_bytes: int) -> int:
    if num_bytes < block_bytes:
        raise ConfigError(
            f"{max(0, num_bytes)} bytes are there for the KV cache, one block takes {block_bytes}; "
            "free some memory, or set kv_cache_memory, kv_tokens or a smaller block_size"
        )
    return num_bytes // block_bytes
