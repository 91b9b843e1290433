"""Arithmetic that a model wrote, worked out without running it as code."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType

MAX_CHARACTERS = 100

_Binary = Callable[[float, float], float]
_OPERATORS: Mapping[type[ast.operator], _Binary] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
    }
)


class CalculatorError(ValueError):
    """What was asked is no arithmetic, or has no finite result."""


def calculate(expression: str) -> float:
    """The value of an expression of numbers, + - * / and brackets.

    Digits may be grouped with commas, and dollar signs mean nothing. Takes at most
    MAX_CHARACTERS, so that it is done at once whatever is asked. Raises CalculatorError.
    """
    if len(expression) > MAX_CHARACTERS:
        raise CalculatorError(
            f"the expression has {len(expression)} characters, at most {MAX_CHARACTERS} are taken"
        )
    try:
        tree = ast.parse(expression.replace(",", "").replace("$", "").strip(), mode="eval")
        value = _value(tree.body)
    except SyntaxError as error:
        raise CalculatorError(f"{expression.strip()!r} is not arithmetic") from error
    except (ZeroDivisionError, OverflowError) as error:
        raise CalculatorError(f"{expression.strip()!r} has no result: {error}") from error
    if not math.isfinite(value):
        raise CalculatorError(f"{expression.strip()!r} is too large")
    return value


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
    raise CalculatorError(f"{ast.unparse(node)!r} is neither a number nor one of + - * /")
