"""The masks of a step's constrained rows: one buffer, one copy to the device, one pass."""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sapwood.kernels.interface import Kernels
from sapwood.runtime.constraints.interface import GrammarError, Matcher

logger = logging.getLogger(__name__)


class TokenMasks:
    """Room for `max_rows` masks of `vocab_size` tokens; page-locked where they go to a GPU."""

    def __init__(
        self, kernels: Kernels, *, max_rows: int, vocab_size: int, device: torch.device
    ) -> None:
        self._kernels = kernels
        self._device = device
        self._buffer = torch.zeros(
            max_rows, -(-vocab_size // 32), dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._words = self._buffer.numpy()

    def apply(self, logits: Tensor, matchers: Mapping[int, Matcher]) -> dict[int, str]:
        """Mask the rows of `logits` float32 [*, vocab_size] that have a matcher, in place.

        Returns what went wrong, by row: such a row must not be drawn from. At most `max_rows`
        matchers, each row with one of its own. O(rows * vocab_size / 32) beside the matchers' work.
        """
        masked: list[int] = []
        errors: dict[int, str] = {}
        for row, matcher in matchers.items():
            try:
                is_restricted = matcher.fill_mask(self._words[len(masked)])
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
        indices = torch.tensor(rows, dtype=torch.int64, device=self._device)
        self._kernels.mask_logits(logits, indices, allowed)
