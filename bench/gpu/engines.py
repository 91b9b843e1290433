"""Whole engines of random weights, put together without a tokenizer, and workloads for them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gpu.context import Context
from gpu.steps import BLOCK_SIZE
from sapwood.kernels.interface import Kernels
from sapwood.radix import PrefixCache
from sapwood.runtime.batch import BatchBuilder
from sapwood.runtime.config import SchedulerOptions
from sapwood.runtime.core import EngineCore
from sapwood.runtime.cuda_graphs import (
    CudaGraphRecorder,
    GraphedModel,
    GraphRecorder,
    Recording,
    graph_row_counts,
)
from sapwood.runtime.model_runner import ModelRunner
from sapwood.runtime.models import Model
from sapwood.runtime.policy import load_policy
from sapwood.runtime.request import Request
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.scheduler import Scheduler
from sapwood.runtime.segmenter import Segmenter


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """What differs between the engines of the check. `num_tokens` are those the cache holds."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_tokens: int
    has_graphs: bool = True
    has_overlap: bool = True
    has_tree: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Tokens to read, and how many to generate."""

    token_ids: NDArray[np.int32]
    num_generated: int
    temperature: float = 0.0


class CallingRecorder:
    """Stands in for CUDA graphs where there is no GPU: what is replayed is called again."""

    def record(self, run: Callable[[], None]) -> Recording:
        return _Call(run)


@dataclass(frozen=True, slots=True)
class _Call:
    run: Callable[[], None]

    def replay(self) -> None:
        self.run()


class BenchEngine:
    """A core with a model, that takes prompts of token ids and runs until all have ended."""

    def __init__(
        self,
        context: Context,
        model: Model,
        kernels: Kernels,
        vocab_size: int,
        shape: EngineShape,
        device: torch.device | None = None,
    ) -> None:
        device = device or context.device
        num_blocks = -(-shape.num_tokens // BLOCK_SIZE)
        kv = kernels.make_kv_cache(model.kv_spec(num_blocks, BLOCK_SIZE))
        self.graphed: GraphedModel | None = None
        if shape.has_graphs:
            self.graphed = GraphedModel(
                model,
                kernels,
                kv,
                _recorder(device),
                row_counts=graph_row_counts(shape.max_num_seqs),
                vocab_size=vocab_size,
                max_context_len=shape.max_model_len,
            )
        runner = ModelRunner(
            self.graphed or model,
            kernels,
            kv,
            batches=BatchBuilder(kernels, kv.spec, self.graphed),
        )

        def make_cache() -> PrefixCache:
            return PrefixCache(num_blocks, BLOCK_SIZE, enabled=shape.has_tree)

        scheduler = Scheduler(
            make_cache(),
            load_policy("lpm"),
            SchedulerOptions(
                max_num_seqs=shape.max_num_seqs,
                max_num_batched_tokens=shape.max_num_batched_tokens,
            ),
            segmenter=Segmenter(BLOCK_SIZE, kernels.min_saved_tokens),
            max_model_len=shape.max_model_len,
            token_bytes=(),
        )
        self.core = EngineCore(
            scheduler,
            runner,
            clock=time.monotonic,
            make_cache=make_cache,
            overlap=shape.has_overlap,
        )
        self._num_requests = 0

    def submit(self, prompt: Prompt) -> str:
        """Queue a prompt; the id of its request."""
        request_id = f"request-{self._num_requests}"
        self._num_requests += 1
        self.core.add(
            Request(
                request_id=request_id,
                caller_id=request_id,
                prompt_token_ids=prompt.token_ids,
                sampling=SamplingParams(
                    temperature=prompt.temperature,
                    max_tokens=prompt.num_generated,
                    ignore_eos=True,
                ),
                max_tokens=prompt.num_generated,
                seed=self._num_requests,
                eos_token_ids=(),
                arrival_time=time.monotonic(),
            )
        )
        return request_id

    def step(self) -> dict[str, list[int]]:
        """One step of the core; the new tokens by request. Raises RuntimeError where one failed."""
        told: dict[str, list[int]] = {}
        for output in self.core.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            told.setdefault(output.request_id, []).extend(map(int, output.token_ids))
        return told

    def run(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The tokens generated for each prompt."""
        token_ids: dict[str, list[int]] = {self.submit(prompt): [] for prompt in prompts}
        while self.core.has_work:
            for request_id, new in self.step().items():
                token_ids[request_id] += new
        if self.core.stats().num_quarantines:
            raise RuntimeError("a step of the engine failed; its log says why")
        return list(token_ids.values())

    def clear(self) -> None:
        """Drop what is cached, so that nothing of a warm-up is left."""
        self.core.flush_cache()


def _recorder(device: torch.device) -> GraphRecorder:
    return CudaGraphRecorder(device) if device.type == "cuda" else CallingRecorder()


def random_prompt(
    rng: np.random.Generator, vocab_size: int, length: int, num_generated: int, **options: float
) -> Prompt:
    token_ids = rng.integers(0, vocab_size, length).astype(np.int32)
    return Prompt(token_ids=token_ids, num_generated=num_generated, **options)


def give_back_memory(device: torch.device) -> None:
    """What an engine that is no longer referred to had; graphs and caches refer in circles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
