"""Masks of token ids: bit i % 32 of word i // 32 stands for token i."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sapwood.runtime.constraints.interface import TokenMask


def mask_of(token_ids: Iterable[int] | NDArray[np.int32], mask_size: int) -> TokenMask:
    """The mask int32 [mask_size] of some tokens. O(mask_size + tokens)."""
    ids = token_ids if isinstance(token_ids, np.ndarray) else np.fromiter(token_ids, np.int32)
    bits = np.zeros(mask_size * 32, dtype=np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


def only_token(mask: TokenMask) -> int | None:
    """The one token in a mask; None if there are others or none."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else int(words[0]) * 32 + word.bit_length() - 1


def first_token(mask: TokenMask) -> int:
    """The smallest id in a mask; -1 if there is none."""
    words = np.flatnonzero(mask)
    if not len(words):
        return -1
    word = int(mask[words[0]]) & 0xFFFFFFFF
    return int(words[0]) * 32 + (word & -word).bit_length() - 1


def has_token(mask: TokenMask, token_id: int) -> bool:
    """Whether a token is in a mask; False for an id outside it."""
    return 0 <= token_id < len(mask) * 32 and bool(int(mask[token_id // 32]) >> token_id % 32 & 1)


def set_tokens(mask: TokenMask, token_ids: Sequence[int]) -> None:
    """Put tokens in, in place."""
    words: Any = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def clear_tokens(mask: TokenMask, token_ids: Sequence[int]) -> None:
    """Take tokens out, in place."""
    words: Any = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
