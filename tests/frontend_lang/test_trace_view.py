"""`state.trace()` shows what a run did."""

import re

import sapwood as sgl
from sapwood.frontend_lang.state import ProgramState
from tests.frontend_lang.fakes import FakeBackend


@sgl.function
def tips(s: ProgramState, topic: str) -> None:
    with s.user():
        s += "Tips about " + topic
    branches = s.fork(2)
    for index, branch in enumerate(branches):
        branch += f" {index}." + sgl.gen("tip")
    branches.join()
    s += " In short: " + sgl.gen("short") + sgl.pause(2)


def shape(text: str) -> list[str]:
    """The lines of a tree without their figures."""
    return [re.sub(r"  +prompt .*", "", line) for line in text.splitlines()]


def test_the_tree_has_a_line_for_each_node_and_branches_are_indented() -> None:
    state = tips.run(topic="tea", backend=FakeBackend(["one", "two", "three"]))
    summary, *lines = str(state.trace()).splitlines()
    assert summary.startswith("3 requests: prompt ") and summary.endswith("generated 11 tokens")
    assert shape("\n".join(lines)) == [
        "  role begin user '<user>'",
        "  constant 'Tips about tea'",
        "  role end user '</user>'",
        "  fork 2",
        "    branch 0",
        "      constant ' 0.'",
        "      gen tip 'one'",
        "    branch 1",
        "      constant ' 1.'",
        "      gen tip 'two'",
        "  constant ' In short: '",
        "  gen short 'three'",
        "  pause 2 s",
    ]


def test_tokens_and_times_are_those_that_the_backend_told() -> None:
    backend = FakeBackend("answer", delay=0.02)
    state = tips.run(topic="tea", backend=backend)
    [short] = [record for record in state.trace().records if record.name == "short"]
    prompt = backend.asked[-1].prompt.token_ids
    assert prompt is not None
    assert (short.prompt_tokens, short.cached_tokens, short.completion_tokens) == (
        len(prompt),
        0,
        len("answer"),
    )
    assert short.seconds >= 0.02
    assert short.place is not None and short.place.function == "tips"
    figures = rf"gen short 'answer' +prompt {len(prompt)} \(0 cached\), generated 6, [\d.]+ ms"
    assert re.search(figures, str(state.trace()))


def test_a_select_shows_that_its_tokens_are_those_of_all_choices() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += "Q: " + sgl.select("x", ["a", "bc"])

    state = program.run(backend=FakeBackend())
    assert re.search(r"select x 'a'  2 choices, prompt \d+ in all \(\d", str(state.trace()))


def test_long_texts_are_shortened_and_stay_on_their_line() -> None:
    state = tips.run(topic="\n".join(["much"] * 50), backend=FakeBackend())
    assert all(len(line) < 120 for line in str(state.trace()).splitlines())


def test_a_failed_state_shows_what_it_did_and_why_it_goes_on_no_further() -> None:
    [state] = tips.run_batch(
        [{"topic": "tea"}], backend=FakeBackend(failing=[2]), on_error="return"
    )
    text = str(state.trace())
    assert "gen tip" in text and "gen short" not in text
    assert re.search(r"failed: test_trace_view.py:\d+ in tips: ScriptedError", text)


def test_a_trace_inside_a_program_waits_for_what_was_appended() -> None:
    seen: list[str] = []

    @sgl.function
    def curious(s: ProgramState) -> None:
        s += sgl.gen("x")
        seen.append(str(s.trace()))

    curious.run(backend=FakeBackend("answer", delay=0.01))
    assert "gen x 'answer'" in seen[0]


def test_all_records_are_walked_depth_first() -> None:
    state = tips.run(topic="tea", backend=FakeBackend(["one", "two", "three"]))
    generated = [record.text for record in state.trace().walk() if record.asks]
    assert generated == ["one", "two", "three"]
