"""Carries out step plans: tensors, forward pass, sampling.

Knows no cache, no policy and no text.
"""

from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sapwood.kernels.interface import Kernels, KVCache, RowCopy
from sapwood.kernels.staging import send
from sapwood.runtime.batch import BatchBuilder, ForwardBatch
from sapwood.runtime.compute_threads import ComputeThreads
from sapwood.runtime.request import ChunkResult, Sequence
from sapwood.runtime.sampler import Drawn, draw
from sapwood.runtime.sampling_row import SamplingRow
from sapwood.runtime.step_plan import Chunk, StepPlan
from sapwood.runtime.token_logprobs import Scored, score
from sapwood.runtime.token_masks import TokenMasks


class Model(Protocol):
    """A language model over paged keys and values."""

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Logits float32 [num_logits, vocab_size] of the batch's `logits_rows`."""
        ...


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """What the device was asked for: tokens, and scores where a chunk has any."""

    plan: StepPlan
    drawn: Drawn
    scored: list[Scored | None]

    def result(self) -> list[ChunkResult]:
        """What each chunk of the plan gave, in its order. Waits for this step alone."""
        tokens = iter(self.drawn.told())
        return [
            ChunkResult(
                sampled=tuple(islice(tokens, chunk.num_drawn)),
                scores=None if scored is None else scored.told(),
            )
            for chunk, scored in zip(self.plan.chunks, self.scored, strict=True)
        ]

    def places(self) -> dict[Sequence, int]:
        """Where each sequence's newest token is among those drawn. O(chunks)."""
        ends = accumulate(chunk.num_drawn for chunk in self.plan.chunks)
        return {c.sequence: end - 1 for c, end in zip(self.plan.chunks, ends, strict=True)}


class ModelRunner:
    """Runs plans on one model and one KV cache, in the order of their launch.

    Its only state is the KV cache's contents, and what the last step draws: the pending tokens of
    the next one. `masks` are needed where requests are constrained. `batches` makes what `model`
    takes: where that is a graphed one, it knows of its static batches.

    All work for a device goes to one stream, so that each step finds what the ones before it wrote,
    block copies and drawn tokens too, without anybody waiting.
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
        self._last: LaunchedStep | None = None
        # Elsewhere threads of the processor only prepare what is computed.
        self._threads = ComputeThreads(max_threads=None if kv.spec.device.type == "cpu" else 1)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Ask the device for a step. Waits for it only where a request's matcher does."""
        copies = [RowCopy(copy.source, copy.target, copy.num_rows) for copy in plan.copies]
        if copies:
            self._kernels.copy_rows(self._kv, copies)
        with self._threads.watched():
            batch = self._batches.build(plan)
            self._fill_in_pending(plan, batch.input_ids)
            logits = self._model.forward(batch, self._kv)
        by_chunk = torch.split(logits, [chunk.num_logits for chunk in plan.chunks])
        scored = [_scored(chunk, rows) for chunk, rows in zip(plan.chunks, by_chunk, strict=True)]
        drawn = draw(logits, _sampling_rows(plan), self._masks, self._kernels)
        self._last = LaunchedStep(plan, drawn, scored)
        return self._last

    def _fill_in_pending(self, plan: StepPlan, input_ids: Tensor) -> None:
        """Put in, on the device, the tokens that the step before draws."""
        ends = accumulate(chunk.length for chunk in plan.chunks)
        pending = [
            (chunk.sequence, end - 1)
            for chunk, end in zip(plan.chunks, ends, strict=True)
            if chunk.is_pending
        ]
        if not pending:
            return
        assert self._last is not None, "nothing was drawn for a pending token"
        places = self._last.places()
        arrays = {
            "places": np.array([places[sequence] for sequence, _ in pending], np.int64),
            "rows": np.array([row for _, row in pending], np.int64),
        }
        sent = send(arrays, input_ids.device)
        input_ids[sent["rows"]] = self._last.drawn.token_ids[sent["places"]]


def _sampling_rows(plan: StepPlan) -> list[SamplingRow]:
    """The tokens to draw, those of a chunk behind each other."""
    last_rows = accumulate(chunk.num_logits for chunk in plan.chunks)
    rows: list[SamplingRow] = []
    for chunk, end in zip(plan.chunks, last_rows, strict=True):
        last_row, num_drafts = end - 1, chunk.num_drafts
        for num_tried in range(num_drafts):
            at = last_row - num_drafts + num_tried
            rows.append(SamplingRow.of(chunk, at, num_tried=num_tried))
        for num_forks in range(chunk.num_samples):
            rows.append(SamplingRow.of(chunk, last_row, num_forks, num_tried=num_drafts))
    return rows


def _scored(chunk: Chunk, logits: Tensor) -> Scored | None:
    """Of the prompt tokens that follow the first of the chunk's rows with logits."""
    if not chunk.num_scores:
        return None
    token_ids = chunk.sequence.token_ids[chunk.first_score :][: chunk.num_scores]
    num_top = chunk.sequence.request.sampling.prompt_logprobs or 0
    return score(logits[: chunk.num_scores], token_ids, num_top)
