"""Made-up sequences over scattered blocks, to try a model on before it serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sapwood.kernels import AttentionPlan, PrivateSegment
from sapwood.kernels.interface import Kernels
from sapwood.runtime.batch import ForwardBatch
from sapwood.runtime.models import Model

_BLOCK_SIZE = 4


@dataclass(slots=True, eq=False)
class MadeUpSequence:
    """Tokens that were computed and the blocks that hold them; only `PagedTrial` changes it."""

    num_tokens: int = 0
    block_table: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The next tokens of a sequence. `first_position` is said to the model in place of its own."""

    sequence: MadeUpSequence
    token_ids: Sequence[int]
    first_position: int | None = None


class PagedTrial:
    """Runs chunks of made-up sequences in flattened batches, as the engine would.

    Blocks are handed out in no order and never come back.
    """

    def __init__(self, model: Model, kernels: Kernels, max_tokens: int) -> None:
        """A cache for `max_tokens` tokens in all, at most a few sequences."""
        self._model = model
        self._kernels = kernels
        num_blocks = max_tokens // _BLOCK_SIZE + 16
        self._kv = kernels.make_kv_cache(model.kv_spec(num_blocks, _BLOCK_SIZE))
        self._free: list[int] = np.random.default_rng(0).permutation(num_blocks).tolist()

    def step(self, *chunks: Chunk) -> list[Tensor]:
        """Logits float32 [num_tokens, vocab_size] of each chunk, from one forward pass."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        private: list[PrivateSegment] = []
        for chunk in chunks:
            sequence, first_row, length = chunk.sequence, len(ids), len(chunk.token_ids)
            start, end = sequence.num_tokens, sequence.num_tokens + length
            self._extend(sequence, end)
            first = start if chunk.first_position is None else chunk.first_position
            ids += chunk.token_ids
            positions += range(first, first + length)
            slots += [_slot(sequence, position) for position in range(start, end)]
            private.append(
                PrivateSegment(
                    block_ids=np.array(sequence.block_table, np.int32),
                    start=0,
                    length=end,
                    first_row=first_row,
                    num_rows=length,
                )
            )
        plan = AttentionPlan(
            num_rows=len(ids), block_size=_BLOCK_SIZE, shared=(), private=tuple(private)
        )
        device = self._kv.spec.device
        batch = ForwardBatch(
            input_ids=torch.tensor(ids, device=device),
            positions=torch.tensor(positions, device=device),
            slots=torch.tensor(slots, device=device),
            logits_rows=torch.arange(len(ids), device=device),
            attention=self._kernels.plan_attention(plan, self._kv.spec),
        )
        logits = self._model.forward(batch, self._kv)
        return list(torch.split(logits, [len(chunk.token_ids) for chunk in chunks]))

    def _extend(self, sequence: MadeUpSequence, num_tokens: int) -> None:
        """Give the sequence the blocks that `num_tokens` tokens take."""
        while len(sequence.block_table) * _BLOCK_SIZE < num_tokens:
            sequence.block_table.append(self._free.pop())
        sequence.num_tokens = num_tokens


def _slot(sequence: MadeUpSequence, position: int) -> int:
    return sequence.block_table[position // _BLOCK_SIZE] * _BLOCK_SIZE + position % _BLOCK_SIZE


def made_up_tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids out of the whole vocabulary, the same ones every time."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, vocab_size, count).tolist()
    return drawn
