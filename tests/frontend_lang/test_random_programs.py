"""Random programs with a backend that fails at a random call: they end, and leave nothing."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import sapwood as sgl
from sapwood.frontend_lang.process import PROCESS
from sapwood.frontend_lang.state import ProgramState
from tests.frontend_lang.fakes import FakeBackend
from tests.frontend_lang.loops import num_tasks_left, own_loop
from tests.frontend_lang.random_programs import PROGRAMS, Statement, perform

PATIENCE = 20.0  # seconds after which a thread hangs; a program here takes milliseconds


@pytest.fixture(scope="module", autouse=True)
def _own_loop() -> Iterator[None]:
    with own_loop():
        yield


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


def run_in_a_batch(program: tuple[Statement, ...], backend: FakeBackend) -> None:
    states = play.run_batch([{"program": program}] * 3, backend=backend, on_error="return")
    errors = [error for state in states if (error := state.error()) is not None]
    if errors:
        raise errors[0]


def run_in_a_batch_of_all_or_none(program: tuple[Statement, ...], backend: FakeBackend) -> None:
    play.run_batch([{"program": program}] * 5, backend=backend, num_threads=2)


def run_in_a_batch_that_the_cache_does_not_hold(
    program: tuple[Statement, ...], backend: FakeBackend
) -> None:
    backend.info = {"max_total_num_tokens": 1, "prefix_caching": True}
    run_in_a_batch(program, backend)


FORMS = (
    run,
    read_along,
    ask_for_the_text,
    ask_for_the_error,
    read_a_name,
    run_on_another_loop,
    run_in_time,
    run_in_a_batch,
    run_in_a_batch_of_all_or_none,
    run_in_a_batch_that_the_cache_does_not_hold,
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
    assert num_tasks_left(PROCESS.background) == 0
    assert backend.num_active == 0


CASES = given(
    program=PROGRAMS,
    form=st.sampled_from(FORMS),
    failing=st.sampled_from([part / 20 for part in range(21)]),  # of the calls it makes
    with_encoder=st.booleans(),
    delay=st.sampled_from((0.0, 0.0, 0.0005)),
)
ANY_TIME = [HealthCheck.too_slow, HealthCheck.data_too_large]
NO_SHRINKING = [Phase.explicit, Phase.reuse, Phase.generate]  # what hangs takes its time


@CASES
@settings(max_examples=100, deadline=None, suppress_health_check=ANY_TIME, phases=NO_SHRINKING)
def test_a_program_that_fails_anywhere_ends_and_leaves_nothing(**case: Any) -> None:
    check_that_it_ends(**case)


@pytest.mark.slow
@CASES
@settings(max_examples=2000, deadline=None, suppress_health_check=ANY_TIME, phases=NO_SHRINKING)
def test_two_thousand_programs_that_fail_anywhere_end_and_leave_nothing(**case: Any) -> None:
    check_that_it_ends(**case)
