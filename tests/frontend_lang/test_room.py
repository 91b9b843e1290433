"""How many programs of a batch go on at once in a cache that cannot hold all of them."""

import asyncio
import math
import random
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import sapwood as sgl
from sapwood.frontend_lang.backends.interface import Answer, Call, Prompt
from sapwood.frontend_lang.room import FIRST_GROWTH, NUM_LEARNED, Room, TreeSize, common_length
from tests.frontend_lang.fakes import FakeBackend

Tokens = tuple[int, ...]


def prompt(first: int, num_tokens: int = 1000) -> Prompt:
    """Shares nothing with one of another `first`."""
    return Prompt(text="", token_ids=tuple(range(first * 10_000, first * 10_000 + num_tokens)))


def answer(num_tokens: int, first: int = 7) -> Answer:
    return Answer(text="", token_ids=tuple(range(first, first + num_tokens)))


def perform(room: Room, asked: Prompt, rounds: Sequence[int]) -> None:
    """A program that is alone, of one request after another, with answers of these lengths."""
    visit = room.enter(asked)
    for index, num_tokens in enumerate(rounds):
        if visit is not None:
            told = [answer(num_tokens, first=10_000 * index)]
            visit.end_request(visit.begin_request(), asked, told)
    room.leave(asked, visit)


def num_that_fit(room: Room, num_tokens: int = 1000, limit: int = 30) -> int:
    """How many more programs come in, one after the other; they leave again."""
    inside = []
    for index in range(limit):
        asked = prompt(100 + index, num_tokens)
        if not room.fits(asked):
            break
        inside.append((asked, room.enter(asked)))
    for asked, visit in inside:
        room.leave(asked, visit)
    return len(inside)


# -- trees -----------------------------------------------------------------------------------------


def test_a_tree_counts_shared_tokens_once_whatever_comes_and_goes() -> None:
    draw = random.Random(7)
    for _ in range(50):
        tree, held = TreeSize(), []  # type: TreeSize, list[Tokens]
        for _ in range(30):
            if held and draw.random() < 0.4:
                tree.remove(held.pop(draw.randrange(len(held))))
            else:
                held.append(tuple(draw.choices((1, 2), k=draw.randrange(6))))
                new = tree.num_tokens + tree.num_new(held[-1])
                tree.add(held[-1])
                assert tree.num_tokens == new
            prefixes = {sequence[:n] for sequence in held for n in range(1, len(sequence) + 1)}
            assert tree.num_tokens == len(prefixes)
            assert len(tree) == len(held)
            inner = {sequence[:n] for sequence in held for n in range(len(sequence))}
            assert tree.num_leaves == len(set(held) - inner)
    with pytest.raises(KeyError, match="not in this tree"):
        held_by_nobody = TreeSize()
        held_by_nobody.add((2,))
        held_by_nobody.remove((1,))


def test_common_length_is_that_of_a_comparison_one_by_one() -> None:
    draw = random.Random(7)
    for _ in range(300):
        first = draw.choices("ab", k=draw.randrange(8))
        second = draw.choices("ab", k=draw.randrange(8))
        pairs = zip(first, second, strict=False)
        differing = (index for index, (a, b) in enumerate(pairs) if a != b)
        assert common_length(first, second) == next(differing, min(len(first), len(second)))


# -- how many fit ----------------------------------------------------------------------------------


def test_everybody_comes_in_where_nobody_knows_how_large_the_cache_is() -> None:
    assert num_that_fit(Room()) == num_that_fit(Room.of({})) == 30
    assert num_that_fit(Room.of({"max_total_num_tokens": 1000, "prefix_caching": False})) == 30
    assert num_that_fit(Room.of({"max_total_num_tokens": 1000, "prefix_caching": True})) == 1


def test_the_first_programs_come_in_as_their_prompts_fit() -> None:
    assert num_that_fit(Room(3 * (1000 + FIRST_GROWTH))) == 3
    assert num_that_fit(Room(3 * (1000 + FIRST_GROWTH) - 1)) == 2
    assert num_that_fit(Room(100)) == 1  # somebody has to


def test_what_prompts_share_takes_room_once() -> None:
    room = Room(1000 + 10 * (20 + FIRST_GROWTH))
    shared = prompt(1).token_ids or ()
    for index in range(10):
        asked = Prompt(text="", token_ids=(*shared, *range(index, index + 20)))
        assert room.fits(asked)
        room.enter(asked)
    assert not room.fits(Prompt(text="", token_ids=(*shared, *range(11, 31))))


@pytest.mark.parametrize(
    ("performed", "num"),
    [([], 5), ([[250, 250]], 4), ([[250, 250], [500, 500]], 3), ([[500, 500], [250, 250]], 3)],
)
def test_later_programs_come_in_as_those_before_them_have_grown(
    performed: list[list[int]], num: int
) -> None:
    room = Room(6100)  # of 1,128, 1,502 or 2,002 each
    for index, rounds in enumerate(performed):
        perform(room, prompt(index), rounds)
    assert num_that_fit(room) == num


def test_blocks_that_are_not_full_count_as_full() -> None:
    room = Room(6000, block_size=16)
    perform(room, prompt(1), [242, 242])  # two answers, each of which ends in a block of its own
    assert num_that_fit(room) == 3  # 1,516 each


# -- what is worth it ------------------------------------------------------------------------------


def learned(fixed_rows: float | None, num_prompt: int, rounds: Sequence[int]) -> Room:
    """A room of two programs, one of which has ended."""
    room = Room(2 * (num_prompt + FIRST_GROWTH))
    room.take({"stats": {"fixed_rows_per_step": fixed_rows}})
    perform(room, prompt(1, num_prompt), rounds)
    return room


@pytest.mark.parametrize(
    ("fixed_rows", "num_prompt", "rounds", "is_held"),
    [
        (30, 2000, [16, 16], True),  # 2,000 tokens to come back to, 32 steps
        (30, 100, [16, 16], False),  # few tokens
        (30, 2000, [16], False),  # nothing to come back to
        (30, 2000, [200, 16], False),  # many steps
        (30, 2000, [40, 40, 40], True),  # as many for each round
        (500, 2000, [16, 16], False),  # steps that cost much, as on a GPU
        (0.0, 2000, [16], False),  # steps that cost nothing of their own
        (None, 2000, [16, 16], True),  # nobody knows what they cost
    ],
)
def test_programs_are_held_where_computing_again_costs_more_than_smaller_steps(
    fixed_rows: float | None, num_prompt: int, rounds: list[int], is_held: bool
) -> None:
    room = learned(fixed_rows, num_prompt, rounds)
    assert (num_that_fit(room, num_prompt) < 30) == is_held


def test_what_all_programs_begin_with_is_not_what_one_comes_back_to() -> None:
    room = Room(3000)
    room.take({"stats": {"fixed_rows_per_step": 30}})
    shared = prompt(1).token_ids or ()
    first, second = (Prompt(text="", token_ids=(*shared, index)) for index in range(2))
    visit = room.enter(first, second)
    assert visit is not None and visit.num_own == 1
    for _ in range(2):
        visit.end_request(visit.begin_request(), first, [answer(16)])
    room.leave(first, visit)
    assert num_that_fit(room) == 30  # each program's own part is small


def test_requests_at_the_same_time_are_one_round_and_take_its_longest_answers_steps() -> None:
    room = Room(9000)
    asked = prompt(1)
    visit = room.enter(asked)
    assert visit is not None
    together = [visit.begin_request() for _ in range(3)]
    for index, round_index in enumerate(together):
        visit.end_request(round_index, asked, [answer(10 * (index + 1))])
    last = visit.begin_request()
    visit.end_request(last, asked, [answer(5)])
    assert (together, last, visit.steps) == ([0, 0, 0], 1, [30, 5])


def test_after_the_first_programs_nothing_is_noted_any_more() -> None:
    room = Room(10_000)
    visits = [room.enter(prompt(index)) for index in range(NUM_LEARNED + 2)]
    assert [visit is None for visit in visits] == [False] * NUM_LEARNED + [True] * 2


def test_what_a_step_costs_is_asked_for_until_it_is_known() -> None:
    room = learned(None, 1000, [4, 4])
    assert room.is_curious
    room.take({"stats": {"fixed_rows_per_step": None}})
    assert not room.is_curious  # not again before there is more to know
    perform(room, prompt(2), [4, 4])
    assert room.is_curious
    room.take({"stats": {"fixed_rows_per_step": 30.0}})
    perform(room, prompt(3), [4, 4])
    assert not room.is_curious


# -- in a batch ------------------------------------------------------------------------------------


class SmallBackend(FakeBackend):
    """Tells how large its cache is, and counts the programs that are at work in it."""

    def __init__(self, info: Any) -> None:
        super().__init__(delay=0.002)
        self.info = info
        self.inside: list[str] = []
        self.most_inside = 0

    async def server_info(self) -> Mapping[str, Any]:
        if isinstance(self.info, Exception):
            raise self.info
        return self.info

    async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
        self.inside.append(prompt.text[:2])
        self.most_inside = max(self.most_inside, len(set(self.inside)))
        try:
            return await super().generate(prompt, call)
        finally:
            self.inside.remove(prompt.text[:2])


@sgl.function
def two_rounds(s: sgl.ProgramState, index: int, num: int = 2) -> None:
    s += f"{index:02} " + "text " * 200
    for round_index in range(num):
        s += f"Question {round_index}." + sgl.gen(f"answer_{round_index}", max_tokens=4)


def most_at_once(info: Any, num: int = 2, **options: Any) -> int:
    backend = SmallBackend(info)
    batch = [{"index": index, "num": num} for index in range(12)]
    states = two_rounds.run_batch(batch, backend=backend, **options)
    assert [state["answer_0"] for state in states] == ["ok"] * 12
    return backend.most_inside


def info(num_tokens: int, fixed_rows: float | None = 10.0) -> Mapping[str, Any]:
    return {
        "max_total_num_tokens": num_tokens,
        "page_size": 16,
        "prefix_caching": True,
        "stats": {"fixed_rows_per_step": fixed_rows},
    }


def test_a_batch_goes_on_as_the_cache_holds_its_programs() -> None:
    assert most_at_once(info(2500)) == 2
    assert most_at_once(info(2500, fixed_rows=None)) == 2
    assert most_at_once(info(100_000)) == 12


def test_a_batch_is_not_held_where_its_programs_come_back_to_nothing() -> None:
    assert most_at_once(info(2500), num=1) > 2


@pytest.mark.parametrize(
    "told", [{"page_size": None}, {"page_size": "16"}, {"stats": None}, {"stats": []}]
)
def test_what_is_garbled_of_the_rest_is_taken_as_not_told(told: Mapping[str, Any]) -> None:
    assert most_at_once(garbled(**told)) == 2


def test_who_says_how_many_gets_as_many() -> None:
    assert most_at_once(info(2500), num_threads=12) == 12


def garbled(**told: Any) -> Mapping[str, Any]:
    return {**info(2500), **told}


@pytest.mark.parametrize(
    "told",
    [
        {},
        [],
        "no object",
        None,
        RuntimeError("broken"),
        *(garbled(max_total_num_tokens=number) for number in (None, "2500", -1, 0, float("nan"))),
    ],
)
def test_a_backend_that_tells_nothing_gets_all_at_once(told: Any) -> None:
    assert most_at_once(told) == 12


@pytest.mark.parametrize("bad", ["2500", -5, 0, math.nan, math.inf, [1], {}, None, True, 10**400])
@pytest.mark.parametrize("name", ["max_total_num_tokens", "page_size", "stats", "fixed_rows"])
def test_what_is_no_number_is_as_if_it_were_not_told(name: str, bad: Any) -> None:
    told = info(2500, fixed_rows=bad) if name == "fixed_rows" else garbled(**{name: bad})
    room = Room.of(told)
    perform(room, prompt(1), [4, 4])
    room.take(told)
    assert num_that_fit(room) in (1, 2, 30)


def test_a_batch_leaves_what_a_recording_was_asked_of_the_server_to_the_program(
    tmp_path: Path,
) -> None:
    recording = sgl.Recording(FakeBackend(), tmp_path / "tape", mode="record")
    two_rounds.run(1, backend=recording)
    told = sgl.get_server_info(recording)
    replayed = sgl.Recording(None, tmp_path / "tape", mode="replay")
    two_rounds.run_batch([{"index": 1}], backend=replayed)
    assert sgl.get_server_info(replayed) == told


def test_a_backend_that_does_not_answer_about_itself_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sapwood.frontend_lang.batch.INFO_SECONDS", 0.01)

    class Silent(SmallBackend):
        async def server_info(self) -> Mapping[str, Any]:
            await asyncio.sleep(60)
            return {}

    states = two_rounds.run_batch([{"index": 1}, {"index": 2}], backend=Silent({}))
    assert [state["answer_1"] for state in states] == ["ok"] * 2


def test_programs_that_fail_or_are_given_up_leave_their_room() -> None:
    @sgl.function
    def failing(s: sgl.ProgramState, index: int) -> None:
        s += f"{index:02} " + "text " * 200 + sgl.gen("answer", max_tokens=4)
        s.sync()
        raise ValueError("no")

    backend = SmallBackend(info(1500))
    batch = [{"index": index} for index in range(6)]
    states = failing.run_batch(batch, backend=backend, on_error="return")
    assert all(isinstance(state.error(), sgl.ProgramError) for state in states)


def test_programs_that_are_busy_elsewhere_keep_nobody_out() -> None:
    has_ended = threading.Event()

    @sgl.function
    def program(s: sgl.ProgramState, index: int) -> None:
        s += f"{index:02} " + "text " * 200 + sgl.gen("answer", max_tokens=4)
        s.sync()
        if index == 0:  # the first in order waits for the last, as for a tool
            assert has_ended.wait(timeout=20)
        elif index == 5:
            has_ended.set()

    batch = [{"index": index} for index in range(6)]
    states = program.run_batch(batch, backend=SmallBackend(info(1500)))
    assert [state["answer"] for state in states] == ["ok"] * 6
