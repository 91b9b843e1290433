"""Engines of both faces over one core: they share the cache, and do not disturb each other."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sapwood import AsyncEngine, Engine, EngineClosedError, RequestError, SamplingParams
from sapwood.runtime.mailroom import Mailroom
from sapwood.runtime.outputs import RequestMetrics
from sapwood.runtime.request import SequenceOutput
from tests.runtime.harness import Harness
from tests.runtime.test_engine import assert_nothing_held

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
PROMPT = list(range(3, 103))


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), num_kv_blocks=512, max_num_seqs=4, check_invariants=True) as made:
        yield made


def test_what_one_face_computed_the_other_finds(engine: Engine) -> None:
    [first] = engine.generate(PROMPT, GREEDY)
    [second] = asyncio.run(AsyncEngine.over(engine).generate(PROMPT, GREEDY))
    assert second.num_cached_tokens == len(PROMPT) - 1
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    third = Engine.over(AsyncEngine.over(engine)).generate(PROMPT, GREEDY)[0]
    assert third.outputs[0].token_ids == first.outputs[0].token_ids


def test_both_faces_answer_at_the_same_time(engine: Engine) -> None:
    expected = [engine.generate([3 + i, 4], GREEDY)[0].outputs[0].token_ids for i in range(8)]
    face = AsyncEngine.over(engine)
    found: dict[int, tuple[int, ...]] = {}

    def from_a_thread() -> None:
        for i in range(0, 8, 2):
            found[i] = engine.generate([3 + i, 4], GREEDY)[0].outputs[0].token_ids

    async def from_a_loop() -> None:
        outputs = await asyncio.gather(*(face.generate([3 + i, 4], GREEDY) for i in (1, 3, 5, 7)))
        for i, [output] in zip((1, 3, 5, 7), outputs, strict=True):
            found[i] = output.outputs[0].token_ids

    thread = threading.Thread(target=from_a_thread)
    thread.start()
    asyncio.run(asyncio.wait_for(from_a_loop(), 60))
    thread.join(60)
    assert [found[i] for i in range(8)] == expected
    assert_nothing_held(engine)


def test_a_caller_id_is_in_use_for_both_faces(engine: Engine) -> None:
    face, other = AsyncEngine.over(engine), AsyncEngine.over(engine)

    async def body() -> None:
        call = asyncio.create_task(face.generate(PROMPT, LONG, request_ids=["mine"]))
        while not engine.stats().num_running:
            await asyncio.sleep(0.001)
        with pytest.raises(RequestError, match="'mine' is in use"):
            await other.generate(PROMPT, GREEDY, request_ids=["mine"])
        assert await other.abort("mine")
        [output] = await call
        assert output.outputs[0].finish_reason == "abort"

    asyncio.run(asyncio.wait_for(body(), 60))


def test_closing_one_face_tells_the_callers_of_the_other(engine: Engine) -> None:
    face = AsyncEngine.over(engine)

    async def body() -> None:
        call = asyncio.create_task(face.generate(PROMPT, LONG))
        while not engine.stats().generated_tokens:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineClosedError):
            await call

    asyncio.run(asyncio.wait_for(body(), 60))
    with pytest.raises(EngineClosedError):
        engine.generate(PROMPT, GREEDY)


class _Place:
    """Counts how often it is woken."""

    def __init__(self, *, is_gone: bool = False) -> None:
        self.num_calls = 0
        self._is_gone = is_gone

    def run(self, deliver: Callable[[], None]) -> bool:
        self.num_calls += 1
        if not self._is_gone:
            deliver()
        return not self._is_gone


class _Inbox:
    def __init__(self, place: _Place) -> None:
        self.place = place
        self.told: list[SequenceOutput | None] = []

    def put(self, told: SequenceOutput | None) -> None:
        self.told.append(told)


def output_of(request_id: str) -> SequenceOutput:
    return SequenceOutput(request_id=request_id, metrics=RequestMetrics(arrival_time=0.0))


@pytest.fixture
def mail() -> Iterator[Mailroom]:
    made = Mailroom(Harness().core)
    yield made
    made.core.close()


def test_a_step_wakes_each_place_once_however_many_inboxes_are_there(mail: Mailroom) -> None:
    one, other = _Place(), _Place()
    inboxes = {"a": _Inbox(one), "b": _Inbox(one), "c": _Inbox(other)}
    mail._inboxes.update(inboxes)
    mail._deliver([output_of(name) for name in "abca"])
    assert (one.num_calls, other.num_calls) == (1, 1)
    assert [len(inbox.told) for inbox in inboxes.values()] == [2, 1, 1]


def test_the_end_is_told_to_everyone_once(mail: Mailroom) -> None:
    place = _Place()
    shared = _Inbox(place)
    mail._inboxes.update({"a": shared, "b": shared, "c": _Inbox(place)})
    mail._deliver([])
    assert shared.told == [None]
    assert place.num_calls == 1


def test_requests_of_a_place_where_nobody_is_left_are_ended(mail: Mailroom) -> None:
    mail._inboxes.update({"a": _Inbox(_Place(is_gone=True)), "b": _Inbox(_Place())})
    mail._in_flight.update({"mine": "a", "yours": "b"})
    mail._deliver([output_of("a"), output_of("b")])
    assert list(mail._inboxes) == ["b"]
    assert mail.request_id("mine") is None
    assert mail.request_id("yours") == "b"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_an_engine_in_a_forked_process_says_that_it_is_its_parents(engine: Engine) -> None:
    child = os.fork()
    if not child:
        try:
            engine.generate(PROMPT, GREEDY)
        except EngineClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert engine.generate(PROMPT, GREEDY)
