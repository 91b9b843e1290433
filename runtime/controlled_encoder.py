"""Token ids of texts in which only some of the spelled control tokens are real.

The tokenizer library knows special tokens by their spelling alone. For a text that spells one which
is not real there is a second tokenizer: it takes every special token for plain text, and has each
of them once more under an alias, its spelling with U+FDD0 in front. The real ones are written as
aliases, the whole text is encoded in one call, and the aliases' ids are replaced. So whatever hangs
on a token's neighbours or on its place in the text (a space put in front of the first word, white
space that a token takes in) comes out as ever. Either way, the special tokens in the result are
compared with those that are real.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from sapwood.runtime.control_tokens import NONCHARACTERS, ControlledText
from sapwood.runtime.errors import RequestError

TokenIds = NDArray[np.int32]

_ALIAS = NONCHARACTERS[0]
_NO_CHARACTER = "\U0010ffff"  # in no vocabulary, unless as bytes
_BEFORE, _AFTER = ("a", "a b", "1."), ("", "a b", " a", "\na")  # what a split is tried on


class ControlledEncoder:
    """Encodes with a tokenizer of the library, which it never changes. Thread-safe."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special = {i: token for i, token in added.items() if token.special}
        self._splits: dict[str, bool] = {}  # by control token; worked out once

    def encode(self, content: ControlledText, start: int = 0) -> TokenIds:
        """Token ids of the text from character `start` on, with nothing put in front or behind.

        For a text with nothing quoted they are the library's for the text. Raises RequestError
        where this tokenizer cannot keep quoted tokens apart.
        """
        controls = [span for span in content.controls if span[0] >= start]
        real = [content.text[first:last] for first, last in controls]
        if content.has_quoted:
            return self._encode_quoted(content.text, [first for first, _ in controls], start, real)
        token_ids = _encode(self._backend, content.text[start:])
        # One that must stand alone as a word may be written and yet not be one.
        if not _is_subsequence(self._spellings(self._control_ids_in(token_ids)), real):
            raise _not_apart()
        return token_ids

    def can_split_before(self, control_token: str) -> bool:
        """Whether a text's tokens before this control token do not hang on what follows, nor the
        others on what is before. Tried on a few texts, once per token."""
        if control_token not in self._splits:
            self._splits[control_token] = all(
                self._splits_at(before, control_token + after)
                for before in _BEFORE
                for after in (*_AFTER, control_token)
            )
        return self._splits[control_token]

    def _splits_at(self, before: str, rest: str) -> bool:
        parts = [_encode(self._backend, before), _encode(self._backend, rest)]
        return np.array_equal(_encode(self._backend, before + rest), np.concatenate(parts))

    def _encode_quoted(
        self, text: str, places: Sequence[int], start: int, real: Sequence[str]
    ) -> TokenIds:
        if _ALIAS in text:
            raise RequestError(
                "the messages spell a control token and have the character U+FDD0; leave one out",
                param="messages",
            )
        bounds = [start, *places, len(text)]
        parts = [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
        backend, real_ids = self._aliased
        ids = _encode(backend, _ALIAS.join(parts))
        token_ids = real_ids[ids]
        found = token_ids[token_ids != ids]
        if self._spellings(found.tolist()) != real or self._control_ids_in(ids):
            raise _not_apart()
        return token_ids

    def _spellings(self, token_ids: Sequence[int]) -> list[str]:
        return [self._special[token_id].content for token_id in token_ids]

    def _control_ids_in(self, token_ids: TokenIds) -> list[int]:
        """The special tokens among ids, without that for unknown characters."""
        known = token_ids[token_ids < len(self._is_control)]
        found: list[int] = known[self._is_control[known]].tolist()
        return found

    @cached_property
    def _is_control(self) -> NDArray[np.bool_]:
        """For each token id whether it is a special token other than that for the unknown."""
        table = np.zeros(max(self._special, default=-1) + 1, np.bool_)
        table[list(self._special)] = True
        unknown = _encode(self._backend, _NO_CHARACTER)
        table[unknown[unknown < len(table)]] = False
        return table

    @cached_property
    def _aliased(self) -> tuple[Backend, TokenIds]:
        """The second tokenizer, and the real id of each of its ids. Made at first use: it takes as
        long as reading tokenizer.json."""
        backend = Backend.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        backend.add_tokens([_alias_of(token) for token in self._special.values()])
        size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        real_ids = np.arange(size, dtype=np.int32)
        for token_id, token in self._special.items():
            real_ids[backend.token_to_id(_ALIAS + token.content)] = token_id
        return backend, real_ids


def _alias_of(token: AddedToken) -> AddedToken:
    return AddedToken(
        _ALIAS + token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


def _encode(backend: Backend, text: str) -> TokenIds:
    # One text goes as a batch of one: that call lets other threads run meanwhile.
    [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)
    return np.array(encoding.ids, dtype=np.int32)


def _is_subsequence(items: Sequence[str], of: Sequence[str]) -> bool:
    """Whether `of` has all `items` in their order."""
    rest = iter(of)
    return all(item in rest for item in items)


def _not_apart() -> RequestError:
    return RequestError(
        "the messages spell a control token in a way that this model's tokenizer does not keep "
        "apart from a real one; leave it out or write it differently",
        param="messages",
    )
