"""What a state has said and heard: tokens, text and messages, kept in step.

Constants wait as text until an answer needs their tokens, so those that stand together are encoded
together; generated tokens enter as they are and are never encoded again. Knows no nodes, no
variables and no loop.
"""

from sapwood.frontend_lang.backends.interface import Encoder, Piece, Prompt, RoleText, TokenIds
from sapwood.frontend_lang.nodes import Message
from sapwood.runtime.errors import RequestError


class Transcript:
    """The one owner of a state's content. Copies share all of it, as every field is a value.

    `token_ids` are settled and spell the text up to `pending`. Without an encoder they stay empty,
    and nothing pends.
    """

    __slots__ = (
        "_content", "_has_tokens", "_loose", "_messages", "_pending", "_role", "_suffix", "text",
        "token_ids",
    )  # fmt: skip

    def __init__(self, *, has_tokens: bool) -> None:
        self.text = ""
        self.token_ids: TokenIds = ()
        self._has_tokens = has_tokens
        self._pending: tuple[Piece, ...] = ()
        self._messages: tuple[Message, ...] = ()  # those that are closed
        self._role: str | None = None  # of the open message
        self._suffix = ""  # what closes it
        self._content = ""  # of it, so far
        self._loose = ""  # the first constant outside of every role

    def copy(self) -> "Transcript":
        """Costs the same for every length."""
        other = Transcript.__new__(Transcript)
        for name in Transcript.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    @property
    def pending(self) -> tuple[Piece, ...]:
        """Constants that are not encoded yet."""
        return self._pending

    @property
    def role(self) -> str | None:
        """The role of the open message."""
        return self._role

    @property
    def loose_text(self) -> str:
        """The first constant outside of every role, which no chat API is told of."""
        return self._loose

    @property
    def messages(self) -> tuple[Message, ...]:
        """All of them, the open one last."""
        if self._role is None:
            return self._messages
        return (*self._messages, {"role": self._role, "content": self._content})

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(message["role"] for message in self.messages)

    def add_constant(self, text: str) -> None:
        """Text of the program."""
        self._add(Piece(text))
        self._content += text
        if self._role is None and not self._loose and not text.isspace():
            self._loose = text

    def add_generated(self, text: str, token_ids: TokenIds | None) -> None:
        """An answer to the prompt of this moment, after `settle`. Tokens that the backend did not
        tell are encoded like a constant's."""
        if not self._has_tokens or token_ids is None:
            self._add(Piece(text))
        else:
            assert not self._pending
            self.token_ids += token_ids
            self.text += text
        self._content += text

    def replace_pending(self, text: str, token_ids: TokenIds) -> None:
        """An answer whose tokens spell the pending constants, too."""
        self._pending = ()
        self.add_generated(text, token_ids)

    def begin_role(self, role: str, around: RoleText) -> None:
        """Open a message. Raises RequestError where one is open."""
        if self._role is not None:
            raise RequestError(
                f"a message of role {role!r} begins inside one of role {self._role!r}; close that "
                "first"
            )
        self._role, self._content, self._suffix = role, "", around.suffix
        self._add(Piece(around.prefix, is_control=True))

    def end_role(self, role: str) -> None:
        """Close the open message. Raises RequestError where it is another's."""
        if self._role != role:
            is_open = f"one of {self._role!r} is" if self._role else "none is"
            raise RequestError(f"a message of role {role!r} ends, but {is_open} open")
        self._messages = self.messages
        self._role = None
        self._add(Piece(self._suffix, is_control=True))

    async def settle(self, encoder: Encoder | None) -> None:
        """Encode what is pending."""
        if encoder is None or not self._pending:
            return
        ids = await encoder.encode(self._pending, at_start=not self.token_ids)
        self._pending = ()
        self.token_ids += ids

    def prompt(self) -> Prompt:
        """What an answer would continue, after `settle`."""
        return Prompt(
            text=self.text,
            token_ids=self.token_ids if self._has_tokens else None,
            messages=self.messages,
        )

    def _add(self, piece: Piece) -> None:
        self.text += piece.text
        if self._has_tokens and piece.text:
            self._pending = (*self._pending, piece)


def plain_role_text(role: str) -> RoleText:
    """How a message is shown in `text()` where the backend has no chat template: a line of its own,
    `role: content`."""
    return RoleText(f"{role}: ", "\n")
