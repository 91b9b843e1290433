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
from sapwood.runtime.programs import Rank
from sapwood.runtime.request import Sequence

# Cached prefixes that differ by fewer tokens are as good as each other: what a program says of its
# requests decides, not how many tokens two unrelated prompts happen to have in common.
NEARLY_EQUAL = 16


class SchedulingPolicy(Protocol):
    """An order over waiting sequences."""

    def order(
        self,
        waiting: list[Sequence],
        num_cached: Callable[[Sequence], int],
        rank: Callable[[Sequence], Rank],
    ) -> list[Sequence]:
        """Sort `waiting`, given in arrival order. `num_cached` tells the tokens of the longest
        cached prefix; it is looked up only when asked for. `rank` is by program, the smallest
        first (`Programs.ranks`); it is the same for all if no request names a program."""
        ...


class LongestPrefixMatch:
    """Longest cached prefix first (Zheng et al. 2024, §3): it visits the tree depth first, so that
    an edge is used by everyone below it while it is there. Where the prefixes are equal, or
    nearly so, programs are taken depth first as well."""

    def order(
        self,
        waiting: list[Sequence],
        num_cached: Callable[[Sequence], int],
        rank: Callable[[Sequence], Rank],
    ) -> list[Sequence]:
        def key(sequence: Sequence) -> tuple[int, Rank, int]:
            num_tokens = num_cached(sequence)
            return -(num_tokens // NEARLY_EQUAL), rank(sequence), -num_tokens

        return sorted(waiting, key=key)


class FirstComeFirstServed:
    """Arrival order, whatever a program says."""

    def order(
        self,
        waiting: list[Sequence],
        num_cached: Callable[[Sequence], int],
        rank: Callable[[Sequence], Rank],
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
