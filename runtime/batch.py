"""The tensors of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sapwood.kernels.interface import Kernels, KVCacheSpec
from sapwood.kernels.segments import AttentionPlan
from sapwood.kernels.staging import Staging
from sapwood.runtime.step_plan import Chunk, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One flattened batch: the rows of all sequences behind each other, no padding.

    `attention` is what the kernels' `plan_attention` prepared for these rows. Until the forward
    pass, `input_ids` may be overwritten in place where they are known on the device alone.
    """

    input_ids: torch.Tensor  # int64 [num_rows]
    positions: torch.Tensor  # int64 [num_rows]
    slots: torch.Tensor  # int64 [num_rows], block * block_size + offset: where keys are written
    logits_rows: torch.Tensor  # int64 [num_logits], rows whose logits are wanted
    attention: object


class BatchArrays(NamedTuple):
    """A batch's tensors while they are arrays of the processor, int64 each."""

    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    logits_rows: NDArray[np.int64]

    @classmethod
    def of(cls, plan: StepPlan, block_size: int) -> BatchArrays:
        """Work of numpy for all rows together, some slices in Python for each chunk."""
        chunks = plan.chunks
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        lengths = np.array([chunk.length for chunk in chunks], np.int64)
        num_logits = np.array([chunk.num_logits for chunk in chunks], np.int64)
        ends_in_batch = lengths.cumsum()
        num_rows, last_logits = plan.num_rows, num_logits.cumsum()
        positions = np.arange(num_rows) + (starts + lengths - ends_in_batch).repeat(lengths)
        return cls(
            input_ids=np.concatenate([c.token_ids for c in chunks], dtype=np.int64),
            positions=positions,
            slots=_slots(chunks, positions, starts, lengths, block_size),
            logits_rows=np.arange(last_logits[-1])
            + (ends_in_batch - last_logits).repeat(num_logits),
        )

    def sent(self, staging: Staging, attention: object) -> ForwardBatch:
        """The batch on the device, in one copy, with what the kernels prepared for it."""
        return ForwardBatch(**staging.send(self._asdict()), attention=attention)


class StaticBatches(Protocol):
    """Has memory for some batches that stays where it is (cuda_graphs.py)."""

    def load(self, arrays: BatchArrays, plan: AttentionPlan) -> ForwardBatch | None:
        """The batch, which is the next to be run, in that memory, or elsewhere if its attention was
        planned before it was known not to fit; None where nothing is planned for it."""
        ...


class BatchBuilder:
    """Makes the tensors of plans, for one cache. Belongs to one thread."""

    def __init__(
        self, kernels: Kernels, spec: KVCacheSpec, static: StaticBatches | None = None
    ) -> None:
        """A batch that fits in `static` is made there."""
        self._kernels = kernels
        self._spec = spec
        self._static = static
        self._staging = Staging(spec.device)

    def build(self, plan: StepPlan) -> ForwardBatch:
        """The plan's tensors, brought to the device in one copy beside that of its attention.

        Its attention is planned once.
        """
        arrays = BatchArrays.of(plan, self._spec.block_size)
        if self._static is not None:
            batch = self._static.load(arrays, plan.attention)
            if batch is not None:
                return batch
        attention = self._kernels.plan_attention(plan.attention, self._spec)
        return arrays.sent(self._staging, attention)


def _slots(
    chunks: tuple[Chunk, ...],
    positions: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    block_size: int,
) -> NDArray[np.int64]:
    """Where each row's keys are written, int64 [num_rows]."""
    first_blocks = starts // block_size
    ends = -(-(starts + lengths) // block_size)
    written = [
        chunk.sequence.held_lease.block_table[first:end]
        for chunk, first, end in zip(chunks, first_blocks.tolist(), ends.tolist(), strict=True)
    ]
    # Of each chunk, what takes a block's index in its table to its index in all of `written`.
    num_written = ends - first_blocks
    shifts = num_written.cumsum() - ends
    block_ids = np.concatenate(written, dtype=np.int64)
    block_ids = block_ids[positions // block_size + shifts.repeat(lengths)]
    slots: NDArray[np.int64] = block_ids * block_size + positions % block_size
    return slots
