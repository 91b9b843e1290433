"""What the formats of quantised checkpoints share: a weight and the stored tensors it comes from.

Every header is checked here before anything is read, so that no size in a file or in config.json
makes room for more than the file holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sapwood.runtime.checkpoint_json import field_of
from sapwood.runtime.checkpoint_tensors import FLOATS, TensorHeader, TensorSource
from sapwood.runtime.dequantize import dequantize_blocks, words_per_period
from sapwood.runtime.errors import ModelError, UnsupportedModelError

WHERE = "config.json: quantization_config"
INSTEAD = "load the model's float weights"
SCALES = (*FLOATS, "F8_E8M0")
INDICES = ("I32", "I64")

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """One weight that is computed when it is read.

    `parts` are the stored tensors whose place it takes, `dequantize` reads them and returns
    float32 of `shape`.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    dequantize: Callable[[], Tensor]


def weight_of(
    module: str, shape: tuple[int, int], parts: list[str], dequantize: Callable[[], Tensor]
) -> QuantizedWeight:
    return QuantizedWeight(
        name=f"{module}.weight",
        shape=shape,
        parts=tuple(f"{module}.{part}" for part in parts),
        dequantize=dequantize,
    )


def scaled_weight(
    stored: TensorSource,
    module: str,
    scale_name: str,
    block: tuple[int, int] | None,
) -> QuantizedWeight:
    """weight float8 [O, I] times a scale for all of it, for each row or for each block."""
    num_outputs, num_inputs = part_of(stored, module, "weight", ("F8_E4M3",), (None, None)).shape
    scale_shape = rows_shape(part_of(stored, module, scale_name, SCALES, None).shape)
    if scale_shape == (1, 1):
        block = (num_outputs, num_inputs)
    elif block is None:
        block = (1, num_inputs)
    expected = (-(-num_outputs // block[0]), -(-num_inputs // block[1]))
    if scale_shape != expected:
        raise misshapen(f"{module}.{scale_name}", scale_shape, expected)

    def dequantize() -> Tensor:
        scales = stored.read(f"{module}.{scale_name}").reshape(expected)
        return dequantize_blocks(stored.read(f"{module}.weight"), scales, block)

    return weight_of(module, (num_outputs, num_inputs), ["weight", scale_name], dequantize)


def modules_with(stored: TensorSource, suffix: str) -> list[str]:
    """The modules that have a tensor of that suffix."""
    return [name.removesuffix(suffix) for name in stored.headers if name.endswith(suffix)]


def part_of(
    stored: TensorSource,
    module: str,
    part: str,
    dtypes: tuple[str, ...],
    shape: tuple[int | None, ...] | None,
) -> TensorHeader:
    """The checked header of a module's tensor. None in `shape` is any positive size."""
    name = f"{module}.{part}"
    header = stored.headers.get(name)
    if header is None:
        raise ModelError(f"the checkpoint has a quantised {module} and lacks {name}")
    if header.dtype not in dtypes:
        raise UnsupportedModelError(
            f"the checkpoint has {name} as {header.dtype}; served is {', '.join(dtypes)}"
        )
    if shape is not None:
        fits = len(shape) == len(header.shape) and all(
            size > 0 if wanted is None else size == wanted
            for size, wanted in zip(header.shape, shape, strict=True)
        )
        if not fits:
            raise misshapen(name, header.shape, shape)
    return header


def rows_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape [rows, columns] of scales that may be written as [], [rows] or [rows, columns]."""
    return (*shape, 1, 1)[:2] if len(shape) < 2 else shape


def as_rows(values: Tensor, num_outputs: int) -> Tensor:
    """[num_outputs, num_groups] of what may be written as [], [1] or [num_outputs]."""
    return values.reshape(rows_shape(tuple(values.shape))).expand(num_outputs, -1)


def group_of_inputs(
    stored: TensorSource, order: str | None, num_inputs: int, num_groups: int, size: int | None
) -> Tensor:
    """Each input's group, int64 [num_inputs]: as the tensor `order` says, else in their order."""
    in_order = torch.arange(num_inputs) // (size or num_inputs)
    if order is None:
        return in_order
    groups = stored.read(order).to(torch.int64)
    if (groups == -1).all():  # how an order that is not used is written
        return in_order
    if groups.min() < 0 or groups.max() >= num_groups:
        raise ModelError(
            f"{order} names groups {int(groups.min())} to {int(groups.max())}, and there are "
            f"0 to {num_groups - 1}; fetch the checkpoint again"
        )
    return groups


def count_groups(num_inputs: int, group_size: int | None) -> int:
    return 1 if group_size is None else -(-num_inputs // group_size)


def group_size_of(settings: Settings) -> int | None:
    """How many inputs share a scale; None for all of them."""
    size = field_of(settings, "group_size", int, where=WHERE)
    if size != -1 and size < 1:
        raise unsupported("group_size", size, "-1 or positive")
    return None if size == -1 else size


def block_size_of(name: str, value: Any) -> tuple[int, int]:
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise unsupported(name, value, "two positive sizes")


def one_of(settings: Settings, name: str, served: tuple[int, ...]) -> int:
    value = field_of(settings, name, int, where=WHERE)
    if value not in served:
        raise unsupported(name, value, " or ".join(map(str, served)))
    return value


def check_whole_words(name: str, num_words: int, bits: int) -> None:
    if num_words % words_per_period(bits):
        raise ModelError(
            f"{name} has {num_words} words of {bits}-bit values; they come in multiples of "
            f"{words_per_period(bits)}"
        )


def misshapen(name: str, shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> ModelError:
    sizes = ", ".join("any" if size is None else str(size) for size in wanted)
    return ModelError(
        f"the checkpoint has {name} of shape {list(shape)} where [{sizes}] was expected; "
        "fetch it again"
    )


def unsupported(name: str, value: object, served: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{WHERE}: {name} is {value!s:.80}; served is {served}; {INSTEAD}")
