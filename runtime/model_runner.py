"""Carries out a step plan: tensors, forward pass, sampling.

Knows no cache, no policy and no text.
"""

from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sapwood.kernels.interface import Kernels, KVCache
from sapwood.runtime.batch import ForwardBatch
from sapwood.runtime.compute_threads import ComputeThreads
from sapwood.runtime.request import ChunkResult, SampledToken, Sequence
from sapwood.runtime.sampler import SamplingRow, prompt_logprobs, sample
from sapwood.runtime.scoring import TokenScores
from sapwood.runtime.step_plan import Chunk, StepPlan
from sapwood.runtime.token_masks import TokenMasks


class Model(Protocol):
    """A language model over paged keys and values."""

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Logits float32 [num_logits, vocab_size] of the batch's `logits_rows`."""
        ...


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The tokens that a step draws: int64 [sum of the chunks' `num_drawn`], on the device."""

    plan: StepPlan
    token_ids: Tensor

    def place_by_sequence(self) -> dict[Sequence, int]:
        """Where each sequence's token is among them. O(chunks)."""
        ends = accumulate(chunk.num_drawn for chunk in self.plan.chunks)
        return {c.sequence: end - 1 for c, end in zip(self.plan.chunks, ends, strict=True)}


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    results: list[ChunkResult]

    def result(self) -> list[ChunkResult]:
        return self.results


class ModelRunner:
    """Runs plans on one model and one KV cache.

    Its only state is the KV cache's contents, and what the last step draws: the pending tokens of
    the next one. `masks` are needed where requests are constrained.
    """

    def __init__(
        self, model: Model, kernels: Kernels, kv: KVCache, masks: TokenMasks | None = None
    ) -> None:
        self._model = model
        self._masks = masks
        self._kernels = kernels
        self._kv = kv
        self._last_drawn: _Drawn | None = None
        # Elsewhere threads of the processor only prepare what is computed.
        self._threads = ComputeThreads(max_threads=None if kv.spec.device.type == "cpu" else 1)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> _LaunchedStep:
        """Begin a step; its result has what each chunk of the plan gave, in its order."""
        for copy in plan.copies:
            self._kernels.copy_rows(self._kv, copy.source, copy.target, copy.num_rows)
        batch = self._batch(plan)
        self._fill_in_pending(plan, batch.input_ids)
        with self._threads.watched():
            logits = self._model.forward(batch, self._kv)
        by_chunk = torch.split(logits, [chunk.num_logits for chunk in plan.chunks])
        scores = [_scores(chunk, rows) for chunk, rows in zip(plan.chunks, by_chunk, strict=True)]
        sampled = self._sample(plan, logits)
        token_ids = [token.token_id for token in sampled]
        self._last_drawn = _Drawn(plan, torch.tensor(token_ids, device=logits.device))
        tokens = iter(sampled)
        return _LaunchedStep(
            [
                ChunkResult(sampled=tuple(islice(tokens, chunk.num_drawn)), scores=of_prompt)
                for chunk, of_prompt in zip(plan.chunks, scores, strict=True)
            ]
        )

    def _fill_in_pending(self, plan: StepPlan, input_ids: Tensor) -> None:
        """Put in the tokens that the step before draws, as they are on the device."""
        ends = accumulate(chunk.length for chunk in plan.chunks)
        pending = [
            (chunk.sequence, end - 1)
            for chunk, end in zip(plan.chunks, ends, strict=True)
            if chunk.is_pending
        ]
        if pending:
            assert self._last_drawn is not None, "nothing was drawn for a pending token"
            places = self._last_drawn.place_by_sequence()
            drawn = self._last_drawn.token_ids[[places[sequence] for sequence, _ in pending]]
            input_ids[[row for _, row in pending]] = drawn

    def _sample(self, plan: StepPlan, logits: Tensor) -> list[SampledToken]:
        """The tokens that are drawn, those of a chunk behind each other; overwrites logits."""
        last_rows = np.cumsum([chunk.num_logits for chunk in plan.chunks]) - 1
        rows: list[SamplingRow] = []
        for chunk, last_row in zip(plan.chunks, last_rows.tolist(), strict=True):
            num_drafts = chunk.num_drafts
            for num_tried in range(num_drafts):
                at = last_row - num_drafts + num_tried
                rows.append(SamplingRow.of(chunk, at, num_tried=num_tried))
            for num_forks in range(chunk.num_samples):
                row = SamplingRow.of(chunk, last_row, num_forks, num_tried=num_drafts)
                rows.append(row)
        return sample(logits, rows, self._masks)

    def _batch(self, plan: StepPlan) -> ForwardBatch:
        """The plan's tensors. numpy work per chunk, none in Python per token."""
        device = self._kv.spec.device
        block_size = self._kv.spec.block_size
        input_ids = np.concatenate([chunk.token_ids for chunk in plan.chunks])
        positions = np.concatenate([np.arange(c.start, c.end) for c in plan.chunks])
        blocks = np.concatenate([_blocks_of_rows(c, block_size) for c in plan.chunks])
        slots = blocks.astype(np.int64) * block_size + positions % block_size
        ends = np.cumsum([chunk.length for chunk in plan.chunks])
        logits_rows = [
            np.arange(end - chunk.num_logits, end)
            for chunk, end in zip(plan.chunks, ends, strict=True)
        ]
        return ForwardBatch(
            input_ids=_tensor(input_ids, device),
            positions=_tensor(positions, device),
            slots=_tensor(slots, device),
            logits_rows=_tensor(np.concatenate(logits_rows), device),
            attention=self._kernels.plan_attention(plan.attention, self._kv.spec),
        )


def _blocks_of_rows(chunk: Chunk, block_size: int) -> np.ndarray:
    """The block that each row of a chunk is written to, int32 [length]."""
    table = chunk.sequence.held_lease.block_table
    return table[np.arange(chunk.start, chunk.end) // block_size]


def _scores(chunk: Chunk, logits: Tensor) -> TokenScores | None:
    """Of the prompt tokens that follow the first of the chunk's rows with logits."""
    if not chunk.num_scores:
        return None
    token_ids = chunk.sequence.token_ids[chunk.first_score :][: chunk.num_scores]
    num_top = chunk.sequence.request.sampling.prompt_logprobs or 0
    return prompt_logprobs(logits[: chunk.num_scores], token_ids, num_top)


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False)).to(device)
