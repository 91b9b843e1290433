"""From options to a core that is ready to step."""

import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from sapwood.radix import Namespace, NamespaceKind, NamespacePart, PrefixCache
from sapwood.runtime.config import CacheOptions, EngineConfig, SchedulerOptions
from sapwood.runtime.constraints.backends import Backends
from sapwood.runtime.constraints.compiler import ConstraintCompiler
from sapwood.runtime.constraints.reasoning import ReasoningMatchers
from sapwood.runtime.constraints.vocabulary import vocabulary_of
from sapwood.runtime.core import EngineCore
from sapwood.runtime.cuda_graphs import CudaGraphRecorder, GraphPlan, graph_row_counts
from sapwood.runtime.device_options import (
    check_device_options,
    choose_device,
    choose_kernels,
    wants_graphs,
)
from sapwood.runtime.errors import ConfigError
from sapwood.runtime.memory_trial import CudaMeter, StepLimits
from sapwood.runtime.model_runner import ModelRunner
from sapwood.runtime.models import Model
from sapwood.runtime.placement import memory_for, place_on_cpu, place_on_gpu
from sapwood.runtime.policy import load_policy
from sapwood.runtime.processing import InputProcessor
from sapwood.runtime.reasoning import reasoning_tags
from sapwood.runtime.reasoning_block import ReasoningTags
from sapwood.runtime.request_limits import RequestLimits
from sapwood.runtime.scheduler import Scheduler
from sapwood.runtime.segmenter import Segmenter
from sapwood.runtime.token_masks import TokenMasks
from sapwood.runtime.tokenizer import Tokenizer
from sapwood.runtime.weights import choose_dtype, load_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What is being served, and with what; for banners, model lists and error messages."""

    model_name: str
    dtype: str  # of activations
    kv_dtype: str  # of keys and values
    quantize: str  # int8 where projections are, or none
    device: str
    kernels: str
    max_model_len: int  # tokens of prompt and answer: the model's context or the pool's size
    vocab_size: int
    block_size: int  # tokens
    num_kv_blocks: int
    kv_bytes: int
    max_num_batched_tokens: int  # rows of one step
    max_graph_rows: int  # steps of up to so many rows are CUDA graphs; 0: none are
    schedule_policy: str
    prefix_caching: bool
    has_chat_template: bool
    reasoning_tags: ReasoningTags | None  # around what the model writes before it answers
    load_seconds: float
    created: int  # seconds since the epoch

    @property
    def precision(self) -> str:
        """What is computed in, in words."""
        computed = self.dtype if self.quantize == "none" else f"{self.dtype} and {self.quantize}"
        if self.kv_dtype == self.dtype:
            return computed
        return f"{computed}, keys and values in {self.kv_dtype}"

    @property
    def kv_capacity_tokens(self) -> int:
        return self.num_kv_blocks * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """A core and what its faces need to speak to it."""

    core: EngineCore
    inputs: InputProcessor
    tokenizer: Tokenizer
    compiler: ConstraintCompiler
    reasoning: ReasoningMatchers
    info: EngineInfo
    namespace: Namespace


def build_engine(config: EngineConfig, clock: Callable[[], float]) -> EngineParts:
    """Load the model, allocate the KV cache and put the core together.

    Raises ModelError and ConfigError. Cost: reading the weights once.

    It is done on a thread that ends. Every thread that computes gets OpenMP workers of its own, and
    libgomp's workers no longer wait actively once there are more of them than cores: a caller's
    thread that had loaded a model would cost every later step up to a half of its speed.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="sapwood-build") as pool:
        return pool.submit(_build, config, clock).result()


def _build(config: EngineConfig, clock: Callable[[], float]) -> EngineParts:
    started = time.monotonic()
    policy = load_policy(config.scheduler.schedule_policy)
    device = choose_device(config.model.device)
    check_device_options(config.model, config.cache, device)
    scheduler_options = config.scheduler.on(device.type)
    kernels = choose_kernels(config.model, config.cache, device)
    meter = CudaMeter(device) if device.type == "cuda" else None
    free_at_first = meter.look().free if meter is not None else 0
    with memory_for("the model", "choose a smaller one, or end other programs that use the GPU"):
        loaded = load_model(
            config.model.model,
            dtype=config.model.dtype,
            load_format=config.model.load_format,
            quantize=config.model.quantize,
            verify_model=config.model.verify_model,
            device=device,
            kernels=kernels,
        )
    assert loaded.path is not None, "a name always leads to a folder"
    tokenizer = Tokenizer.from_folder(loaded.path, tool_format=config.model.tool_format)
    block_size = config.cache.block_size
    wanted_len = _wanted_len(config, loaded.config.max_position_embeddings)
    if meter is None:
        placed = place_on_cpu(loaded.model, kernels, config.cache)
    else:
        placed = place_on_gpu(
            loaded.model,
            kernels,
            config.cache,
            _step_limits(config.cache, scheduler_options, wanted_len),
            meter=meter,
            free_at_first=free_at_first,
            graphs=_graphs(config, loaded.model, device, wanted_len),
        )
    spec = placed.kv.spec
    num_blocks = spec.num_blocks
    max_model_len = _max_model_len(wanted_len, spec.num_slots)

    def make_cache() -> PrefixCache:
        return PrefixCache(num_blocks, block_size, enabled=config.cache.prefix_caching)

    scheduler = Scheduler(
        make_cache(),
        policy,
        scheduler_options,
        segmenter=Segmenter(block_size, kernels.min_saved_tokens),
        max_model_len=max_model_len,
        token_bytes=tokenizer.token_bytes,
    )
    masks = TokenMasks(
        kernels, num_rows=config.scheduler.max_num_seqs, vocab_size=loaded.config.vocab_size
    )
    core = EngineCore(
        scheduler,
        ModelRunner(placed.model, kernels, placed.kv, masks, placed.batches),
        clock=clock,
        make_cache=make_cache,
        overlap=scheduler_options.overlaps(device.type),
        check_invariants=config.scheduler.check_invariants,
    )
    info = EngineInfo(
        model_name=loaded.name,
        dtype=_name(choose_dtype(config.model.dtype, loaded.config, device)),
        kv_dtype=_name(spec.dtype),
        quantize=loaded.quantize.value,
        device=str(device),
        kernels=kernels.name,
        max_model_len=max_model_len,
        vocab_size=loaded.config.vocab_size,
        block_size=block_size,
        num_kv_blocks=num_blocks,
        kv_bytes=spec.num_bytes,
        max_num_batched_tokens=scheduler_options.step_budget(),
        max_graph_rows=placed.max_graph_rows,
        schedule_policy=config.scheduler.schedule_policy,
        prefix_caching=config.cache.prefix_caching,
        has_chat_template=tokenizer.has_chat_template,
        reasoning_tags=reasoning_tags(tokenizer.chat_template, config.model.reasoning),
        load_seconds=time.monotonic() - started,
        created=int(time.time()),
    )
    namespace = (NamespacePart(NamespaceKind.MODEL, loaded.name),)
    limits = RequestLimits(vocab_size=info.vocab_size, max_num_seqs=config.scheduler.max_num_seqs)
    inputs = InputProcessor(
        tokenizer,
        max_model_len=max_model_len,
        limits=limits,
        namespace=namespace,
        reasoning=config.model.reasoning,
    )
    # Made when it is first needed, beside what the engine does meanwhile.
    make_vocabulary = functools.cache(lambda: vocabulary_of(tokenizer, info.vocab_size))
    return EngineParts(
        core=core,
        inputs=inputs,
        tokenizer=tokenizer,
        compiler=ConstraintCompiler(Backends(make_vocabulary), config.constraints, clock=clock),
        reasoning=ReasoningMatchers(make_vocabulary),
        info=info,
        namespace=namespace,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _step_limits(
    cache: CacheOptions, scheduler: SchedulerOptions, max_context_len: int
) -> StepLimits:
    return StepLimits(
        num_rows=scheduler.step_budget(),
        num_draws=scheduler.max_num_seqs,
        max_context_len=max_context_len,
        block_size=cache.block_size,
    )


def _graphs(
    config: EngineConfig, model: Model, device: torch.device, max_context_len: int
) -> GraphPlan | None:
    """What to record as graphs on a GPU. Raises ConfigError where it is asked for and cannot be."""
    options = config.model
    if not wants_graphs(options, device, can_be_recorded=model.can_be_recorded):
        return None
    return GraphPlan(
        row_counts=graph_row_counts(min(options.max_graph_rows, config.scheduler.max_num_seqs)),
        vocab_size=model.config.vocab_size,
        max_context_len=max_context_len,
        make_recorder=lambda: CudaGraphRecorder(device),
        at_start=options.cuda_graphs != "lazy",
    )


def _wanted_len(config: EngineConfig, model_len: int) -> int:
    """Tokens that a request may have: no more than asked, and than the model takes."""
    asked = config.model.max_model_len
    if asked is not None and asked > model_len:
        raise ConfigError(f"max_model_len is {asked}, the model takes {model_len} tokens; lower it")
    return asked or model_len


def _max_model_len(wanted: int, capacity: int) -> int:
    """And no more than the pool's `capacity` of tokens."""
    if capacity < 2:
        raise ConfigError(f"the KV cache holds {capacity} tokens, at least 2 are needed")
    if capacity < wanted:
        logger.warning(
            "the KV cache holds %d tokens, so requests may have that many and not %d; "
            "raise its size (kv_tokens, kv_cache_memory or memory_fraction) for longer ones",
            capacity,
            wanted,
        )
    return min(wanted, capacity)
