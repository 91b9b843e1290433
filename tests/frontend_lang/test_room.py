"""Programs of a batch in a cache that cannot hold all of them."""

import asyncio
from collections.abc import Sequence

import pytest

from sapwood.frontend_lang.backends.interface import Answer, Prompt
from sapwood.frontend_lang.room import Member, Room

FIRST = Prompt(text="", token_ids=tuple(range(20)))


def answer(num_prompt: int, num_cached: int, num_new: int) -> Answer:
    meta = {
        "prompt_tokens": num_prompt,
        "cached_tokens": num_cached,
        "completion_tokens": num_new,
    }
    return Answer(text="", meta=meta)


class Work:
    """Programs of several requests each, and how they went on."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.order: list[int] = []  # the program of each request that began
        self.active: set[Member] = set()
        self.most_active = 0

    async def program(self, index: int, sizes: Sequence[int]) -> None:
        member = self.room.enter(FIRST)
        for size in sizes:
            async with self.room.request(member, size) as note:
                self.order.append(index)
                self.active.add(member)
                self.most_active = max(self.most_active, len(self.active))
                await asyncio.sleep(0.001)
                num_held = member.num_held
                note.add([answer(num_held + 20, num_held, size)])
                self.active.discard(member)
        self.room.leave(member)


def run(room: Room, programs: Sequence[Sequence[int]]) -> Work:
    async def all_of_them() -> Work:
        work = Work(room)
        await asyncio.gather(*(work.program(i, sizes) for i, sizes in enumerate(programs)))
        return work

    return asyncio.run(asyncio.wait_for(all_of_them(), 20))


def test_nothing_waits_where_everything_fits_or_nobody_knows_what_does() -> None:
    for room in (Room(None), Room(100_000)):
        assert run(room, [[10, 10]] * 8).order[:8] == list(range(8))


def test_programs_that_began_first_end_first_where_the_cache_holds_few_of_them() -> None:
    work = run(Room(400), [[10] * 5] * 8)
    assert work.most_active == 2
    ends = [max(at for at, which in enumerate(work.order) if which == i) for i in range(8)]
    assert ends == sorted(ends)


@pytest.mark.parametrize("num_tokens", [1, 30, 200])
def test_a_program_that_needs_more_than_there_is_goes_on_alone(num_tokens: int) -> None:
    work = run(Room(num_tokens), [[500, 500], [3], [500]])
    assert sorted(work.order) == [0, 0, 1, 2]
    assert work.most_active == 1


def test_what_programs_took_says_how_many_fit() -> None:
    """The first guess is for long programs; these are short."""
    work = run(Room(500), [[5, 5]] * 40)
    assert 8 <= work.most_active < 20


def test_programs_of_one_request_do_not_wait_for_each_other_once_one_has_ended() -> None:
    assert run(Room(200), [[5]] * 40).most_active == 39


def test_a_request_that_is_cancelled_while_it_waits_or_runs_leaves_its_place() -> None:
    async def check() -> None:
        room = Room(300)
        first, second = room.enter(FIRST), room.enter(FIRST)

        async def ask(member: Member, seconds: float) -> None:
            async with room.request(member, 10):
                await asyncio.sleep(seconds)

        running = asyncio.create_task(ask(first, 60))
        waiting = asyncio.create_task(ask(second, 0))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])
        again = asyncio.create_task(ask(second, 0))
        await asyncio.sleep(0.01)
        assert not again.done()
        running.cancel()
        await asyncio.wait_for(again, 5)
        assert (first.num_expected, second.num_expected) == (0, 0)

    asyncio.run(check())


def test_a_program_that_leaves_lets_others_go_on() -> None:
    async def check() -> None:
        room = Room(250)
        first, second = room.enter(FIRST), room.enter(FIRST)
        async with room.request(first, 10):
            waiting = asyncio.create_task(anext(aiter(_requests(room, second))))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            room.leave(first)
            await asyncio.wait_for(waiting, 5)

    async def _requests(room: Room, member: Member):  # type: ignore[no-untyped-def]
        async with room.request(member, 10):
            yield

    asyncio.run(check())
