"""A .gguf file's metadata and its tensors, still quantised and mapped from disk.

The format is that of ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian. The file may
come from anywhere: every length is compared with what is left of the file before it is used.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sapwood.runtime.errors import ModelError, UnsupportedModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
# Ten times what the largest vocabulary takes. What is read of it becomes Python objects.
_MAX_HEADER_BYTES = 2**27
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6
# By the format's number for each kind of value: numpy's name of it.
_SCALARS = MappingProxyType(
    {
        0: "<u1",
        1: "<i1",
        2: "<u2",
        3: "<i2",
        4: "<u4",
        5: "<i4",
        6: "<f4",
        7: "<?",
        10: "<u8",
        11: "<i8",
        12: "<f8",
    }
)


class GgufTensor(NamedTuple):
    """A stored tensor: shape with the longest stride first, and its rows' bytes [..., bytes]."""

    name: str
    shape: tuple[int, ...]
    kind: int  # gguf.GGMLQuantizationType
    data: NDArray[np.uint8]

    def floats(self) -> NDArray[np.float32]:
        """Dequantised, of `shape`. Raises UnsupportedModelError for a kind nobody dequantises."""
        # The library takes a quarter of a second to import.
        from gguf import GGMLQuantizationType, dequantize

        kind = GGMLQuantizationType(self.kind)
        try:
            dense = dequantize(self.data, kind)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{self.name} is stored as {kind.name}, which is not served"
            ) from error
        return np.asarray(dense, dtype=np.float32).reshape(self.shape)

    def part(self, index: int) -> GgufTensor:
        """The tensor at `index` of the first dimension."""
        return self._replace(shape=self.shape[1:], data=self.data[index])


class GgufFile(NamedTuple):
    """What a file holds. Strings are str, numbers int or float, arrays lists of those."""

    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of `path`; tensors are mapped. Costs a Python step for each string in it.

    Raises ModelError for a file that is not a whole GGUF, UnsupportedModelError for one that is
    split over several files.
    """
    try:
        with open(path, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        found = _read(_Cursor(content))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
    if found.metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedModelError(
            f"{path.name} is one of {found.metadata['split.count']} parts; join them first with "
            "llama.cpp's llama-gguf-split --merge"
        )
    return found


class _Cursor:
    """Where in a mapped file the next value begins. Raises ValueError past the end."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.offset = 0

    def take(self, size: int) -> int:
        """Step over `size` bytes and return where they begin."""
        start = self.offset
        if size > len(self.content) - start:
            raise ValueError(f"it ends before the {size} bytes at offset {start}")
        if start + size > _MAX_HEADER_BYTES:
            raise ValueError(f"its header is longer than {_MAX_HEADER_BYTES} bytes")
        self.offset += size
        return start

    def integer(self, kind: str) -> int:
        layout = struct.Struct(f"<{kind}")
        value: int = layout.unpack_from(self.content, self.take(layout.size))[0]
        return value

    def string(self) -> str:
        size = self.integer("Q")
        start = self.take(size)
        return self.content[start : start + size].decode("utf-8")

    def numbers(self, dtype: np.dtype[Any], count: int) -> list[Any]:
        start = self.take(dtype.itemsize * count)
        found: list[Any] = np.frombuffer(self.content, dtype, count, start).tolist()
        return found


def _read(cursor: _Cursor) -> GgufFile:
    start = cursor.take(4)
    if cursor.content[start : start + 4] != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    if (version := cursor.integer("I")) not in _VERSIONS:
        raise ValueError(f"its version is {version}; read are {' and '.join(map(str, _VERSIONS))}")
    num_tensors, num_values = cursor.integer("Q"), cursor.integer("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        name = cursor.string()
        if name in metadata:
            raise ValueError(f"it has {name!r:.80} twice")
        metadata[name] = _value(cursor, cursor.integer("I"))
    stored = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"its alignment is {alignment!r:.40}, not a power of two")
    begin = cursor.offset + -cursor.offset % alignment
    tensors = tuple(_tensor(cursor.content, begin, info) for info in stored)
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise ValueError("it has two tensors of one name")
    return GgufFile(MappingProxyType(metadata), tensors)


def _value(cursor: _Cursor, kind: int) -> Any:
    if kind == _STRING:
        return cursor.string()
    if kind == _ARRAY:
        return _array(cursor)
    value = cursor.numbers(_dtype(kind), 1)[0]
    # The shortest decimal that reads back as the same float32, as config.json would have it.
    return float(str(np.float32(value))) if kind == _FLOAT32 else value


def _array(cursor: _Cursor) -> list[Any]:
    kind, length = cursor.integer("I"), cursor.integer("Q")
    if kind == _STRING:
        return [cursor.string() for _ in range(length)]
    return cursor.numbers(_dtype(kind), length)


def _dtype(kind: int) -> np.dtype[Any]:
    if kind not in _SCALARS:
        raise ValueError(f"it has a value of the unknown kind {kind}")
    return np.dtype(_SCALARS[kind])


class _TensorInfo(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int  # bytes from the beginning of the tensors


def _tensor_info(cursor: _Cursor) -> _TensorInfo:
    name = cursor.string()
    num_dimensions = cursor.integer("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"{name!r:.80} has {num_dimensions} dimensions")
    sizes = [cursor.integer("Q") for _ in range(num_dimensions)]
    return _TensorInfo(name, tuple(reversed(sizes)), cursor.integer("I"), cursor.integer("Q"))


def _tensor(content: mmap.mmap, begin: int, info: _TensorInfo) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block_len, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.kind)]
    if info.shape[-1] % block_len or min(info.shape) < 1:
        raise ValueError(f"{info.name!r:.80} of shape {list(info.shape)} is not whole blocks")
    row_bytes = info.shape[-1] // block_len * block_bytes
    num_bytes = math.prod(info.shape[:-1]) * row_bytes
    start = begin + info.offset
    if start + num_bytes > len(content):
        raise ValueError(f"it ends before the end of {info.name!r:.80}")
    data = np.frombuffer(content, np.uint8, num_bytes, start)
    return GgufTensor(info.name, info.shape, info.kind, data.reshape(*info.shape[:-1], row_bytes))
