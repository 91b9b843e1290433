"""Engine options: a value in a few small groups, checked once.

`EngineConfig.from_options("smollm2", max_num_seqs=8)` sorts flat names into the groups, so that
Python callers and the command line need not know them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from sapwood.runtime.constraints import BACKENDS
from sapwood.runtime.errors import ConfigError
from sapwood.runtime.reasoning import REASONING_TAGS
from sapwood.runtime.tools import TOOL_FORMATS

MAX_CONSTRAINT_DEADLINE_MS = 5000
DEFAULT_MEMORY_FRACTION = 0.9  # what is left is for the driver, fragments and other programs
# Rows of one step. A CPU takes seconds for as many as a GPU needs to be busy.
GPU_STEP_BUDGET, CPU_STEP_BUDGET = 2048, 512


class BatchingMode(StrEnum):
    """How requests join a running batch."""

    CONTINUOUS = "continuous"  # membership is decided before every step (Yu et al. 2022, Orca)
    STATIC = "static"  # a group is frozen until its longest member ends: the textbook baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What to load and how to compute with it."""

    model: str = "smollm2"  # a known name, a folder, a .gguf file or a hub id
    dtype: str = "auto"  # float32, bfloat16, float16; auto: float32 on a CPU, else the checkpoint's
    quantize: str = "auto"  # int8: projections, on a CPU; auto: if predictions hardly move; none
    load_format: str = "auto"  # auto, dummy (random weights from the folder's config)
    device: str = "auto"  # cpu, cuda
    kernels: str = "auto"  # a name from sapwood.kernels.KERNELS
    max_model_len: int | None = None  # tokens of prompt and answer; None: the model's own
    reasoning: str = "auto"  # how it is marked: of REASONING_TAGS; none; auto: as the template does
    tool_format: str = "auto"  # how calls are written: of TOOL_FORMATS; auto: as the template does
    verify_model: bool = False  # through transformers: compare with its own attention on loading
    cuda_graphs: str = "auto"  # recorded at the start, lazy, none; auto: start where they can be
    max_graph_rows: int = 256  # of a step that is replayed as a graph

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _one_of("quantize", self.quantize, ("auto", "none", "int8"))
        _one_of("load_format", self.load_format, ("auto", "dummy"))
        _one_of("reasoning", self.reasoning, ("auto", "none", *REASONING_TAGS))
        _one_of("tool_format", self.tool_format, ("auto", *TOOL_FORMATS))
        _is_bool("verify_model", self.verify_model)
        _one_of("cuda_graphs", self.cuda_graphs, ("auto", "start", "lazy", "none"))
        _at_least("max_graph_rows", self.max_graph_rows, 1)
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        for name in ("model", "device", "kernels"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{name} is {value!r}; it must be a name")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """The KV cache and the tree over it.

    Its size is said by one of four options at most. Without any, it is what
    `DEFAULT_MEMORY_FRACTION` leaves of a GPU, or a share of what is free on a CPU.
    """

    block_size: int = 16  # tokens of a block; hits are token-granular at any size
    kv_dtype: str = "auto"  # int8, fp8 (e4m3): of keys and values; auto: as activations, or so
    memory_fraction: float | None = None  # of a GPU's memory: weights, steps and KV cache together
    kv_cache_memory: int | None = None  # bytes
    kv_tokens: int | None = None  # tokens that fit at least: as many whole blocks as hold them
    num_kv_blocks: int | None = None
    prefix_caching: bool = True  # False: no tree, every prompt is computed anew

    def __post_init__(self) -> None:
        _at_least("block_size", self.block_size, 1)
        _one_of("kv_dtype", self.kv_dtype, ("auto", "int8", "fp8"))
        _is_bool("prefix_caching", self.prefix_caching)
        for name in ("kv_cache_memory", "kv_tokens", "num_kv_blocks"):
            if (value := getattr(self, name)) is not None:
                _at_least(name, value, 1)
        if self.memory_fraction is not None:
            _is_share("memory_fraction", self.memory_fraction)
        sizes = ("memory_fraction", "kv_cache_memory", "kv_tokens", "num_kv_blocks")
        given = [name for name in sizes if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)} each say how large the KV cache is; leave out all but one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Who runs when."""

    max_num_seqs: int = 128
    max_num_batched_tokens: int | None = None  # rows of one step; None: 2048 on a GPU, else 512
    schedule_policy: str = "lpm"  # a name from sapwood.runtime.policy.POLICIES
    max_overtakes: int = 64  # a request overtaken that often goes first
    mode: BatchingMode = BatchingMode.CONTINUOUS
    overlap: bool | str = "auto"  # plan while the device works; auto: on a GPU
    jump_forward: bool = True  # tokens that a constraint leaves no choice of are not drawn
    check_invariants: bool = False  # after every step; for tests and debugging, slow

    def __post_init__(self) -> None:
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        if self.max_num_batched_tokens is not None:
            _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("max_overtakes", self.max_overtakes, 1)
        if self.overlap != "auto":
            _is_bool("overlap", self.overlap)
        _is_bool("jump_forward", self.jump_forward)
        _is_bool("check_invariants", self.check_invariants)
        if not isinstance(self.schedule_policy, str):
            raise ConfigError(f"schedule_policy is {self.schedule_policy!r}; it must be a name")
        _one_of("mode", self.mode, tuple(BatchingMode))
        object.__setattr__(self, "mode", BatchingMode(self.mode))
        if (
            self.max_num_batched_tokens is not None
            and self.max_num_batched_tokens < self.max_num_seqs
        ):
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, fewer than "
                f"max_num_seqs {self.max_num_seqs}: a full batch could not take one token each; "
                "raise the first or lower the second"
            )

    def on(self, device_type: str) -> "SchedulerOptions":
        """These options with what is right on such a device in place of what was not given."""
        return replace(
            self,
            max_num_batched_tokens=self.step_budget(device_type),
            overlap=self.overlaps(device_type),
        )

    def overlaps(self, device_type: str) -> bool:
        """Whether a step is planned while the device works on the one before.

        On a CPU nothing is gained by itself: planning takes time from the same cores.
        """
        return device_type == "cuda" if self.overlap == "auto" else bool(self.overlap)

    def step_budget(self, device_type: str = "cpu") -> int:
        """Rows of one step, as given, or what is right on such a device."""
        usual = GPU_STEP_BUDGET if device_type == "cuda" else CPU_STEP_BUDGET
        return self.max_num_batched_tokens or max(usual, self.max_num_seqs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintOptions:
    """How what answers must satisfy is compiled."""

    constraint_backend: str = "llguidance"  # where a request names none: of `constraints.BACKENDS`
    constraint_deadline_ms: int = 250  # that compiling one constraint may take
    constraint_cache_memory: int = 2**28  # bytes of compiled constraints to keep; 0: none

    def __post_init__(self) -> None:
        _one_of("constraint_backend", self.constraint_backend, tuple(BACKENDS))
        _at_least("constraint_deadline_ms", self.constraint_deadline_ms, 1)
        _at_least("constraint_cache_memory", self.constraint_cache_memory, 0)
        if self.constraint_deadline_ms > MAX_CONSTRAINT_DEADLINE_MS:
            raise ConfigError(
                f"constraint_deadline_ms is {self.constraint_deadline_ms}; it must be at most "
                f"{MAX_CONSTRAINT_DEADLINE_MS}: others wait in line meanwhile"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options of one engine."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    constraints: ConstraintOptions = field(default_factory=ConstraintOptions)

    @classmethod
    def from_options(cls, model: str = "smollm2", **options: Any) -> "EngineConfig":
        """Sort flat option names into their groups. Raises ConfigError for an unknown one."""
        values: dict[str, Any] = {"model": model, **options}
        unknown = sorted(set(values) - set(option_groups()))
        if unknown:
            known = ", ".join(sorted(option_groups()))
            near = get_close_matches(unknown[0], sorted(option_groups()), n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"unknown engine option {unknown[0]!r}; {hint}the options are: {known}"
            )
        picked: dict[str, dict[str, Any]] = {group: {} for group in set(option_groups().values())}
        for name, value in values.items():
            picked[option_groups()[name]][name] = value
        return cls(
            model=ModelOptions(**picked["model"]),
            cache=CacheOptions(**picked["cache"]),
            scheduler=SchedulerOptions(**picked["scheduler"]),
            constraints=ConstraintOptions(**picked["constraints"]),
        )


def option_groups() -> Mapping[str, str]:
    """The group (a field of EngineConfig) by option name."""
    groups = (
        ("model", ModelOptions),
        ("cache", CacheOptions),
        ("scheduler", SchedulerOptions),
        ("constraints", ConstraintOptions),
    )
    return MappingProxyType({f.name: group for group, cls in groups for f in fields(cls)})


def _at_least(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {low}")


def _is_share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{name} is {value!r}; it must be above 0 and at most 1, such as 0.9")


def _is_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be True or False")


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")
