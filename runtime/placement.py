"""A loaded model with its KV cache and graphs on a device: what a runner runs steps on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sapwood.kernels.interface import Kernels, KVCache
from sapwood.runtime.batch import BatchBuilder
from sapwood.runtime.config import CacheOptions
from sapwood.runtime.cuda_graphs import GraphPlan
from sapwood.runtime.device_memory import DeviceUse, gib
from sapwood.runtime.errors import ConfigError
from sapwood.runtime.first_launches import launch_the_rest
from sapwood.runtime.kv_sizing import make_kv_cache, num_blocks_on_cpu, num_blocks_on_gpu
from sapwood.runtime.memory_trial import MemoryMeter, MemoryTrial, StepLimits
from sapwood.runtime.model_runner import Model as RunnableModel
from sapwood.runtime.models import Model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedModel:
    """`model` runs the batches that `batches` makes over `kv`.

    Steps of up to `max_graph_rows` rows that only decode are replayed as graphs; 0: none are.
    """

    model: RunnableModel
    kv: KVCache
    batches: BatchBuilder
    max_graph_rows: int = 0


def place_on_cpu(model: Model, kernels: Kernels, cache: CacheOptions) -> PlacedModel:
    """Allocate the KV cache. Raises ConfigError where its size cannot be had."""
    block_bytes = model.kv_spec(1, cache.block_size).num_bytes
    num_blocks = num_blocks_on_cpu(cache, block_bytes)
    kv = make_kv_cache(kernels, model.kv_spec(num_blocks, cache.block_size))
    return PlacedModel(model=model, kv=kv, batches=BatchBuilder(kernels, kv.spec))


def place_on_gpu(
    model: Model,
    kernels: Kernels,
    cache: CacheOptions,
    limits: StepLimits,
    *,
    meter: MemoryMeter,
    free_at_first: int,
    graphs: GraphPlan | None,
) -> PlacedModel:
    """Try out what steps and graphs take, give the KV cache what is left, and record the graphs.

    Afterwards every operation that steps ask of the kernels was launched once.

    `free_at_first` bytes were free before the model was loaded. Raises ConfigError where something
    does not fit. Cost: a few steps, and seconds for compiling and recording.
    """
    block_bytes = model.kv_spec(1, cache.block_size).num_bytes
    trial = MemoryTrial(model=model, kernels=kernels, limits=limits, meter=meter)
    way_out = "lower max_num_batched_tokens, max_num_seqs or max_graph_rows"
    with memory_for("a step beside the model", way_out):
        use = trial.measure(free_at_first, graphs)
    num_blocks = num_blocks_on_gpu(cache, block_bytes, use)
    kv = make_kv_cache(kernels, model.kv_spec(num_blocks, cache.block_size))
    _tell(use, kv)
    launch_the_rest(model, kernels, kv, limits)
    if graphs is None:
        return PlacedModel(model=model, kv=kv, batches=BatchBuilder(kernels, kv.spec))
    with memory_for("the graphs", "lower memory_fraction or max_graph_rows, or use none"):
        graphed = graphs.over(model, kernels, kv)
        if graphs.at_start:
            graphed.record_all()
    return PlacedModel(
        model=graphed,
        kv=kv,
        batches=BatchBuilder(kernels, kv.spec, graphed),
        max_graph_rows=graphed.max_rows,
    )


@contextmanager
def memory_for(what: str, way_out: str) -> Iterator[None]:
    """Where the GPU's memory runs out inside, that is a ConfigError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigError(f"the GPU has no room for {what} ({first_line}); {way_out}") from error


def _tell(use: DeviceUse, kv: KVCache) -> None:
    logger.info(
        "the GPU has %s: weights and kernels take %s, a step up to %s, graphs %s, the KV cache %s",
        *map(gib, (use.total, use.engine, use.step, use.graphs, kv.spec.num_bytes)),
    )
