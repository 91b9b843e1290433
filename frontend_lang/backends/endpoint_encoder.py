"""The tokenizer and the chat template of our server, asked over HTTP."""

from collections.abc import Sequence
from typing import Any

from sapwood.frontend_lang.backends.http import HttpClient
from sapwood.frontend_lang.backends.interface import Piece, RoleText, TokenIds
from sapwood.frontend_lang.backends.memo import Memo
from sapwood.frontend_lang.backends.role_formats import RoleTexts

MAX_KEPT_CHARACTERS = 8 * 2**20  # of constants whose tokens are kept
MAX_KEPT_ROLES = 65_536

_Constant = tuple[tuple[Piece, ...], bool]


class EndpointEncoder:
    """An `Encoder`. The same constant, and the same roles, are asked for once.

    `around` says what stands around messages in place of the server's own template.
    """

    def __init__(self, http: HttpClient, around: RoleTexts | None = None) -> None:
        self._http = http
        self._around = around
        self._constants: Memo[_Constant, TokenIds] = Memo(
            max_size=MAX_KEPT_CHARACTERS, size_of=_num_characters
        )
        self._roles: Memo[tuple[str, ...], RoleText] = Memo(max_size=MAX_KEPT_ROLES, size_of=len)

    async def encode(self, pieces: Sequence[Piece], *, at_start: bool) -> TokenIds:
        """As `Encoder.encode`: at most one request."""
        if not any(piece.text for piece in pieces) and not at_start:
            return ()
        constant = (tuple(pieces), at_start)
        return await self._constants.get(constant, lambda: self._asked_tokens(*constant))

    async def role_text(self, roles: tuple[str, ...]) -> RoleText:
        """As `Encoder.role_text`: at most one request."""
        if self._around is not None:
            return self._around(roles)
        return await self._roles.get(roles, lambda: self._asked_role_text(roles))

    async def _asked_tokens(self, pieces: Sequence[Piece], at_start: bool) -> TokenIds:
        said: list[dict[str, Any]] = [
            {"text": piece.text, "is_control": piece.is_control} for piece in pieces
        ]
        told = await self._http.post("/tokenize", {"pieces": said, "at_start": at_start})
        return tuple(told["tokens"])

    async def _asked_role_text(self, roles: tuple[str, ...]) -> RoleText:
        told = await self._http.post("/role_text", {"roles": list(roles)})
        return RoleText(told["prefix"], told["suffix"])


def _num_characters(constant: _Constant) -> int:
    pieces, _ = constant
    return sum(len(piece.text) + 64 for piece in pieces)  # a short one is not for nothing
