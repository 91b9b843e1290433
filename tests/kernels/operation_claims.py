"""Claims about the operations around attention, each against its formula in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sapwood.kernels.interface import Activation
from tests.kernels.claims import DTYPES, Subject, assert_close, claim


@claim(dtype=DTYPES)
def rms_norm_equals_its_formula(subject: Subject, dtype: torch.dtype) -> None:
    x, weight = subject.random(5, 48, dtype=dtype), subject.random(48, dtype=dtype)
    exact = x.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    result = subject.kernels.rms_norm(x, weight, 1e-5)
    assert result.dtype == dtype
    assert_close(result, expected)


@claim(dtype=DTYPES)
def rms_norm_takes_the_heads_of_a_part_of_each_row(subject: Subject, dtype: torch.dtype) -> None:
    wide, weight = subject.random(5, 9, 16, dtype=dtype), subject.random(16)
    heads, before = wide[:, 2:5], wide.clone()
    exact = heads.double()
    scaled = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    result = subject.kernels.rms_norm(heads, weight.to(dtype), 1e-5)
    assert result.dtype == dtype
    assert_close(result, scaled * weight.to(dtype).double())
    assert torch.equal(wide, before)


@claim(dtype=DTYPES, size=[1, 12, 576, 1100])
def rms_norm_adds_a_residual(subject: Subject, dtype: torch.dtype, size: int) -> None:
    x, residual = (subject.random(7, size, dtype=dtype) for _ in range(2))
    weight, before = subject.random(size, dtype=dtype), residual.clone()
    exact = x.double()
    scaled = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    result = subject.kernels.rms_norm(x, weight, 1e-5, residual)
    assert result.dtype == dtype
    assert_close(result, residual.double() + scaled * weight.double())
    assert torch.equal(residual, before)


@claim()
def rms_norm_does_not_overflow_in_float16(subject: Subject) -> None:
    x = torch.full((1, 32), 3000.0, dtype=torch.float16, device=subject.device)
    ones = torch.ones_like(x)
    assert_close(subject.kernels.rms_norm(x, ones[0], 1e-5), ones)


@claim(dtype=DTYPES)
def rotary_turns_the_coordinates_of_each_frequency(subject: Subject, dtype: torch.dtype) -> None:
    heads = subject.random(5, 4, 16, dtype=dtype)
    angles = subject.random(5, 8)
    cos, sin = angles.cos(), angles.sin()
    # Complex numbers turned by multiplication are an independent way of writing a rotation.
    numbers = torch.complex(heads[..., :8].double(), heads[..., 8:].double())
    turned = numbers * torch.polar(torch.ones_like(angles).double(), angles.double()).unsqueeze(1)
    result = subject.kernels.rotary(
        heads, torch.cat((cos, cos), 1).unsqueeze(1), torch.cat((-sin, sin), 1).unsqueeze(1)
    )
    assert result.dtype == dtype
    assert_close(result, torch.cat((turned.real, turned.imag), dim=-1))


@claim(dtype=DTYPES)
def rotary_turns_the_first_dimensions_and_leaves_the_others(
    subject: Subject, dtype: torch.dtype
) -> None:
    wide = subject.random(5, 6, 20, dtype=dtype)
    heads, before = wide[:, 1:4], wide.clone()
    angles = subject.random(5, 1, 4)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    result = subject.kernels.rotary(heads, cos, sin)
    assert result.dtype == dtype
    assert torch.equal(result[..., 8:], heads[..., 8:])
    narrow = heads[..., :8].double().contiguous()
    assert_close(
        result[..., :8], narrow * cos + torch.cat((narrow[..., 4:], narrow[..., :4]), -1) * sin
    )
    assert torch.equal(wide, before)


def formula(activation: Activation, gate: Tensor) -> Tensor:
    if activation is Activation.SILU:
        return gate / (1 + (-gate).exp())
    return gate / 2 * (1 + ((gate + 0.044715 * gate**3) * (2 / torch.pi) ** 0.5).tanh())


@claim(dtype=DTYPES, activation=tuple(Activation), size=[32, 1, 1100])
def activate_and_mul_equals_its_formula(
    subject: Subject, dtype: torch.dtype, activation: Activation, size: int
) -> None:
    gate_up = 3.0 * subject.random(5, 2 * size, dtype=dtype)
    before = gate_up.clone()
    gate, up = gate_up.double().chunk(2, dim=-1)
    result = subject.kernels.activate_and_mul(gate_up, activation)
    assert result.dtype == dtype
    assert_close(result, formula(activation, gate) * up)
    assert (gate_up == before).all()


@claim(dtype=[torch.float32, torch.bfloat16], num_rows=[0, 1, 5, 40], has_bias=[True, False])
def linear_is_a_product_with_the_transposed_weight(
    subject: Subject, has_bias: bool, num_rows: int, dtype: torch.dtype
) -> None:
    x, weight = (subject.random(n, 24, dtype=dtype) for n in (num_rows, 40))
    bias = subject.random(40, dtype=dtype) if has_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    result = subject.kernels.linear(x, subject.kernels.pack_linear(weight, bias))
    assert result.dtype == dtype
    assert_close(result, expected)


@claim(dtype=[torch.float32, torch.bfloat16], num_rows=[0, 1, 40])
def fused_linears_are_their_two_parts(subject: Subject, num_rows: int, dtype: torch.dtype) -> None:
    x, gate_up = (subject.random(num_rows, n, dtype=dtype) for n in (24, 48))
    norm, residual = subject.random(24, dtype=dtype), subject.random(num_rows, 40, dtype=dtype)
    packed = subject.kernels.pack_linear(subject.random(40, 24, dtype=dtype))
    normed = subject.kernels.linear(subject.kernels.rms_norm(x, norm, 1e-5), packed)
    assert_close(subject.kernels.norm_linear(x, norm, 1e-5, packed), normed)
    for activation in Activation:
        gated = subject.kernels.activate_and_mul(gate_up, activation)
        assert_close(
            subject.kernels.gated_linear(gate_up, packed, activation=activation),
            subject.kernels.linear(gated, packed),
        )
        # A residual is passed once: the sum may take its place.
        assert_close(
            subject.kernels.gated_linear(gate_up, packed, residual.clone(), activation=activation),
            subject.kernels.linear(gated, packed, residual.clone()),
        )
    gated = subject.kernels.activate_and_mul(gate_up, Activation.SILU)
    silu = subject.kernels.linear(gated, packed, residual.clone())
    assert_close(subject.kernels.gated_linear(gate_up, packed, residual), silu)


@claim(dtype=DTYPES, has_bias=[False, True])
def linear_adds_a_residual(subject: Subject, dtype: torch.dtype, has_bias: bool) -> None:
    x, weight = subject.random(5, 24, dtype=dtype), subject.random(40, 24, dtype=dtype)
    bias = subject.random(40, dtype=dtype) if has_bias else None
    residual = subject.random(5, 40, dtype=dtype)
    expected = residual.double() + x.double() @ weight.double().T
    if bias is not None:
        expected = expected + bias.double()
    packed = subject.kernels.pack_linear(weight, bias)
    result = subject.kernels.linear(x, packed, residual)
    assert result.dtype == dtype
    assert_close(result, expected)


@claim(vocab_size=[1, 31, 32, 100, 4096])
def masked_logits_keep_their_bits_or_become_minus_infinity(
    subject: Subject, vocab_size: int
) -> None:
    logits = subject.random(5, vocab_size)
    logits[1, 0] = torch.nan
    rows = torch.tensor([4, 1, 2], device=subject.device)
    num_words = -(-vocab_size // 32) + 1  # a mask may be wider than the vocabulary
    allowed = np.random.default_rng(5).integers(-(2**31), 2**31, (3, num_words)).astype(np.int32)
    allowed[2] = ([-1, 0] * num_words)[:num_words]  # whole words of either
    expected = logits.cpu().numpy().copy()
    for row, words in zip(rows.tolist(), allowed, strict=True):
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]
        expected[row, bits == 0] = -np.inf
    subject.kernels.mask_logits(logits, rows, torch.from_numpy(allowed).to(subject.device))
    np.testing.assert_array_equal(logits.cpu().numpy(), expected)
