"""What a chat template writes around the last message of a conversation.

A program writes its conversation message by message, and a template renders whole ones. So whole
ones are rendered, with marks for contents, and the texts of longer and shorter ones are compared.
Knows no templates: `Render` is whatever renders.
"""

from collections.abc import Callable, Sequence

from sapwood.runtime.chat import Message
from sapwood.runtime.errors import RequestError

# Messages, and whether the text goes on to where the assistant's answer begins.
Render = Callable[[list[Message], bool], str]

MAX_ROLES = 1024


def role_text(render: Render, roles: Sequence[str]) -> tuple[str, str]:
    """The texts before and after the last message's content, for a conversation of these roles.

    What stands before the last message is the text of the others alone, if a longer conversation
    goes on from there; else (Llama 2 writes a system message into the user's first one) it ends
    with the last content, and the rest is part of the next prefix. The prefix of an assistant's
    message is the generation prompt. Texts joined this way are what `render` makes of the whole
    conversation, as far as it never changes what it wrote of earlier messages.

    Raises RequestError where `render` does, and for a template that rewrites earlier messages.
    Cost: at most five renderings.
    """
    if not 0 < len(roles) <= MAX_ROLES:
        raise RequestError(
            f"a conversation has 1 to {MAX_ROLES} messages, not {len(roles)}", param="roles"
        )
    before = _closed(render, roles[:-1]) if len(roles) > 1 else ""
    whole = _closed(render, roles)
    if not whole.startswith(before):
        raise _rewrites()
    prefix, _, suffix = whole[len(before) :].partition(_content(len(roles) - 1))
    if roles[-1] == "assistant" and len(roles) > 1:
        opened = render(_messages(roles[:-1]), True)
        if not opened.startswith(before):
            raise _rewrites()
        prefix = opened[len(before) :]
    if any(_content(i) in prefix + suffix for i in range(len(roles))):
        raise _rewrites()
    return prefix, suffix


def _closed(render: Render, roles: Sequence[str]) -> str:
    """The text of a conversation up to the end of its last message."""
    follower = "assistant" if roles[-1] == "user" else "user"
    alone = _rendered(render, roles)
    longer = _rendered(render, [*roles, follower])
    if isinstance(longer, RequestError):
        if isinstance(alone, RequestError):
            raise alone
        return alone
    if not isinstance(alone, RequestError) and longer.startswith(alone):
        return alone
    last = _content(len(roles) - 1)
    return longer[: longer.index(last) + len(last)]


def _rendered(render: Render, roles: Sequence[str]) -> str | RequestError:
    """The text of a conversation with every content in it once, or why there is none."""
    try:
        text = render(_messages(roles), False)
    except RequestError as error:
        return error
    if any(text.count(_content(i)) != 1 for i in range(len(roles))):
        return RequestError(
            "the model's chat template does not write every message's content once, so a "
            f"conversation of {', '.join(roles)} cannot be written message by message; leave out "
            "or join some of them",
            param="roles",
        )
    return text


def _messages(roles: Sequence[str]) -> list[Message]:
    return [{"role": role, "content": _content(i)} for i, role in enumerate(roles)]


def _content(index: int) -> str:
    """A content that no template writes by itself, and that is not within another one."""
    return f"[content {index} of the conversation]"


def _rewrites() -> RequestError:
    return RequestError(
        "the model's chat template changes what it wrote of earlier messages when others follow, "
        "so this conversation cannot be written message by message; send it as messages",
        param="roles",
    )
