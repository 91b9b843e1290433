"""Claims about what is written to a KV cache, moved in it and kept of it.

Kept rows are read back from both layouts that backends have: by slots, and by blocks and heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sapwood.kernels.interface import (
    QUANTIZED_KV_DTYPES,
    HeadNorms,
    Kernels,
    KVCache,
    KVCacheSpec,
    RowCopy,
)
from sapwood.kernels.kv_quantization import LARGEST_CODE, decode, encode
from tests.kernels.claims import DTYPES, TOLERANCE, Subject, assert_close, claim
from tests.kernels.steps import LAYER, NUM_LAYERS, SCALE, Edge, Step, Tail, make_step

# Rows from about 1e-3 to 30: each has a scale of its own.
ROW_SIZES = (1e-3, 0.1, 1.0, 30.0)


class Kept(NamedTuple):
    """Rows of one layer as the cache has them: [n, Hkv, D], scales [n, Hkv] or None."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None


def kept_rows(kv: KVCache, slots: Tensor, layer: int = LAYER) -> Kept:
    def rows(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        # Bytes are compared, and not all of torch's operations know e4m3.
        of_layer = tensor[layer].view(torch.uint8) if tensor.itemsize == 1 else tensor[layer]
        is_by_block = kv.keys.dim() == 5
        by_slot = of_layer.transpose(1, 2).flatten(0, 1) if is_by_block else of_layer
        return by_slot[slots]

    keys, values = rows(kv.keys), rows(kv.values)
    assert keys is not None and values is not None
    return Kept(keys, values, rows(kv.key_scales), rows(kv.value_scales))


def exact_rows(codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What is kept, float64."""
    return (codes if scales is None else decode(codes.view(dtype), scales)).double()


def keeping(kernels: Kernels, kv_dtype: torch.dtype) -> Kernels:
    """The backend with keys and values in `kv_dtype`; itself for those that need no scales."""
    if kv_dtype not in QUANTIZED_KV_DTYPES:
        return kernels
    quantizing = kernels.with_kv_dtype(kv_dtype)
    assert quantizing is not None
    return quantizing


def spec_of(
    subject: Subject, dtype: torch.dtype, *, num_kv_heads: int = 2, head_dim: int = 16
) -> KVCacheSpec:
    return KVCacheSpec(
        num_layers=NUM_LAYERS,
        num_blocks=6,
        block_size=4,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=subject.device,
    )


def random_rows(subject: Subject, num_rows: int, *shape: int) -> Tensor:
    """Rows of sizes that go around."""
    sizes = torch.tensor(ROW_SIZES, device=subject.device).repeat(num_rows)[:num_rows]
    return subject.random(num_rows, *shape) * sizes.view(-1, *(1 for _ in shape))


def random_slots(subject: Subject, num_rows: int) -> Tensor:
    """Different slots of a cache of `spec_of`."""
    return subject.random(24).argsort()[:num_rows]


def exactly_turned(heads: Tensor, angles: Tensor) -> Tensor:
    """heads float64 [T, H, D] turned by angles [T, 1, R / 2], as complex numbers."""
    half = angles.shape[-1]
    first, second, rest = heads.split([half, half, heads.shape[-1] - 2 * half], dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, rest), dim=-1)


def exactly_normed(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    return heads * weight.double() / (heads.square().mean(-1, keepdim=True) + eps).sqrt()


class TurnedHeads(NamedTuple):
    """Queries, keys and values side by side, their angles and norms; and what becomes of them."""

    heads: Tensor
    cos: Tensor
    sin: Tensor
    norms: HeadNorms | None
    query: Tensor
    key: Tensor
    value: Tensor


def turned_heads(
    subject: Subject,
    num_rows: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
    is_normed: bool,
) -> TurnedHeads:
    heads = random_rows(subject, num_rows, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    angles = subject.random(num_rows, 1, rotary_dim // 2)
    query, key, value = heads.double().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    norms = None
    if is_normed:
        weights = (subject.random(head_dim, dtype=dtype) for _ in range(2))
        norms = HeadNorms(*weights, 1e-5)
        query = exactly_normed(query, norms.query, norms.eps)
        key = exactly_normed(key, norms.key, norms.eps)
    return TurnedHeads(
        heads=heads,
        cos=torch.cat((angles.cos(), angles.cos()), dim=-1),
        sin=torch.cat((-angles.sin(), angles.sin()), dim=-1),
        norms=norms,
        query=exactly_turned(query, angles.double()),
        key=exactly_turned(key, angles.double()),
        value=value,
    )


# Head counts that share 1, 2, 3 and 8 heads; heads that are turned whole, in part, and not in steps
# that a vector has.
@claim(
    dtype=DTYPES,
    shape=[(4, 1, 16, 16), (6, 2, 12, 8), (9, 3, 64, 64), (8, 8, 80, 20), (16, 8, 128, 128)],
    is_normed=[False, True],
)
def rotary_and_write_turns_queries_and_keys_and_keeps_values(
    subject: Subject, dtype: torch.dtype, shape: tuple[int, int, int, int], is_normed: bool
) -> None:
    num_heads, num_kv_heads, head_dim, rotary_dim = shape
    turned = turned_heads(
        subject,
        5,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        dtype=dtype,
        is_normed=is_normed,
    )
    spec = spec_of(subject, dtype, num_kv_heads=num_kv_heads, head_dim=head_dim)
    kv, slots = subject.kernels.make_kv_cache(spec), random_slots(subject, 5)
    before = turned.heads.clone()
    query = subject.kernels.rotary_and_write(
        *(turned.heads, num_heads, turned.cos, turned.sin, kv, LAYER, slots), norms=turned.norms
    )
    assert query.dtype == dtype
    kept = kept_rows(kv, slots)
    # Rows of different sizes, each to its own accuracy.
    for actual, expected in ((query, turned.query), (kept.keys, turned.key)):
        for row, exact in zip(actual, expected, strict=True):
            assert_close(row, exact)
    assert torch.equal(kept.values, turned.heads[:, num_heads + num_kv_heads :])
    assert torch.equal(turned.heads, before)


@claim(kv_dtype=QUANTIZED_KV_DTYPES, is_normed=[False, True])
def rotary_and_write_keeps_rounded_keys_and_values(
    subject: Subject, kv_dtype: torch.dtype, is_normed: bool
) -> None:
    turned = turned_heads(
        subject,
        5,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rotary_dim=32,
        dtype=torch.float32,
        is_normed=is_normed,
    )
    kernels = keeping(subject.kernels, kv_dtype)
    kv = kernels.make_kv_cache(spec_of(subject, kv_dtype, head_dim=32))
    slots = random_slots(subject, 5)
    query = kernels.rotary_and_write(
        *(turned.heads, 4, turned.cos, turned.sin, kv, LAYER, slots), norms=turned.norms
    )
    for row, exact in zip(query, turned.query, strict=True):
        assert_close(row, exact)
    kept = kept_rows(kv, slots)
    assert_within_format(exact_rows(kept.keys, kept.key_scales, kv_dtype), turned.key, kv_dtype)
    expected = encode(turned.value.float(), kv_dtype)
    assert torch.equal(kept.values, expected.codes.view(torch.uint8))
    assert torch.equal(kept.value_scales, expected.scales)


@claim(kv_dtype=(torch.float32, *QUANTIZED_KV_DTYPES))
def what_is_kept_of_a_row_does_not_depend_on_how_rows_are_cut(
    subject: Subject, kv_dtype: torch.dtype
) -> None:
    kernels = keeping(subject.kernels, kv_dtype)
    spec = spec_of(subject, kv_dtype)
    together, apart = kernels.make_kv_cache(spec), kernels.make_kv_cache(spec)
    turned = turned_heads(
        subject,
        14,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rotary_dim=16,
        dtype=torch.float32,
        is_normed=True,
    )
    slots, other_slots = random_slots(subject, 14), random_slots(subject, 14)

    def write(kv: KVCache, rows: slice, to: Tensor) -> None:
        tensors = (turned.heads[rows], 4, turned.cos[rows], turned.sin[rows], kv, LAYER, to)
        kernels.rotary_and_write(*tensors, norms=turned.norms)

    write(together, slice(0, 14), slots)
    for start, end in ((13, 14), (0, 1), (6, 13), (1, 6)):
        write(apart, slice(start, end), other_slots[start:end])
    for one, other in zip(kept_rows(together, slots), kept_rows(apart, other_slots), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@claim(kv_dtype=QUANTIZED_KV_DTYPES)
def rows_are_rounded_to_the_nearest_ties_to_even(subject: Subject, kv_dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(kv_dtype).float()
    codes = codes[codes.abs() <= LARGEST_CODE[kv_dtype]].unique()  # without NaN and int8's -128
    halves = (codes[1:] + codes[:-1]) / 2
    around = [halves, halves.nextafter(codes[1:]), halves.nextafter(codes[:-1]), codes]
    numbers = torch.cat((*around, -codes[:1])).to(subject.device)
    # Each head begins with the largest code: it has a scale of 1 or, times it, of a power of two.
    row = torch.nn.functional.pad(numbers, (0, -len(numbers) % 15)).view(-1, 15)
    row = torch.cat((torch.full_like(row[:, :1], LARGEST_CODE[kv_dtype]), row), dim=1)
    kernels = keeping(subject.kernels, kv_dtype)
    kv = kernels.make_kv_cache(spec_of(subject, kv_dtype, num_kv_heads=len(row)))
    slots = torch.tensor([9], device=subject.device)
    kernels.write_kv(kv, LAYER, row.unsqueeze(0), row.unsqueeze(0) * 2.0**-70, slots)
    kept = kept_rows(kv, slots)
    expected = row.to(kv_dtype) if kv_dtype.is_floating_point else row.round().to(kv_dtype)
    for actual in (kept.keys, kept.values):
        assert torch.equal(actual[0], expected.view(torch.uint8))
    assert (kept.key_scales == 1.0).all()
    assert (kept.value_scales == 2.0**-70).all()


@claim(kv_dtype=QUANTIZED_KV_DTYPES, dtype=DTYPES)
def what_is_kept_is_within_the_formats_error(
    subject: Subject, kv_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    kernels = keeping(subject.kernels, kv_dtype)
    assert kernels.kv_dtype(dtype, 64) == kv_dtype
    kv = kernels.make_kv_cache(spec_of(subject, kv_dtype, head_dim=64))
    key, value = (random_rows(subject, 20, 2, 64).to(dtype) for _ in range(2))
    key[3], value[3, 1] = 0.0, 0.0
    slots = random_slots(subject, 20)
    kernels.write_kv(kv, LAYER, key, value, slots)
    kept = kept_rows(kv, slots)
    assert_within_format(exact_rows(kept.keys, kept.key_scales, kv_dtype), key, kv_dtype)
    assert_within_format(exact_rows(kept.values, kept.value_scales, kv_dtype), value, kv_dtype)


@claim(kv_dtype=QUANTIZED_KV_DTYPES)
def a_row_with_a_number_that_is_not_finite_is_kept_as_nan(
    subject: Subject, kv_dtype: torch.dtype
) -> None:
    kernels = keeping(subject.kernels, kv_dtype)
    kv = kernels.make_kv_cache(spec_of(subject, kv_dtype))
    key = subject.random(4, 2, 16)
    key[0, 0, 3], key[1, 1, 5], key[2, 0, 0] = torch.nan, torch.inf, -torch.inf
    slots = random_slots(subject, 4)
    kernels.write_kv(kv, LAYER, key, key, slots)
    kept = kept_rows(kv, slots)
    is_nan = exact_rows(kept.keys, kept.key_scales, kv_dtype).isnan()
    is_broken = ~key.isfinite().all(dim=-1, keepdim=True)
    assert torch.equal(is_nan, is_broken.expand_as(is_nan))


def quantized_step(
    subject: Subject, kv_dtype: torch.dtype, dtype: torch.dtype, head_dim: int
) -> Step:
    """Two levels of sharing, decode rows and chunks; one layer sees all, one 30 tokens."""
    system = Edge(num_blocks=2)
    tools = Edge(num_blocks=1, parent=system)
    tails = [
        Tail(length=1, edge=tools),
        Tail(length=20, edge=tools),
        Tail(length=12, num_rows=5, edge=system),
        Tail(length=9, num_rows=9),
        Tail(length=40),
    ]
    return make_step(
        subject, tails, head_dim=head_dim, dtype=dtype, layer_windows=(None, 30), kv_dtype=kv_dtype
    )


@claim(kv_dtype=QUANTIZED_KV_DTYPES, dtype=DTYPES, head_dim=[12, 64, 128], layer=[0, 1])
def attention_over_rounded_keys_equals_dense_attention_over_what_is_kept(
    subject: Subject, kv_dtype: torch.dtype, dtype: torch.dtype, head_dim: int, layer: int
) -> None:
    step = quantized_step(subject, kv_dtype, dtype, head_dim)
    sizes = torch.tensor((0.01, 0.1, 1.0, 3.0), device=subject.device)
    step.values *= sizes.to(dtype).repeat(len(step.values))[: len(step.values), None, None]
    result = step.attend(keeping(subject.kernels, kv_dtype), layer, softcap=30.0)
    assert result.dtype == dtype
    step.keys = decode(*encode(step.keys, kv_dtype))
    step.values = decode(*encode(step.values, kv_dtype))
    assert_close(result, step.oracle(layer, softcap=30.0), max(TOLERANCE[dtype], 8e-6))


@claim(kv_dtype=QUANTIZED_KV_DTYPES)
def attention_over_rounded_keys_is_within_the_formats_error(
    subject: Subject, kv_dtype: torch.dtype
) -> None:
    """A score is off by no more than e = scale * sum |q| * (what the format allows of k), so a
    weight by a factor of exp(2 e), and a result by that much of the largest value and by what the
    format allows of it."""
    step = quantized_step(subject, kv_dtype, torch.float32, 64)
    step.query *= 0.03  # so that the bound says something
    error = allowed_error(step.keys.double(), kv_dtype).amax(dim=0).repeat_interleave(3, dim=0)
    score_error = SCALE * (step.query.double().abs() * error).sum(dim=-1, keepdim=True)
    value_error = allowed_error(step.values.double(), kv_dtype).max()
    bound = (2 * score_error).expm1() * step.values.abs().max() + value_error
    actual = step.attend(keeping(subject.kernels, kv_dtype), 0).double()
    assert ((actual - step.oracle(0)).abs() <= bound).all()
    assert bound.max() < step.values.abs().max() / 2


@claim(kv_dtype=QUANTIZED_KV_DTYPES)
def a_broken_sequence_changes_no_other_where_rows_are_rounded(
    subject: Subject, kv_dtype: torch.dtype
) -> None:
    tails = [Tail(length=20), Tail(length=40), Tail(length=50, num_rows=3)]
    step = make_step(subject, tails, shuffled=False, kv_dtype=kv_dtype)
    broken = step.slots[:20]
    step.keys[broken], step.values[broken] = torch.nan, torch.inf
    result = step.attend(keeping(subject.kernels, kv_dtype))
    assert result[1:].isfinite().all()
    assert not result[0].isfinite().any()


@claim(kv_dtype=(torch.float32, torch.bfloat16, *QUANTIZED_KV_DTYPES), num_rows=[1, 3, 4])
def copies_are_made_in_all_layers_to_the_bit(
    subject: Subject, kv_dtype: torch.dtype, num_rows: int
) -> None:
    kernels = keeping(subject.kernels, kv_dtype)
    kv = kernels.make_kv_cache(spec_of(subject, kv_dtype, head_dim=12))
    dtype = torch.float32 if kv_dtype in QUANTIZED_KV_DTYPES else kv_dtype
    everywhere = torch.arange(24, device=subject.device)
    for layer in range(NUM_LAYERS):
        key, value = (subject.random(24, 2, 12, dtype=dtype) for _ in range(2))
        kernels.write_kv(kv, layer, key, value, everywhere)
    before = [kept_rows(kv, everywhere, layer) for layer in range(NUM_LAYERS)]
    copies = [RowCopy(5, 0, num_rows), RowCopy(2, 4, 2), RowCopy(2, 1, 4)]
    kernels.copy_rows(kv, copies)
    kernels.copy_rows(kv, [])
    source = everywhere.clone()
    for copy in copies:
        rows = torch.arange(copy.num_rows, device=subject.device)
        source[copy.target * 4 + rows] = copy.source * 4 + rows
    for layer in range(NUM_LAYERS):
        for now, then in zip(kept_rows(kv, everywhere, layer), before[layer], strict=True):
            assert (now is None and then is None) or torch.equal(now, then[source])


@claim(kv_dtype=QUANTIZED_KV_DTYPES)
def attention_over_copied_rows_has_the_same_bits(subject: Subject, kv_dtype: torch.dtype) -> None:
    kernels = keeping(subject.kernels, kv_dtype)
    step = make_step(subject, [Tail(length=16, edge=Edge(1))], kv_dtype=kv_dtype)
    kv = step.fill(kernels)
    prepared = kernels.plan_attention(step.plan, step.spec)
    expected = kernels.attention(step.query, kv, LAYER, prepared, SCALE)
    source = int(step.plan.private[0].block_ids[0])
    used = {source, int(step.plan.shared[0].block_ids[0])}
    target = next(block for block in range(step.spec.num_blocks) if block not in used)
    kernels.copy_rows(kv, [RowCopy(source, target, 16)])
    step.plan.private[0].block_ids[0] = target
    prepared = kernels.plan_attention(step.plan, step.spec)
    assert torch.equal(kernels.attention(step.query, kv, LAYER, prepared, SCALE), expected)


@claim(kv_dtype=(torch.float32, *QUANTIZED_KV_DTYPES))
def no_rows_are_written_for_a_step_without_any(subject: Subject, kv_dtype: torch.dtype) -> None:
    kernels = keeping(subject.kernels, kv_dtype)
    kv = kernels.make_kv_cache(spec_of(subject, kv_dtype))
    empty, no_slots = subject.random(0, 8, 16), random_slots(subject, 0)
    angles = subject.random(0, 1, 16)
    query = kernels.rotary_and_write(empty, 4, angles, angles, kv, LAYER, no_slots)
    assert query.shape == (0, 4, 16)
    kernels.write_kv(kv, LAYER, empty[:, :2], empty[:, :2], no_slots)


def allowed_error(exact: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """What a row's numbers may be off by when kept, float64, as kv_quantization.py has it."""
    largest = exact.abs().amax(dim=-1, keepdim=True)
    if kv_dtype == torch.int8:
        return (largest / 254).expand_as(exact)
    return torch.maximum(exact.abs() / 16, largest / (448 * 1024))


def assert_within_format(actual: Tensor, exact: Tensor, kv_dtype: torch.dtype) -> None:
    exact = exact.double()
    # Beside the format's the errors of float32: of the scale, and of what is rounded.
    float32_error = 2.0**-21 * exact.abs().amax(dim=-1, keepdim=True)
    assert ((actual - exact).abs() <= allowed_error(exact, kv_dtype) + float32_error).all()
