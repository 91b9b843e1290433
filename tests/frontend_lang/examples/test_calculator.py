"""The calculator takes whatever a model writes, and does arithmetic only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood.frontend_lang.examples.calculator import MAX_CHARACTERS, CalculatorError, calculate
from sapwood.frontend_lang.examples.react_calculator import observe


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", 14),
        (" (2 + 3) * 4 ", 20),
        ("-7 + +2", -5),
        ("1 / 4", 0.25),
        ("$1,200 - 0.5", 1199.5),
        ("1e3", 1000),
    ],
)
def test_arithmetic_has_the_value_it_has(expression: str, value: float) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "what",
        "__import__('os').getcwd()",
        "2 ** 10",
        "9 ** 9 ** 9",
        "1 << 60",
        "[1][0]",
        "'a' * 9",
        "True + 1",
        "1j",
        "x := 2",
        "lambda: 1",
        "1 if 1 else 2",
        "1; 2",
        "1 / 0",
        "1e308 * 10",
        "1e400",
        "1" * (MAX_CHARACTERS + 1),
        "(" * MAX_CHARACTERS,
        "-" * (MAX_CHARACTERS - 1) + "x",
        "1\x00",
    ],
)
def test_all_else_is_refused(expression: str) -> None:
    with pytest.raises(CalculatorError):
        calculate(expression)


@given(st.text(alphabet="0123456789+-*/(). ,$e_xj'[]\n", max_size=120))
def test_whatever_is_written_gives_a_number_or_a_refusal(expression: str) -> None:
    try:
        assert isinstance(calculate(expression), float)
    except CalculatorError:
        pass


def test_a_failure_of_the_tool_is_told_to_the_agent() -> None:
    assert observe("12 * 7 - 5") == "79"
    assert observe("1 / 0") == "Error: '1 / 0' has no result: float division by zero."
