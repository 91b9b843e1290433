"""In which order waiting requests are considered.

A policy is one class with one method and one line in `POLICIES`. The scheduler puts preempted
and often-overtaken requests in front of whatever order a policy gives; ties keep arrival order.
Knows no tensors and reads no clock.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Protocol

from sapwood.runtime.errors import ConfigError
from sapwood.runtime.request import Sequence


class SchedulingPolicy(Protocol):
    """An order over waiting sequences."""

    def order(
        self, waiting: list[Sequence], num_cached: Callable[[Sequence], int]
    ) -> list[Sequence]:
        """Sort `waiting`, given in arrival order. `num_cached` tells the tokens of the longest
        cached prefix; it is looked up only when asked for."""
        ...


class LongestPrefixMatch:
    """Longest cached prefix first (Zheng et al. 2024, §3): it visits the tree depth first, so that
    an edge is used by everyone below it while it is there."""

    def order(
        self, waiting: list[Sequence], num_cached: Callable[[Sequence], int]
    ) -> list[Sequence]:
        return sorted(waiting, key=lambda sequence: -num_cached(sequence))


class FirstComeFirstServed:
    """Arrival order."""

    def order(
        self, waiting: list[Sequence], num_cached: Callable[[Sequence], int]
    ) -> list[Sequence]:
        return waiting


POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "lpm": "sapwood.runtime.policy:LongestPrefixMatch",
        "fcfs": "sapwood.runtime.policy:FirstComeFirstServed",
    }
)


def load_policy(name: str) -> SchedulingPolicy:
    """The policy registered under `name`. Raises ConfigError for an unknown one."""
    if name not in POLICIES:
        raise ConfigError(
            f"schedule_policy is {name!r}; it must be one of {', '.join(sorted(POLICIES))}"
        )
    module, attribute = POLICIES[name].split(":")
    policy: SchedulingPolicy = getattr(import_module(module), attribute)()
    return policy
