"""How large a KV cache fits on a GPU: arithmetic over what was measured there.

    total    [ weights | compiled kernels ... | graphs | one step | KV cache         | left free  ]
             [ engine ------------------------)                                      |
             [ memory_fraction of total ---------------------------------------------)

A cache takes all that is left of the share, and never more than is free: other programs may use
the GPU as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from sapwood.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """Bytes of a GPU, measured when the weights are there and the KV cache is not."""

    total: int
    free: int  # for whoever asks
    engine: int  # that the engine holds by now: weights, tables, compiled kernels
    step: int  # the most that one step takes beside
    graphs: int  # that recorded steps will take

    @property
    def free_for_cache(self) -> int:
        """What may be allocated and still leaves a step its room; negative where that lacks."""
        return self.free - self.step - self.graphs

    def told(self) -> str:
        """What is taken, in words."""
        return (
            f"weights and kernels take {gib(self.engine)}, a step up to {gib(self.step)}, graphs "
            f"{gib(self.graphs)}; {gib(self.free)} of {gib(self.total)} are free"
        )


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def cache_bytes(use: DeviceUse, memory_fraction: float) -> int:
    """Bytes for the KV cache. Raises ConfigError where the share leaves none."""
    share = int(use.total * memory_fraction)
    by_share = share - use.engine - use.step - use.graphs
    if by_share <= 0:
        raise ConfigError(
            f"memory_fraction {memory_fraction:g} is {gib(share)}, of which nothing is left for "
            f"the KV cache ({use.told()}); raise it, lower max_num_batched_tokens or "
            "max_graph_rows, or choose a smaller model"
        )
    if use.free_for_cache <= 0:
        raise ConfigError(
            f"no memory of the GPU is left for the KV cache ({use.told()}); end other programs "
            "that use it, or lower max_num_batched_tokens or max_graph_rows"
        )
    return min(by_share, use.free_for_cache)


def check_cache_fits(use: DeviceUse, num_bytes: int) -> None:
    """Raise ConfigError where a KV cache of `num_bytes` leaves a step no room."""
    if num_bytes > use.free_for_cache:
        raise ConfigError(
            f"the KV cache asked for takes {gib(num_bytes)}, and {gib(max(0, use.free_for_cache))} "
            f"can be had ({use.told()}); ask for less, give memory_fraction instead, or choose a "
            "smaller kv_dtype"
        )


def graph_bytes(first: int, two: int, num_graphs: int) -> int:
    """What `num_graphs` graphs take, of which the largest takes `first` and with the next one
    `two`: each further one is smaller, and none takes more than that one added."""
    return first + (num_graphs - 1) * max(0, two - first)
