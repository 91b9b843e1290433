"""The other ways to call a program: `bind`, `with_options`, `trace`, `cache`."""

from typing import Any

import pytest

import sapwood as sgl
from sapwood.frontend_lang.program import Program
from sapwood.frontend_lang.state import ProgramState
from tests.frontend_lang.fakes import FakeBackend


@sgl.function(num_api_spec_tokens=7)
def answer(s: ProgramState, question: str, tone: str = "calm") -> None:
    s += "Be " + tone + ".\n"
    s += sgl.user("Q: " + question)
    with s.assistant():
        s += sgl.gen("answer")


def options_of(backend: FakeBackend) -> Any:
    call = backend.asked[-1].call
    assert call is not None
    return call.options


def test_bind_keeps_everything_else() -> None:
    bound = answer.with_options(temperature=0).bind(tone="loud").bind(question="why?")
    assert isinstance(bound, Program) and bound.num_api_spec_tokens == 7
    backend = FakeBackend()
    state = bound.run(backend=backend, top_p=0.5)
    assert state.text().startswith("Be loud.\n<user>Q: why?</user>")
    assert options_of(backend) == {"max_tokens": 128, "temperature": 0, "top_p": 0.5}
    assert (bound.__name__, answer.num_api_spec_tokens) == ("answer", 7)


def test_what_is_bound_may_be_given_anew_and_the_first_program_stays_as_it_was() -> None:
    bound = answer.bind(question="why?")
    assert "how?" in bound.run(question="how?", backend=FakeBackend()).text()
    with pytest.raises(TypeError, match="question"):
        answer.run(backend=FakeBackend())


def test_a_gens_own_option_comes_before_the_runs() -> None:
    @sgl.function
    def short(s: ProgramState) -> None:
        s += sgl.gen("x", max_tokens=2)

    backend = FakeBackend()
    short.run(backend=backend, max_new_tokens=9, temperature=0.5)
    assert options_of(backend) == {"max_tokens": 2, "temperature": 0.5}


def test_an_argument_may_have_any_name_and_options_are_reached_all_the_same() -> None:
    @sgl.function
    def odd(s: ProgramState, stop: str, backend: str, n: int, stream: str, self: str) -> None:
        s += f"{stop} {backend} {n} {stream} {self}" + sgl.gen("x")

    fake = FakeBackend()
    program = odd.with_options(backend=fake, stop="END")
    state = program.run(stop="a", backend="b", n=3, stream="d", self="e")
    assert state.text() == "a b 3 d eok"
    assert options_of(fake)["stop"] == "END"


def test_a_constraint_of_the_run_is_that_of_gens_without_their_own() -> None:
    backend = FakeBackend("7")
    answer.run(question="q", backend=backend, dtype=int)
    call = backend.asked[-1].call
    assert call is not None and call.constraint is not None
    assert call.options["stop"] == (" ", "\n") and "dtype" not in call.options


def test_a_trace_takes_the_arguments_that_are_bound() -> None:
    graph = answer.bind(question="why?").trace()
    assert "constant 'Q: why?'" in str(graph)
    assert "argument question" in str(answer.trace())


def test_cache_computes_what_every_run_begins_with() -> None:
    backend = FakeBackend()
    answer.cache(backend)
    [asked] = backend.asked
    assert asked.prompt.text == "Be calm.\n<user>Q: "
    assert options_of(backend)["max_tokens"] == 1
    answer.bind(question="why?").cache(backend)
    assert backend.asked[-1].prompt.text == "Be calm.\n<user>Q: why?</user><assistant>"


def test_cache_takes_the_backend_that_is_bound_and_raises_its_errors() -> None:
    with pytest.raises(sgl.ProgramError, match="call 0 fails"):
        answer.with_options(backend=FakeBackend(failing=[0])).cache()


def test_cache_asks_nothing_where_nothing_is_constant_or_messages_are_taken_only() -> None:
    @sgl.function
    def unknown(s: ProgramState, question: str) -> None:
        s += question + sgl.gen("x")

    backend = FakeBackend()
    unknown.cache(backend)
    chat = FakeBackend(chat_only=True)
    answer.cache(chat)
    assert backend.asked == chat.asked == []


def test_image_ends_a_trace_with_its_own_clear_error() -> None:
    @sgl.function
    def look(s: ProgramState) -> None:
        s += "See: " + sgl.image("cat.png")

    with pytest.raises(sgl.RequestError, match="images are not supported"):
        look.trace()
