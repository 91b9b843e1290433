"""The tokenizer and the chat template of our server, asked over HTTP."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from sapwood.frontend_lang.backends.http import HttpClient
from sapwood.frontend_lang.backends.interface import Piece, RoleText, TokenIds
from sapwood.frontend_lang.backends.memo import Memo
from sapwood.frontend_lang.backends.role_formats import RoleTexts
from sapwood.runtime.errors import RequestError

MAX_KEPT_CHARACTERS = 8 * 2**20  # of constants whose tokens are kept
MAX_KEPT_ROLES = 65_536
MAX_BATCH = 256  # constants that one request asks for
BATCH_CHARACTERS = 2**18  # of them together, unless one has more

T = TypeVar("T")

_Constant = tuple[tuple[Piece, ...], bool]


class EndpointEncoder:
    """An `Encoder`. The same constant, and the same roles, are asked for once; constants that are
    wanted at the same time (the choices of a `select`), in one request.

    `around` says what stands around messages in place of the server's own template.
    """

    def __init__(self, http: HttpClient, around: RoleTexts | None = None) -> None:
        self._http = http
        self._around = around
        self._constants: Memo[_Constant, TokenIds] = Memo(
            max_size=MAX_KEPT_CHARACTERS, size_of=_num_characters
        )
        self._batches = _Batches(http)
        self._roles: Memo[tuple[str, ...], RoleText] = Memo(max_size=MAX_KEPT_ROLES, size_of=len)

    async def encode(self, pieces: Sequence[Piece], *, at_start: bool) -> TokenIds:
        """As `Encoder.encode`: at most one request."""
        if not any(piece.text for piece in pieces) and not at_start:
            return ()
        constant = (tuple(pieces), at_start)
        return await self._constants.get(constant, lambda: self._batches.get(constant))

    async def role_text(self, roles: tuple[str, ...]) -> RoleText:
        """As `Encoder.role_text`: at most one request."""
        if self._around is not None:
            return self._around(roles)
        return await self._roles.get(roles, lambda: self._asked_role_text(roles))

    async def _asked_role_text(self, roles: tuple[str, ...]) -> RoleText:
        told = await self._http.post("/role_text", {"roles": list(roles)})
        return RoleText(told["prefix"], told["suffix"])


class _Batches:
    """Asks for the tokens of constants: those that are wanted at the same time in one request."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http
        self._wanted: list[tuple[_Constant, asyncio.Future[TokenIds]]] = []
        self._asking: set[asyncio.Task[None]] = set()

    async def get(self, constant: _Constant) -> TokenIds:
        """Its tokens. Raises SapwoodError."""
        future = asyncio.get_running_loop().create_future()
        self._wanted.append((constant, future))
        if len(self._wanted) == 1:
            # It begins when all that is ready to run has run, and so said what it wants.
            task = asyncio.ensure_future(self._ask())
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        tokens: TokenIds = await future
        return tokens

    async def _ask(self) -> None:
        wanted, self._wanted = self._wanted, []
        try:
            for batch in _batches(wanted):
                await self._answer(batch)
        finally:
            for _, future in wanted:
                future.cancel()  # of those that nothing became of

    async def _answer(self, batch: "Sequence[tuple[_Constant, asyncio.Future[TokenIds]]]") -> None:
        try:
            told = await self._http.post("/tokenize", {"batch": [_said(c) for c, _ in batch]})
            for (_, future), tokens in zip(batch, told["tokens"], strict=True):
                if not future.done():
                    future.set_result(tuple(tokens))
        except RequestError as error:
            if len(batch) == 1:
                _fail(batch, error)
            else:  # one of them is wrong, and it should be its own fault only
                for one in batch:
                    await self._answer([one])
        except Exception as error:
            _fail(batch, error)


def _fail(batch: "Sequence[tuple[_Constant, asyncio.Future[TokenIds]]]", error: Exception) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)


def _batches(wanted: Sequence[tuple[_Constant, T]]) -> Iterator[list[tuple[_Constant, T]]]:
    """In their order, each no larger than one request should be."""
    batch: list[tuple[_Constant, T]] = []
    size = 0
    for one in wanted:
        size += _num_characters(one[0])
        if batch and (size > BATCH_CHARACTERS or len(batch) == MAX_BATCH):
            yield batch
            batch, size = [], _num_characters(one[0])
        batch.append(one)
    if batch:
        yield batch


def _said(constant: _Constant) -> dict[str, Any]:
    pieces, at_start = constant
    said = [{"text": piece.text, "is_control": piece.is_control} for piece in pieces]
    return {"pieces": said, "at_start": at_start}


def _num_characters(constant: _Constant) -> int:
    pieces, _ = constant
    return sum(len(piece.text) + 64 for piece in pieces)  # a short one is not for nothing
