"""Programs of a batch begin their work at a backend in the order of their prompts."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from sapwood.frontend_lang.backends.interface import Call, Prompt
from sapwood.frontend_lang.gate import Gate, GatedBackend, common_prefix
from sapwood.frontend_lang.room import Room
from tests.frontend_lang.fakes import FakeBackend

TREE = [f"{'shared ' * 10}{group} {question}" for group in "abc" for question in "xyz"]


def prompt(text: str) -> Prompt:
    return Prompt(text=text, token_ids=tuple(text.encode()))


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, timeout=10)

    return asyncio.run(bounded())


async def ask(gate: Gate, backend: FakeBackend, *texts: str, after: float = 0.0) -> None:
    """One program: requests with these prompts, one after the other."""
    ticket = gate.ticket()
    try:
        await asyncio.sleep(after)
        gated = GatedBackend(backend, ticket)
        for text in texts:
            await gated.generate(prompt(text), Call())
    finally:
        ticket.leave()


def test_first_requests_go_in_the_order_of_their_prompts_and_the_common_prefix_before_them() -> (
    None
):
    backend = FakeBackend()
    shuffled = random.Random(7).sample(TREE, len(TREE))

    async def batch() -> None:
        gate = Gate(backend, width=1)
        await asyncio.gather(*(ask(gate, backend, text) for text in shuffled))

    run(batch())
    assert backend.prompts == ["shared " * 10, *TREE]
    assert backend.asked[0].call is not None
    assert backend.asked[0].call.options.get("max_tokens") == 1


def test_later_requests_of_a_program_pass_freely_and_a_seat_is_free_when_it_ends() -> None:
    backend = FakeBackend(delay=0.001)

    async def batch() -> None:
        gate = Gate(backend, width=1)
        await asyncio.gather(*(ask(gate, backend, text, text + "!") for text in ("b", "a", "c")))

    run(batch())
    assert backend.prompts == ["a", "a!", "b", "b!", "c", "c!"]


def test_no_more_programs_than_the_width_are_inside() -> None:
    backend = FakeBackend(delay=0.001)
    most = 0

    async def watched(gate: Gate, text: str) -> None:
        nonlocal most
        await ask(gate, backend, text)
        most = max(most, backend.num_active)

    async def batch() -> None:
        gate = Gate(backend, width=3)
        await asyncio.gather(*(watched(gate, f"{index}") for index in range(20)))

    run(batch())
    assert most <= 3 and len(backend.asked) == 20


def test_a_program_that_takes_long_before_its_first_request_holds_nobody_up() -> None:
    backend = FakeBackend()
    done: list[str] = []

    async def program(gate: Gate, text: str, after: float) -> None:
        await ask(gate, backend, text, after=after)
        done.append(text)

    async def batch() -> None:
        gate = Gate(backend, width=1, quiet_seconds=0.01)
        await asyncio.gather(
            program(gate, "slow", 0.5), *(program(gate, f"{index}", 0) for index in range(5))
        )

    run(batch())
    assert done == ["0", "1", "2", "3", "4", "slow"]


def test_those_that_come_later_go_on_from_where_the_order_is() -> None:
    backend = FakeBackend(delay=0.02)

    async def batch() -> None:
        gate = Gate(backend, width=1, quiet_seconds=0.001)
        early = [ask(gate, backend, text) for text in ("b", "m", "y")]
        late = [ask(gate, backend, text, after=0.01) for text in ("a", "c")]
        await asyncio.gather(*early, *late)

    run(batch())
    assert backend.prompts == ["b", "c", "m", "y", "a"]


def test_a_program_that_ends_before_or_at_the_gate_leaves_it_open() -> None:
    backend = FakeBackend()

    async def batch() -> None:
        gate = Gate(backend, width=1, quiet_seconds=5)
        gate.ticket().leave()
        given_up = asyncio.create_task(ask(gate, backend, "a"))
        others = [asyncio.create_task(ask(gate, backend, "b", after=0.02)) for _ in range(2)]
        await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.gather(*others)

    run(batch())
    assert backend.prompts == ["b", "b"]


def test_a_request_of_a_program_that_has_ended_takes_nobodys_place() -> None:
    backend = FakeBackend()

    async def batch() -> None:
        gate = Gate(backend, width=9, quiet_seconds=0.01)
        gate.room = Room(100)
        ticket = gate.ticket()
        ticket.leave()
        late = GatedBackend(backend, ticket).generate(
            prompt("LATE" * 20), Call()
        )  # the first in order
        task = asyncio.create_task(late)
        await asyncio.sleep(0)
        task.cancel()  # as its worker is, a moment after the program's end
        await asyncio.gather(*(ask(gate, backend, text * 90) for text in "ab"))

    run(batch())
    assert backend.prompts == ["a" * 90, "b" * 90]


def test_those_who_need_not_wait_any_more_go_as_soon_as_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sapwood.frontend_lang.gate.REST_SECONDS", 60)
    backend = FakeBackend()

    async def batch() -> None:
        gate = Gate(backend, width=9, quiet_seconds=0.01)
        gate.room = Room(100)
        never_ends = gate.ticket()
        await ask(gate, backend, "a" * 90)  # comes back to nothing
        await GatedBackend(backend, never_ends).generate(prompt("b" * 90), Call())
        held = asyncio.create_task(ask(gate, backend, "c" * 90))
        await asyncio.sleep(0.05)
        assert not held.done()
        gate.take({"stats": {"fixed_rows_per_step": 30}})
        await held

    run(batch())


def test_a_prefix_that_cannot_be_computed_is_left_to_the_programs() -> None:
    backend = FakeBackend(failing=[0])

    async def batch() -> None:
        gate = Gate(backend, width=9)
        await asyncio.gather(*(ask(gate, backend, text) for text in TREE))

    run(batch())
    assert backend.prompts[1:] == TREE


def test_a_backend_that_takes_messages_only_is_asked_for_no_prefix() -> None:
    backend = FakeBackend(chat_only=True)

    async def batch() -> None:
        gate = Gate(backend, width=9)
        await asyncio.gather(*(ask(gate, backend, text) for text in TREE))

    run(batch())
    assert backend.prompts == TREE


@pytest.mark.parametrize(
    ("texts", "common"),
    [
        ([], None),
        (["a" * 100], None),
        (["a" * 15 + "b", "a" * 15 + "c"], None),
        (["a" * 16 + "b", "a" * 16 + "c", "a" * 20], "a" * 16),
        (["a" * 20, "a" * 20], "a" * 20),
    ],
)
def test_the_common_prefix_is_what_all_begin_with(texts: list[str], common: str | None) -> None:
    found = common_prefix([prompt(text) for text in texts])
    assert found == (None if common is None else prompt(common))


def test_without_tokens_the_common_text_counts() -> None:
    assert common_prefix([Prompt(text="a" * 63), Prompt(text="a" * 63)]) is None
    shared = common_prefix([Prompt(text="a" * 64 + "b"), Prompt(text="a" * 64 + "c")])
    assert shared == Prompt(text="a" * 64)


def test_a_stream_through_the_gate_is_closed_with_it() -> None:
    backend = FakeBackend("many letters", delay=0.001)

    async def one() -> None:
        gated = GatedBackend(backend, Gate(backend, width=1).ticket())
        stream = gated.stream(prompt("a"), Call())
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    run(one())
    assert backend.num_cancelled == 1 and backend.num_active == 0
