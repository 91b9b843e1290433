"""The value of a text as the type that its `gen` asked for."""

from collections.abc import Callable
from typing import Any

from sapwood.frontend_lang.nodes import Gen, Node

_PARSE_BY_DTYPE: tuple[tuple[tuple[object, str], Callable[[str], Any]], ...] = (
    ((int, "int"), int),
    ((float, "float"), float),
    ((bool, "bool"), lambda text: text == "True"),
)


def parsed(node: Node | None, value: Any) -> Any:
    """`value`, a text or a list of them, as the type that `node` asks for."""
    if not isinstance(node, Gen):
        return value
    if isinstance(value, list):
        return [_parsed_text(node, text) for text in value]
    return _parsed_text(node, value)


def _parsed_text(node: Gen[Any], text: str) -> Any:
    dtype = node.options.get("dtype")
    for names, parse in _PARSE_BY_DTYPE:
        if dtype in names:
            return parse(text)
    return text
