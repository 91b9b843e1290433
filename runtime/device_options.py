"""What the options that depend on the device come to, or why they cannot be had."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

import torch

from sapwood.kernels import KERNELS, load_kernels
from sapwood.kernels.interface import Kernels
from sapwood.kernels.tuning import TuningError
from sapwood.runtime.config import CacheOptions, ModelOptions
from sapwood.runtime.errors import ConfigError

_DEFAULT_KERNELS: Mapping[str, str] = MappingProxyType({"cpu": "cpu", "cuda": "triton"})
_CPU_ONLY_KERNELS = ("cpu", "cpu-torch")
_KV_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
)


def choose_device(name: str) -> torch.device:
    """Raises ConfigError for one that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; it must be auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, and torch sees no GPU; use cpu, or install a CUDA build")
    return torch.device(name)


def choose_kernels(model: ModelOptions, cache: CacheOptions, device: torch.device) -> Kernels:
    """The backend for a device, keeping keys and values as asked. Raises ConfigError."""
    name = model.kernels
    if name == "auto":
        name = _DEFAULT_KERNELS[device.type]
    if name not in KERNELS:
        raise ConfigError(f"kernels is {name!r}; it must be auto or one of {', '.join(KERNELS)}")
    if name in _CPU_ONLY_KERNELS and device.type != "cpu":
        raise ConfigError(f"kernels is {name}, which computes on a CPU, and device is {device}")
    if name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("kernels is triton, which computes on a GPU, and device is cpu; use cpu")
    try:
        kernels = load_kernels(name)
    except TuningError as error:
        raise ConfigError(f"{error}; measure it anew with `sapwood tune`, or remove it") from error
    if cache.kv_dtype == "auto":
        return kernels
    quantized = kernels.with_kv_dtype(_KV_DTYPES[cache.kv_dtype])
    if quantized is None:
        raise ConfigError(
            f"kv_dtype is {cache.kv_dtype}, in which the kernels {name!r} keep no keys and values; "
            "use auto, or other kernels"
        )
    return quantized


def check_device_options(model: ModelOptions, cache: CacheOptions, device: torch.device) -> None:
    """Raise ConfigError for an option that says nothing on this device, whatever the model."""
    if cache.memory_fraction is not None and device.type != "cuda":
        raise ConfigError(
            "memory_fraction is a share of a GPU's memory, and device is "
            f"{device}: give kv_tokens or kv_cache_memory"
        )
    wants_graphs(model, device, can_be_recorded=True)


def wants_graphs(model: ModelOptions, device: torch.device, *, can_be_recorded: bool) -> bool:
    """Whether steps are to be replayed as graphs. Raises ConfigError where they cannot be.

    `can_be_recorded`: whether the model's forward pass never waits for the device.
    """
    if model.cuda_graphs == "none":
        return False
    obstacle = None
    if device.type != "cuda":
        obstacle = f"device is {device}"
    elif not can_be_recorded:
        obstacle = "this model's forward pass reads results back, which no graph can"
    if obstacle is not None and model.cuda_graphs != "auto":
        raise ConfigError(f"cuda_graphs is {model.cuda_graphs}, and {obstacle}; use auto or none")
    return obstacle is None
