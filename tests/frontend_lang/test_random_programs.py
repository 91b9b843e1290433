"""Random programs with a backend that fails at a random call: they end, and leave nothing."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sapwood as sgl
from sapwood.frontend_lang.process import PROCESS
from sapwood.frontend_lang.state import ProgramState
from tests.frontend_lang.fakes import FakeBackend
from tests.frontend_lang.random_programs import PROGRAMS, Statement, perform

PATIENCE = 20.0  # seconds after which a thread hangs; a program here takes milliseconds


@sgl.function
def play(s: ProgramState, program: tuple[Statement, ...]) -> None:
    perform(s, program)


def run(program: tuple[Statement, ...], backend: FakeBackend) -> None:
    state = play.run(program=program, backend=backend)
    assert state.error() is None
    assert "".join(state.text_iter()) == state.text()


def read_along(program: tuple[Statement, ...], backend: FakeBackend) -> None:
    state = play.run(program=program, backend=backend, stream=True)
    text = "".join(state.text_iter())
    assert state.error() is None
    assert text == state.text()


def ask_for_the_text(program: tuple[Statement, ...], backend: FakeBackend) -> None:
    play.run(program=program, backend=backend, stream=True).text()


def ask_for_the_error(program: tuple[Statement, ...], backend: FakeBackend) -> None:
    error = play.run(program=program, backend=backend, stream=True).error()
    if error is not None:
        raise error


def read_a_name(program: tuple[Statement, ...], backend: FakeBackend) -> None:
    state = play.run(program=program, backend=backend, stream=True)
    with suppress(KeyError):
        "".join(state.text_iter("a"))
        assert state["a"] is not None
    state.sync()


def run_on_another_loop(program: tuple[Statement, ...], backend: FakeBackend) -> None:
    asyncio.run(play.arun(program=program, backend=backend))


def run_in_time(program: tuple[Statement, ...], backend: FakeBackend) -> None:
    play.run(program=program, backend=backend, timeout=PATIENCE)


FORMS = (
    run,
    read_along,
    ask_for_the_text,
    ask_for_the_error,
    read_a_name,
    run_on_another_loop,
    run_in_time,
)


def outcome(call: Callable[[], None]) -> BaseException | None:
    """What a call ends with, on a thread that may not hang."""
    raised: list[BaseException | None] = [None]

    def work() -> None:
        try:
            call()
        except BaseException as error:
            raised[0] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it hangs"
    return raised[0]


async def other_tasks() -> int:
    """How many tasks are on the loop beside this one, once cancelled ones are through."""
    for _ in range(1000):
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if not others:
            return 0
        await asyncio.sleep(0.001)
    return len(others)


def num_calls(program: tuple[Statement, ...], **options: Any) -> int:
    """How often the program asks its backend where nothing fails."""
    backend = FakeBackend("ok", **options)
    assert outcome(lambda: run(program, backend)) is None
    return len(backend.asked)


def check_that_it_ends(
    program: tuple[Statement, ...], form: Callable[..., None], failing: float, **options: Any
) -> None:
    call = int(failing * num_calls(program, **options))
    backend = FakeBackend("ok", failing=[call], **options)
    error = outcome(lambda: form(program, backend))
    assert error is None or isinstance(error, sgl.ProgramError), repr(error)
    if len(backend.asked) <= call:
        assert error is None
    assert PROCESS.background.run(other_tasks()) == 0
    assert backend.num_active == 0


CASES = given(
    program=PROGRAMS,
    form=st.sampled_from(FORMS),
    failing=st.sampled_from([part / 20 for part in range(21)]),  # of the calls it makes
    with_encoder=st.booleans(),
    delay=st.sampled_from((0.0, 0.0, 0.0005)),
)
ANY_TIME = [HealthCheck.too_slow, HealthCheck.data_too_large]


@CASES
@settings(max_examples=100, deadline=None, suppress_health_check=ANY_TIME)
def test_a_program_that_fails_anywhere_ends_and_leaves_nothing(**case: Any) -> None:
    check_that_it_ends(**case)


@pytest.mark.slow
@CASES
@settings(max_examples=2000, deadline=None, suppress_health_check=ANY_TIME)
def test_two_thousand_programs_that_fail_anywhere_end_and_leave_nothing(**case: Any) -> None:
    check_that_it_ends(**case)
