"""Faults that users of other frontends met, each shown not to be here."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

import sapwood as sgl
from sapwood.frontend_lang.backends.interface import Answer, Call, Prompt
from sapwood.frontend_lang.state import ProgramState
from tests.frontend_lang.fakes import FakeBackend, ScriptedError, spelled

READS: dict[str, Callable[[ProgramState], Any]] = {
    "variable": lambda s: s["a"],
    "get": lambda s: s.get("a"),
    "get_var": lambda s: s.get_var("a"),
    "meta": lambda s: s.get_meta_info("a"),
    "text": lambda s: s.text(),
    "messages": lambda s: s.messages(),
    "sync": lambda s: s.sync(),
    "text_iter": lambda s: list(s.text_iter()),
    "text_iter of it": lambda s: list(s.text_iter("a")),
    "branch": lambda s: s.fork(2)[1].text(),
    "join": lambda s: s.fork(2).join(),
    "copy": lambda s: s.copy()["a"],
}


@pytest.mark.parametrize("read", READS)
def test_an_error_of_the_backend_is_raised_at_the_first_read_of_what_depends_on_it(
    read: str,
) -> None:
    caught: list[BaseException] = []

    @sgl.function
    def program(s: ProgramState) -> None:
        s += "q" + sgl.gen("a")
        with pytest.raises(sgl.ProgramError, match=r"test_faults.py:\d+ in program") as raised:
            READS[read](s)
        caught.append(raised.value)

    with pytest.raises(sgl.ProgramError):
        program.run(backend=FakeBackend(failing=[0]))
    assert isinstance(caught[0].__cause__, ScriptedError)


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), asyncio.CancelledError("gone")])
def test_whatever_a_backend_raises_is_the_cause_of_a_program_error(error: BaseException) -> None:
    def script(prompt: Prompt, call: Call) -> str:
        raise error

    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.gen("a")

    with pytest.raises(sgl.ProgramError) as caught:
        program.run(backend=FakeBackend(script))
    assert caught.value.__cause__ is error
    program.run(backend=FakeBackend())  # the loop has lived on


def _appends(s: ProgramState) -> None:
    s += "more" + sgl.gen("b")


def _forks(s: ProgramState) -> None:
    group = s.fork(2)
    group += sgl.gen("b")
    with suppress(sgl.ProgramError):
        group.join()


def _opens_a_role(s: ProgramState) -> None:
    with s.user():
        s += "more"


def _sets(s: ProgramState) -> None:
    s.set_var("b", "c")


@pytest.mark.parametrize("goes_on", [_appends, _forks, _opens_a_role, _sets])
@pytest.mark.parametrize("asks", ["text", "error", "run", "iterate"])
def test_statements_after_a_failure_let_nothing_wait(
    goes_on: Callable[[ProgramState], None], asks: str
) -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.gen("a")
        with suppress(sgl.ProgramError):
            s["a"]
        goes_on(s)
        if asks == "text":
            with pytest.raises(sgl.ProgramError):
                s.text()
        elif asks == "error":
            assert isinstance(s.error(), sgl.ProgramError)
        elif asks == "iterate":
            with pytest.raises(sgl.ProgramError):
                list(s.text_iter())

    backend = FakeBackend(failing=[0])
    with pytest.raises(sgl.ProgramError):
        program.run(backend=backend)
    assert len(backend.asked) == 1  # nothing after it was sent


def test_a_later_join_of_the_same_names_adds_to_the_list() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        for _ in range(2):
            group = s.fork(2)
            group += sgl.gen("x")
            group.join()
            s += "."

    assert program.run(backend=FakeBackend(["1", "2", "3", "4"]))["x"] == ["1", "2", "3", "4"]


def test_joins_of_forks_that_overlap_drop_nothing() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        first, second = s.fork(1), s.fork(1)
        first += sgl.gen("x")
        first.join()
        second += sgl.gen("x")
        second.join()

    assert program.run(backend=FakeBackend(["1", "2"]))["x"] == ["1", "2"]


def test_a_join_leaves_a_variable_of_the_parent_itself() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.gen("x")
        group = s.fork(2)
        group += sgl.gen("x") + sgl.gen("y")
        group.join()

    state = program.run(backend=FakeBackend(["parent", "1", "2", "3", "4"]))
    assert state["x"] == "parent"
    assert sorted(state["y"]) != []


def test_a_bound_program_keeps_how_far_it_speculates() -> None:
    @sgl.function(num_api_spec_tokens=7)
    def program(s: ProgramState, a: str, b: str) -> None:
        s += a + b

    assert program.bind(a="x").num_api_spec_tokens == 7
    assert program.bind(a="x").with_options(temperature=0).run(b="y", backend=FakeBackend())
    assert program.bind(a="x").run(b="y", backend=FakeBackend()).text() == "xy"


@pytest.mark.parametrize("with_encoder", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_several_answers_of_one_gen_are_a_list(with_encoder: bool, stream: bool) -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += "q" + sgl.gen("a", n=2) + "!"

    backend = FakeBackend(["one", "two"], with_encoder=with_encoder)
    state = program.run(backend=backend, stream=stream)
    assert state["a"] == ["one", "two"]
    assert [meta["completion_tokens"] for meta in state.get_meta_info("a")] == [3, 3]
    assert state.text() == "qone!"  # it goes on with the first


def test_an_exception_in_a_role_block_closes_the_role() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        with suppress(ValueError), s.user():
            s += "half"
            raise ValueError
        with s.assistant():
            s += sgl.gen("a")

    state = program.run(backend=FakeBackend())
    assert [message["role"] for message in state.messages()] == ["user", "assistant"]


def test_an_exception_of_the_program_ends_its_run_and_is_raised_as_it_is() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        with s.assistant():
            s += sgl.gen("a")
            raise ValueError("mine")

    backend = FakeBackend(delay=60)
    with pytest.raises(ValueError, match="mine"):
        program.run(backend=backend)


def test_arguments_of_any_name_reach_the_program() -> None:
    @sgl.function
    def program(
        s: ProgramState,
        stop: str,
        n: str,
        stream: str,
        backend: str,
        timeout: str,
        temperature: str,
        max_tokens: str,
        use_thread: str,
        self: str,
        args: str,
        arguments: str,
        options: str,
    ) -> None:
        given = dict(locals())
        del given["s"]
        s.set_var("given", given)

    names = program.parameters.names
    given = {name: f"<{name}>" for name in names}
    sound = program.with_options(backend=FakeBackend(), n=2)
    assert len(names) == 12
    assert sound.run(**given)["given"] == given
    assert sound.bind(**given).run()["given"] == given


def test_a_fork_starts_no_threads() -> None:
    counts: list[int] = []

    @sgl.function
    def program(s: ProgramState) -> None:
        s += "q"
        before = threading.active_count()
        group = s.fork(50)
        group += sgl.gen("x")
        counts.append(threading.active_count() - before)
        group.join()

    assert len(program.run(backend=FakeBackend(delay=0.001))["x"]) == 50
    assert counts == [0]


def test_appended_branches_are_an_ordinary_continuation_with_their_tokens() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += "root "
        group = s.fork(2)
        group += lambda index: f"{index}:" + sgl.gen("x") + " "
        group.join("concate_and_append")
        s += "end:" + sgl.gen("y")

    backend = FakeBackend(lambda prompt, call: f"<{prompt.text[-2]}>")
    state = program.run(backend=backend)
    assert state.text() == "root 0:<0> 1:<1> end:<d>"
    assert state["x"] == ["<0>", "<1>"]
    last = backend.asked[-1].prompt
    assert last.token_ids is not None
    assert spelled(last.token_ids) == last.text == "root 0:<0> 1:<1> end:"


def test_appending_a_branch_that_failed_fails_the_parent_there() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += "root"
        s.fork(2).__iadd__(sgl.gen("x")).join("concate_and_append")
        with pytest.raises(sgl.ProgramError):
            s["x"]
        s += sgl.gen("y")

    backend = FakeBackend(failing=[1])
    with pytest.raises(sgl.ProgramError, match="call 1 fails"):
        program.run(backend=backend)
    assert len(backend.asked) == 2


def test_a_fork_may_be_the_first_statement() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        group = s.fork(2)
        group += "q" + sgl.gen("x")
        group.join()

    assert program.run(backend=FakeBackend())["x"] == ["ok", "ok"]


def test_programs_run_from_any_number_of_event_loops() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += "q" + sgl.gen("a")

    async def ask() -> list[str]:
        inside = program.run(backend=FakeBackend("inside"))["a"]  # as in a notebook
        states = await asyncio.gather(*(program.arun(backend=FakeBackend()) for _ in range(3)))
        return [inside, *(state["a"] for state in states)]

    for _ in range(3):
        assert asyncio.run(ask()) == ["inside", "ok", "ok", "ok"]


def test_a_stream_of_a_program_that_fails_ends_with_the_error() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += "q" + sgl.gen("a") + sgl.gen("b")

    def pieces() -> Iterator[str]:
        state = program.run(backend=FakeBackend("four", failing=[1]), stream=True)
        return state.text_iter()

    told = []
    with pytest.raises(sgl.ProgramError, match="call 1 fails"):
        for piece in pieces():
            told.append(piece)
    assert "".join(told) == "qfourfo"  # the second answer broke in its middle


class _Reasoner(FakeBackend):
    """Thinks before it answers."""

    async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
        assert call.separate_reasoning
        assert call.reasoning_type == "qwen3"
        return [Answer(text="42", reasoning="6 * 7", token_ids=(52, 50), finish_reason="stop")]

    async def stream(self, prompt: Prompt, call: Call) -> Any:
        assert call.separate_reasoning
        for answer in (Answer(text="", reasoning="6 "), Answer(text="", reasoning="* 7")):
            yield answer
        yield Answer(text="42", token_ids=(52, 50), finish_reason="stop")


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_is_kept_apart_streamed_or_not(stream: bool) -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.user("6 * 7?")
        s += sgl.assistant(sgl.separate_reasoning(sgl.gen("a"), model_type="qwen3"))

    state = program.run(backend=_Reasoner(), stream=stream)
    assert (state["a"], state["a_reasoning_content"]) == ("42", "6 * 7")
    assert state.messages()[-1]["content"] == "42"


@pytest.mark.parametrize("make", [lambda: sgl.image("a.png"), lambda: sgl.video("a.mp4", 8)])
def test_images_and_videos_are_refused_where_they_stand(make: Callable[[], Any]) -> None:
    with pytest.raises(sgl.RequestError, match="not supported"):
        make()


def test_forks_of_forks_by_the_thousand_die_with_what_they_began_from() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.gen("a")
        branch = s
        for _ in range(1500):
            branch = branch.fork()[0]
        branch += sgl.gen("x")
        branch.sync()

    with pytest.raises(sgl.ProgramError, match="call 0 fails"):
        program.run(backend=FakeBackend(delay=0.05, failing=[0]))


@pytest.mark.parametrize("mode", ["gather_variable", "concate_and_append"])
def test_what_was_joined_is_not_joined_again(mode: Any) -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += "q"
        with s.fork(2) as branches:  # the end of the block joins, too
            branches += sgl.gen("x")
            branches.join(mode)
            branches += sgl.gen("x")
            branches.join(mode)

    state = program.run(backend=FakeBackend("a"))
    assert state["x"] == ["a"] * 4
    assert state.text() == ("q" if mode == "gather_variable" else "qaaaa")


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_async_program_that_exits_does_not_end_the_loop(kind: type[BaseException]) -> None:
    @sgl.function
    async def leaving(s: ProgramState) -> None:
        raise kind("enough")

    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.gen("x")

    with pytest.raises(kind, match="enough"):
        leaving.run(backend=FakeBackend())
    assert program.run(backend=FakeBackend(), timeout=10)["x"] == "ok"
