"""Arguments that readers stumble over, and calls of them in every format."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sapwood.runtime.answer_format import AnswerParts, AnswerReader
from sapwood.runtime.tools import Tool, checked_tools, tool_format
from sapwood.runtime.tools.tool import ToolChoice

Call = tuple[str, str]  # name and arguments, as JSON text

ARGUMENTS: tuple[Mapping[str, Any], ...] = (
    {},
    {"text": ""},
    {"text": "she said \"no\" and 'yes'"},
    {"text": "</tool_call>\n<tool_call>\n"},
    {"text": '{"name": "ping", "arguments": {}}', "value": {"a": {"b": [1, {"c": []}]}}},
    {"text": "[TOOL_CALLS][ARGS]<|python_tag|>], )}"},
    {"text": "日本語 é ß 😀 👩‍👩‍👧 \u2028"},
    {"text": "line\nbreak\ttab\\ back\\\\ slash / \b\f"},
    {"value": 123456789012345678901234567890},
    {"value": -1.5e-07},
    {"value": [True, False, None, 0, -0.5, "x"]},
    {"value": {"": {"k": "v"}, "a b": []}},
    {"text": "12"},
    {"text": "null", "value": None},
    {"text": "  spaces  ", "value": True},
)

TOOLS: tuple[Tool, ...] = checked_tools(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "It takes anything.",
                "parameters": {
                    "type": "object",
                    "properties": {"text": {"type": "string"}, "value": {}},
                },
            },
        }
        for name in ("ping", "ping.all-2")
    ]
)

_OPENERS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "generic": ("", "\n", ""),
        "hermes": ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
        "llama3": ("", "", ""),
        "mistral": ("[TOOL_CALLS][", ", ", "]"),
        "mistral_spaced": ("[TOOL_CALLS] [", ", ", "]"),
        "mistral_args": ("[TOOL_CALLS]", "[TOOL_CALLS]", ""),
        "pythonic": ("[", ", ", "]"),
        "qwen3_coder": ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    }
)
FORMATS = tuple(_OPENERS)
TAKES_ONE_CALL = ("llama3",)
TAKES_TEXT_BEFORE = ("hermes", "mistral", "mistral_spaced", "mistral_args", "qwen3_coder")


def written(name: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Calls as a model writes them in the format `name`."""
    opening, separator, closing = _OPENERS[name]
    return opening + separator.join(_call(name, *call) for call in calls) + closing


def arguments_text(name: str, arguments: Mapping[str, Any]) -> str:
    """The arguments as a reader gives them."""
    return json.dumps(arguments, ensure_ascii=False)


def _call(name: str, tool: str, arguments: Mapping[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    if name == "mistral_args":
        return f"{tool}[ARGS]{text}"
    if name == "pythonic":
        return f"{tool}({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"
    if name == "qwen3_coder":
        elements = "".join(_element(key, value) for key, value in arguments.items())
        return f"<function={tool}>\n{elements}</function>"
    key = "parameters" if name == "llama3" else "arguments"
    return f'{{"name": "{tool}", "{key}": {text}}}'


def _python(value: Any) -> str:
    """A literal with strings as JSON has them, which Python reads the same."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_python(k)}: {_python(v)}' for k, v in value.items())}}}"
    return repr(value)


def _element(key: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"<parameter={key}>\n{text}\n</parameter>\n"


class Transcript:
    """What a reader has given in all, with what it promises of its pieces checked."""

    def __init__(self) -> None:
        self.content = ""
        self.calls: list[Call] = []
        self.ids: list[str] = []

    def add(self, parts: AnswerParts) -> None:
        self.content += parts.content
        for piece in parts.tool_calls:
            if piece.index == len(self.calls):
                assert piece.id is not None and piece.name is not None
                self.ids.append(piece.id)
                self.calls.append((piece.name, ""))
            else:
                assert piece.id is None and piece.name is None
                assert piece.arguments
            name, arguments = self.calls[piece.index]
            assert piece.index == len(self.calls) - 1
            self.calls[piece.index] = (name, arguments + piece.arguments)

    def as_tuple(self) -> tuple[str, list[Call]]:
        return self.content, self.calls


def reader_of(name: str, tools: Sequence[Tool] = TOOLS) -> AnswerReader:
    return tool_format(name).answer_format(tools, ToolChoice()).reader()


def read(name: str, pieces: Sequence[str], tools: Sequence[Tool] = TOOLS) -> Transcript:
    """What comes of an answer in these pieces."""
    transcript, reader = Transcript(), reader_of(name, tools)
    for i, piece in enumerate(pieces):
        transcript.add(reader.feed(piece, finished=i == len(pieces) - 1))
    return transcript
