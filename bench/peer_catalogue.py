"""The engines that `bench/peers.py` measures, and how each is started."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from peer_setup import MODEL, Places
from workloads import WORKLOADS

ADAPTERS = Path(__file__).parent / "peer_engines"
NUM_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine to measure. An adapter may know better what `activations` and `kv_cache` are here.

    `options` are its adapter's; a word in braces stands for the path of a model. `memory_gib` is
    a guess, to decide how many engines may be loaded at once. `is_late`: measured last, with what
    is left of the time, and cut off earlier; for those that another row of the same engine, or
    every other engine, is known to beat. `primed` names the workloads that are also run with a
    client that sends the shared prefixes first.
    """

    name: str
    title: str
    weights: str
    activations: str
    kv_cache: str
    environment: str | None  # None: the running interpreter's
    adapter: str
    options: tuple[str, ...] = ()
    memory_gib: float
    is_slow_to_load: bool = False
    is_late: bool = False
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    primed: tuple[str, ...] = ()

    @property
    def is_sapwood(self) -> bool:
        return self.environment is None

    @property
    def is_float32(self) -> bool:
        return {self.weights, self.activations, self.kv_cache} == {"float32"}


def _sapwood(quantize: str, weights: str, activations: str) -> EngineSpec:
    name = "sapwood-f32" if quantize == "none" else f"sapwood-{quantize}"
    return EngineSpec(
        name=name,
        title=f"Sapwood, {weights}",
        weights=weights,
        activations=activations,
        kv_cache="float32",
        environment=None,
        adapter="sapwood_engine.py",
        options=("--model", MODEL, "--quantize", quantize, "--threads", str(NUM_THREADS)),
        memory_gib=2,
    )


def _openvino(weight_format: str, dtype: str, kv_cache: str) -> EngineSpec:
    is_float32 = dtype == "float32"
    options = ("--model", f"{{openvino-{weight_format}}}", "--precision", dtype)
    cache_gb = "2" if is_float32 else "1"
    return EngineSpec(
        name="openvino-f32" if is_float32 else f"openvino-{dtype}",
        title=f"OpenVINO GenAI, {dtype}",
        weights=dtype,
        activations="float32",
        kv_cache=kv_cache,
        environment="openvino",
        adapter="openvino_engine.py",
        options=(*options, "--cache-gb", cache_gb, "--threads", str(NUM_THREADS)),
        memory_gib=4 if is_float32 else 2,
        primed=("c", "t"),
    )


def _llamacpp(quantization: str, num_slots: int) -> EngineSpec:
    is_float32 = quantization == "F32"
    slots = "1 slot" if num_slots == 1 else f"{num_slots} slots"
    options = ("--model", f"{{gguf-{quantization}}}", "--kv-type", "f32" if is_float32 else "f16")
    return EngineSpec(
        name=f"llamacpp-{quantization.lower().replace('_', '')}-{num_slots}",
        title=f"llama.cpp, {quantization}, {slots}",
        weights="float32" if is_float32 else quantization,
        activations="float32" if is_float32 else "Q8_0",
        kv_cache="float32" if is_float32 else "float16",
        environment="llamacpp",
        adapter="llamacpp_engine.py",
        options=(*options, "--slots", str(num_slots), "--threads", str(NUM_THREADS)),
        memory_gib=4 if is_float32 else 2,
        is_late=num_slots > 1 and quantization != "Q4_0",
    )


def _transformers(batching: str) -> EngineSpec:
    options = ("--model", "{checkpoint}", "--batching", batching, "--threads", str(NUM_THREADS))
    return EngineSpec(
        name=f"transformers-{batching}",
        title=f"transformers, {batching} batching",
        weights="float32",
        activations="float32",
        kv_cache="float32",
        environment="transformers",
        adapter="transformers_engine.py",
        options=options,
        memory_gib=4,
        is_late=True,
        # The naive way shares nothing: what the others show of sharing is the same as in c.
        workloads=("a", "b", "c", "d", "e"),
    )


ENGINES: Mapping[str, EngineSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            _sapwood("int8", "int8", "int8"),
            _sapwood("none", "float32", "float32"),
            EngineSpec(
                name="vllm",
                title="vLLM",
                weights="float32",
                activations="float32",
                kv_cache="float32",
                environment="vllm",
                adapter="vllm_engine.py",
                options=("--model", "{checkpoint}"),
                memory_gib=5,
                is_slow_to_load=True,
            ),
            _openvino("int8", "int8", "uint8"),
            _openvino("fp32", "float32", "float32"),
            _llamacpp("Q4_0", 1),
            _llamacpp("Q4_0", 8),
            _llamacpp("Q8_0", 1),
            _llamacpp("Q8_0", 8),
            _llamacpp("F32", 1),
            _llamacpp("F32", 8),
            _transformers("continuous"),
            _transformers("static"),
        )
    }
)


def command(spec: EngineSpec, places: Places) -> list[str]:
    """What starts the adapter of an engine, in the engine's environment."""
    python = sys.executable if spec.environment is None else places.python(spec.environment)
    options = [
        str(_model_path(option, places)) if option.startswith("{") else option
        for option in spec.options
    ]
    return [str(python), str(ADAPTERS / spec.adapter), *options]


def _model_path(option: str, places: Places) -> Path:
    kind, _, variant = option.strip("{}").partition("-")
    match kind:
        case "gguf":
            return places.gguf(variant)
        case "openvino":
            return places.openvino(variant)
        case _:
            return places.checkpoint()


def environment_variables(spec: EngineSpec) -> dict[str, str]:
    """This process's own, with what the engines need on the CPUs that it may use."""
    cpus = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0)))
    inherited = dict(os.environ)
    if not spec.is_sapwood:
        inherited.pop("PYTHONPATH", None)  # their packages may have the names of our folders
    return inherited | {
        "OMP_NUM_THREADS": str(NUM_THREADS),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": cpus,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
