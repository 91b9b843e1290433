"""Weights as the library compressed-tensors stores them (llm-compressor, Red Hat's checkpoints).

One scheme for all quantised modules: float8 with scales, int8 with scales, or 2, 4 and 8 bits
packed into words. The library's other layouts are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from torch import Tensor

from sapwood.runtime.checkpoint_json import field_of
from sapwood.runtime.checkpoint_tensors import TensorSource
from sapwood.runtime.dequantize import dequantize_groups, unpack_bits
from sapwood.runtime.errors import ModelError
from sapwood.runtime.quantized_weights import (
    INDICES,
    SCALES,
    WHERE,
    QuantizedWeight,
    Settings,
    as_rows,
    block_size_of,
    count_groups,
    group_of_inputs,
    group_size_of,
    misshapen,
    modules_with,
    one_of,
    part_of,
    rows_shape,
    scaled_weight,
    unsupported,
    weight_of,
)


class _Strategy(StrEnum):
    """What one scale of a compressed-tensors weight is for."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    GROUP = "group"
    BLOCK = "block"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheme:
    """How the weights are stored. `block` is for blocks, `group_size` and `is_ordered` for groups:
    ordered are inputs that name their groups instead of lying in them one after another."""

    num_bits: int
    is_float: bool
    is_symmetric: bool
    is_ordered: bool
    strategy: _Strategy
    group_size: int | None
    block: tuple[int, int] | None


def compressed_weights(stored: TensorSource, settings: Settings) -> Iterator[QuantizedWeight]:
    """The quantised weights of a checkpoint. Raises as `quantized_checkpoint.float_weights`."""
    for name in ("sparsity_config", "transform_config"):
        extra = field_of(settings, name, dict, {}, where=WHERE)
        if extra and extra.get("format") != "dense":
            raise unsupported(name, "set", "left out")
    for layout, scheme in _layouts(settings):
        match layout:
            case "pack-quantized" if not scheme.is_float:
                find, suffix = _packed_weight, ".weight_packed"
            case "float-quantized" | "naive-quantized" if scheme.is_float:
                find, suffix = _float_weight, ".weight_scale"
            case "int-quantized" | "naive-quantized" if scheme.num_bits == 8:
                find, suffix = _int_weight, ".weight_scale"
            case _:
                served = "pack-quantized, int-quantized, float-quantized or naive-quantized"
                raise unsupported(f"format of {scheme.num_bits} bits", layout, served)
        for module in modules_with(stored, suffix):
            yield find(stored, module, scheme)


def _layouts(settings: Settings) -> set[tuple[str, _Scheme]]:
    """Format and scheme of the weights: one, or none where no weights are quantised."""
    found: set[tuple[str, _Scheme]] = set()
    for name, group in field_of(settings, "config_groups", dict, {}, where=WHERE).items():
        if not isinstance(group, dict):
            raise unsupported(f"config_groups.{name}", group, "an object")
        if group.get("weights") is not None:
            layout = str(group.get("format") or settings.get("format"))
            found.add((layout, _scheme(field_of(group, "weights", dict, where=WHERE))))
    if len(found) > 1:
        raise unsupported("config_groups", "several ways to store weights", "one way for all")
    return found


def _scheme(weights: Mapping[str, Any]) -> _Scheme:
    where = f"{WHERE}: weights"
    kind = field_of(weights, "type", str, "int", where=where)
    num_bits = one_of(weights, "num_bits", (8,) if kind == "float" else (2, 4, 8))
    if kind not in ("int", "float"):
        raise unsupported("weights.type", kind, "int or float")
    try:
        strategy = _Strategy(field_of(weights, "strategy", str, where=where))
    except ValueError as error:
        strategies = ", ".join(_Strategy)
        raise unsupported("weights.strategy", weights["strategy"], strategies) from error
    block = group_size = None
    if strategy is _Strategy.BLOCK:
        block = block_size_of("block_structure", weights.get("block_structure"))
    if strategy is _Strategy.GROUP:
        group_size = group_size_of(weights)
    return _Scheme(
        num_bits=num_bits,
        is_float=kind == "float",
        is_symmetric=field_of(weights, "symmetric", bool, True, where=where),
        is_ordered=weights.get("actorder") == "group",
        strategy=strategy,
        group_size=group_size,
        block=block,
    )


def _float_weight(stored: TensorSource, module: str, scheme: _Scheme) -> QuantizedWeight:
    """weight float8 [O, I], weight_scale of one value, [O, 1], [O, G] or one for each block."""
    block = scheme.block
    if scheme.strategy is _Strategy.GROUP:
        block = (1, scheme.group_size) if scheme.group_size else None
    return scaled_weight(stored, module, "weight_scale", block)


def _int_weight(stored: TensorSource, module: str, scheme: _Scheme) -> QuantizedWeight:
    """weight int8 [O, I], weight_scale [O, G] and weight_zero_point [O, G], if not symmetric."""
    num_outputs, num_inputs = part_of(stored, module, "weight", ("I8",), (None, None)).shape
    parts, groups = _group_parts(stored, module, scheme, num_outputs, num_inputs)
    has_zeros = not scheme.is_symmetric or f"{module}.weight_zero_point" in stored.headers
    if has_zeros:
        scale = stored.headers[f"{module}.weight_scale"]
        part_of(stored, module, "weight_zero_point", ("I8",), scale.shape)
        parts.append("weight_zero_point")

    def dequantize() -> Tensor:
        zeros: Tensor | int = 0
        if has_zeros:
            zeros = as_rows(stored.read(f"{module}.weight_zero_point"), num_outputs)
        scales = as_rows(stored.read(f"{module}.weight_scale"), num_outputs)
        return dequantize_groups(stored.read(f"{module}.weight"), scales, zeros, groups())

    return weight_of(module, (num_outputs, num_inputs), ["weight", *parts], dequantize)


def _packed_weight(stored: TensorSource, module: str, scheme: _Scheme) -> QuantizedWeight:
    """weight_packed [O, I * bits / 32], weight_scale [O, G], weight_shape = (O, I) and, where
    asymmetric, weight_zero_point packed along its rows: [O * bits / 32, G]."""
    bits = scheme.num_bits
    num_outputs, num_words = part_of(stored, module, "weight_packed", ("I32",), (None, None)).shape
    part_of(stored, module, "weight_shape", INDICES, (2,))
    shape = tuple(stored.read(f"{module}.weight_shape").tolist())
    num_inputs = shape[1]
    if shape[0] != num_outputs or num_inputs < 1 or -(-num_inputs * bits // 32) != num_words:
        raise ModelError(
            f"{module}.weight_shape is {list(shape)}, and {module}.weight_packed holds "
            f"[{num_outputs}, {num_words * 32 // bits}]; fetch the checkpoint again"
        )
    parts, groups = _group_parts(stored, module, scheme, num_outputs, num_inputs)
    if not scheme.is_symmetric:
        num_groups = rows_shape(stored.headers[f"{module}.weight_scale"].shape)[1]
        num_zero_words = -(-num_outputs * bits // 32)
        part_of(stored, module, "weight_zero_point", ("I32",), (num_zero_words, num_groups))
        parts.append("weight_zero_point")

    def dequantize() -> Tensor:
        levels = unpack_bits(stored.read(f"{module}.weight_packed"), bits)[:, :num_inputs]
        # Stored are levels and zero points from 0 up, half the range more than they stand for.
        zeros: Tensor | int = 1 << (bits - 1)
        if not scheme.is_symmetric:
            packed = stored.read(f"{module}.weight_zero_point")
            zeros = unpack_bits(packed.t(), bits).t()[:num_outputs]
        scales = as_rows(stored.read(f"{module}.weight_scale"), num_outputs)
        return dequantize_groups(levels, scales, zeros, groups())

    parts = ["weight_packed", "weight_shape", *parts]
    return weight_of(module, (num_outputs, num_inputs), parts, dequantize)


def _group_parts(
    stored: TensorSource, module: str, scheme: _Scheme, num_outputs: int, num_inputs: int
) -> tuple[list[str], Callable[[], Tensor]]:
    """The checked names of a module's scales and order, and the function for inputs' groups."""
    if scheme.strategy is _Strategy.BLOCK:
        raise unsupported("weights.strategy", "block", "tensor, channel or group here")
    header = part_of(stored, module, "weight_scale", SCALES, None)
    num_groups = count_groups(num_inputs, scheme.group_size)
    rows = 1 if scheme.strategy is _Strategy.TENSOR else num_outputs
    if rows_shape(header.shape) != (rows, num_groups):
        raise misshapen(f"{module}.weight_scale", header.shape, (rows, num_groups))
    parts = ["weight_scale"]
    order = None
    if scheme.is_ordered or f"{module}.weight_g_idx" in stored.headers:
        order = f"{module}.weight_g_idx"
        part_of(stored, module, "weight_g_idx", INDICES, (num_inputs,))
        parts.append("weight_g_idx")
    groups = partial(group_of_inputs, stored, order, num_inputs, num_groups, scheme.group_size)
    return parts, groups
