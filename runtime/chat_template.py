"""A model's own chat template: messages in, prompt text out.

The template comes with the checkpoint, so it is foreign code: it runs in Jinja's immutable sandbox
and sees copies of the messages. What a template may use (filters, functions, variables) is what
`transformers` offers, since that is what templates are written against.

Knows nothing of token ids.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sapwood.runtime.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import Environment, Template

ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatTemplate:
    """A Jinja template and the special tokens it may name (`bos_token`, `eos_token`, ...).

    Compiled at the first `render` and kept; may be used from several threads.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt text for `messages`, up to where the assistant's answer begins.

        Raises RequestError, with `param` "messages", for malformed messages and for whatever the
        template itself refuses, in the template's own words.
        """
        plain = plain_messages(messages, keep_developer="developer" in self.source)
        try:
            return self._template.render(
                **self._special_tokens,
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except RequestError:
            raise
        except Exception as error:  # a template is foreign code and may raise anything
            raise RequestError(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error

    @cached_property
    def _template(self) -> "Template":
        from jinja2 import TemplateError

        try:
            return _environment().from_string(self.source)
        except TemplateError as error:
            raise RequestError(
                f"the model's chat template is broken ({error}); send a plain prompt instead",
                param="messages",
            ) from error


def plain_messages(
    messages: Sequence[Mapping[str, Any]], *, keep_developer: bool
) -> list[dict[str, Any]]:
    """Copies of `messages` in the one shape that templates know: text content, no null fields.

    Text parts are joined by newlines. An assistant message may leave its content out (it may
    consist of tool calls). A `developer` message becomes a `system` message unless the template
    knows the newer name. Raises RequestError for anything else.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise _refused("messages must be a list with at least one message")
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _refused(f"messages[{i}] must be an object with a role and a content")
        role = message.get("role")
        if role not in ROLES:
            raise _refused(f"messages[{i}].role is {role!r}; it must be one of {', '.join(ROLES)}")
        if role == "developer" and not keep_developer:
            role = "system"
        content = _plain_content(message.get("content"), role, f"messages[{i}].content")
        filled = {key: value for key, value in message.items() if value is not None}
        plain.append({**filled, "role": role, "content": content})
    return plain


def _plain_content(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
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
    return text


def _refused(message: str) -> RequestError:
    return RequestError(message, param="messages")


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
    """JSON as it is; Jinja's own filter of this name escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
