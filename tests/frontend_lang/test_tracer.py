"""A program is traced without a backend."""

import asyncio
import inspect
from typing import Any

import pytest

import sapwood as sgl
from sapwood.frontend_lang.forks import ForkGroup
from sapwood.frontend_lang.nodes import (
    Concat,
    Constant,
    Gen,
    Node,
    Pause,
    RoleBegin,
    RoleEnd,
    Select,
    SeparateReasoning,
    as_node,
)
from sapwood.frontend_lang.state import ProgramState
from sapwood.frontend_lang.trace_graph import Trace, TraceKind
from sapwood.frontend_lang.trace_state import TraceError, TraceGroup, TraceState
from sapwood.frontend_lang.tracer import trace, trace_prefix


def gen(name: str, **options: Any) -> Gen[str]:
    return Gen(name, options)  # type: ignore[arg-type]


def first(choices: Any, logprobs: Any, token_ids: Any, unconditional: Any) -> Any:
    raise AssertionError("a trace chooses nothing")


def select(name: str, choices: tuple[str, ...]) -> Select:
    return Select(name, choices, first)  # type: ignore[arg-type]


def user(expression: Any) -> Node:
    return Concat((RoleBegin("user"), as_node(expression), RoleEnd("user")))


def traced(function: Any, **arguments: Any) -> Trace:
    return trace(function, (), arguments)


def kinds(graph: Trace) -> list[TraceKind]:
    return [node.kind for node in graph.nodes]


def test_a_trace_has_every_node_in_the_programs_order() -> None:
    def program(s: Any, question: str) -> None:
        s += "Q: " + question + "\nA: "  # type: ignore[operator]
        s += gen("answer", max_tokens=4)
        s += "Is that " + s["answer"] + "?" + select("sure", ("yes", "no"))
        s += Pause(2.0)

    graph = traced(program)
    assert [str(node) for node in graph.nodes] == [
        "[0] argument question",
        "[1] constant 'Q: '",
        "[2] variable question <- [0]",
        "[3] constant '\\nA: '",
        "[4] gen answer (max_tokens=4)",
        "[5] constant 'Is that '",
        "[6] variable answer <- [4]",
        "[7] constant '?'",
        "[8] select sure ('yes | no')",
        "[9] pause 2 s",
    ]
    assert [node.previous for node in graph.nodes] == [None, None, 1, 2, 3, 4, 5, 6, 7, 8]
    assert list(graph.variables) == ["answer", "sure"]


def test_arguments_that_are_given_are_constants_and_defaults_stay() -> None:
    def program(s: Any, question: str, tone: str = "calm") -> None:
        s += f"{tone}: {question}"
        s += gen("answer")

    assert str(traced(program, question="why?").nodes[0]) == "[0] constant 'calm: why?'"


def test_the_branches_of_a_fork_are_indented_under_it() -> None:
    def program(s: Any) -> None:
        s += "Tips:"
        forks = s.fork(2)
        for index, branch in enumerate(forks):
            branch += f" {index}."
            branch += gen("tip")
        forks.join()
        s += "In short:" + s["tip"][0] + s["tip"][1] + gen("summary")

    graph = traced(program)
    assert str(graph).splitlines() == [
        "[0] constant 'Tips:'",
        "[1] fork 2",
        "  [2] branch 0",
        "  [4] constant ' 0.'",
        "  [5] gen tip",
        "  [3] branch 1",
        "  [6] constant ' 1.'",
        "  [7] gen tip",
        "[8] join gather_variable <- [5], [7]",
        "[9] constant 'In short:'",
        "[10] variable tip <- [5]",
        "[11] variable tip <- [7]",
        "[12] gen summary",
    ]
    assert [node.kind for node in graph.followers(1)] == [
        TraceKind.BRANCH,
        TraceKind.BRANCH,
        TraceKind.JOIN,
    ]


def test_a_second_fork_with_the_same_names_appends_to_the_list() -> None:
    def program(s: Any) -> None:
        for _ in range(2):
            with s.fork(2) as forks:
                forks += gen("x")
        assert len(s["x"]) == 4

    traced(program)


def test_print_graph_dfs_writes_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    def program(s: Any) -> None:
        s += "a" + gen("b")

    graph = traced(program)
    graph.print_graph_dfs()
    assert capsys.readouterr().out == f"{graph}\n" == "[0] constant 'a'\n[1] gen b\n"


def test_roles_and_scopes_are_in_the_graph_and_close_when_the_program_raises() -> None:
    def program(s: Any) -> None:
        with s.user():
            s += "hi"
        s += user("again")
        with s.var_scope("v"):
            s += gen("x")
        s.assistant(gen("y"))

    expected = [
        *(TraceKind.ROLE_BEGIN, TraceKind.CONSTANT, TraceKind.ROLE_END) * 2,
        *(TraceKind.SCOPE_BEGIN, TraceKind.GEN, TraceKind.SCOPE_END),
        *(TraceKind.ROLE_BEGIN, TraceKind.GEN, TraceKind.ROLE_END),
    ]
    assert kinds(traced(program)) == expected

    def broken(s: Any) -> None:
        with s.user():
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        traced(broken)


def test_an_f_string_of_an_unknown_argument_is_a_clear_type_error() -> None:
    def program(s: Any, question: str) -> None:
        s += f"Q: {question}"

    with pytest.raises(TypeError, match="'question' is not known while a program is traced"):
        traced(program)


@pytest.mark.parametrize(
    "use",
    [
        bool,
        len,
        int,
        float,
        list,
        lambda text: text == "yes",
        lambda text: text != "yes",
        lambda text: "yes" in text,
        lambda text: text[0],
        lambda text: text.strip(),
        lambda text: text < "b",
        lambda text: range(text),
    ],
)
def test_control_flow_on_an_unknown_text_is_a_clear_error(use: Any) -> None:
    def program(s: Any) -> None:
        s += gen("x")
        use(s["x"])

    with pytest.raises(TraceError, match="'x' is not known.*; run the program"):
        traced(program)


def test_control_flow_on_an_unknown_argument_asks_for_the_argument() -> None:
    def program(s: Any, question: str) -> None:
        s += "yes" if question else "no"

    with pytest.raises(TraceError, match="'question' is not known.*the argument, or run"):
        traced(program)


def test_a_node_that_the_tracer_does_not_know_does_not_break_the_graph() -> None:
    class Picture(Node):
        pass

    def program(s: Any) -> None:
        s += "look: "
        s += Picture()
        s += gen("x")

    graph = traced(program)
    assert str(graph).splitlines()[1] == "[1] other Picture"


def test_reading_a_variable_that_no_statement_sets_is_a_key_error() -> None:
    def program(s: Any) -> None:
        s += gen("x")
        s["y"]

    with pytest.raises(KeyError, match="'y'; there are x"):
        traced(program)


def test_the_other_verbs_of_a_state_do_nothing_in_a_trace() -> None:
    def program(s: Any) -> None:
        s += "a" + gen("x")
        s.sync()
        assert s.error() is None
        assert list(s.text_iter()) == []
        s.set_var("y", "known")
        assert s.get_var("y") == "known" and "y" in s and "z" not in s
        with s.copy() as other:
            other += s.text() + gen("z")
        s += s.get_meta_info("x")

    assert TraceKind.FORK in kinds(traced(program))


def test_an_async_program_is_traced_too() -> None:
    async def program(s: Any) -> None:
        s += "a" + gen("x")
        await asyncio.sleep(0)
        s += await s.aget("x")

    assert kinds(traced(program)) == [TraceKind.CONSTANT, TraceKind.GEN, TraceKind.VARIABLE]


def test_the_prefix_is_all_before_the_first_text_that_is_not_known() -> None:
    def program(s: Any, question: str) -> None:
        s += "You are" + Constant(" calm.")
        s += RoleBegin("user")
        s += question
        s += "later" + gen("x")

    expected = (Constant("You are"), Constant(" calm."), RoleBegin("user"))
    assert traced(program).prefix == expected
    assert trace_prefix(program, (), {}) == expected
    assert trace_prefix(program, (), {"question": "q"})[-2:] == (Constant("q"), Constant("later"))


def test_the_prefix_of_a_program_that_cannot_be_traced_ends_where_it_goes_astray() -> None:
    def program(s: Any, question: str) -> None:
        s += "examples"
        s += f"Q: {question}"

    assert trace_prefix(program, (), {}) == (Constant("examples"),)


def test_a_traced_state_has_the_verbs_of_a_state_with_the_same_parameters() -> None:
    for real, stand_in in ((ProgramState, TraceState), (ForkGroup, TraceGroup)):
        for name, verb in vars(real).items():
            if name.startswith("_") or not callable(verb):
                continue
            own = inspect.signature(getattr(stand_in, name)).parameters
            assert list(own) == list(inspect.signature(verb).parameters), name


def test_a_program_that_a_traced_one_runs_is_traced_too() -> None:
    @sgl.function
    def inner(s: Any, topic: str) -> None:
        s += "about " + topic + gen("fact")

    @sgl.function
    def outer(s: Any, topic: str) -> None:
        s += "Intro. "
        fact = inner.run(topic=topic)["fact"]
        many = inner.run_batch([{"topic": "tea"}])
        s += fact + many[0]["fact"] + gen("end")

    graph = outer.trace()
    assert str(graph).splitlines()[:6] == [
        "[0] argument topic",
        "[1] constant 'Intro. '",
        "[9] variable fact <- [5]",
        "[10] variable fact <- [8]",
        "[11] gen end",
        "[2] call inner",
    ]
    assert graph.prefix == (Constant("Intro. "),)


def test_an_async_program_is_traced_where_an_event_loop_runs() -> None:
    @sgl.function
    async def program(s: Any) -> None:
        s += "a" + gen("x")
        await s.settled()

    async def notebook() -> Trace:
        return program.trace()

    assert kinds(asyncio.run(notebook())) == [TraceKind.CONSTANT, TraceKind.GEN]


def test_groups_take_what_those_of_a_run_take() -> None:
    def program(s: Any) -> None:
        group = s.fork(2)
        group += lambda index: f"{index}"
        group += ["a", "b"]
        group += "both"
        group[0] += gen("only")
        group.join("concate_and_append")
        s += "after"

    graph = traced(program)
    assert [node.detail for node in graph.nodes if node.kind is TraceKind.CONSTANT] == [
        "'0'",
        "'1'",
        "'a'",
        "'b'",
        "'both'",
        "'both'",
        "'after'",
    ]


def test_the_reasoning_of_an_answer_is_a_variable_too() -> None:
    def program(s: Any) -> None:
        s += SeparateReasoning(gen("x"))
        s += s["x_reasoning_content"]

    assert list(traced(program).variables) == ["x", "x_reasoning_content"]
