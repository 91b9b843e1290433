"""Options that depend on the device are chosen for it, or refused with the reason."""

from pathlib import Path

import pytest
import torch

from sapwood import ConfigError
from sapwood.kernels.tuning import own_table_path
from sapwood.runtime.config import CacheOptions, EngineConfig, ModelOptions, SchedulerOptions
from sapwood.runtime.device_options import (
    check_device_options,
    choose_device,
    choose_kernels,
    wants_graphs,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("cuda_graphs", "device", "can_be_recorded", "expected"),
    [
        ("auto", CUDA, True, True),
        ("auto", CUDA, False, False),
        ("auto", CPU, True, False),
        ("start", CUDA, True, True),
        ("lazy", CUDA, True, True),
        ("none", CUDA, True, False),
        ("none", CPU, False, False),
    ],
)
def test_steps_are_graphs_where_they_can_be(
    cuda_graphs: str, device: torch.device, can_be_recorded: bool, expected: bool
) -> None:
    options = ModelOptions(cuda_graphs=cuda_graphs)
    assert wants_graphs(options, device, can_be_recorded=can_be_recorded) is expected


@pytest.mark.parametrize(
    ("device", "can_be_recorded", "reason"),
    [(CPU, True, "device is cpu"), (CUDA, False, "reads results back")],
)
@pytest.mark.parametrize("cuda_graphs", ["start", "lazy"])
def test_graphs_that_cannot_be_had_are_refused_if_they_are_asked_for(
    cuda_graphs: str, device: torch.device, can_be_recorded: bool, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"cuda_graphs is {cuda_graphs}, and.*{reason}"):
        wants_graphs(ModelOptions(cuda_graphs=cuda_graphs), device, can_be_recorded=can_be_recorded)


def test_what_says_nothing_on_a_cpu_is_refused_there() -> None:
    plain = ModelOptions()
    with pytest.raises(ConfigError, match="device is cpu: give kv_tokens or kv_cache_memory"):
        check_device_options(plain, CacheOptions(memory_fraction=0.5), CPU)
    with pytest.raises(ConfigError, match="cuda_graphs is start"):
        check_device_options(ModelOptions(cuda_graphs="start"), CacheOptions(), CPU)
    check_device_options(ModelOptions(cuda_graphs="none"), CacheOptions(kv_tokens=64), CPU)
    check_device_options(ModelOptions(cuda_graphs="start"), CacheOptions(memory_fraction=0.5), CUDA)


@pytest.mark.parametrize("value", [0, -0.1, 1.01, True, "0.9", float("nan")])
def test_a_share_is_above_zero_and_at_most_one(value: object) -> None:
    with pytest.raises(ConfigError, match="memory_fraction is"):
        EngineConfig.from_options(memory_fraction=value)


def test_two_options_that_say_the_caches_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="memory_fraction and kv_tokens each say"):
        EngineConfig.from_options(memory_fraction=0.9, kv_tokens=1000)
    with pytest.raises(ConfigError, match="kv_cache_memory and num_kv_blocks each say"):
        EngineConfig.from_options(kv_cache_memory=1000, num_kv_blocks=5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_tokens", 0),
        ("kv_tokens", 1.5),
        ("kv_dtype", "int4"),
        ("cuda_graphs", "sometimes"),
        ("cuda_graphs", True),
        ("max_graph_rows", 0),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value!r}"):
        EngineConfig.from_options(**{name: value})


@pytest.mark.parametrize(
    ("options", "on_cpu", "on_gpu"),
    [
        ({}, 512, 2048),
        ({"max_num_batched_tokens": 700}, 700, 700),
        ({"max_num_seqs": 1000}, 1000, 2048),  # a full batch takes one token each
        ({"max_num_seqs": 3000}, 3000, 3000),
    ],
)
def test_a_steps_rows_are_as_given_or_as_the_device_takes_them(
    options: dict[str, int], on_cpu: int, on_gpu: int
) -> None:
    scheduler = SchedulerOptions(**options)
    assert scheduler.on("cpu").step_budget() == scheduler.step_budget() == on_cpu
    assert scheduler.on("cuda").step_budget() == on_gpu


def test_a_device_that_is_not_there_is_refused() -> None:
    assert choose_device("cpu") == CPU
    with pytest.raises(ConfigError, match="must be auto, cpu or cuda"):
        choose_device("tpu")
    if not torch.cuda.is_available():
        assert choose_device("auto") == CPU
        with pytest.raises(ConfigError, match="torch sees no GPU"):
            choose_device("cuda")


def test_kernels_for_a_cpu_are_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="computes on a CPU, and device is cuda"):
        choose_kernels(ModelOptions(kernels="cpu"), CacheOptions(), CUDA)


def test_kernels_for_a_gpu_are_refused_on_a_cpu_that_does_not_interpret_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="computes on a GPU, and device is cpu; use cpu"):
        choose_kernels(ModelOptions(kernels="triton"), CacheOptions(), CPU)


@pytest.mark.parametrize(("name", "dtype"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)])
def test_keys_and_values_are_kept_as_asked(name: str, dtype: torch.dtype) -> None:
    kernels = choose_kernels(ModelOptions(kernels="reference"), CacheOptions(kv_dtype=name), CPU)
    assert kernels.kv_dtype(torch.float32, 64) is dtype
    plain = choose_kernels(ModelOptions(kernels="reference"), CacheOptions(), CPU)
    assert plain.kv_dtype(torch.float32, 64) is torch.float32


def test_a_broken_tuning_table_is_told_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    path = own_table_path("NVIDIA H200")
    path.parent.mkdir()
    path.write_text("")
    with pytest.raises(ConfigError, match="h200.json is not JSON.*anew with `sapwood tune`"):
        choose_kernels(ModelOptions(kernels="triton"), CacheOptions(), CUDA)
