"""A conversation as it is asked: messages, and how to render them.

Everything in it comes from whoever asks, so it is checked and copied here before a template sees
it. Knows no templates and no tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sapwood.runtime.errors import RequestError
from sapwood.runtime.plain_json import check_unicode, plain_json
from sapwood.runtime.tools import Tool, ToolChoice, checked_tool_choice, checked_tools

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
MAX_CALLS_OF_A_MESSAGE = 1024
MAX_TEMPLATE_KWARGS_CHARS = 65_536  # as JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How to render a conversation.

    `add_generation_prompt`: end where the assistant's answer begins; None is True, but False with
    `continue_final_message`. `continue_final_message`: the last message is the beginning of the
    answer and is left open. `chat_template_kwargs`: variables that this model's template reads,
    such as `enable_thinking`. `turns_key`: turns of conversations with another key are never
    continued, as if their texts were others.

    `tools` are functions that the model may call, in OpenAI's shape. `tool_choice`: "auto" (the
    default where there are tools) lets the model decide, "required" makes it call one or more,
    {"type": "function", "function": {"name": ...}} that one, and with "none" it does not see them.
    An answer has one call at most without `parallel_tool_calls`. Calls are told in
    `CompletionOutput.parts`; one that was cut off has arguments that are no whole JSON object.

    `reasoning_effort`: for templates that know it; "none" turns the reasoning of a model off, where
    its template can. `separate_reasoning`: what a model wrote as its reasoning is told apart from
    the content, in `CompletionOutput.parts`; without, it is the beginning of the content.

    Raises RequestError, with `param` set, for what contradicts itself or is no JSON.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    turns_key: str = ""
    reasoning_effort: str | None = None
    separate_reasoning: bool = True

    known_tools: tuple[Tool, ...] = field(init=False, repr=False, compare=False)
    choice: ToolChoice = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.add_generation_prompt, bool | None):
            raise _wrong("add_generation_prompt", "must be true or false")
        if not isinstance(self.continue_final_message, bool):
            raise _wrong("continue_final_message", "must be true or false")
        if self.add_generation_prompt and self.continue_final_message:
            raise _wrong(
                "continue_final_message",
                "leaves the last message open, add_generation_prompt opens another after it; "
                "give one of them",
            )
        if not isinstance(self.turns_key, str):
            raise _wrong("turns_key", "must be a string")
        if self.reasoning_effort not in (None, *REASONING_EFFORTS):
            raise _wrong("reasoning_effort", f"must be one of {', '.join(REASONING_EFFORTS)}")
        if not isinstance(self.separate_reasoning, bool):
            raise _wrong("separate_reasoning", "must be true or false")
        if not isinstance(self.parallel_tool_calls, bool):
            raise _wrong("parallel_tool_calls", "must be true or false")
        object.__setattr__(self, "known_tools", checked_tools(self.tools))
        tools = plain_json(self.tools or (), "tools", param="tools")
        object.__setattr__(self, "tools", tuple(tools))
        choice = checked_tool_choice(self.tool_choice, self.known_tools)
        object.__setattr__(self, "choice", choice)
        kwargs = _checked_kwargs(self.chat_template_kwargs)
        object.__setattr__(self, "chat_template_kwargs", kwargs)

    @property
    def opens_an_answer(self) -> bool:
        """Whether the template is asked for its generation prompt."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


@dataclass(frozen=True, slots=True)
class Chat:
    """An input of the engine: a conversation with options. A bare list of messages has none."""

    messages: Sequence[Message]
    options: ChatOptions = field(default_factory=ChatOptions)


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Copies of `messages` in the one shape that templates know: text content, no null fields.

    Text parts are joined by newlines. An assistant message may leave its content out (it may
    consist of tool calls). The arguments of tool calls are JSON text on OpenAI's wire and objects
    in templates, so text that is a JSON object becomes that object. Raises RequestError, with
    `param` "messages", for anything else.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise _refused("messages must be a list with at least one message")
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _refused(f"{where} must be an object with a role and a content")
    role = message.get("role")
    if role not in ROLES:
        raise _refused(f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}")
    content = _plain_content(message.get("content"), role, f"{where}.content")
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and len(calls) > MAX_CALLS_OF_A_MESSAGE:
        raise _refused(
            f"{where}.tool_calls has {len(calls)} calls, at most {MAX_CALLS_OF_A_MESSAGE} are "
            "taken; tell of them in several messages"
        )
    filled = {key: value for key, value in message.items() if value is not None}
    # `content` may be parts, which are not to be copied; it keeps its place among the keys.
    plain: dict[str, Any] = plain_json({**filled, "content": ""}, where, param="messages")
    plain["content"] = content
    calls = plain.get("tool_calls", ())
    for call in calls if isinstance(calls, list) else ():
        _parse_arguments(call, f"{where}.tool_calls")
    return plain


def _plain_content(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        check_unicode(content, where, "messages")
        return content
    if content is None:
        if role == "assistant":
            return ""
        raise _refused(f"{where} is missing; only an assistant message may have none")
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _refused(f"{where} must be a string or a list of text parts")
    return "\n".join(_part_text(part, f"{where}[{j}]") for j, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise _refused(f'{where} must be {{"type": "text", "text": ...}}; only text is served')
    check_unicode(text, where, "messages")
    return text


def _parse_arguments(call: Any, where: str) -> None:
    """Replace a plain tool call's arguments by the JSON object that they spell, if they do."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if function is None or not isinstance(arguments, str):
        return
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return
    if isinstance(parsed, dict):
        function["arguments"] = plain_json(parsed, where, param="messages")


def _checked_kwargs(kwargs: Any) -> dict[str, Any]:
    name = "chat_template_kwargs"
    if not isinstance(kwargs, Mapping):
        raise _wrong(name, "must be an object: names of template variables with their values")
    plain: dict[str, Any] = plain_json(kwargs, name, param=name)
    _check_size(name, plain, MAX_TEMPLATE_KWARGS_CHARS)
    return plain


def _check_size(name: str, value: Any, limit: int) -> None:
    size = len(json.dumps(value, ensure_ascii=False))
    if size > limit:
        raise _wrong(name, f"has {size} characters as JSON, at most {limit} are taken; shorten it")


def _wrong(name: str, what: str) -> RequestError:
    return RequestError(f"{name} {what}", param=name)


def _refused(message: str) -> RequestError:
    return RequestError(message, param="messages")
