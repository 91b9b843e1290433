"""The masks of a step's constrained rows: one buffer, one copy to the device, one pass."""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from sapwood.kernels.interface import Kernels
from sapwood.kernels.staging import send
from sapwood.runtime.constraints.interface import GrammarError, Matcher

logger = logging.getLogger(__name__)


class TokenMasks:
    """Room for `num_rows` masks of `vocab_size` tokens, and for more when a step has more.

    Page-locked where they go to a GPU, and then each step has a buffer of its own: the copy of the
    step before may still read that one's.
    """

    def __init__(
        self, kernels: Kernels, *, num_rows: int, vocab_size: int, device: torch.device
    ) -> None:
        self._kernels = kernels
        self._device = device
        self._num_words = -(-vocab_size // 32)
        self._buffer = self._make(num_rows)

    def _make(self, num_rows: int) -> Tensor:
        pinned = self._device.type == "cuda"
        return torch.zeros(num_rows, self._num_words, dtype=torch.int32, pin_memory=pinned)

    def apply(self, logits: Tensor, matchers: Mapping[int, Matcher]) -> dict[int, str]:
        """Mask the rows of `logits` float32 [*, vocab_size] that have a matcher, in place.

        Returns what went wrong, by row: such a row must not be drawn from. Each row has a matcher
        of its own. O(rows * vocab_size / 32) beside the matchers' work.
        """
        if len(matchers) > len(self._buffer):
            self._buffer = self._make(2 * len(matchers))
        elif self._device.type != "cpu":
            self._buffer = self._make(len(self._buffer))
        words = self._buffer.numpy()
        masked: list[int] = []
        errors: dict[int, str] = {}
        for row, matcher in matchers.items():
            try:
                is_restricted = matcher.fill_mask(words[len(masked)])
            except Exception as error:  # whoever enforces it: it must harm no other row
                errors[row] = f"the constraint cannot be followed any further: {error}; simplify it"
                if not isinstance(error, GrammarError):
                    logger.exception("a constraint failed")
                continue
            if is_restricted:
                masked.append(row)
        if masked:
            self._mask(logits, masked)
        return errors

    def _mask(self, logits: Tensor, rows: Sequence[int]) -> None:
        allowed = self._buffer[: len(rows)].to(self._device, non_blocking=True)
        indices = send({"rows": np.array(rows, np.int64)}, self._device)
        self._kernels.mask_logits(logits, indices["rows"], allowed)
