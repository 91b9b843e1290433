"""Quantised weights to float32: packed words, groups with scales and zero points, scaled blocks.

Functions of tensors. Which tensors a checkpoint keeps them in is told in quantized_checkpoint.py.
Every result is rounded once, from the exact product of a level and its scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_WORD_BITS = 32
# Which of eight 4-bit values each nibble of an AWQ word is: a mask of 0x000f000f gives two
# neighbours (Lin et al. 2024, AutoAWQ's gemm).
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_CHUNK_LEN = 2**18  # values whose scales, zero points and products stay in a core's cache


def words_per_period(bits: int) -> int:
    """After how many 32-bit words a value of `bits` bits begins with a word again."""
    return bits // math.gcd(bits, _WORD_BITS)


def unpack_bits(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Unsigned values of `bits` bits, 1 to 8, packed without gaps along the last dimension.

    int32 [rows, words] to uint8 [rows, words * 32 / bits]: the n-th begins at bit n * bits of its
    row, bit 0 being the lowest of the first word. `order` says where in a row each of the values
    of a period goes. The number of words is a multiple of `words_per_period(bits)`. Costs one pass
    over the words for each value in a period.
    """
    period = words_per_period(bits)
    values_per_period = period * _WORD_BITS // bits
    words = words.contiguous().view(*words.shape[:-1], words.shape[-1] // period, period)
    values = words.new_empty((*words.shape[:-1], values_per_period), dtype=torch.uint8)
    for index, place in enumerate(order or range(values_per_period)):
        word, offset = divmod(index * bits, _WORD_BITS)
        num_low = min(bits, _WORD_BITS - offset)
        value = (words[..., word] >> offset) & ((1 << num_low) - 1)
        if num_low < bits:
            value |= (words[..., word + 1] & ((1 << (bits - num_low)) - 1)) << num_low
        values[..., place] = value
    return values.flatten(-2)


def unpack_awq(words: Tensor) -> Tensor:
    """int32 [rows, words] to uint8 [rows, words * 8]: 4-bit values in AWQ's interleaved order."""
    return unpack_bits(words, 4, _AWQ_ORDER)


def dequantize_groups(
    levels: Tensor, scales: Tensor, zeros: Tensor | int, groups: Tensor
) -> Tensor:
    """(level - zero) * scale, each input's by its group: float32 [outputs, inputs].

    `levels` are whole numbers [outputs, inputs], `scales` and `zeros` [outputs, num_groups],
    `groups` int64 [inputs].
    """
    weights = torch.empty(levels.shape, dtype=torch.float32, device=levels.device)
    groups, scales = groups.to(levels.device), scales.to(torch.float32)
    zeros = zeros if isinstance(zeros, int) else zeros.to(torch.float32)
    for rows in _row_chunks(levels):
        chunk = levels[rows].to(torch.float32)
        chunk -= zeros if isinstance(zeros, int) else zeros[rows].index_select(1, groups)
        torch.mul(chunk, scales[rows].index_select(1, groups), out=weights[rows])
    return weights


def dequantize_blocks(levels: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """level * scale of its block: float32 [outputs, inputs].

    `levels` are floats or whole numbers [outputs, inputs]; `scales` has one entry for each block
    of `block` rows and columns, those at the lower and right edges may be smaller.
    """
    weights = torch.empty(levels.shape, dtype=torch.float32, device=levels.device)
    num_outputs, num_inputs = levels.shape
    of_row = torch.arange(num_outputs, device=levels.device) // block[0]
    of_column = torch.arange(num_inputs, device=levels.device) // block[1]
    scales = scales.to(torch.float32)
    for rows in _row_chunks(levels):
        spread = scales.index_select(0, of_row[rows]).index_select(1, of_column)
        torch.mul(levels[rows].to(torch.float32), spread, out=weights[rows])
    return weights


def _row_chunks(levels: Tensor) -> Iterator[slice]:
    """Rows of a matrix, some at a time: what is made on the way stays small."""
    num_rows = max(1, _CHUNK_LEN // levels.shape[1])
    for start in range(0, levels.shape[0], num_rows):
        yield slice(start, start + num_rows)
