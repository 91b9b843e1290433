"""A model's own chat template: messages in, prompt text out.

The template comes with the checkpoint, so it is foreign code: it runs in Jinja's immutable sandbox,
sees copies of the messages, and its time and output are bounded (`runtime/template_meter.py` says
how far). What a template may use (filters, functions, variables) is what `transformers` offers,
since that is what templates are written against.

Knows nothing of token ids.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sapwood.runtime.chat import Chat, ChatOptions, plain_messages
from sapwood.runtime.control_tokens import (
    NONCHARACTERS,
    ControlledText,
    ControlTokens,
    strings_in,
    unescaped,
    unused_characters,
)
from sapwood.runtime.errors import RequestError
from sapwood.runtime.reasoning import reasoning_tags
from sapwood.runtime.template_meter import METER, Meter, RenderLimits, metered
from sapwood.runtime.tools import ToolFormat
from sapwood.runtime.turn_rules import joined_turns, without_system

if TYPE_CHECKING:
    from jinja2 import Environment, Template

# Variables that a caller may not set by name: they have fields of their own, or are ours.
RESERVED = frozenset(
    "messages tools documents add_generation_prompt continue_final_message raise_exception "
    "strftime_now".split()
)


# Variables with which templates turn reasoning off: Qwen3's and most others', DeepSeek's.
REASONING_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as text, with the messages and options that it was made of.

    `messages` are plain copies (`plain_messages`), not to be changed. `told_tools` is what the
    rendering hung on of the tools.
    """

    content: ControlledText
    messages: list[dict[str, Any]]
    options: ChatOptions
    told_tools: Sequence[Any] = ()

    @property
    def text(self) -> str:
        return self.content.text


@dataclass(frozen=True, slots=True)
class _Values:
    """What of a conversation comes from its caller, as the template gets it."""

    messages: list[dict[str, Any]]
    tools: list[Any]
    kwargs: dict[str, Any]

    def strings(self) -> list[str]:
        """All strings but the roles, which are among a few known words."""
        messages = [{**message, "role": ""} for message in self.messages]
        return [*strings_in(messages), *strings_in(self.tools), *strings_in(self.kwargs)]

    def mapped(self, change: Callable[[str], str]) -> "_Values":
        return _Values(
            [{**_mapped(m, change), "role": m["role"]} for m in self.messages],
            _mapped(self.tools, change),
            _mapped(self.kwargs, change),
        )


@dataclass(frozen=True, slots=True)
class _Told:
    """A conversation as the template gets it: with `tools`, or with `instructions` in words."""

    messages: list[dict[str, Any]]
    tools: list[Any]
    instructions: str = ""

    @property
    def told_tools(self) -> list[Any]:
        return [self.instructions] if self.instructions else self.tools


class ChatTemplate:
    """A Jinja template and the special tokens it may name (`bos_token`, `eos_token`, ...).

    `control_tokens` are those that no message can spell. `tool_format` is how the model writes tool
    calls, None where that is not known: then tools are refused. Compiled at the first `render` and
    kept; may be used from several threads. `clock` gives seconds, by default of the thread's
    processor time, so that a busy machine refuses nobody.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        control_tokens: ControlTokens | None = None,
        *,
        tool_format: ToolFormat | None = None,
        limits: RenderLimits | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.source = source
        self.tool_format = tool_format
        self._special_tokens = dict(special_tokens)
        self._control_tokens = control_tokens or ControlTokens(())
        self._limits = limits or RenderLimits()
        self._clock = clock

    def render(self, chat: Chat) -> RenderedChat:
        """The prompt text for a conversation, up to where the assistant's answer begins.

        Raises RequestError, with `param` set, for malformed messages, for options that this
        template does not know, and for whatever it refuses, in its own words.
        """
        messages = plain_messages(chat.messages)
        self._check_options(chat.options)
        told = self._told(messages, chat.options)
        values = _Values(
            messages=told.messages,
            tools=told.tools,
            kwargs=self._kwargs(chat.options),
        )
        mark, end = self._marks(values, chat.options)
        if mark is not None:
            values = values.mapped(lambda text: self._control_tokens.marked(text, mark))
        if end is not None:
            last = values.messages[-1]
            # The space shows whether the template trims what it writes.
            values.messages[-1] = {**last, "content": f"{last['content']}{end} "}
        rendered = self._rendered(values, chat.options)
        for ours in filter(None, (mark, end)):
            rendered = unescaped(rendered, ours)
        if end is not None:
            rendered = _cut_at(rendered, end)
        content = self._control_tokens.read(rendered, mark)
        return RenderedChat(content, messages, chat.options, told.told_tools)

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads and does not set itself. Raises RequestError."""
        from jinja2.meta import find_undeclared_variables

        with _named_errors():
            return frozenset(find_undeclared_variables(self._environment.parse(self.source)))

    def _told(self, messages: list[dict[str, Any]], options: ChatOptions) -> _Told:
        """The conversation with its tools; where the template knows none, in words."""
        messages = [self._known_role(message) for message in messages]
        tools = options.choice.among(options.known_tools)
        tool_format = self.tool_format
        if tool_format is None or tool_format.knows_template:
            return _Told(messages, [tool.as_json() for tool in options.known_tools if tools])
        asked = (options.known_tools, options.choice)
        parallel = options.parallel_tool_calls
        instructions = tool_format.instructions(*asked, parallel=parallel)
        has_results = any(message["role"] == "tool" for message in messages)
        written = tool_format.messages(messages, *asked, parallel=parallel)
        if has_results:
            written = joined_turns(written)
        if instructions and not self._takes_system:
            written = without_system(written)
        return _Told(list(map(dict, written)), [], instructions)

    @cached_property
    def _takes_system(self) -> bool:
        """Whether a system message comes through. Tried once."""
        said = "Answer in French."
        turns = [{"role": "system", "content": said}, {"role": "user", "content": "Hello"}]
        try:
            return said in self._rendered(_Values(turns, [], {}), ChatOptions())
        except RequestError:
            return False

    def _marks(self, values: _Values, options: ChatOptions) -> tuple[str | None, str | None]:
        """The characters that mark quoted control tokens and the end of an open message."""
        texts = values.strings()
        needs_mark = any(map(self._control_tokens.touch, texts))
        needs_end = options.continue_final_message
        if not needs_mark and not needs_end:
            return None, None
        mark, end = tuple(unused_characters(texts, 2))
        return (mark if needs_mark else None), (end if needs_end else None)

    def _rendered(self, values: _Values, options: ChatOptions) -> str:
        template = self._template
        meter = Meter(self._limits, self._clock)
        variables = {
            **values.kwargs,
            **self._special_tokens,
            "messages": values.messages,
            "tools": values.tools or None,
            "documents": None,
            "add_generation_prompt": options.opens_an_answer,
            METER: meter,
        }
        try:
            return meter.joined(template.generate(variables))
        except RequestError:
            raise
        except Exception as error:  # a template is foreign code and may raise anything
            raise RequestError(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error

    def _known_role(self, message: dict[str, Any]) -> dict[str, Any]:
        """A developer's message is a system message where the template knows no other."""
        if message["role"] == "developer" and "developer" not in self.source:
            return {**message, "role": "system"}
        return message

    def _check_options(self, options: ChatOptions) -> None:
        if options.choice.among(options.known_tools):
            self._check_tools()
        given = options.chat_template_kwargs
        if not given:
            return
        ours = RESERVED | self._special_tokens.keys() | self._environment.globals.keys()
        known = {name for name in self.variables - ours if not name.endswith("_token")}
        for name in given:
            if name not in known:
                raise RequestError(
                    f"{name!r} is no variable of this model's chat template that a request may "
                    f"set; those are {', '.join(sorted(known)) or 'none'}: leave it out",
                    param="chat_template_kwargs",
                )

    def _check_tools(self) -> None:
        """Raises RequestError where tools cannot be told to the model, or its calls not be read."""
        known = (
            "start the engine with a tool_format, such as generic, or describe them in a message"
        )
        if self.tool_format is None:
            raise RequestError(
                f"this model's chat template writes tool calls in a way that is not known; {known}",
                param="tools",
            )
        if self.tool_format.knows_template and "tools" not in self.variables:
            raise RequestError(
                f"this model's chat template knows no tools, and the tool format "
                f"{self.tool_format.name} leaves them to it; {known}",
                param="tools",
            )

    def _kwargs(self, options: ChatOptions) -> dict[str, Any]:
        """The variables that a request sets, by name or by `reasoning_effort`."""
        kwargs = dict(options.chat_template_kwargs)
        if options.reasoning_effort is None:
            return kwargs
        for name, value in self._effort(options.reasoning_effort).items():
            if kwargs.setdefault(name, value) != value:
                raise RequestError(
                    f"reasoning_effort {options.reasoning_effort!r} sets {name} of the chat "
                    "template, and chat_template_kwargs sets it otherwise; give one of them",
                    param="reasoning_effort",
                )
        return kwargs

    def _effort(self, effort: str) -> dict[str, Any]:
        """What tells the template how much the model should reason."""
        if "reasoning_effort" in self.variables:
            return {"reasoning_effort": effort}
        if effort != "none":
            raise RequestError(
                "this model's chat template knows no reasoning_effort but none; leave it out, or "
                "limit the reasoning with max_reasoning_tokens",
                param="reasoning_effort",
            )
        switches = [name for name in REASONING_SWITCHES if name in self.variables]
        if not switches and reasoning_tags(self.source) is not None:
            raise RequestError(
                "this model's chat template cannot turn its reasoning off; end it at once with "
                "max_reasoning_tokens 0",
                param="reasoning_effort",
            )
        return dict.fromkeys(switches, False)

    @cached_property
    def _template(self) -> "Template":
        with _named_errors():
            return metered(self._environment, self.source)

    @cached_property
    def _environment(self) -> "Environment":
        return _environment()


@contextmanager
def _named_errors() -> Iterator[None]:
    """Turns Jinja's complaints about a template's source into RequestErrors."""
    from jinja2 import TemplateError

    try:
        yield
    except TemplateError as error:
        raise RequestError(
            f"the model's chat template is broken ({error}); send a plain prompt instead",
            param="messages",
        ) from error


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with every string in it changed, keys of objects included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return value


def _cut_at(rendered: str, end: str) -> str:
    """The text up to `end`, and without white space there if the template trims."""
    if rendered.count(end) != 1:
        raise RequestError(
            "the model's chat template does not write the last message's content once, so there is "
            "no place to continue it; leave continue_final_message out",
            param="continue_final_message",
        )
    text, _, after = rendered.partition(end)
    return text if after.startswith(" ") else text.rstrip()


def _environment() -> "Environment":
    """The sandbox, with the names that templates on the model hub expect."""
    from jinja2 import Environment, TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}` marks what a trainer learns from; for a prompt it is its body."""

        def __init__(self, environment: Environment) -> None:
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter of this name escapes for HTML.

    Noncharacters stay as they are, also with `ensure_ascii`: they are our marks.
    """
    text = json.dumps(
        value,
        ensure_ascii=False,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return _NOT_ASCII.sub(_escaped, text) if ensure_ascii else text


_NOT_ASCII = re.compile(rf"[^\x00-~{NONCHARACTERS}]+")


def _escaped(match: re.Match[str]) -> str:
    return json.dumps(match.group())[1:-1]


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
