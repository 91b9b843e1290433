"""What a state tells: variables, texts, messages, streams, and what it refuses."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import sapwood as sgl
from sapwood.frontend_lang.errors import ProgramUsageError
from sapwood.frontend_lang.state import ProgramState
from tests.frontend_lang.fakes import FakeBackend


@sgl.function
def two(s: ProgramState) -> None:
    s += "Q" + sgl.gen("a") + "R" + sgl.gen("b")


def test_a_variable_before_the_failure_stays_readable() -> None:
    seen: list[Any] = []

    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.gen("a") + sgl.gen("b")
        assert s.error() is not None
        seen.append((s["a"], s.get_meta_info("a")["completion_tokens"], list(s.text_iter("a"))))

    with pytest.raises(sgl.ProgramError):
        program.run(backend=FakeBackend("first", failing=[1]))
    assert seen == [("first", 5, ["first"])]


def test_a_name_that_no_statement_sets_is_an_error_that_names_those_there_are() -> None:
    state = two.run(backend=FakeBackend())
    with pytest.raises(sgl.UnknownVariableError, match="'anser'; there are a, b") as caught:
        state["anser"]
    assert isinstance(caught.value, KeyError)
    for read in (state.get, state.get_var, state.get_meta_info, lambda n: list(state.text_iter(n))):
        with pytest.raises(KeyError):
            read("anser")
    assert "a" in state
    assert "anser" not in state
    assert state.variables() == ("a", "b")


def test_reading_waits_for_what_is_read_only() -> None:
    backend = FakeBackend(delay=0.01)

    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.gen("a") + sgl.gen("b")
        s["a"]
        assert backend.num_active <= 1
        assert len(backend.asked) <= 2

    assert program.run(backend=backend)["b"] == "ok"


def test_the_newest_of_statements_with_one_name_is_read() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.gen("a") + sgl.gen("a")

    assert program.run(backend=FakeBackend(["old", "new"]))["a"] == "new"


def test_a_scope_is_a_variable_after_it_and_none_inside() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += "before "
        with s.var_scope("outer"):
            s += "x"
            with s.var_scope("inner"):
                s += sgl.gen("a")
            assert "outer" not in s
            s += "y"
        assert s["outer"] == "xoky"

    state = program.run(backend=FakeBackend())
    assert (state["outer"], state["inner"]) == ("xoky", "ok")


def test_a_branch_may_end_the_scope_that_it_began_in() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        with s.var_scope("line"):
            s += "a"
            branch = s.copy()
        branch += sgl.gen("x")
        s.set_var("of_branch", branch["x"])

    assert program.run(backend=FakeBackend())["line"] == "a"


def test_values_have_the_type_that_their_gen_asked_for() -> None:
    number = sgl.gen_int("number", max_tokens=3)

    @sgl.function
    def program(s: ProgramState) -> None:
        s += number + sgl.gen("several", dtype=int, n=2) + sgl.gen("text")

    state = program.run(backend=FakeBackend("42"))
    value: int = state.get(number)
    assert value == 42
    assert state.get("number") == 42
    assert state["number"] == "42"
    assert state.get("text") == "42"
    assert state.get("several") == [42, 42]
    assert asyncio.run(state.aget(number)) == 42


def test_values_are_read_after_a_join_and_of_several_answers() -> None:
    number = sgl.gen_int("number")
    pair = sgl.gen("pair", dtype=int, n=2)

    @sgl.function
    def program(s: ProgramState) -> None:
        for _ in range(2):
            with s.fork(2) as branches:
                branches += number + pair

    state = program.run(backend=FakeBackend("42"))
    assert state.get(number) == state.get("number") == [42] * 4
    assert state.get("pair") == asyncio.run(state.aget(pair)) == [[42, 42]] * 4
    assert state["number"] == ["42"] * 4


def test_values_of_thousands_of_joins_are_read() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        for _ in range(1200):
            with s.fork(1) as branches:
                branches += sgl.gen_int("number")

    assert program.run(backend=FakeBackend("4", with_encoder=False)).get("number") == [4] * 1200


def test_a_gen_without_a_name_cannot_be_asked_for() -> None:
    state = two.run(backend=FakeBackend())
    with pytest.raises(ProgramUsageError, match="no name"):
        state.get(sgl.gen(max_tokens=2))


def test_the_pieces_of_a_text_are_the_text() -> None:
    state = two.run(backend=FakeBackend(["one", "two"]), stream=True)
    assert list(state.text_iter()) == ["Q", *"one", "R", *"two"]
    assert list(state.text_iter("b")) == [*"two"]
    assert state.text() == "QoneRtwo"
    assert list(state.text_iter()) == ["Q", *"one", "R", *"two"]  # as often as it is asked for


def test_a_stream_waits_for_a_variable_that_is_not_named_yet() -> None:
    may_go = threading.Event()

    @sgl.function
    def program(s: ProgramState) -> None:
        may_go.wait()
        s += sgl.gen("late")

    state = program.run(backend=FakeBackend(), stream=True)
    pieces = state.text_iter("late")
    assert "late" not in state
    threading.Timer(0.02, may_go.set).start()
    assert "".join(pieces) == "ok"
    assert state["late"] == "ok"
    with pytest.raises(KeyError):
        state["never"]


def test_a_program_may_read_its_own_text_while_it_runs() -> None:
    seen = []

    @sgl.function
    def program(s: ProgramState) -> None:
        s += "a" + sgl.gen("x")
        seen.append("".join(s.text_iter()))
        seen.append("".join(s.text_iter("x")))
        s += "b"
        seen.append("".join(s.text_iter()))

    program.run(backend=FakeBackend())
    assert seen == ["aok", "ok", "aokb"]


def test_a_branch_tells_the_text_before_it_and_variables_of_its_parent() -> None:
    seen = []

    @sgl.function
    def program(s: ProgramState) -> None:
        s += "a" + sgl.gen("x")
        s.set_var("set", "value")
        [branch] = s.fork(1)
        branch += "b"
        seen.append("".join(branch.text_iter()))
        seen.append("".join(branch.text_iter("x")))
        seen.append("".join(branch.text_iter("set")))

    program.run(backend=FakeBackend())
    assert seen == ["aokb", "ok", "value"]


def test_an_async_stream_tells_what_the_backend_told_of_each_piece() -> None:
    async def read() -> list[Any]:
        state = await two.arun(backend=FakeBackend(["one", "two"]), stream=True)
        return [pair async for pair in state.text_async_iter("b", return_meta_data=True)]

    pairs = asyncio.run(read())
    assert "".join(text for text, _ in pairs) == "two"
    state = two.run(backend=FakeBackend(["one", "two"]), stream=True)

    async def whole() -> str:
        return "".join([piece async for piece in state.text_async_iter()])

    assert asyncio.run(whole()) == "QoneRtwo"


def test_text_from_outside_is_the_whole_text() -> None:
    @sgl.function
    def slow(s: ProgramState) -> None:
        for _ in range(5):
            s += sgl.gen("a")
            s["a"]

    state = slow.run(backend=FakeBackend(delay=0.002), stream=True)
    assert state.text() == "ok" * 5
    assert state.error() is None


def test_select_takes_the_likeliest_and_tells_the_scores() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += "It is " + sgl.select("a", ["long text", "short"]) + "." + sgl.gen("b")

    for with_encoder in (True, False):
        backend = FakeBackend(with_encoder=with_encoder)
        state = program.run(backend=backend)
        assert state["a"] == "short"
        assert state.text() == "It is short.ok"
        assert len(state.get_meta_info("a")["normalized_prompt_logprobs"]) == 2
        assert backend.prompts[-1] == "It is short."


def test_gen_with_choices_is_select() -> None:
    assert sgl.gen("a", choices=["x", "y"]) == sgl.select("a", ["x", "y"])
    with pytest.raises(TypeError, match="takes no max_tokens"):
        sgl.gen("a", 5, choices=["x", "y"])


def test_what_is_no_text_and_no_node_is_refused_where_it_stands() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += 5  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="not of int"):
        program.run(backend=FakeBackend())


@pytest.mark.parametrize(
    "node", [sgl.gen("a"), "Hello " + sgl.gen("a"), sgl.select("a", ["b"]), sgl.user("c")]
)
def test_a_node_in_an_f_string_is_refused(node: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot stand in an f-string.*join it with \+"):
        f"Hello {node}"
    with pytest.raises(TypeError, match="cannot stand in an f-string"):
        str(node)


def test_a_state_or_nothing_where_a_node_belongs_is_refused_with_advice() -> None:
    @sgl.function
    def joined(s: Any) -> None:
        s + sgl.gen("a")

    @sgl.function
    def nested(s: Any) -> None:
        s += two.run()

    for program in (joined, nested):
        sgl.set_default_backend(FakeBackend())
        try:
            with pytest.raises(TypeError, match=r"append with s \+= .*a plain function"):
                program.run()
        finally:
            sgl.set_default_backend(None)
    nothing: Any = None
    with pytest.raises(TypeError, match="did a function return nothing"):
        sgl.gen("a") + nothing


def test_a_variable_of_a_branch_is_told_before_the_join() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        branches = s.fork(2)
        branches += sgl.gen("x")
        s["x"]

    with pytest.raises(sgl.UnknownVariableError, match=r'branches\["x"\].*join\(\)'):
        program.run(backend=FakeBackend())


def test_select_tells_where_its_name_goes_and_what_its_choices_are() -> None:
    names: Any = ["a", "b"]
    with pytest.raises(TypeError, match=r"select\(name, choices\)"):
        sgl.select(names)
    numbers: Any = [1, 2]
    with pytest.raises(sgl.RequestError, match=r"write str\(1\)"):
        sgl.select("x", numbers)


def test_nothing_is_appended_after_the_end() -> None:
    state = two.run(backend=FakeBackend())
    with pytest.raises(ProgramUsageError, match="has ended"):
        state += "more"


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_a_fork_takes_a_number_of_branches(size: Any) -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s.fork(size)

    with pytest.raises(ProgramUsageError, match="whole number"):
        program.run(backend=FakeBackend())


def test_a_group_is_a_list_of_states() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += "q"
        with s.fork(3) as group:
            group += ["a", "b", "c"]
            group += lambda index: str(index)
            group[0] += sgl.gen("x")
            for branch in group[1:]:
                branch += sgl.gen("x")
            assert group["x"] == ["ok"] * 3
            assert [branch.text() for branch in group] == ["qa0ok", "qb1ok", "qc2ok"]
            with pytest.raises(ValueError, match="argument"):
                group += ["only one"]
        assert s["x"] == ["ok"] * 3

    program.run(backend=FakeBackend())


def test_a_copy_is_a_state_and_a_block() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += "q"
        aside = s.copy()
        aside += " aside" + sgl.gen("x")
        assert aside["x"] == "ok"
        assert "x" not in s
        with s.copy() as block:
            block += sgl.gen("y")
        assert s["y"] == ["ok"]

    assert program.run(backend=FakeBackend()).text() == "q"


def test_roles_may_be_expressions_blocks_or_ends() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.system("a")
        s.user("b")
        with s.assistant():
            s += "c" + sgl.gen("x")
        s += sgl.user_begin() + "d" + sgl.user_end() + sgl.assistant_begin() + sgl.gen("y")

    state = program.run(backend=FakeBackend())
    told = [(message["role"][0], message["content"]) for message in state.messages()]
    assert told == [("s", "a"), ("u", "b"), ("a", "cok"), ("u", "d"), ("a", "ok")]


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (sgl.user_begin() + sgl.system("x"), "inside one of role 'user'"),
        (sgl.user_end(), "none is open"),
        (sgl.user_begin() + sgl.assistant_end(), "one of role 'user' is open"),
    ],
)
def test_roles_that_do_not_nest_are_refused_with_their_line(node: Any, message: str) -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += node

    with pytest.raises(sgl.ProgramError, match=rf"test_reading.py:\d+ in program.*{message}"):
        program.run(backend=FakeBackend())


def test_a_backend_of_messages_only_answers_in_an_assistants_message() -> None:
    @sgl.function
    def outside(s: ProgramState) -> None:
        s += sgl.user("q") + sgl.gen("a")

    @sgl.function
    def loose(s: ProgramState) -> None:
        s += "no role\n" + sgl.user("q") + sgl.assistant(sgl.gen("a"))

    @sgl.function
    def sound(s: ProgramState) -> None:
        s += sgl.user("q") + "\n" + sgl.assistant(sgl.gen("a"))

    backend = FakeBackend(chat_only=True, with_encoder=False)
    with pytest.raises(sgl.ProgramError, match="assistant"):
        outside.run(backend=backend)
    with pytest.raises(sgl.ProgramError, match="'no role.n' is in none"):
        loose.run(backend=backend)
    state = sound.run(backend=backend)
    assert backend.asked[0].prompt.messages == (
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": ""},
    )
    assert state.text() == "user: q\n\nassistant: ok\n"


def test_a_state_shows_its_variables() -> None:
    assert "a, b" in repr(two.run(backend=FakeBackend()))


def test_run_gives_what_the_program_returned() -> None:
    @sgl.function
    def program(s: ProgramState) -> int:
        return 7

    assert program.run(backend=FakeBackend()).ret_value == 7
    assert program(backend=FakeBackend()).ret_value == 7


def test_scopes_of_one_name_nest() -> None:
    seen: list[str] = []

    @sgl.function
    def program(s: ProgramState) -> None:
        with s.var_scope("v"):
            s += "a"
            with s.var_scope("v"):
                s += "b"
            seen.append(s["v"])
            s += "c"

    assert program.run(backend=FakeBackend())["v"] == "abc"
    assert seen == ["b"]


def test_other_threads_of_a_streamed_program_read_its_branches() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        branches = s.fork(2)
        branches += sgl.gen("x")
        with ThreadPoolExecutor(2) as threads:
            s.set_var("texts", list(threads.map(lambda branch: branch.text(), branches)))

    assert program.run(backend=FakeBackend("a"), stream=True)["texts"] == ["a", "a"]


def test_an_async_stream_tells_how_an_answer_ended() -> None:
    state = two.run(backend=FakeBackend(["one", "two"]), stream=True)

    async def pieces() -> list[Any]:
        return [piece async for piece in state.text_async_iter("a", return_meta_data=True)]

    *_, (text, meta) = asyncio.run(pieces())
    assert (text, meta["finish_reason"]["type"]) == ("", "stop")
    assert all(state.text_iter("a"))  # no empty piece without the meta


def test_what_is_no_name_is_no_variable() -> None:
    state: Any = two.run(backend=FakeBackend())
    for read in (lambda: state[0], lambda: list(state), lambda: state.get_meta_info(None)):
        with pytest.raises(KeyError, match="no statement before this sets a variable"):
            read()


def test_a_reader_whose_loop_was_closed_is_in_nobodys_way() -> None:
    state = two.run(backend=FakeBackend(["one", "two"], delay=0.05), stream=True)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(state.aget("a"), 0.001)

    asyncio.run(give_up())
    assert (state["a"], state["b"]) == ("one", "two")
