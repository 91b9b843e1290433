"""A checkpoint with quantised weights, seen as one with float weights.

Served are GPTQ, AWQ, FP8 and compressed-tensors, as config.json names them. Their weights are
turned into float32 when they are read, one at a time; the shapes are known and checked before.
Whatever would come out differently from what the checkpoint's own software computes is refused.
Scales of activations and of the KV cache are passed over: both stay float here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sapwood.runtime.checkpoint_json import field_of
from sapwood.runtime.checkpoint_tensors import TensorHeader, TensorSource, some_of
from sapwood.runtime.compressed_tensors import compressed_weights
from sapwood.runtime.dequantize import dequantize_groups, unpack_awq, unpack_bits
from sapwood.runtime.errors import ModelError, UnsupportedModelError
from sapwood.runtime.quantized_weights import (
    INDICES,
    INSTEAD,
    SCALES,
    WHERE,
    QuantizedWeight,
    Settings,
    block_size_of,
    check_whole_words,
    count_groups,
    group_of_inputs,
    group_size_of,
    modules_with,
    one_of,
    part_of,
    scaled_weight,
    unsupported,
    weight_of,
)

# Of activations, of the KV cache and of what FP8 attention would need.
_PASSED_OVER = (
    ".input_scale",
    ".input_zero_point",
    ".activation_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
)


class QuantMethod(StrEnum):
    """What config.json may name as quantization_config.quant_method."""

    GPTQ = "gptq"  # Frantar et al. 2023
    AWQ = "awq"  # Lin et al. 2024
    FP8 = "fp8"  # float8_e4m3fn, as DeepSeek-V3 and Qwen3 store it
    COMPRESSED_TENSORS = "compressed-tensors"


class FloatWeights:
    """A TensorSource of float tensors over a stored one, some of whose weights are quantised."""

    def __init__(self, stored: TensorSource, weights: Mapping[str, QuantizedWeight]) -> None:
        parts = {part for weight in weights.values() for part in weight.parts}
        headers = {
            name: header
            for name, header in stored.headers.items()
            if name not in parts and not name.endswith(_PASSED_OVER)
        }
        if twice := sorted(headers.keys() & weights.keys()):
            raise ModelError(f"the checkpoint has {some_of(twice)} both plain and quantised")
        headers |= {name: TensorHeader("F32", weight.shape) for name, weight in weights.items()}
        self._stored = stored
        self._weights = weights
        self._headers = MappingProxyType(headers)

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        return self._headers

    @property
    def num_quantized(self) -> int:
        """How many weights are computed when they are read."""
        return len(self._weights)

    def read(self, name: str) -> Tensor:
        weight = self._weights.get(name)
        return self._stored.read(name) if weight is None else weight.dequantize()

    def without_idle_biases(self, expected: Mapping[str, object]) -> FloatWeights:
        """The same without the biases that quantisers add: zeros the model has no place for."""
        modules = {name.removesuffix(".weight") for name in self._weights}
        idle = [
            name
            for name in self._headers
            if name not in expected
            and name.endswith(".bias")
            and name.removesuffix(".bias") in modules
            and not self._stored.read(name).any()
        ]
        return FloatWeights(_Without(self._stored, frozenset(idle)), self._weights)


class _Without:
    """A TensorSource without some of its tensors."""

    def __init__(self, stored: TensorSource, names: frozenset[str]) -> None:
        self._stored = stored
        self._names = names

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        return {n: header for n, header in self._stored.headers.items() if n not in self._names}

    def read(self, name: str) -> Tensor:
        return self._stored.read(name)


def quantization_settings(config: Mapping[str, Any]) -> Settings | None:
    """What a parsed config.json says of quantised weights; None for float weights."""
    for name in ("quantization_config", "compression_config"):
        settings: Settings = field_of(config, name, dict, {}, where="config.json")
        if settings:
            return settings
    return None


def quant_method(settings: Settings) -> QuantMethod:
    """Raises UnsupportedModelError for a method that is not served."""
    name = settings.get("quant_method", "an unnamed method")
    try:
        return QuantMethod(name)
    except ValueError as error:
        raise UnsupportedModelError(
            f"weights quantised by {name!s:.40} are not served; served are "
            f"{', '.join(QuantMethod)} and GGUF files, or {INSTEAD}"
        ) from error


def float_weights(stored: TensorSource, settings: Settings) -> FloatWeights:
    """The float tensors of a checkpoint that was quantised as `settings` say.

    Reads no tensor but the few that hold a shape. Raises UnsupportedModelError for settings that
    are not served and ModelError where tensors are missing or do not fit each other.
    """
    find: Mapping[QuantMethod, Callable[[TensorSource, Settings], Iterator[QuantizedWeight]]] = {
        QuantMethod.GPTQ: _gptq_weights,
        QuantMethod.AWQ: _awq_weights,
        QuantMethod.FP8: _fp8_weights,
        QuantMethod.COMPRESSED_TENSORS: compressed_weights,
    }
    weights = find[quant_method(settings)](stored, settings)
    return FloatWeights(stored, {weight.name: weight for weight in weights})


def _gptq_weights(stored: TensorSource, settings: Settings) -> Iterator[QuantizedWeight]:
    bits = one_of(settings, "bits", (2, 3, 4, 8))
    layout = settings.get("checkpoint_format", settings.get("format")) or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise unsupported("checkpoint_format", layout, "gptq or gptq_v2")
    if (word := settings.get("pack_dtype") or "int32") not in ("int32", "torch.int32"):
        raise unsupported("pack_dtype", word, "int32")
    rules = field_of(settings, "dynamic", dict, {}, where=WHERE)
    if any(not name.startswith("-") and rule for name, rule in rules.items()):
        raise unsupported("dynamic", "settings of its own for some modules", "left out")
    # The first format stores zero points less one.
    zero_offset = 1 if layout == "gptq" else 0
    group_size = group_size_of(settings)
    for module in modules_with(stored, ".qweight"):
        yield _gptq_weight(stored, module, bits, group_size, zero_offset)


def _gptq_weight(
    stored: TensorSource, module: str, bits: int, group_size: int | None, zero_offset: int
) -> QuantizedWeight:
    """qweight [I * bits / 32, O], qzeros [G, O * bits / 32], scales [G, O], g_idx [I] or none."""
    part = partial(part_of, stored, module)
    num_words, num_outputs = part("qweight", ("I32",), (None, None)).shape
    check_whole_words(f"{module}.qweight", num_words, bits)
    num_inputs = num_words * 32 // bits
    num_groups = count_groups(num_inputs, group_size)
    num_zero_words = -(-num_outputs * bits // 32)
    check_whole_words(f"{module}.qzeros", num_zero_words, bits)
    part("qzeros", ("I32",), (num_groups, num_zero_words))
    part("scales", SCALES, (num_groups, num_outputs))
    parts = ["qweight", "qzeros", "scales"]
    has_order = f"{module}.g_idx" in stored.headers
    if has_order:
        part("g_idx", INDICES, (num_inputs,))
        parts.append("g_idx")

    def dequantize() -> Tensor:
        levels = unpack_bits(stored.read(f"{module}.qweight").t(), bits)
        zeros = unpack_bits(stored.read(f"{module}.qzeros"), bits)[:, :num_outputs].t()
        scales = stored.read(f"{module}.scales").t()
        order = f"{module}.g_idx" if has_order else None
        groups = group_of_inputs(stored, order, num_inputs, num_groups, group_size)
        return dequantize_groups(levels, scales, zeros.to(torch.int16) + zero_offset, groups)

    return weight_of(module, (num_outputs, num_inputs), parts, dequantize)


def _awq_weights(stored: TensorSource, settings: Settings) -> Iterator[QuantizedWeight]:
    one_of(settings, "bits", (4,))
    version = str(settings.get("version", settings.get("format")) or "gemm").lower()
    if version != "gemm":
        raise unsupported("version", version, "gemm")
    if settings.get("zero_point", True) is not True:
        raise unsupported("zero_point", settings["zero_point"], "true")
    group_size = group_size_of(settings)
    for module in modules_with(stored, ".qweight"):
        yield _awq_weight(stored, module, group_size)


def _awq_weight(stored: TensorSource, module: str, group_size: int | None) -> QuantizedWeight:
    """qweight [I, O / 8], qzeros [G, O / 8], scales [G, O]."""
    part = partial(part_of, stored, module)
    num_inputs, num_words = part("qweight", ("I32",), (None, None)).shape
    num_outputs = num_words * 8
    num_groups = count_groups(num_inputs, group_size)
    part("qzeros", ("I32",), (num_groups, num_words))
    part("scales", SCALES, (num_groups, num_outputs))

    def dequantize() -> Tensor:
        levels = unpack_awq(stored.read(f"{module}.qweight")).t().contiguous()
        zeros = unpack_awq(stored.read(f"{module}.qzeros")).t()
        scales = stored.read(f"{module}.scales").t()
        groups = group_of_inputs(stored, None, num_inputs, num_groups, group_size)
        return dequantize_groups(levels, scales, zeros, groups)

    return weight_of(module, (num_outputs, num_inputs), ["qweight", "qzeros", "scales"], dequantize)


def _fp8_weights(stored: TensorSource, settings: Settings) -> Iterator[QuantizedWeight]:
    if (kind := settings.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise unsupported("fmt", kind, "e4m3")
    block = None
    if settings.get("weight_block_size") is not None:
        block = block_size_of("weight_block_size", settings["weight_block_size"])
    # "inv" is of what was multiplied with when quantising: both are multiplied with here.
    for scale in ("weight_scale_inv", "weight_scale"):
        for module in modules_with(stored, f".{scale}"):
            yield scaled_weight(stored, module, scale, block)
