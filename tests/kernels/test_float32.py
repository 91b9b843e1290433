"""Projections in float32 against float64, and the same bits of a row in every batch."""

import pytest
import torch
from torch import Tensor

from sapwood.kernels.interface import Activation
from sapwood.kernels.native import Native
from sapwood.kernels.projections import Float32Projection, linear, pack_float32

SHAPES = [(1, 1), (3, 5), (31, 47), (64, 48), (33, 49), (576, 100)]  # in, out


def random_numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 64])
def test_products(native: Native, num_inputs: int, num_outputs: int, num_rows: int) -> None:
    weight = random_numbers(num_outputs, num_inputs, seed=0)
    x = random_numbers(num_rows, num_inputs, seed=1)
    bias, residual = (
        random_numbers(num_outputs, seed=2),
        random_numbers(num_rows, num_outputs, seed=3),
    )
    expected = x.double() @ weight.double().t()
    close(linear(native, x, pack_float32(native, weight, None), None), expected)
    packed = pack_float32(native, weight, bias)
    close(linear(native, x, packed, None), expected + bias)
    close(linear(native, x, packed, residual), expected + bias + residual)


def test_inputs_are_normed_or_gated_on_the_way(native: Native) -> None:
    x, weight = random_numbers(5, 40, seed=1), random_numbers(9, 40, seed=2)
    packed, scale = pack_float32(native, weight, None), random_numbers(40, seed=3)
    wide = x.double()
    normed = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * scale
    close(linear(native, x, packed, None, norm=(scale, 1e-5)), normed @ weight.double().t())
    both, residual = random_numbers(5, 80, seed=4), random_numbers(5, 9, seed=5)
    gate, up = both.double().chunk(2, dim=-1)
    products = (torch.nn.functional.silu(gate) * up) @ weight.double().t()
    close(linear(native, both, packed, residual, activation=Activation.SILU), products + residual)
    products = (torch.nn.functional.gelu(gate, approximate="tanh") * up) @ weight.double().t()
    close(linear(native, both, packed, None, activation=Activation.GELU_TANH), products)


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(33, 49), (576, 960)])
def test_a_row_has_the_same_bits_in_every_batch(
    native: Native, num_inputs: int, num_outputs: int
) -> None:
    packed = pack_float32(native, random_numbers(num_outputs, num_inputs, seed=0), None)
    x = random_numbers(40, num_inputs, seed=1)
    together = linear(native, x, packed, None)
    for first, last in ((0, 1), (3, 4), (5, 12), (8, 24), (31, 40)):
        assert torch.equal(linear(native, x[first:last], packed, None), together[first:last])


def test_nothing_needs_to_be_contiguous(native: Native) -> None:
    weight, bias = random_numbers(50, 80, seed=0)[:, ::2], random_numbers(100, seed=1)[::2]
    x, scale = random_numbers(3, 80, seed=2)[:, ::2], random_numbers(80, seed=3)[::2]
    packed = pack_float32(native, weight, bias)
    same = pack_float32(native, weight.contiguous(), bias.contiguous())
    expected = linear(native, x.contiguous(), same, None, norm=(scale.contiguous(), 1e-5))
    assert torch.equal(linear(native, x, packed, None, norm=(scale, 1e-5)), expected)


def test_what_is_broken_shows_in_its_own_row_only(native: Native) -> None:
    packed = pack_float32(native, random_numbers(50, 40, seed=0), None)
    x = random_numbers(9, 40, seed=1)
    expected = linear(native, x, packed, None)
    x[4, 7] = torch.nan
    actual = linear(native, x, packed, None)
    assert actual[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(actual[others], expected[others])


def test_no_rows_are_no_results(native: Native) -> None:
    packed = pack_float32(native, random_numbers(50, 40, seed=0), None)
    scale = torch.ones(40)
    assert linear(native, torch.empty(0, 40), packed, None, norm=(scale, 1e-5)).shape == (0, 50)


def test_wrong_inputs_are_refused(native: Native) -> None:
    packed = pack_float32(native, random_numbers(6, 40, seed=0), None)
    assert isinstance(packed, Float32Projection)
    with pytest.raises(ValueError, match="41 inputs, the projection 40"):
        linear(native, torch.zeros(2, 41), packed, None)
    with pytest.raises(TypeError, match="float32 rows"):
        linear(native, torch.zeros(2, 40, dtype=torch.bfloat16), packed, None)
    with pytest.raises(TypeError, match="float32 rows"):
        linear(native, torch.zeros(2, 2, 40), packed, None)
    with pytest.raises(ValueError, match="bias"):
        pack_float32(native, torch.zeros(6, 40), torch.zeros(5))
    with pytest.raises(ValueError, match="residual"):
        linear(native, torch.zeros(2, 40), packed, torch.zeros(2, 7))
    with pytest.raises(TypeError, match="float32 weights"):
        pack_float32(native, torch.zeros(6, 40, dtype=torch.bfloat16), None)
