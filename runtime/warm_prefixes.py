"""Prefixes that programs will come back to, kept in the tree before everything else.

Warmth is an order of eviction and no hold (`PrefixCache.warm`): what is warm is evicted last, and
evicted all the same when a request needs the room. It is bounded in time, in blocks and in number.
Where more wants to be warm than may be, what will be needed last goes first (Belady 1966); a
caller who claims a long absence is thus the first to lose. Reads no clock: it is told the time.
"""

from dataclasses import dataclass, field

from sortedcontainers import SortedKeyList

from sapwood.radix import Namespace, PrefixCache, WarmPrefix
from sapwood.runtime.hints import MAX_SECONDS, Hints
from sapwood.runtime.request import Request, TokenIds

GRACE_SECONDS = 5.0  # how much longer than its program said a prefix is kept
WARM_SHARE = 1 / 4  # of the pool, at most
MAX_PREFIXES = 1024  # that are warm at a time, however small


@dataclass(slots=True, eq=False, kw_only=True)
class _Kept:
    """A prefix that is warm: until when, and for whom."""

    prefix: WarmPrefix
    deadline: float
    program: tuple[Namespace, str | None]
    fork_size: int | None  # None: one request follows
    arrived: set[int] = field(default_factory=set)  # branches

    def is_taken_up_by(self, hints: Hints) -> bool:
        """Whether nobody else is expected once this request has come."""
        if self.fork_size is None:
            return True
        if hints.fork_index is not None:
            self.arrived.add(hints.fork_index)
        return len(self.arrived) >= self.fork_size


class WarmPrefixes:
    """What is kept warm for requests that are yet to come.

    Invariants: at most `max_blocks` blocks of the tree are warm, at most `MAX_PREFIXES` prefixes.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self.max_blocks = int(cache.num_blocks * WARM_SHARE)
        self._cache = cache
        self._kept: SortedKeyList[_Kept] = SortedKeyList(key=lambda kept: kept.deadline)
        self._by_prefix: dict[WarmPrefix, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, request: Request, token_ids: TokenIds, now: float) -> None:
        """Keep warm what is cached of a request that has ended, if its hints say so.

        Of a prefix longer than may be warm, its beginning. O(tokens).
        """
        hints = request.hints
        is_parent = hints.fork_size is not None and hints.fork_index is None
        if not hints.more_follows and not is_parent:
            return
        token_ids = token_ids[: self.max_blocks * self._cache.block_size]
        prefix = self._cache.warm(token_ids, request.namespace)
        if prefix is None:
            return
        seconds = min(MAX_SECONDS, (hints.idle_seconds or 0.0) + GRACE_SECONDS)
        kept = _Kept(
            prefix=prefix,
            deadline=now + seconds,
            program=_program_of(request),
            fork_size=hints.fork_size if is_parent else None,
        )
        self._kept.add(kept)
        self._by_prefix[prefix] = kept
        while self._cache.num_warm_blocks > self.max_blocks or len(self._kept) > MAX_PREFIXES:
            self._cool(self._kept[-1])

    def take_up(self, request: Request) -> bool:
        """Say that a request runs; whether it is one for which a prefix was kept warm.

        The prefix cools if nobody else is expected on it: the request holds the blocks now, and
        says at its end whether more follows. O(tokens), nothing while nothing is warm.
        """
        if not self._kept:
            return False
        program = _program_of(request)
        for prefix in self._cache.warm_prefixes(request.prompt_token_ids, request.namespace):
            kept = self._by_prefix[prefix]
            if kept.program == program:
                if kept.is_taken_up_by(request.hints):
                    self._cool(kept)
                return True
        return False

    def expire(self, now: float) -> None:
        """Cool what nobody came back to in time."""
        while self._kept and self._kept[0].deadline <= now:
            self._cool(self._kept[0])

    def check(self) -> None:
        """Assert the invariants."""
        assert self._cache.num_warm_blocks <= self.max_blocks, "too much is warm"
        assert len(self._kept) == len(self._by_prefix) <= MAX_PREFIXES, "too many are warm"
        assert bool(self._kept) or not self._cache.num_warm_blocks, "blocks are warm for nobody"

    def _cool(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        del self._by_prefix[kept.prefix]
        self._cache.cool(kept.prefix)


def _program_of(request: Request) -> tuple[Namespace, str | None]:
    """Whose request it is; those without a program are all of one."""
    return request.namespace, request.hints.program_id
