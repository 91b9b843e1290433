"""Carries out a step plan: tensors, forward pass, sampling.

Knows no cache, no policy and no text.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sapwood.kernels.interface import Kernels, KVCache, RowCopy
from sapwood.runtime.batch import BatchBuilder, ForwardBatch
from sapwood.runtime.compute_threads import ComputeThreads
from sapwood.runtime.request import ChunkResult, SampledToken
from sapwood.runtime.sampler import sample
from sapwood.runtime.sampling_row import SamplingRow
from sapwood.runtime.scoring import TokenScores
from sapwood.runtime.step_plan import Chunk, StepPlan
from sapwood.runtime.token_logprobs import prompt_logprobs
from sapwood.runtime.token_masks import TokenMasks


class Model(Protocol):
    """A language model over paged keys and values."""

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Logits float32 [num_logits, vocab_size] of the batch's `logits_rows`."""
        ...


class ModelRunner:
    """Runs plans on one model and one KV cache. The KV cache's contents are its only state.

    `masks` are needed where requests are constrained. `batches` makes what `model` takes: where
    that is a graphed one, it knows of its static batches.
    """

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        kv: KVCache,
        masks: TokenMasks | None = None,
        batches: BatchBuilder | None = None,
    ) -> None:
        self._model = model
        self._masks = masks
        self._kernels = kernels
        self._kv = kv
        self._batches = batches or BatchBuilder(kernels, kv.spec)
        # Elsewhere threads of the processor only prepare what is computed.
        self._threads = ComputeThreads(max_threads=None if kv.spec.device.type == "cpu" else 1)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[ChunkResult]:
        """What each chunk of the plan gave, in its order."""
        copies = [RowCopy(copy.source, copy.target, copy.num_rows) for copy in plan.copies]
        if copies:
            self._kernels.copy_rows(self._kv, copies)
        with self._threads.watched():
            logits = self._model.forward(self._batches.build(plan), self._kv)
        by_chunk = torch.split(logits, [chunk.num_logits for chunk in plan.chunks])
        scores = [_scores(chunk, rows) for chunk, rows in zip(plan.chunks, by_chunk, strict=True)]
        sampled = self._sample(plan, logits)
        return [
            ChunkResult(sampled=tuple(islice(sampled, chunk.num_drawn)), scores=of_prompt)
            for chunk, of_prompt in zip(plan.chunks, scores, strict=True)
        ]

    def _sample(self, plan: StepPlan, logits: Tensor) -> Iterator[SampledToken]:
        """The tokens that are drawn, those of a chunk behind each other; overwrites logits."""
        last_rows = np.cumsum([chunk.num_logits for chunk in plan.chunks]) - 1
        rows: list[SamplingRow] = []
        for chunk, last_row in zip(plan.chunks, last_rows.tolist(), strict=True):
            sequence, num_drafts = chunk.sequence, chunk.num_drafts
            for num_tried in range(num_drafts):
                at = last_row - num_drafts + num_tried
                rows.append(SamplingRow.of(sequence, at, num_tried=num_tried))
            for num_forks in range(chunk.num_samples):
                row = SamplingRow.of(sequence, last_row, num_forks, num_tried=num_drafts)
                rows.append(row)
        return iter(sample(logits, rows, self._masks))


def _scores(chunk: Chunk, logits: Tensor) -> TokenScores | None:
    """Of the prompt tokens that follow the first of the chunk's rows with logits."""
    if not chunk.num_scores:
        return None
    token_ids = chunk.sequence.token_ids[chunk.first_score :][: chunk.num_scores]
    num_top = chunk.sequence.request.sampling.prompt_logprobs or 0
    return prompt_logprobs(logits[: chunk.num_scores], token_ids, num_top)
