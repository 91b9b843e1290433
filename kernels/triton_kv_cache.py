"""What is written to a KV cache and moved in it, in Triton.

The cache's layout is `[num_layers, num_blocks + 1, num_kv_heads, block_size, head_dim]`, and the
same without the last axis for scales: a block's rows of one head are one run. The last block is for
rows that only fill up a CUDA graph; it takes what nobody reads.

Keys and values are rounded as in kv_quantization.py, to the same bytes. e4m3 is made by operations
on bits, since processors before compute capability 8.9 have no conversion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood.kernels.interface import (
    QUANTIZED_KV_DTYPES,
    HeadNorms,
    KVCache,
    KVCacheSpec,
    RowCopy,
)
from sapwood.kernels.kernel_form import KernelForm, next_power_of_two
from sapwood.kernels.model_shapes import MODEL_SHAPES, ModelShape
from sapwood.kernels.specialization import Specialization
from sapwood.kernels.staging import send

_TILE_ELEMENTS = 2048  # of heads that one program takes at most
_WORD = torch.int32  # what copies move: rows are a multiple of 4 bytes long
_COPY_BLOCK = 1024  # words a program moves at a time: two loads of 16 bytes for each of 128 threads

_TYPES = MappingProxyType(  # Triton's names; e4m3 is stored as bytes
    {
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.int8: "i8",
        torch.float8_e4m3fn: "u8",
    }
)

_SMALLEST_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def _int8(x: tl.tensor) -> tl.tensor:
    """|x| <= 127 to the nearest integer, ties to even: the low bits of a sum with 1.5 * 2^23."""
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _e4m3(x: tl.tensor) -> tl.tensor:
    """The byte of the nearest e4m3 number to |x| <= 448, ties to even.

    From 2^-6 on that is a float32's exponent, with another bias, and three bits of its mantissa;
    below, a multiple of 2^-9, which a sum with 2^14 has in its low bits.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(tl.abs(x) < 0.015625, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _store_rows(
    kept: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    x: tl.tensor,
    dims: tl.tensor,
    HEAD_DIM: tl.constexpr,
    IS_INT8: tl.constexpr,
    IS_E4M3: tl.constexpr,
) -> None:
    """Keep x float32 [heads, dims], 0 beyond each, as the rows `row` int64 [heads] of the cache."""
    target = kept + row[:, None] * HEAD_DIM + dims[None, :]
    inside = (dims < HEAD_DIM)[None, :]
    if IS_INT8 or IS_E4M3:
        largest: tl.constexpr = 127.0 if IS_INT8 else 448.0
        is_finite = tl.abs(x) < float("inf")  # and not NaN, which a maximum may pass over
        magnitude = tl.max(tl.where(is_finite, tl.abs(x), 0.0), axis=1)
        scale = tl.maximum(tl.div_rn(magnitude, largest), _SMALLEST_SCALE)
        scale = tl.where(tl.min(is_finite.to(tl.int32), axis=1) > 0, scale, float("nan"))
        scaled = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        tl.store(target, _int8(scaled) if IS_INT8 else _e4m3(scaled), mask=inside)
        tl.store(scales + row, scale)
    else:
        tl.store(target, x.to(kept.dtype.element_ty), mask=inside)


@triton.jit
def _rows_of_slot(
    slots: tl.tensor,
    token: tl.tensor,
    first_block: tl.tensor,
    head: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """The cache's rows, int64, of a token's heads; `first_block` is the layer's."""
    slot = tl.load(slots + token)
    block = first_block + slot // BLOCK_SIZE
    return (block * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE


@triton.jit
def _turned(
    x: tl.tensor,
    row: tl.tensor,
    norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    token: tl.tensor,
    dims: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> tl.tensor:
    """x float32 [heads, dims], which lies at `row`, normed and turned by its token's angles.

    Each dimension takes its cosine and its partner's sine; the partner is read again, from the
    cache lines that have just been read.
    """
    half: tl.constexpr = ROTARY_DIM // 2
    partner = tl.where(dims < half, dims + half, tl.where(dims < ROTARY_DIM, dims - half, dims))
    # What all heads share is loaded for each head, so that it comes in the layout of x: from the
    # nearest cache and without an exchange between threads.
    dims = tl.broadcast_to(dims[None, :], x.shape)
    partner = tl.broadcast_to(partner[None, :], x.shape)
    other = tl.load(row + partner, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        weight = tl.load(norm + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        other_weight = tl.load(norm + partner, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        x = x * scale * weight
        other = other * scale * other_weight
    angle = token * ROTARY_DIM + dims
    cosine = tl.load(cos + angle, mask=dims < ROTARY_DIM, other=1.0)
    sine = tl.load(sin + angle, mask=dims < ROTARY_DIM, other=0.0)
    return x * cosine + other * sine


@triton.jit(do_not_specialize=["first_block"])
def _rotary_and_write(
    heads: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    slots: tl.tensor,
    token_stride: tl.tensor,
    first_block: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    IS_INT8: tl.constexpr,
    IS_E4M3: tl.constexpr,
) -> None:
    """A token's heads, TILE at a time: all of a tile are queries, keys or values.

    Without KV heads it turns queries only.
    """
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    head = first + tl.arange(0, TILE)
    dims = tl.arange(0, DIM_BLOCK)
    inside = (dims < HEAD_DIM)[None, :]
    row = heads + token * token_stride + head[:, None] * HEAD_DIM
    x = tl.load(row + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    if first < NUM_HEADS:
        x = _turned(x, row, query_norm, cos, sin, token, dims, eps, HEAD_DIM, ROTARY_DIM, HAS_NORMS)
        target = query + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(target, x.to(query.dtype.element_ty), mask=inside)
    elif NUM_KV_HEADS > 0:
        kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
        kept = _rows_of_slot(slots, token, first_block, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
        if first < NUM_HEADS + NUM_KV_HEADS:
            x = _turned(
                x, row, key_norm, cos, sin, token, dims, eps, HEAD_DIM, ROTARY_DIM, HAS_NORMS
            )
            _store_rows(keys, key_scales, kept, x, dims, HEAD_DIM, IS_INT8, IS_E4M3)
        else:
            _store_rows(values, value_scales, kept, x, dims, HEAD_DIM, IS_INT8, IS_E4M3)


@triton.jit(do_not_specialize=["first_block"])
def _write_kv(
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    slots: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    first_block: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    IS_INT8: tl.constexpr,
    IS_E4M3: tl.constexpr,
) -> None:
    """A token's keys and values, TILE heads of each at a time."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, DIM_BLOCK)
    inside = (dims < HEAD_DIM)[None, :]
    at = head[:, None] * HEAD_DIM + dims[None, :]
    kept = _rows_of_slot(slots, token, first_block, head, NUM_KV_HEADS, BLOCK_SIZE)
    k = tl.load(key + token * key_stride + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(value + token * value_stride + at, mask=inside, other=0.0).to(tl.float32)
    _store_rows(keys, key_scales, kept, k, dims, HEAD_DIM, IS_INT8, IS_E4M3)
    _store_rows(values, value_scales, kept, v, dims, HEAD_DIM, IS_INT8, IS_E4M3)


@triton.jit
def _copy_runs(
    keys: tl.tensor,
    values: tl.tensor,
    copies: tl.tensor,
    layer_stride: tl.tensor,
    block_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The first rows of one block, in one layer and of one head, keys and values, to another block.

    `copies` int32 [n, 3] are source block, target block and rows. Strides are in words; a block
    has its heads' runs behind each other.
    """
    copy = copies + tl.program_id(0) * 3
    layer = (tl.program_id(1) // NUM_KV_HEADS).to(tl.int64)
    head = tl.program_id(1) % NUM_KV_HEADS
    runs = layer * layer_stride + head * (BLOCK_SIZE * ROW_WORDS)
    source = runs + tl.load(copy) * block_stride.to(tl.int64)
    target = runs + tl.load(copy + 1) * block_stride.to(tl.int64)
    num_words = tl.load(copy + 2) * ROW_WORDS
    for start in range(0, BLOCK_SIZE * ROW_WORDS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < num_words
        key = tl.load(keys + source + at, mask=inside)
        value = tl.load(values + source + at, mask=inside)
        tl.store(keys + target + at, key, mask=inside)
        tl.store(values + target + at, value, mask=inside)


def rotary_and_write(
    heads: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    kv: KVCache,
    layer: int,
    slots: Tensor,
    *,
    norms: HeadNorms | None = None,
) -> Tensor:
    """`Kernels.rotary_and_write`: one launch, in which each head is read once and written once."""
    num_kv_heads, head_dim = kv.spec.num_kv_heads, kv.spec.head_dim
    heads = _with_whole_rows(heads)
    query = torch.empty((len(heads), num_heads, head_dim), dtype=heads.dtype, device=heads.device)
    form = _rotary_form(
        num_heads, num_kv_heads, head_dim, cos.shape[-1], has_norms=norms is not None, kv=kv.spec
    )
    _rotary_and_write[(len(heads), heads.shape[1] // form.constants["TILE"])](
        heads,
        cos,
        sin,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        query,
        *kept_bytes(kv),
        slots,
        heads.stride(0),
        layer * kv.keys.shape[1],
        0.0 if norms is None else norms.eps,
        **form.constants,
        **form.options,
    )
    return query


def rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`Kernels.rotary`."""
    heads = _with_whole_rows(heads)
    num_heads, head_dim = heads.shape[1:]
    turned = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    form = _rotary_form(num_heads, 0, head_dim, cos.shape[-1], has_norms=False, kv=None)
    _rotary_and_write[(len(heads), num_heads // form.constants["TILE"])](
        *(heads, cos, sin, None, None, turned, None, None, None, None, None),
        *(heads.stride(0), 0, 0.0),
        **form.constants,
        **form.options,
    )
    return turned


def write_kv(kv: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """`Kernels.write_kv`."""
    key, value = _with_whole_rows(key), _with_whole_rows(value)
    form = _write_form(kv.spec)
    _write_kv[(len(slots), kv.spec.num_kv_heads // form.constants["TILE"])](
        key,
        value,
        *kept_bytes(kv),
        slots,
        key.stride(0),
        value.stride(0),
        layer * kv.keys.shape[1],
        **form.constants,
        **form.options,
    )


def copy_rows(kv: KVCache, copies: Sequence[RowCopy]) -> None:
    """`Kernels.copy_rows`: all copies in all layers are one launch, scales are a second."""
    if not copies:
        return
    spec = kv.spec
    sent = send({"copies": np.array(copies, np.int32)}, spec.device)
    words = [tensor.view(_WORD) for tensor in kv.tensors]
    pairs = zip(words[::2], words[1::2], strict=True)  # keys and values, then their scales
    for (keys, values), row_words in zip(pairs, _row_words(spec), strict=True):
        form = _copy_form(spec, row_words)
        _copy_runs[(len(copies), spec.num_layers * spec.num_kv_heads)](
            keys,
            values,
            sent["copies"],
            keys.stride(0),
            keys.stride(1),
            **form.constants,
            **form.options,
        )


def kept_bytes(kv: KVCache) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys, values and their scales, e4m3 as bytes: not all of Triton's targets know the type."""
    keys, values = kv.keys, kv.values
    if keys.dtype == torch.float8_e4m3fn:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    return keys, values, kv.key_scales, kv.value_scales


def specializations() -> Iterator[Specialization]:
    """The forms that MODEL_SHAPES are launched in, with keys and values kept in each dtype.

    Copies move words, so that they are the same for all dtypes of a size.
    """
    for shape in MODEL_SHAPES:
        for dtype in (torch.bfloat16, torch.float16):
            for kept in (dtype, *QUANTIZED_KV_DTYPES):
                yield from _write_specializations(shape, dtype, _example_spec(shape, kept))
        yield _rotary_form(
            *(shape.num_heads, 0, shape.head_dim, shape.rotary_dim), has_norms=False, kv=None
        ).specialization(
            f"rotary-{shape.name}-bf16",
            _rotary_and_write,
            {
                **dict.fromkeys(("heads", "query"), "*bf16"),
                **dict.fromkeys(("cos", "sin"), "*fp32"),
                "token_stride": "i32:16",
                "first_block": "i32",
                "eps": "fp32",
            },
        )
        for kept in (torch.bfloat16, torch.int8):
            yield from _copy_specializations(shape, _example_spec(shape, kept))


def _write_specializations(
    shape: ModelShape, dtype: torch.dtype, spec: KVCacheSpec
) -> Iterator[Specialization]:
    name = f"{shape.name}-{_TYPES[dtype]}-kept-in-{_TYPES[spec.dtype]}"
    activations, kept = f"*{_TYPES[dtype]}", f"*{_TYPES[spec.dtype]}"
    cache = {"keys": kept, "values": kept, "slots": "*i64", "first_block": "i32"}
    if spec.is_quantized:
        cache |= {"key_scales": "*fp32", "value_scales": "*fp32"}
    norms = {"query_norm": activations, "key_norm": activations} if shape.has_head_norms else {}
    yield _rotary_form(
        *(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.rotary_dim),
        has_norms=shape.has_head_norms,
        kv=spec,
    ).specialization(
        f"rotary-and-write-{name}",
        _rotary_and_write,
        {
            "heads": activations,
            "cos": "*fp32",
            "sin": "*fp32",
            "query": activations,
            "token_stride": "i32:16",
            "eps": "fp32",
            **cache,
            **norms,
        },
    )
    yield _write_form(spec).specialization(
        f"write-kv-{name}",
        _write_kv,
        {
            "key": activations,
            "value": activations,
            "key_stride": "i32:16",
            "value_stride": "i32:16",
            **cache,
        },
    )


def _copy_specializations(shape: ModelShape, spec: KVCacheSpec) -> Iterator[Specialization]:
    for row_words in _row_words(spec):
        what = "scales" if row_words == 1 else f"rows-of-{4 * row_words}-bytes"
        yield _copy_form(spec, row_words).specialization(
            f"copy-{what}-{shape.name}",
            _copy_runs,
            {
                **dict.fromkeys(("keys", "values", "copies"), "*i32"),
                **dict.fromkeys(("layer_stride", "block_stride"), "i32:16"),
            },
        )


def _example_spec(shape: ModelShape, kept: torch.dtype) -> KVCacheSpec:
    return KVCacheSpec(
        num_layers=1,
        num_blocks=1,
        block_size=16,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=kept,
        device=torch.device("cpu"),
    )


def _rotary_form(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    *,
    has_norms: bool,
    kv: KVCacheSpec | None,
) -> KernelForm:
    tile = _tile(math.gcd(num_heads, num_kv_heads), head_dim)
    return KernelForm(
        {
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "ROTARY_DIM": rotary_dim,
            "BLOCK_SIZE": 1 if kv is None else kv.block_size,
            "TILE": tile.heads,
            "DIM_BLOCK": tile.dims,
            "HAS_NORMS": has_norms,
            "IS_INT8": kv is not None and kv.dtype == torch.int8,
            "IS_E4M3": kv is not None and kv.dtype == torch.float8_e4m3fn,
        },
        tile.num_warps,
    )


def _write_form(spec: KVCacheSpec) -> KernelForm:
    tile = _tile(spec.num_kv_heads, spec.head_dim)
    return KernelForm(
        {
            "NUM_KV_HEADS": spec.num_kv_heads,
            "HEAD_DIM": spec.head_dim,
            "BLOCK_SIZE": spec.block_size,
            "TILE": tile.heads,
            "DIM_BLOCK": tile.dims,
            "IS_INT8": spec.dtype == torch.int8,
            "IS_E4M3": spec.dtype == torch.float8_e4m3fn,
        },
        tile.num_warps,
    )


def _copy_form(spec: KVCacheSpec, row_words: int) -> KernelForm:
    run_words = spec.block_size * row_words
    return KernelForm(
        {
            "NUM_KV_HEADS": spec.num_kv_heads,
            "BLOCK_SIZE": spec.block_size,
            "ROW_WORDS": row_words,
            "BLOCK": min(_COPY_BLOCK, next_power_of_two(run_words)),
        },
        num_warps=4,
    )


class _Tile(NamedTuple):
    """The heads that one program works on, and the size of one, in powers of two."""

    heads: int
    dims: int

    @property
    def num_warps(self) -> int:
        """A thread has 8 elements, one load of 16 bytes in half precision."""
        return min(8, max(1, self.heads * self.dims // 256))


def _tile(num_heads: int, head_dim: int) -> _Tile:
    """For groups of `num_heads` heads, each of which is cut into whole tiles."""
    dims = next_power_of_two(head_dim)
    largest_divisor = num_heads & -num_heads  # that is a power of two
    return _Tile(min(largest_divisor, max(1, _TILE_ELEMENTS // dims)), dims)


def _row_words(spec: KVCacheSpec) -> list[int]:
    """Words of a head's row, and of its scale if there are any."""
    row_bytes = spec.head_dim * spec.dtype.itemsize
    return [row_bytes // _WORD.itemsize, *([1] if spec.is_quantized else [])]


def _with_whole_rows(heads: Tensor) -> Tensor:
    """heads [T, H, D] with a token's heads behind each other; tokens any stride apart."""
    is_whole = heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
    return heads if is_whole else heads.contiguous()
