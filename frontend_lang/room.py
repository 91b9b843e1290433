"""How the programs of a batch share a cache that cannot hold all of them.

A program that has begun comes back to what it has computed, and where all go on side by side, each
evicts what the next one needs. So those that began first go on first: a request waits while its
program and those before it need more than there is, and others are at work. It is depth first
again, over programs rather than prompts. Nothing waits where everything fits.
"""

import asyncio
from bisect import insort
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sapwood.frontend_lang.backends.interface import Answer, Prompt

DEFAULT_NUM_NEW = 128  # tokens of an answer that has no limit
GROWTH = 8  # how many times its first request a program takes, until one has ended


@dataclass(eq=False, slots=True)
class Member:
    """A program: what it holds of the cache, and what its requests under way may add; in tokens."""

    turn: int  # in which order programs have begun
    num_first: int  # of its first request
    num_held: int = 0
    num_expected: int = 0
    num_requests: int = 0


@dataclass(slots=True)
class Note:
    """What a request has added to the cache: what of it was not there, in tokens."""

    num_tokens: int = 0

    def add(self, answers: list[Answer]) -> None:
        """Once its answers are there."""
        first = answers[0].meta
        num_prompt, num_cached = first.get("prompt_tokens", 0), first.get("cached_tokens", 0)
        self.num_tokens = num_prompt - num_cached
        self.num_tokens += sum(answer.meta.get("completion_tokens", 0) for answer in answers)


@dataclass(order=True, slots=True)
class _Waiting:
    turn: int
    arrival: int
    member: Member = field(compare=False)
    num_new: int = field(compare=False)
    passed: "asyncio.Future[None]" = field(compare=False)


class Room:
    """The tokens of one cache. Used on one event loop only. O(programs that have begun) a request,
    O(1) where nobody knows how large the cache is: then nothing waits."""

    def __init__(self, num_tokens: int | None, block_size: int = 1) -> None:
        """Of a block, the unit of the cache, a request fills the last one in part."""
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._members: list[Member] = []  # by turn, as that is how they come
        self._waiting: list[_Waiting] = []
        self._num_ended = self._num_of_ended = 0  # programs, and their tokens
        self._has_returned = False  # whether some program had more than one request
        self._num_under_way = 0
        self._num_arrived = 0

    def leave(self, member: Member) -> None:
        """Its program has ended: nobody comes back to what it holds."""
        self._members.remove(member)
        self._num_ended += 1
        self._num_of_ended += member.num_held
        self._let_go()

    def enter(self, prompt: Prompt) -> Member:
        """A program begins its work, with this prompt."""
        turn = self._members[-1].turn + 1 if self._members else 0
        self._members.append(Member(turn, len(prompt.token_ids or ())))
        return self._members[-1]

    @asynccontextmanager
    async def request(self, member: Member, num_new: int | None) -> AsyncIterator[Note]:
        """Around a request, whose answers are told to what this gives. Waits for its turn."""
        member.num_requests += 1
        self._has_returned = self._has_returned or member.num_requests > 1
        num_expected = DEFAULT_NUM_NEW if num_new is None else num_new
        num_expected += self._block_size
        if not member.num_held:
            num_expected += member.num_first
        note = Note()
        await self._turn_of(member, num_expected)
        try:
            yield note
        finally:
            self._num_under_way -= 1
            member.num_expected -= num_expected
            member.num_held += note.num_tokens + self._block_size
            self._let_go()

    async def _turn_of(self, member: Member, num_new: int) -> None:
        if not self._waiting and self._fits(member, num_new):
            self._begin(member, num_new)
            return
        self._num_arrived += 1
        passed = asyncio.get_running_loop().create_future()
        waiting = _Waiting(member.turn, self._num_arrived, member, num_new, passed)
        insort(self._waiting, waiting)
        self._let_go()
        try:
            await passed
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:  # it was let go, and does not
                self._num_under_way -= 1
                member.num_expected -= num_new
            self._let_go()
            raise

    def _let_go(self) -> None:
        """Let those go that may, the programs that began first before others."""
        while self._waiting:
            first = self._waiting[0]
            if not self._fits(first.member, first.num_new):
                return
            del self._waiting[0]
            self._begin(first.member, first.num_new)
            if not first.passed.done():
                first.passed.set_result(None)

    def _begin(self, member: Member, num_new: int) -> None:
        self._num_under_way += 1
        member.num_expected += num_new

    def _fits(self, member: Member, num_new: int) -> bool:
        """Whether there is room beside the programs before it; or nothing runs, and waiting would
        be in vain; or no program comes back to what it has computed."""
        if self._num_tokens is None or not self._num_under_way:
            return True
        if self._num_ended and not self._has_returned:
            return True
        needed = num_new
        for other in self._members:
            needed += self._needed(other)
            if needed > self._num_tokens:
                return False
            if other is member:
                return True
        return True

    def _needed(self, member: Member) -> int:
        """What a program will hold at its end, as far as is known."""
        if self._num_ended:
            typical = self._num_of_ended // self._num_ended
        else:
            typical = GROWTH * member.num_first
        return max(member.num_held + member.num_expected, typical)
