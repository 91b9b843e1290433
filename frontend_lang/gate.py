"""In which order the programs of a batch begin their work at a backend.

Each program runs until its first request. Those requests are gathered, and let go depth first over
the tree that their prompts make: in the order of their prompts, so that neighbours share most, and
a cache that holds little more than one of them is used as well as a large one. What all have in
common is computed once before. Later requests of a program follow its own text and pass freely.
How many programs go on at once is `room.py`'s to say, where the cache does not hold all.
"""

import asyncio
import logging
from bisect import bisect_left, insort
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from sapwood.frontend_lang.backends.interface import (
    Answer,
    Backend,
    Call,
    Encoder,
    Prompt,
    Score,
    TokenIds,
)
from sapwood.frontend_lang.room import Room, Visit, common_length
from sapwood.runtime.hints import Hints

logger = logging.getLogger(__name__)

QUIET_SECONDS = 0.1  # when no first request has come for so long, those that are there go
GATHER_SECONDS = 2.0  # and they go after so long, however many still come
REST_SECONDS = 0.2  # when no program has asked anything for so long, one more may begin
MIN_PREFIX_TOKENS = 16  # a shorter common prefix costs more as a request of its own than it saves
MIN_PREFIX_CHARACTERS = 64

Key = tuple[Any, ...]  # what prompts are sorted by


@dataclass(slots=True, order=True)
class _Waiting:
    """A program whose first request waits. Sorted by prompt, equal ones by arrival."""

    key: Key
    arrival: int
    prompt: Prompt = field(compare=False)
    passed: "asyncio.Future[None]" = field(compare=False)
    visit: Visit | None = field(default=None, compare=False)


class Gate:
    """Lets at most `width` programs work at a backend at once. Used on one event loop only."""

    def __init__(
        self,
        backend: Backend,
        *,
        width: int,
        more_to_come: Callable[[], bool] = lambda: False,
        quiet_seconds: float = QUIET_SECONDS,
    ) -> None:
        """`more_to_come`: programs will begin as soon as others leave a thread to them."""
        self.room = Room()
        self._backend = backend
        self._width = width
        self._more_to_come = more_to_come
        self._quiet_seconds = quiet_seconds
        self._num_coming = 0  # programs that have begun and asked nothing yet
        self._num_inside = 0
        self._num_arrived = 0
        self._waiting: list[_Waiting] = []
        self._last: Key = ()  # where in the order of prompts the last one was
        self._is_quiet = False  # nobody is worth waiting for
        self._gather_until = 0.0
        self._num_asked = 0  # requests under way
        self._timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._warming: asyncio.Task[None] | None = None
        self._has_begun = False

    def ticket(self) -> "Ticket":
        """Of a program that begins."""
        self._num_coming += 1
        return Ticket(self)

    def arrive(self, prompt: Prompt) -> _Waiting:
        """A program's first request is here; it may go when `passed` is done."""
        self._num_coming -= 1
        self._num_arrived += 1
        passed = asyncio.get_running_loop().create_future()
        waiting = _Waiting(_key_of(prompt), self._num_arrived, prompt, passed)
        self._listen()
        insort(self._waiting, waiting)
        # Not at once: whoever arrives last would go on before those that are let go before it.
        asyncio.get_running_loop().call_soon(self._let_go)
        return waiting

    def leave(self, waiting: _Waiting | None) -> None:
        """A program has ended, before its first request (None), while it waited, or later."""
        if waiting is None:
            self._num_coming -= 1
        elif not waiting.passed.done():
            del self._waiting[bisect_left(self._waiting, waiting)]
            waiting.passed.cancel()
        else:
            self._num_inside -= 1
            self.room.leave(waiting.prompt, waiting.visit)
        self._let_go()

    def take(self, info: Mapping[str, Any]) -> None:
        """Note what the backend tells of itself by now: more may fit than did."""
        self.room.take(info)
        self._let_go()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around each request of a program that is inside."""
        self._num_asked += 1
        try:
            yield
        finally:
            self._num_asked -= 1
            self._watch_rest()

    def close(self) -> None:
        """End what the gate itself has under way."""
        for timer in (self._timer, self._rest_timer):
            if timer is not None:
                timer.cancel()
        if self._warming is not None:
            self._warming.cancel()

    def _listen(self) -> None:
        """Somebody comes: wait for quiet anew."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._gather_until = loop.time() + GATHER_SECONDS
        self._is_quiet = False
        patience = min(self._quiet_seconds, max(0.0, self._gather_until - loop.time()))
        self._timer = loop.call_later(patience, self._be_quiet)

    def _be_quiet(self) -> None:
        self._is_quiet = True
        self._let_go()

    def _watch_rest(self) -> None:
        """Those inside may be busy with something else, a tool perhaps: nobody waits for that."""
        if self._num_asked or not self._waiting:
            return
        if self._rest_timer is not None:
            self._rest_timer.cancel()
        self._rest_timer = asyncio.get_running_loop().call_later(REST_SECONDS, self._end_rest)

    def _end_rest(self) -> None:
        if not self._num_asked and self._waiting and self._num_inside < self._width:
            self._admit(self._next())

    def _let_go(self) -> None:
        """Let those go whose turn it is."""
        if self._warming is not None or not (self._is_quiet or self._is_complete()):
            return
        if self._waiting and not self._has_begun:
            self._has_begun = True
            if self._warm():
                return
        while self._waiting and self._num_inside < self._width:
            index = self._next()
            if not self.room.fits(self._waiting[index].prompt):
                self._watch_rest()
                return
            self._admit(index)

    def _admit(self, index: int) -> None:
        """One of those that wait comes in."""
        waiting = self._waiting.pop(index)
        beside = self._waiting[self._next()].prompt if self._waiting else None
        waiting.visit = self.room.enter(waiting.prompt, beside)
        self._last = waiting.key
        self._num_inside += 1
        waiting.passed.set_result(None)

    def _is_complete(self) -> bool:
        """Whether all that could be gathered is."""
        return not self._num_coming and (self._has_begun or not self._more_to_come())

    def _next(self) -> int:
        """The next prompt in order, from the first again after the last."""
        index = bisect_left(self._waiting, self._last, key=lambda waiting: waiting.key)
        return index if index < len(self._waiting) else 0

    def _warm(self) -> bool:
        """Begin to compute what the prompts that wait have in common; whether it is worth it."""
        common = common_prefix([waiting.prompt for waiting in self._waiting])
        if common is None or self._backend.chat_only:
            return False
        self._warming = asyncio.get_running_loop().create_task(compute(self._backend, common))
        self._warming.add_done_callback(self._warmed)
        return True

    def _warmed(self, task: "asyncio.Task[None]") -> None:
        self._warming = None
        if not task.cancelled():
            if (error := task.exception()) is not None:
                # The programs will meet the same error, and say where.
                logger.debug("the common prefix was not computed: %s", error)
            self._let_go()


class Ticket:
    """One program's way through a gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._waiting: _Waiting | None = None
        self._has_left = False
        self._when_waiting: Callable[[], None] = _nothing
        self._when_passed: Callable[[], None] = _nothing

    def watch(self, when_waiting: Callable[[], None], when_passed: Callable[[], None]) -> None:
        """Be told when the program begins to wait for its turn, and when it has it."""
        self._when_waiting, self._when_passed = when_waiting, when_passed

    async def enter(self, prompt: Prompt) -> None:
        """Wait for the turn of the program, whose first request has this prompt. Raises
        CancelledError once it has ended: a branch may get here before its own end reaches it, and
        nobody would leave for it."""
        if self._has_left:
            raise asyncio.CancelledError("the program has ended")
        if self._waiting is None:
            self._when_waiting()
            self._waiting = self._gate.arrive(prompt)
            self._waiting.passed.add_done_callback(self._pass)
        if not self._waiting.passed.done():
            await asyncio.shield(self._waiting.passed)

    @contextmanager
    def request(self, prompt: Prompt) -> Iterator[list[Answer]]:
        """Around a request of a program that has entered; its answers are put into the list."""
        visit = self._waiting.visit if self._waiting is not None else None
        answers: list[Answer] = []
        round_index = 0 if visit is None else visit.begin_request()
        with self._gate.request():
            yield answers
        if visit is not None:
            visit.end_request(round_index, prompt, answers)

    def leave(self) -> None:
        """The program has ended."""
        self._has_left = True
        self._gate.leave(self._waiting)

    def _pass(self, passed: "asyncio.Future[None]") -> None:
        if not passed.cancelled():
            self._when_passed()


class GatedBackend:
    """A backend as one program of a batch sees it."""

    def __init__(self, backend: Backend, ticket: Ticket) -> None:
        self.name = backend.name
        self.encoder: Encoder | None = backend.encoder
        self.chat_only = backend.chat_only
        self._backend = backend
        self._ticket = ticket

    async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
        await self._ticket.enter(prompt)
        with self._ticket.request(prompt) as told:
            answers = await self._backend.generate(prompt, call)
            told += answers
        return answers

    async def stream(self, prompt: Prompt, call: Call) -> AsyncIterator[Answer]:
        await self._ticket.enter(prompt)
        with self._ticket.request(prompt) as told:
            async with aclosing(self._backend.stream(prompt, call)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    told[:] = [piece]  # the last one has the tokens of all
                    yield piece

    async def score(
        self, prompt: Prompt, continuations: Sequence[TokenIds | str], hints: Hints
    ) -> list[Score]:
        await self._ticket.enter(prompt)
        with self._ticket.request(prompt) as told:
            scores = await self._backend.score(prompt, continuations, hints)
            told.append(Answer(text=""))
        return scores

    async def flush_cache(self) -> None:
        await self._backend.flush_cache()

    async def server_info(self) -> Mapping[str, Any]:
        return await self._backend.server_info()

    async def aclose(self) -> None:
        """The backend belongs to the batch, not to one of its programs."""


def common_prefix(prompts: Sequence[Prompt]) -> Prompt | None:
    """What all prompts begin with; None if they are one or none, or it is short. O(its length)."""
    if len(prompts) < 2:
        return None
    # Of prompts in order the first and the last have in common what all have.
    first, *_, last = sorted(prompts, key=_key_of)
    text = _shared(first.text, last.text)
    if first.token_ids is None or last.token_ids is None:
        return Prompt(text=text) if len(text) >= MIN_PREFIX_CHARACTERS else None
    token_ids = _shared(first.token_ids, last.token_ids)
    return Prompt(text=text, token_ids=token_ids) if len(token_ids) >= MIN_PREFIX_TOKENS else None


async def compute(backend: Backend, prefix: Prompt) -> None:
    """Let a backend compute a prefix, which it then has in its cache. Costs one token more."""
    await backend.generate(prefix, Call(options={"max_tokens": 1, "temperature": 0.0}))


def _nothing() -> None:
    """Nobody watches."""


def _key_of(prompt: Prompt) -> Key:
    return (prompt.token_ids or (), prompt.text)


def _shared(first: Any, last: Any) -> Any:
    return first[: common_length(first, last)]
