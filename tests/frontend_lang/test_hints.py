"""What a program tells the scheduler with each request."""

import sapwood as sgl
from sapwood.frontend_lang.state import ProgramState
from sapwood.runtime.hints import Hints
from tests.frontend_lang.fakes import FakeBackend


def hints_of(program: sgl.Program) -> list[Hints]:
    backend = FakeBackend(delay=0.05)  # a program has appended all before its second request
    program.run(backend=backend)
    return [asked.hints for asked in backend.asked if asked.hints is not None]


def test_requests_of_one_run_have_one_program_id_and_of_two_runs_two() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.gen("a") + sgl.select("b", ["x", "y"])

    first, second = hints_of(program), hints_of(program)
    assert len({hints.program_id for hints in first}) == 1
    assert first[0].program_id != second[0].program_id


def test_a_request_before_others_says_that_more_follows_and_the_last_does_not() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += "a" + sgl.gen("a") + "b" + sgl.gen("b") + "c"

    assert [hints.more_follows for hints in hints_of(program)] == [True, False]


def test_what_the_program_has_still_to_say_may_be_more() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.gen("a")
        s["a"]
        s += sgl.gen("b")

    assert hints_of(program)[0].more_follows


def test_branches_say_which_of_how_many_they_are_and_their_parent_how_many_come() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.gen("first") + sgl.gen("a")
        group = s.fork(3)
        group += sgl.gen("b")
        group.join()

    told = [(hints.fork_size, hints.fork_index) for hints in hints_of(program)]
    assert told == [(None, None), (3, None), (3, 0), (3, 1), (3, 2)]


def test_a_copy_is_no_fan_out() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.gen("a")
        with s.copy() as copy:
            copy += sgl.gen("b")

    assert {hints.fork_size for hints in hints_of(program)} == {None}


def test_a_pause_tells_how_long_the_program_is_away() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.gen("a") + sgl.pause(0.5) + sgl.pause(1) + "found" + sgl.gen("b")
        s += sgl.gen("c") + sgl.pause(1e9)

    told = [(hints.idle_seconds, hints.more_follows) for hints in hints_of(program)]
    assert told == [(1.5, True), (None, True), (600.0, True)]


def test_a_guess_of_the_length_is_a_hint_and_no_option() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.gen("a", output_tokens=7) + sgl.gen("b")

    backend = FakeBackend()
    program.with_options(output_tokens=9).run(backend=backend)
    assert [asked.hints and asked.hints.output_tokens for asked in backend.asked] == [7, 9]
    assert all(asked.call and "output_tokens" not in asked.call.options for asked in backend.asked)
