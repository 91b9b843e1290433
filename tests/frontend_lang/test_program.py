"""Programs run: text, variables, roles, branches, and what is raised where."""

import pytest

import sapwood as sgl
from sapwood.frontend_lang.state import ProgramState
from tests.frontend_lang.fakes import FakeBackend, ScriptedError, spelled


@sgl.function
def chat(s: ProgramState, question: str) -> None:
    s += sgl.system("Be brief.")
    s += sgl.user(question)
    with s.assistant():
        s += sgl.gen("answer", max_tokens=8)


def test_a_program_says_its_constants_and_its_answers() -> None:
    state = chat.run(question="Who?", backend=FakeBackend("Me."))
    assert state["answer"] == "Me."
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Me."},
    ]
    assert state.text() == ("<system>Be brief.</system><user>Who?</user><assistant>Me.</assistant>")


def test_tokens_of_a_prompt_spell_its_text() -> None:
    backend = FakeBackend("Me.")
    chat.run(question="Who?", backend=backend)
    [asked] = backend.asked
    assert asked.prompt.token_ids is not None
    assert spelled(asked.prompt.token_ids) == asked.prompt.text


def test_branches_go_on_from_their_fork_and_gather_their_variables() -> None:
    @sgl.function
    def tree(s: ProgramState) -> None:
        s += "root"
        branches = s.fork(3)
        branches += lambda index: f" {index}" + sgl.gen("leaf")
        branches.join()

    backend = FakeBackend(["a", "b", "c"])
    assert tree.run(backend=backend)["leaf"] == ["a", "b", "c"]
    assert sorted(backend.prompts) == ["root 0", "root 1", "root 2"]


def test_a_failed_gen_is_raised_by_run_with_its_line_and_its_cause() -> None:
    with pytest.raises(sgl.ProgramError, match=r"test_program.py:\d+ in chat") as caught:
        chat.run(question="Who?", backend=FakeBackend(failing=[0]))
    assert isinstance(caught.value.__cause__, ScriptedError)


def test_what_a_program_does_after_a_failure_ends_at_once() -> None:
    @sgl.function
    def stubborn(s: ProgramState) -> None:
        s += sgl.gen("a")
        try:
            s["a"]
        except sgl.ProgramError:
            s += "again" + sgl.gen("b")
            s["b"]

    with pytest.raises(sgl.ProgramError):
        stubborn.run(backend=FakeBackend(failing=[0]))
