"""What happens to the logits of single tokens before temperature.

Tokens are taken out, biases added, then penalties: the host says which tokens of which rows, in few
arrays for all rows, and the device does it.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sapwood.kernels.staging import send
from sapwood.runtime.sampling_row import SamplingRow

Array = NDArray[np.int64] | NDArray[np.float64]
_NO_IDS = np.empty(0, np.int64)


def edit_logits(logits: Tensor, rows: SequenceOf[SamplingRow]) -> None:
    """Take tokens out, add biases, then penalise; in place, one row of `logits` for each of `rows`.

    Everything that comes before temperature. Sums are taken in float64 and rounded once.
    """
    apply_edits(logits, send(edits_of(rows, logits.shape[1]), logits.device))


def edits_of(rows: SequenceOf[SamplingRow], vocab_size: int) -> dict[str, Array]:
    """What `apply_edits` does to the rows, of 8-byte elements; empty if nothing.

    Tokens that the logits have no place for are left out. O(tokens that are edited), and a sort of
    the tokens so far of each row that has penalties.
    """
    edited = {
        index: row
        for index, row in enumerate(rows)
        if row.params.token_edits is not None or row.held_off_token_ids
    }
    penalised = {index: row for index, row in enumerate(rows) if row.params.has_penalties}
    return {**_edited(edited, vocab_size), **_penalised(penalised, vocab_size)}


def apply_edits(logits: Tensor, edits: Mapping[str, Tensor]) -> None:
    """Do to `logits` [num_rows, vocab_size] what `edits_of` says. Does not wait for the device."""
    if "restricted_rows" in edits:
        place = (edits["allowed_rows"], edits["allowed_ids"])
        kept = logits[place]
        logits.index_fill_(0, edits["restricted_rows"], -torch.inf)
        logits[place] = kept
    if "removed_rows" in edits:
        logits[edits["removed_rows"], edits["removed_ids"]] = -torch.inf
    if "biased_rows" in edits:
        place = (edits["biased_rows"], edits["biased_ids"])
        logits[place] = (logits[place].double() + edits["biases"]).float()
    if "penalised_rows" in edits:
        place = (edits["penalised_rows"], edits["penalised_ids"])
        logits[place] = _penalise(logits[place], edits["repetition"], edits["subtracted"])


def _edited(rows: Mapping[int, SamplingRow], vocab_size: int) -> dict[str, Array]:
    if not rows:
        return {}
    return {
        **_allowed(rows, vocab_size),
        **_removed(rows, vocab_size),
        **_biased(rows, vocab_size),
    }


# -- tokens taken out --------------------------------------------------------------------------


def _allowed(rows: Mapping[int, SamplingRow], vocab_size: int) -> dict[str, Array]:
    """The rows of which only some tokens are left, and those."""
    allowed = {
        index: _within(row.params.token_edits.allowed, vocab_size)
        for index, row in rows.items()
        if row.params.token_edits is not None and row.params.token_edits.allowed is not None
    }
    if not allowed:
        return {}
    return {
        "restricted_rows": np.array(list(allowed), np.int64),
        "allowed_rows": _repeated(allowed, allowed.values()),
        "allowed_ids": np.concatenate(list(allowed.values())),
    }


def _removed(rows: Mapping[int, SamplingRow], vocab_size: int) -> dict[str, Array]:
    removed = {
        index: ids for index, row in rows.items() if len(ids := _removed_of(row, vocab_size))
    }
    if not removed:
        return {}
    return {
        "removed_rows": _repeated(removed, removed.values()),
        "removed_ids": np.concatenate(list(removed.values())),
    }


def _removed_of(row: SamplingRow, vocab_size: int) -> NDArray[np.int64]:
    """Banned tokens, and those that are held off; one may be both."""
    edits = row.params.token_edits
    banned = _NO_IDS if edits is None else _within(edits.banned, vocab_size)
    if not row.held_off_token_ids:
        return banned
    held_off = _within(np.array(sorted(row.held_off_token_ids), np.int64), vocab_size)
    return np.concatenate([banned, held_off])


# -- biases and penalties ----------------------------------------------------------------------


def _biased(rows: Mapping[int, SamplingRow], vocab_size: int) -> dict[str, Array]:
    edits = {
        index: row.params.token_edits
        for index, row in rows.items()
        if row.params.token_edits is not None and len(row.params.token_edits.biased)
    }
    if not edits:
        return {}
    ids = [_within(of_row.biased, vocab_size) for of_row in edits.values()]
    biases = [of_row.biases[: len(own)] for of_row, own in zip(edits.values(), ids, strict=True)]
    return {
        "biased_rows": _repeated(edits, ids),
        "biased_ids": np.concatenate(ids),
        "biases": np.concatenate(biases),
    }


@dataclass(frozen=True, slots=True, eq=False)
class _SeenTokens:
    """The distinct tokens that one row's penalties look at, and how often the answer has each."""

    token_ids: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, row: SamplingRow, vocab_size: int) -> "_SeenTokens":
        generated = row.token_ids[row.num_prompt_tokens :]
        token_ids, counts = np.unique(generated, return_counts=True)
        if row.params.repetition_penalty != 1.0:
            in_answer, in_answer_counts = token_ids, counts
            token_ids = np.unique(row.token_ids)
            counts = np.zeros(len(token_ids), np.int64)
            counts[np.searchsorted(token_ids, in_answer)] = in_answer_counts
        num_within = int(np.searchsorted(token_ids, vocab_size))
        return cls(token_ids[:num_within].astype(np.int64), counts[:num_within])


def _penalised(rows: Mapping[int, SamplingRow], vocab_size: int) -> dict[str, Array]:
    """Repetition, frequency and presence penalties; the tokens seen only."""
    if not rows:
        return {}
    seen = [_SeenTokens.of(row, vocab_size) for row in rows.values()]
    params = [row.params for row in rows.values()]
    ids = [tokens.token_ids for tokens in seen]
    subtracted = [
        tokens.counts * p.frequency_penalty + (tokens.counts > 0) * p.presence_penalty
        for tokens, p in zip(seen, params, strict=True)
    ]
    repetition = [float(p.repetition_penalty) for p in params]
    return {
        "penalised_rows": _repeated(rows, ids),
        "penalised_ids": np.concatenate(ids),
        "repetition": np.repeat(repetition, [len(own) for own in ids]),
        "subtracted": np.concatenate(subtracted),
    }


def _penalise(logits: Tensor, repetition: Tensor, subtracted: Tensor) -> Tensor:
    """float32 [num_tokens]: first the one, then the others.

    What was finite stays finite, however small a penalty divides it.
    """
    exact = logits.double()
    exact = torch.where(exact > 0, exact / repetition, exact * repetition) - subtracted
    largest = torch.finfo(torch.float32).max
    return torch.where(logits.isfinite(), exact.clamp(-largest, largest).float(), logits)


def _within(token_ids: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """Those of sorted ids that the logits have a place for."""
    return token_ids[: int(np.searchsorted(token_ids, vocab_size))]


def _repeated(indices: Iterable[int], ids: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Each row's index as often as it has tokens."""
    return np.repeat(np.array(list(indices), np.int64), [len(own) for own in ids])
