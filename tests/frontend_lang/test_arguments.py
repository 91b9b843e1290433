"""Every keyword of `run(...)` finds the one it is for."""

from typing import Any

import pytest

import sapwood as sgl
from sapwood.frontend_lang.arguments import (
    Invocation,
    Parameters,
    check_call,
    invocation_of,
    options_of,
)
from sapwood.frontend_lang.program import Program
from sapwood.frontend_lang.trace_state import Recorder, TraceState
from sapwood.runtime.errors import RequestError


def answer(s: Any, question: str, *, tone: str = "calm") -> None: ...


def captured(s: Any, stop: int, n: int, stream: int, backend: int, temperature: int) -> None: ...


def open_ended(s: Any, question: str, **rest: Any) -> None: ...


def called(function: Any, *positional: Any, **named: Any) -> Invocation:
    return invocation_of(Parameters.of(function), positional, named)


def test_arguments_options_and_settings_are_told_apart() -> None:
    found = called(answer, question="q", temperature=0, stop="x", timeout=2.0)
    assert found.arguments == {"question": "q"}
    assert found.options == {"temperature": 0, "stop": "x"}
    assert found.settings == {"timeout": 2.0}


def test_a_parameter_of_the_program_wins_whatever_it_is_called() -> None:
    own = {"stop": 1, "n": 2, "stream": 3, "backend": 4, "temperature": 5}
    found = called(captured, **own)
    assert found.arguments == own
    assert found.options == {} and found.settings == {}


def test_an_option_that_a_parameter_hides_is_reached_by_another_layer() -> None:
    layer = options_of({"temperature": 0, "stop": "END"})
    own = {"stop": 1, "n": 2, "stream": 3, "backend": 4, "temperature": 5}
    both = called(captured, **own).over(layer)
    assert both.arguments == own
    assert both.options == {"temperature": 0, "stop": "END"}


def test_the_newest_layer_has_the_say_and_the_others_stay() -> None:
    first = called(answer, tone="loud", temperature=1, max_tokens=3, timeout=1.0)
    both = called(answer, question="q", temperature=0).over(first)
    assert both.arguments == {"tone": "loud", "question": "q"}
    assert both.options == {"temperature": 0, "max_tokens": 3}
    assert both.settings == {"timeout": 1.0}


def test_what_nobody_knows_goes_to_a_program_with_keywords_of_any_name() -> None:
    found = called(open_ended, question="q", colour="red", top_p=0.5)
    assert found.arguments == {"question": "q", "colour": "red"}
    assert found.options == {"top_p": 0.5}


@pytest.mark.parametrize(
    ("named", "near"),
    [
        ({"questoin": "q"}, "question"),
        ({"temprature": 0}, "temperature"),
        ({"max_new_token": 3}, "max_new_tokens"),
        ({"time_out": 3}, "timeout"),
    ],
)
def test_an_unknown_name_is_refused_with_those_near_it(named: Any, near: str) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(named))}.*did you mean.*{near}"):
        called(answer, **named)


def test_an_unknown_option_says_nothing_of_programs_arguments() -> None:
    with pytest.raises(TypeError, match="unknown option 'temprature'; did you mean temperature"):
        options_of({"temprature": 0})


def test_max_new_tokens_is_max_tokens_and_not_both() -> None:
    assert called(answer, max_new_tokens=7).options == {"max_tokens": 7}
    with pytest.raises(TypeError, match="give one of them"):
        called(answer, max_new_tokens=7, max_tokens=8)


def test_ebnf_is_grammar_by_sglangs_name_and_not_both() -> None:
    text = 'root ::= "yes" | "no"'
    assert sgl.gen("x", ebnf=text) == sgl.gen("x", grammar=text)
    assert called(answer, ebnf=text).options == {"grammar": text}
    with pytest.raises(TypeError, match="ebnf is grammar by another name"):
        sgl.gen("x", ebnf=text, grammar=text)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"max_tokens": "5"}, "max_tokens is a whole number, not '5'"),
        ({"max_tokens": 5.5}, "max_tokens is a whole number"),
        ({"n": True}, "n is a whole number"),
        ({"temperature": "hot"}, "temperature is a number, not 'hot'"),
        ({"ignore_eos": 1}, "ignore_eos is True or False, not 1"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_before_anything_runs(
    named: Any, expected: str
) -> None:
    with pytest.raises(RequestError, match=expected) as caught:
        called(answer, **named)
    assert caught.value.param == next(iter(named))
    with pytest.raises(RequestError, match=expected):
        sgl.gen("x", **named)


def test_an_unknown_option_of_gen_is_refused_with_the_one_near_it_first() -> None:
    options: Any = {"max_token": 3}
    with pytest.raises(TypeError, match=r"'max_token'; did you mean max_tokens\? there are"):
        sgl.gen("x", **options)


@pytest.mark.parametrize("name", ["b", "questoin"])
def test_an_unknown_argument_is_refused_with_those_of_the_program(name: str) -> None:
    with pytest.raises(TypeError, match="the program takes question, tone"):
        Program(answer).bind(**{name: 1})


def test_none_says_the_same_as_leaving_an_option_out() -> None:
    assert called(answer, question="q", stop=None).options == {}


@pytest.mark.parametrize("timeout", [0, -1, "2", True])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(TypeError, match="seconds above 0"):
        called(answer, timeout=timeout)


def test_a_missing_argument_is_told_before_anything_runs() -> None:
    with pytest.raises(TypeError, match="answer: missing a required argument: 'question'"):
        check_call(answer, called(answer, tone="x"))
    with pytest.raises(TypeError, match="multiple values for argument 'question'"):
        check_call(answer, called(answer, "q", question="q"))
    check_call(answer, called(answer, "q"))


def test_a_state_among_the_arguments_is_told_to_pass_by_itself() -> None:
    state = TraceState.root(Recorder())
    with pytest.raises(TypeError, match="too many positional arguments; the state is passed by"):
        check_call(answer, called(answer, state, "there"))


def test_a_program_needs_a_parameter_for_its_state() -> None:
    def nothing() -> None: ...

    def keywords_only(*, s: Any) -> None: ...

    for function in (nothing, keywords_only):
        with pytest.raises(TypeError, match="first parameter"):
            Parameters.of(function)
