"""What a state has said and heard: tokens, text and messages, kept in step.

Constants wait as text until an answer needs their tokens, so those that stand together are encoded
together; generated tokens enter as they are and are never encoded again. Knows no nodes, no
variables and no loop.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

from sapwood.frontend_lang.backends.interface import Encoder, Piece, Prompt, RoleText, TokenIds
from sapwood.frontend_lang.nodes import Message
from sapwood.runtime.errors import RequestError

Change = Callable[["Transcript"], None]


class Transcript:
    """The one owner of a state's content.

    `token_ids` are settled; they and what is pending spell `text`. Without an encoder they stay
    empty, and nothing pends. Every field is an immutable value, so a copy shares all of them; only
    `changes` grows in place: what happened since the copy was made, for `repeat`.
    """

    __slots__ = (
        "_content", "_has_tokens", "_messages", "_pending", "_role", "_suffix", "changes",
        "loose_text", "text", "token_ids",
    )  # fmt: skip

    def __init__(self, *, has_tokens: bool) -> None:
        self.text = ""
        self.token_ids: TokenIds = ()
        self.loose_text = ""  # the first constant outside of every role
        self.changes: list[Change] = []
        self._has_tokens = has_tokens
        self._pending: tuple[Piece | TokenIds, ...] = ()
        self._messages: tuple[Message, ...] = ()  # those that are closed
        self._role: str | None = None  # of the open message
        self._suffix = ""  # what closes it
        self._content = ""  # of it, so far

    def copy(self) -> "Transcript":
        """The same content, at the same cost for every length."""
        other = Transcript.__new__(Transcript)
        for name in Transcript.__slots__:
            setattr(other, name, getattr(self, name))
        other.changes = []
        return other

    @property
    def role(self) -> str | None:
        """The role of the open message."""
        return self._role

    @property
    def messages(self) -> tuple[Message, ...]:
        """All of them, the open one last."""
        if self._role is None:
            return self._messages
        return (*self._messages, {"role": self._role, "content": self._content})

    @property
    def pending(self) -> tuple[Piece, ...]:
        """The constants at the end that are not encoded yet, after `settle_generated`."""
        pieces = tuple(item for item in self._pending if isinstance(item, Piece))
        assert len(pieces) == len(self._pending)
        return pieces

    def add_constant(self, text: str) -> None:
        """Text of the program."""
        self.changes.append(lambda other: other.add_constant(text))
        self._add(Piece(text))
        self._content += text
        if self._role is None and not self.loose_text and not text.isspace():
            self.loose_text = text

    def add_generated(self, text: str, token_ids: TokenIds | None) -> None:
        """An answer. Tokens that the backend did not tell are encoded as a constant's are."""
        self.changes.append(lambda other: other.add_generated(text, token_ids))
        if token_ids is None or not self._has_tokens:
            self._add(Piece(text))
        else:
            self.text += text
            self._pending = (*self._pending, token_ids)
        self._content += text

    def add_joint(self, text: str, token_ids: TokenIds) -> None:
        """An answer whose tokens spell what is pending as well, as one may have some of both."""
        self.changes.append(lambda other: other.add_generated(text, None))
        self.text += text
        self._content += text
        self._pending = (token_ids,)

    def begin_role(self, role: str, around: RoleText) -> None:
        """Open a message. Raises RequestError where one is open."""
        if self._role is not None:
            raise RequestError(
                f"a message of role {role!r} begins inside one of role {self._role!r}; end that "
                "one first"
            )
        self.changes.append(lambda other: other.begin_role(role, around))
        self._role, self._content, self._suffix = role, "", around.suffix
        self._add(Piece(around.prefix, is_control=True))

    def end_role(self, role: str) -> None:
        """Close the open message. Raises RequestError where it is another's."""
        if self._role != role:
            is_open = f"one of role {self._role!r} is" if self._role else "none is"
            raise RequestError(f"a message of role {role!r} ends, but {is_open} open")
        self.changes.append(lambda other: other.end_role(role))
        self._messages = self.messages
        self._role = None
        self._add(Piece(self._suffix, is_control=True))

    def taken_changes(self) -> Sequence[Change]:
        """`changes`, which begin anew: what was appended elsewhere is not appended twice."""
        changes, self.changes = self.changes, []
        return changes

    def repeat(self, changes: Sequence[Change]) -> None:
        """What another transcript went through, here."""
        for change in changes:
            change(self)

    async def settle(self, encoder: Encoder | None) -> None:
        """Encode what is pending, each run of constants in one piece."""
        await self._settle(encoder, self._pending)
        self._pending = ()

    async def settle_generated(self, encoder: Encoder | None) -> None:
        """Encode what is pending, up to the last generated token."""
        kept = 0
        while kept < len(self._pending) and isinstance(self._pending[-1 - kept], Piece):
            kept += 1
        split = len(self._pending) - kept
        await self._settle(encoder, self._pending[:split])
        self._pending = self._pending[split:]

    def prompt(self, pending_ids: TokenIds = ()) -> Prompt:
        """What an answer would continue. `pending_ids` are the tokens of what is not settled."""
        return Prompt(
            text=self.text,
            token_ids=self.token_ids + pending_ids if self._has_tokens else None,
            messages=self.messages,
        )

    async def _settle(self, encoder: Encoder | None, items: Sequence[Piece | TokenIds]) -> None:
        if encoder is None:
            return
        token_ids = self.token_ids
        for is_constant, run in groupby(items, lambda item: isinstance(item, Piece)):
            if is_constant:
                pieces = [item for item in run if isinstance(item, Piece)]
                token_ids += await encoder.encode(pieces, at_start=not token_ids)
            else:
                for item in run:
                    assert not isinstance(item, Piece)
                    token_ids += item
        self.token_ids = token_ids

    def _add(self, piece: Piece) -> None:
        self.text += piece.text
        if self._has_tokens and piece.text:
            self._pending = (*self._pending, piece)


def plain_role_text(role: str) -> RoleText:
    """How a message is shown in `text()` where the backend has no chat template: on lines of its
    own, after `role: `."""
    return RoleText(f"{role}: ", "\n")
