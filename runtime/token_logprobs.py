"""The model's own log-probabilities, of tokens that are drawn and of those that a prompt has."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sapwood.kernels.drawing import slices
from sapwood.kernels.host_copies import Array, HostCopy
from sapwood.kernels.staging import send
from sapwood.runtime.outputs import Logprob, TokenLogprobs
from sapwood.runtime.request import TokenIds
from sapwood.runtime.sampling_row import SamplingRow
from sapwood.runtime.scoring import TokenScores


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Scores of a prompt's tokens that the device computes, on their way to the host."""

    _copy: HostCopy

    def told(self) -> TokenScores:
        """The scores on the host. Waits for the device."""
        logprobs, top_ids, top_logprobs = self._copy.arrays()
        return TokenScores(
            logprobs=logprobs.astype(np.float32),
            top_ids=top_ids.astype(np.int32),
            top_logprobs=top_logprobs.astype(np.float32),
        )


def score(logits: Tensor, next_token_ids: TokenIds, num_top: int) -> Scored:
    """What each row of `logits` float32 [num_rows, vocab_size] gives the token that does follow.

    The same numbers, bit for bit, as sampling tells of a token that it draws from such a row. The
    logits are left as they are; beside them 16 MiB are in use at a time. Does not wait for the
    device.
    """
    following = send({"next": next_token_ids.astype(np.int64)}, logits.device)["next"]
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for part in [*slices(len(logits), logits.shape[1])] or [slice(0)]:
        of_all = _log_softmax(logits[part])
        top = _top(of_all, num_top)
        own = of_all.gather(1, following[part, None])[:, 0]
        found.append((own, top.token_ids, top.logprobs))
    return Scored(HostCopy.of([torch.cat(parts) for parts in zip(*found, strict=True)]))


def prompt_logprobs(logits: Tensor, next_token_ids: TokenIds, num_top: int) -> TokenScores:
    """`score`, and wait for what it gives."""
    return score(logits, next_token_ids, num_top).told()


@dataclass(frozen=True, slots=True, eq=False)
class AskedLogprobs:
    """Which rows ask for log-probabilities, and how many alternatives each."""

    rows: tuple[int, ...]
    slots: tuple[int, ...]  # for each of them, where among the distinct rows of logits
    logits_rows: tuple[int, ...]  # the distinct rows of logits
    num_top: tuple[int, ...]

    @classmethod
    def by(cls, rows: SequenceOf[SamplingRow]) -> "AskedLogprobs":
        asking = tuple(i for i, row in enumerate(rows) if row.params.needs_logprobs)
        if not asking:
            return cls((), (), (), ())
        logits_rows = sorted({rows[i].logits_index for i in asking})
        slot_of = {index: slot for slot, index in enumerate(logits_rows)}
        return cls(
            rows=asking,
            slots=tuple(slot_of[rows[i].logits_index] for i in asking),
            logits_rows=tuple(logits_rows),
            num_top=tuple(rows[i].params.top_logprobs for i in asking),
        )

    def arrays(self) -> dict[str, NDArray[np.int64]]:
        """What the device must know; empty if no row asks."""
        if not self.rows:
            return {}
        return {
            "asking_rows": np.array(self.rows, np.int64),
            "asking_slots": np.array(self.slots, np.int64),
            "asked_logits": np.array(self.logits_rows, np.int64),
        }

    def told(self, found: SequenceOf[Array], num_rows: int) -> list[TokenLogprobs | None]:
        """For each row that asks, the log-probability of its token and the most likely ones.

        `found` holds the arrays of `ModelLogprobs.of_drawn`.
        """
        told: list[TokenLogprobs | None] = [None] * num_rows
        if not self.rows:
            return told
        token_ids, own, top_ids, top_values = (array.tolist() for array in found)
        top = [tuple(map(Logprob, *pair)) for pair in zip(top_ids, top_values, strict=True)]
        for i, row in enumerate(self.rows):
            best = top[self.slots[i]][: self.num_top[i]]
            told[row] = TokenLogprobs(token_id=token_ids[i], logprob=own[i], top=best)
        return told


@dataclass(frozen=True, slots=True, eq=False)
class ModelLogprobs:
    """Log-probabilities on the device, taken before anything is masked."""

    sent: Mapping[str, Tensor]
    of_all: Tensor  # float32 [num_slots, vocab_size]
    top: "_Top"

    @classmethod
    def of(
        cls, logits: Tensor, asked: AskedLogprobs, sent: Mapping[str, Tensor]
    ) -> "ModelLogprobs | None":
        """Of the rows of `logits` that are asked for; `sent` has `asked.arrays()`."""
        if not asked.rows:
            return None
        of_all = _log_softmax(logits[sent["asked_logits"]])
        return cls(sent, of_all, _top(of_all, max(asked.num_top)))

    def of_drawn(self, token_ids: Tensor) -> list[Tensor]:
        """Of each row that asks its token int64 [m] and that one's log-probability float32 [m].

        Then the most likely ones of each distinct row: int64 and float32 [num_slots, num_top].
        """
        drawn = token_ids[self.sent["asking_rows"]]
        own = self.of_all[self.sent["asking_slots"], drawn]
        return [drawn, own, self.top.token_ids, self.top.logprobs]


@dataclass(frozen=True, slots=True, eq=False)
class _Top:
    """The most likely tokens of each row, the most likely first, equally likely ones by id."""

    token_ids: Tensor  # int64 [num_rows, num_top]
    logprobs: Tensor  # float32 [num_rows, num_top]


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), dim=-1)


def _top(logprobs: Tensor, num_top: int) -> _Top:
    """Of `logprobs` [num_rows, vocab_size]; fewer where the vocabulary is smaller."""
    best = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    token_ids, order = best.indices.sort(dim=-1)
    values, order = best.values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return _Top(token_ids.gather(1, order), values)
