"""No number in an answer goes on for ever.

JSON numbers may have any number of digits, and a model that has begun to repeat one goes on until
its tokens are used up. Where a number has got long, and what may follow are digits or what ends a
number in JSON, the digits are taken out of the mask. A number that the grammar itself needs to be
that long is left alone: there is nothing else in its mask.
"""

import numpy as np

from sapwood.runtime.constraints.interface import TokenMask, Vocabulary

MAX_NUMBER_BYTES = 40  # 64-bit integers have 20, doubles written in full 24
_NUMBER = frozenset(b"0123456789+-.eE")
_ENDS = frozenset(b",]} \n\r\t")


class NumberTokens:
    """What the tokens of a vocabulary are to a number. Immutable.

    `ending_lens[i]`: how many bytes at token i's end could be of a number; `is_inside[i]`: all.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = vocabulary.token_bytes
        self.ending_lens = tuple(map(_ending_len, tokens))
        self.is_inside = tuple(
            size == len(token) for size, token in zip(self.ending_lens, tokens, strict=True)
        )
        first = [token[0] if token else -1 for token in tokens]
        self.goes_on = _mask([byte in _NUMBER for byte in first], vocabulary)
        ends = [byte in _ENDS for byte in first]
        for token_id in vocabulary.eos_token_ids:
            if token_id < len(ends):
                ends[token_id] = True
        self.goes_on_or_ends = self.goes_on | _mask(ends, vocabulary)


class NumberLimit:
    """The length of what may be a number at the end of one answer, after each of its tokens."""

    def __init__(self, tokens: NumberTokens, lens: tuple[int, ...] = (0,)) -> None:
        self._tokens = tokens
        self._lens = list(lens)

    @property
    def is_reached(self) -> bool:
        return self._lens[-1] >= MAX_NUMBER_BYTES

    def push(self, token_id: int) -> None:
        ending = self._tokens.ending_lens[token_id]
        before = self._lens[-1] if self._tokens.is_inside[token_id] else 0
        self._lens.append(before + ending)

    def pop(self, num_tokens: int) -> None:
        del self._lens[len(self._lens) - num_tokens :]

    def copy(self) -> "NumberLimit":
        return NumberLimit(self._tokens, tuple(self._lens))

    def narrow(self, mask: TokenMask) -> None:
        """Take out of `mask` what would make a long number longer."""
        if self._lens[-1] < MAX_NUMBER_BYTES or (mask & ~self._tokens.goes_on_or_ends).any():
            return
        ending = mask & ~self._tokens.goes_on
        if ending.any():
            mask[:] = ending


def _ending_len(token: bytes) -> int:
    size = 0
    while size < len(token) and token[-1 - size] in _NUMBER:
        size += 1
    return size


def _mask(bits: list[bool], vocabulary: Vocabulary) -> TokenMask:
    padded = np.zeros(32 * vocabulary.mask_size, np.bool_)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view(np.int32)
