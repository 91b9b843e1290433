"""Models whose template knows no tools: what they are told, in words, and how calls are text.

The words are few, since every request pays for them, and the example is the form itself, which a
small model copies.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sapwood.runtime.tools.call_syntax import CallSyntax
from sapwood.runtime.tools.tool import Tool, ToolChoice

GENERIC = CallSyntax(
    bare=True,
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}",
    separator="\n",
)

_ANSWER = "\nAnswer my question in plain words."
_FORM = '{"name": "tool name", "arguments": {"argument": "value"}}'


def generic_instructions(tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> str:
    """What the model is told; empty where there is nothing to call.

    The same whichever tools may or have to be called: the constraint sees to that, and the turns
    of a conversation, of which the first often has to call, go on from each other's tokens.
    """
    if not choice.among(tools):
        return ""
    lines = ["You can call these tools:", *map(_described, tools), ""]
    lines.append(f"To call a tool, answer only with JSON such as {_FORM}")
    lines.append("If no tool is needed, answer in plain words.")
    if parallel:
        lines.append("Write several calls on a line each.")
    return "\n".join(lines)


def generic_messages(
    messages: Sequence[Mapping[str, Any]], instructions: str
) -> list[Mapping[str, Any]]:
    """The conversation in system, user and assistant messages of text alone.

    `instructions` end the first message if that is the system's, or are one before all others.
    Calls are the text that the model would have written; their results are the user's, who asks for
    an answer after the last of them: SmolLM2-135M else repeats the call.
    """
    followers = [message["role"] for message in messages[1:]]
    texts = [
        _as_text(message, asks=follower != "tool")
        for message, follower in zip(messages, (*followers, None), strict=True)
    ]
    if not instructions:
        return texts
    if texts and texts[0]["role"] in ("system", "developer"):
        first = texts[0]
        content = f"{first['content']}\n\n{instructions}" if first["content"] else instructions
        return [{**first, "content": content}, *texts[1:]]
    return [{"role": "system", "content": instructions}, *texts]


def _described(tool: Tool) -> str:
    function = tool.as_json()["function"]
    return json.dumps(function, ensure_ascii=False)


def _as_text(message: Mapping[str, Any], *, asks: bool) -> Mapping[str, Any]:
    if message["role"] == "tool":
        asked = _ANSWER if asks else ""
        return {"role": "user", "content": f"The tool answered: {message['content']}{asked}"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    assert GENERIC.separator is not None
    written = GENERIC.separator.join(_written(call["function"]) for call in calls)
    content = f"{message['content']}\n{written}" if message["content"] else written
    return {"role": message["role"], "content": content}


def _written(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f"{GENERIC.begin(function['name'])}{arguments}{GENERIC.after_arguments}"
