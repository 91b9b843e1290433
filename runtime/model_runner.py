"""Carries out a step plan: tensors, forward pass, sampling.

Knows no cache, no policy and no text.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sapwood.kernels.interface import Kernels, KVCache
from sapwood.runtime.batch import ForwardBatch
from sapwood.runtime.request import SampledToken
from sapwood.runtime.sampler import SamplingRow, sample
from sapwood.runtime.step_plan import Chunk, StepPlan


class Model(Protocol):
    """A language model over paged keys and values."""

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Logits float32 [num_logits, vocab_size] of the batch's `logits_rows`."""
        ...


class ModelRunner:
    """Runs plans on one model and one KV cache. The KV cache's contents are its only state."""

    def __init__(self, model: Model, kernels: Kernels, kv: KVCache) -> None:
        self._model = model
        self._kernels = kernels
        self._kv = kv

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[SampledToken]:
        """One token for each sampling chunk of the plan, in its order."""
        for copy in plan.copies:
            self._kernels.copy_rows(self._kv, copy.source, copy.target, copy.num_rows)
        logits = self._model.forward(self._batch(plan), self._kv)
        sequences = [chunk.sequence for chunk in plan.sampling_chunks]
        return sample(logits, [SamplingRow.of(seq, index) for index, seq in enumerate(sequences)])

    def _batch(self, plan: StepPlan) -> ForwardBatch:
        """The plan's tensors. numpy work per chunk, none in Python per token."""
        device = self._kv.spec.device
        block_size = self._kv.spec.block_size
        input_ids = np.concatenate([c.sequence.token_ids[c.start : c.end] for c in plan.chunks])
        positions = np.concatenate([np.arange(c.start, c.end) for c in plan.chunks])
        blocks = np.concatenate([_blocks_of_rows(c, block_size) for c in plan.chunks])
        slots = blocks.astype(np.int64) * block_size + positions % block_size
        lengths = np.array([c.length for c in plan.chunks])
        samples = np.array([c.num_logits for c in plan.chunks], bool)
        return ForwardBatch(
            input_ids=_tensor(input_ids, device),
            positions=_tensor(positions, device),
            slots=_tensor(slots, device),
            logits_rows=_tensor((lengths.cumsum() - 1)[samples], device),
            attention=self._kernels.plan_attention(plan.attention, self._kv.spec),
        )


def _blocks_of_rows(chunk: Chunk, block_size: int) -> np.ndarray:
    """The block that each row of a chunk is written to, int32 [length]."""
    table = chunk.sequence.held_lease.block_table
    return table[np.arange(chunk.start, chunk.end) // block_size]


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False)).to(device)
