"""Logits to tokens, in two parts: `draw` asks the device, `Drawn.told` waits for it.

`SamplingParams` tells what is done, and in what order. Every row is computed from its own logits,
parameters, seed, position and tokens; what else is in the batch does not matter, to the last bit.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sapwood.kernels.host_copies import HostCopy
from sapwood.kernels.interface import NUM_DRAW_PARAMS, DrawParams, Kernels
from sapwood.kernels.reference import ReferenceKernels
from sapwood.kernels.staging import send
from sapwood.runtime.logit_edits import apply_edits, edits_of
from sapwood.runtime.noise import uniform
from sapwood.runtime.request import SampledToken
from sapwood.runtime.sampling_row import SamplingRow
from sapwood.runtime.token_logprobs import AskedLogprobs, ModelLogprobs
from sapwood.runtime.token_masks import TokenMasks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """Tokens that the device draws, of n rows, on their way to the host.

    `token_ids` int64 [n] and `is_sound` bool [n] are on the device and may be computed with at
    once. Of a row that is not sound the token is some token of the vocabulary.
    """

    token_ids: Tensor
    is_sound: Tensor
    _errors: Mapping[int, str]
    _asked: AskedLogprobs
    _copy: HostCopy

    def told(self) -> list[SampledToken]:
        """The tokens on the host, in the order of their rows. Waits for the device."""
        if not len(self.token_ids):
            return []
        token_ids, is_sound, *logprobs = self._copy.arrays()
        tokens: list[int] = token_ids.tolist()
        sound: list[bool] = is_sound.tolist()
        for index in self._errors:
            sound[index] = False
        told = self._asked.told(logprobs, len(tokens))
        faults = map(self._errors.get, range(len(tokens)))
        return [SampledToken(*parts) for parts in zip(tokens, told, sound, faults, strict=True)]


def sample(
    logits: Tensor,
    rows: SequenceOf[SamplingRow],
    masks: TokenMasks | None = None,
    kernels: Kernels | None = None,
) -> list[SampledToken]:
    """`draw`, and wait for what it gives."""
    return draw(logits, rows, masks, kernels).told()


def draw(
    logits: Tensor,
    rows: SequenceOf[SamplingRow],
    masks: TokenMasks | None = None,
    kernels: Kernels | None = None,
) -> Drawn:
    """Draw one token for each of `rows` from `logits` float32 [*, vocab_size]; may overwrite them.

    Does not wait for the device, but for what matchers need. `masks` are needed where a row has
    one. A row whose matcher fails is told as not sound, with the reason. A row without a finite
    maximum (a broken checkpoint, float16 beyond its range, no token left that may be drawn) is told
    as not sound and disturbs no other. Without `kernels` torch's operations draw.

    O(num_rows * vocab_size), a sort of each row that has top_k or top_p, and a sort of the tokens
    so far of each that has penalties.
    """
    if not rows:
        return _nothing(logits.device)
    asked = AskedLogprobs.by(rows)
    params = _params(rows)
    arrays = {"params": params, **asked.arrays(), **edits_of(rows, logits.shape[1])}
    logits_rows = [row.logits_index for row in rows]
    has_own_rows = logits_rows == list(range(len(logits)))
    if not has_own_rows:
        arrays["logits_rows"] = np.array(logits_rows, np.int64)
    sent = send(arrays, logits.device)

    model_logprobs = ModelLogprobs.of(logits, asked, sent)
    if not has_own_rows:
        logits = logits[sent["logits_rows"]]
    errors = _apply_masks(logits, rows, masks)
    apply_edits(logits, sent)
    kernels = kernels or ReferenceKernels()
    token_ids, is_sound = kernels.draw_tokens(logits, DrawParams(params, sent["params"]))
    logprobs = [] if model_logprobs is None else model_logprobs.of_drawn(token_ids)
    return Drawn(
        token_ids=token_ids,
        is_sound=is_sound,
        _errors=errors,
        _asked=asked,
        _copy=HostCopy.of([token_ids, is_sound, *logprobs]),
    )


def _nothing(device: torch.device) -> Drawn:
    return Drawn(
        token_ids=torch.empty(0, dtype=torch.int64, device=device),
        is_sound=torch.empty(0, dtype=torch.bool, device=device),
        _errors={},
        _asked=AskedLogprobs.by(()),
        _copy=HostCopy.of(()),
    )


def _params(rows: SequenceOf[SamplingRow]) -> NDArray[np.float64]:
    """What `DrawParams` wants to know of each row. Greedy ones have nothing but that."""
    values = np.zeros((NUM_DRAW_PARAMS, len(rows)))
    drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if not drawn:
        return values
    params = [rows[i].params for i in drawn]
    seeds = np.array([rows[i].seed for i in drawn], np.int64)
    positions = np.array([rows[i].position for i in drawn], np.int64)
    values[0, drawn] = [p.temperature for p in params]
    values[1, drawn] = [p.top_k if p.top_k > 0 else np.inf for p in params]
    values[2, drawn] = [p.top_p for p in params]
    values[3, drawn] = [p.min_p for p in params]
    values[4, drawn] = uniform(seeds, positions)
    return values


def _apply_masks(
    logits: Tensor, rows: SequenceOf[SamplingRow], masks: TokenMasks | None
) -> dict[int, str]:
    """Take out what constraints do not allow; what went wrong, by row."""
    matchers = {i: row.matcher for i, row in enumerate(rows) if row.matcher is not None}
    if not matchers:
        return {}
    assert masks is not None, "a row is constrained and there is no room for masks"
    return masks.apply(logits, matchers)
