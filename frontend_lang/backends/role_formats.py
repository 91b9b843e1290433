"""What stands around a message's content, for servers that do not tell.

Our server knows its model's chat template. Others take plain text, so whoever asks has to say how
their model's conversations are written: by the name of a format, or by a template of Jinja.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from sapwood.frontend_lang.backends.interface import RoleText
from sapwood.frontend_lang.nodes import Message
from sapwood.runtime.errors import RequestError

# The texts around the last message of a conversation of these roles. Raises RequestError.
RoleTexts = Callable[[tuple[str, ...]], RoleText]


@dataclass(frozen=True, slots=True)
class RoleFormat:
    """The same texts around every message; `{role}` in them is the message's role."""

    prefix: str
    suffix: str

    def __call__(self, roles: tuple[str, ...]) -> RoleText:
        role = roles[-1]
        return RoleText(self.prefix.replace("{role}", role), self.suffix.replace("{role}", role))


# A beginning-of-text token is the server's to put in front.
ROLE_FORMATS: Mapping[str, RoleFormat] = MappingProxyType(
    {
        "chatml": RoleFormat("<|im_start|>{role}\n", "<|im_end|>\n"),
        "llama-3": RoleFormat("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
    }
)
# Words in names of models that write conversations in a format.
_WORDS: Mapping[str, str] = MappingProxyType(
    {"llama-3": "llama-3", "llama3": "llama-3", "qwen": "chatml", "smollm": "chatml",
     "chatml": "chatml", "hermes": "chatml"}
)  # fmt: skip


def role_texts(chat_template: str) -> RoleTexts:
    """By the name of a format, or a template's source. Raises ValueError for neither."""
    if chat_template in ROLE_FORMATS:
        return ROLE_FORMATS[chat_template]
    if "{%" in chat_template or "{{" in chat_template:
        return _of_template(chat_template)
    raise ValueError(
        f"chat_template is {chat_template[:100]!r}; it must be one of {', '.join(ROLE_FORMATS)}, "
        "or the source of a Jinja template"
    )


def role_texts_of_model(name: str) -> RoleTexts | None:
    """By what a model is called; None where that says nothing."""
    lowered = name.lower()
    return next((ROLE_FORMATS[form] for word, form in _WORDS.items() if word in lowered), None)


def written(messages: Sequence[Message], around: RoleTexts | None) -> str:
    """A conversation whose last message is open, as text. Raises RequestError without a format."""
    if around is None:
        raise RequestError(
            "this server does not tell how its model's conversations are written; give the "
            f"endpoint chat_template={' or '.join(map(repr, ROLE_FORMATS))}, or a Jinja template",
            param="chat_template",
        )
    roles = tuple(message["role"] for message in messages)
    texts = [around(roles[: i + 1]) for i in range(len(roles))]
    closed = "".join(
        text.prefix + message["content"] + text.suffix
        for text, message in zip(texts[:-1], messages, strict=False)
    )
    return closed + texts[-1].prefix + messages[-1]["content"]


def _of_template(source: str) -> RoleTexts:
    from sapwood.runtime.chat import Chat, ChatOptions
    from sapwood.runtime.chat import Message as ChatMessage
    from sapwood.runtime.chat_template import ChatTemplate
    from sapwood.runtime.role_text import role_text

    template = ChatTemplate(source, {})

    def rendered(messages: list[ChatMessage], opens: bool) -> str:
        return template.render(Chat(messages, ChatOptions(add_generation_prompt=opens))).text

    return lambda roles: RoleText(*role_text(rendered, roles))
