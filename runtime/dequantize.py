"""Quantised weights to float32: packed words, groups with scales and zero points, scaled blocks.

Functions of tensors. Which tensors a checkpoint keeps them in is told in quantized_checkpoint.py.
Every result is rounded once, from the exact product of a level and its scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_WORD_BITS = 32
# Eight 4-bit values lie in an AWQ word so that a mask of 0x000f000f gives two neighbours: value n
# is nibble _AWQ_NIBBLES[n] of its word (Lin et al. 2024, AutoAWQ's gemm).
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def words_per_period(bits: int) -> int:
    """After how many 32-bit words a value of `bits` bits begins with a word again."""
    return bits // math.gcd(bits, _WORD_BITS)


def unpack_bits(words: Tensor, bits: int) -> Tensor:
    """Unsigned values of `bits` bits, 1 to 8, packed without gaps along the last dimension.

    int32 [rows, words] to uint8 [rows, words * 32 / bits]: value n begins at bit n * bits of its
    row, bit 0 being the lowest of the first word. The number of words is a multiple of
    `words_per_period(bits)`. Costs one pass over the words for each value in a period.
    """
    period = words_per_period(bits)
    values_per_period = period * _WORD_BITS // bits
    words = words.view(*words.shape[:-1], words.shape[-1] // period, period)
    values = words.new_empty((*words.shape[:-1], values_per_period), dtype=torch.uint8)
    for index in range(values_per_period):
        word, offset = divmod(index * bits, _WORD_BITS)
        num_low = min(bits, _WORD_BITS - offset)
        value = (words[..., word] >> offset) & ((1 << num_low) - 1)
        if num_low < bits:
            value |= (words[..., word + 1] & ((1 << (bits - num_low)) - 1)) << num_low
        values[..., index] = value
    return values.flatten(-2)


def unpack_awq(words: Tensor) -> Tensor:
    """int32 [rows, words] to uint8 [rows, words * 8]: 4-bit values in AWQ's interleaved order."""
    nibbles = unpack_bits(words, 4).view(*words.shape, 8)
    return nibbles[..., list(_AWQ_NIBBLES)].flatten(-2)


def dequantize_groups(
    levels: Tensor, scales: Tensor, zeros: Tensor | int, groups: Tensor
) -> Tensor:
    """(level - zero) * scale, each input's by its group: float32 [outputs, inputs].

    `levels` are whole numbers [outputs, inputs], `scales` and `zeros` [outputs, num_groups],
    `groups` int64 [inputs].
    """
    weights = levels.to(torch.float32)
    weights -= zeros if isinstance(zeros, int) else zeros.to(torch.float32)[:, groups]
    weights *= scales.to(torch.float32)[:, groups]
    return weights


def dequantize_blocks(levels: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """level * scale of its block: float32 [outputs, inputs].

    `levels` are floats or whole numbers [outputs, inputs]; `scales` has one entry for each block
    of `block` rows and columns, those at the lower and right edges may be smaller.
    """
    spread = scales.to(torch.float32)
    for dim, size in enumerate(block):
        if spread.shape[dim] > 1 and size > 1:
            spread = spread.repeat_interleave(size, dim=dim)
    weights = levels.to(torch.float32)
    weights *= spread[: levels.shape[0], : levels.shape[1]]
    return weights
