"""The masks of a step's constrained rows: one copy to the device, one pass."""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sapwood.kernels.interface import Kernels
from sapwood.kernels.staging import send
from sapwood.runtime.constraints.interface import GrammarError, Matcher

logger = logging.getLogger(__name__)


class TokenMasks:
    """Room for `num_rows` masks of `vocab_size` tokens, and for more when a step has more.

    Kept from step to step: matchers write every word of a mask, and what goes to a GPU is copied
    when it is sent.
    """

    def __init__(self, kernels: Kernels, *, num_rows: int, vocab_size: int) -> None:
        self._kernels = kernels
        self._num_words = -(-vocab_size // 32)
        self._words = self._room(num_rows)

    def _room(self, num_rows: int) -> NDArray[np.int32]:
        return np.zeros((num_rows, self._num_words), np.int32)

    def apply(self, logits: Tensor, matchers: Mapping[int, Matcher]) -> dict[int, str]:
        """Mask the rows of `logits` float32 [*, vocab_size] that have a matcher, in place.

        Returns what went wrong, by row: such a row must not be drawn from. Each row has a matcher
        of its own. O(rows * vocab_size / 32) beside the matchers' work.
        """
        if len(matchers) > len(self._words):
            self._words = self._room(2 * len(matchers))
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
        masks = self._words[: len(rows)]
        sent = send({"rows": np.array(rows, np.int64), "allowed": masks}, logits.device)
        self._kernels.mask_logits(logits, sent["rows"], sent["allowed"])
