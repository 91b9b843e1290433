"""The tensors of one forward pass."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One flattened batch: the rows of all sequences behind each other, no padding.

    `attention` is what the kernels' `plan_attention` prepared for these rows.
    """

    input_ids: torch.Tensor  # int64 [num_rows]
    positions: torch.Tensor  # int64 [num_rows]
    slots: torch.Tensor  # int64 [num_rows], block * block_size + offset: where keys are written
    logits_rows: torch.Tensor  # int64 [num_logits], rows whose logits are wanted
    attention: object
