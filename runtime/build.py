"""From options to a core that is ready to step."""

import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from sapwood.kernels import KERNELS, load_kernels
from sapwood.kernels.interface import Kernels, KVCache, KVCacheSpec
from sapwood.radix import Namespace, NamespaceKind, NamespacePart, PrefixCache
from sapwood.runtime.config import EngineConfig
from sapwood.runtime.constraints.backends import Backends
from sapwood.runtime.constraints.compiler import ConstraintCompiler
from sapwood.runtime.constraints.reasoning import ReasoningMatchers
from sapwood.runtime.constraints.vocabulary import vocabulary_of
from sapwood.runtime.core import EngineCore
from sapwood.runtime.errors import ConfigError
from sapwood.runtime.memory import available_bytes
from sapwood.runtime.model_runner import ModelRunner
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

CPU_KV_BYTES = 3 * 2**28
MAX_SHARE_OF_FREE_MEMORY = 0.5


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
    device = _device(config.model.device)
    kernels_name = config.model.kernels
    if kernels_name == "auto":
        kernels_name = "cpu" if device.type == "cpu" else "reference"
    if kernels_name not in KERNELS:
        raise ConfigError(
            f"kernels is {kernels_name!r}; it must be auto or one of {', '.join(KERNELS)}"
        )
    kernels = load_kernels(kernels_name)
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
    spec = loaded.model.kv_spec(1, block_size)
    num_blocks = _num_blocks(config, spec.num_bytes, device)
    kv = _make_kv_cache(kernels, loaded.model.kv_spec(num_blocks, block_size))
    max_model_len = _max_model_len(config, loaded.config.max_position_embeddings, num_blocks)

    def make_cache() -> PrefixCache:
        return PrefixCache(num_blocks, block_size, enabled=config.cache.prefix_caching)

    scheduler = Scheduler(
        make_cache(),
        policy,
        config.scheduler,
        segmenter=Segmenter(block_size, kernels.min_saved_tokens),
        max_model_len=max_model_len,
        token_bytes=tokenizer.token_bytes,
    )
    masks = TokenMasks(
        kernels,
        num_rows=config.scheduler.max_num_seqs,
        vocab_size=loaded.config.vocab_size,
        device=device,
    )
    core = EngineCore(
        scheduler,
        ModelRunner(loaded.model, kernels, kv, masks),
        clock=clock,
        make_cache=make_cache,
        overlap=_overlaps(config, device),
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
        kv_bytes=num_blocks * spec.num_bytes,
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


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; it must be auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, and torch sees no GPU; use cpu, or install a CUDA build")
    return torch.device(name)


def _overlaps(config: EngineConfig, device: torch.device) -> bool:
    """On a CPU nothing is gained: planning takes time from the same cores."""
    overlap = config.scheduler.overlap
    return device.type != "cpu" if overlap == "auto" else bool(overlap)


def _num_blocks(config: EngineConfig, block_bytes: int, device: torch.device) -> int:
    """Blocks of the KV cache: as asked, or a share of the free memory."""
    if config.cache.num_kv_blocks is not None:
        return config.cache.num_kv_blocks
    if config.cache.kv_cache_memory is not None:
        kv_bytes = config.cache.kv_cache_memory
    elif device.type == "cuda":
        kv_bytes = int(torch.cuda.mem_get_info(device)[0] * MAX_SHARE_OF_FREE_MEMORY)
    else:
        kv_bytes = min(CPU_KV_BYTES, int(available_bytes() * MAX_SHARE_OF_FREE_MEMORY))
    if kv_bytes < block_bytes:
        raise ConfigError(
            f"{kv_bytes} bytes are there for the KV cache, one block takes {block_bytes}; free "
            "some memory, or set kv_cache_memory or a smaller block_size"
        )
    return kv_bytes // block_bytes


def _make_kv_cache(kernels: Kernels, spec: KVCacheSpec) -> KVCache:
    if spec.device.type == "cpu" and spec.num_bytes > (available := available_bytes()):
        raise ConfigError(
            f"the KV cache of {spec.num_blocks} blocks takes {spec.num_bytes} bytes, {available} "
            "are free; lower num_kv_blocks or kv_cache_memory"
        )
    try:
        return kernels.make_kv_cache(spec)
    except (RuntimeError, MemoryError) as error:  # torch raises the first where memory lacks
        raise ConfigError(
            f"the KV cache of {spec.num_blocks} blocks takes {spec.num_bytes} bytes, which cannot "
            "be had; lower num_kv_blocks or kv_cache_memory"
        ) from error


def _max_model_len(config: EngineConfig, model_len: int, num_blocks: int) -> int:
    """Tokens that a request may have: no more than asked, than the model takes, than the pool
    holds."""
    asked = config.model.max_model_len
    if asked is not None and asked > model_len:
        raise ConfigError(f"max_model_len is {asked}, the model takes {model_len} tokens; lower it")
    wanted = asked or model_len
    capacity = num_blocks * config.cache.block_size
    if capacity < 2:
        raise ConfigError(f"the KV cache holds {capacity} tokens, at least 2 are needed")
    if capacity < wanted:
        logger.warning(
            "the KV cache holds %d tokens, so requests may have that many and not %d; "
            "raise kv_cache_memory or num_kv_blocks for longer ones",
            capacity,
            wanted,
        )
    return min(wanted, capacity)
