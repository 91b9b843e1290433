"""Llama 3.2 and 4, and models trained like them: a Python list of calls with literal arguments."""

from sapwood.runtime.tools.call_syntax import ArgumentStyle, CallSyntax

PYTHONIC = CallSyntax(
    bare=True,
    opening="[",
    before_arguments="(",
    style=ArgumentStyle.PYTHON,
    after_arguments=")",
    separator=", ",
    closing="]",
)
