"""Projections in int8 against the arithmetic they stand for, done in float64."""

import pytest
import torch
from torch import Tensor

from sapwood.kernels import load_kernels
from sapwood.kernels.int8 import Int8Projection, is_available, quantize_weight
from sapwood.kernels.interface import Kernels

pytestmark = pytest.mark.skipif(not is_available(), reason="this build of torch has no fbgemm")

SHAPES = [(1, 1), (3, 5), (64, 17), (96, 576), (576, 96)]  # in, out
LEVELS = 127


@pytest.fixture
def kernels() -> Kernels:
    found = load_kernels("cpu").quantized()
    assert found is not None
    return found


def random_numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exactly(x: Tensor, weight: Tensor) -> Tensor:
    """Float64 [rows, out]: rows rounded to 127 steps of their largest inlier, weights as stored."""
    stored = quantize_weight(weight)
    magnitudes = x.abs().amax(dim=1, keepdim=True)
    rounded = (x / magnitudes * LEVELS).round().double() / LEVELS * magnitudes.double()
    rounded = torch.where(magnitudes == 0, 0.0, rounded)
    values = stored.values.double() * stored.scales.double().unsqueeze(1)
    kept = x[:, stored.outliers].double() @ stored.outlier_weight.double()
    return rounded @ values.t() + kept


@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 64])
def test_rows_and_weights_are_rounded_and_nothing_else(
    kernels: Kernels, num_inputs: int, num_outputs: int, num_rows: int
) -> None:
    x = random_numbers(num_rows, num_inputs, seed=1)
    weight = random_numbers(num_outputs, num_inputs, seed=2)
    bias, residual = (random_numbers(n, num_outputs, seed=3 + n) for n in (1, num_rows))
    expected = exactly(x, weight)
    bare = kernels.pack_linear(weight)
    torch.testing.assert_close(kernels.linear(x, bare).double(), expected, atol=2e-5, rtol=2e-6)
    biased = kernels.pack_linear(weight, bias[0])
    kept = residual.clone()
    torch.testing.assert_close(
        kernels.linear(x, biased, residual).double(),
        expected + bias.double() + residual.double(),
        atol=2e-5,
        rtol=2e-6,
    )
    assert torch.equal(residual, kept)


def test_the_error_is_no_more_than_half_a_step_of_each_factor(kernels: Kernels) -> None:
    x, weight = random_numbers(32, 576, seed=1), random_numbers(96, 576, seed=2)
    stored = quantize_weight(weight)
    steps_of_x = x.abs().amax(dim=1) / LEVELS
    bound = (
        steps_of_x.unsqueeze(1) / 2 * weight.abs().sum(dim=1)
        + x.abs().sum(dim=1, keepdim=True) * stored.scales / 2
        + 576 * steps_of_x.unsqueeze(1) * stored.scales / 4
    )
    error = (kernels.linear(x, kernels.pack_linear(weight)) - x @ weight.t()).abs()
    assert (error <= bound).all()
    assert error.max() > 0


def test_a_row_does_not_depend_on_its_batch(kernels: Kernels) -> None:
    x, weight = random_numbers(64, 576, seed=1), random_numbers(960, 576, seed=2)
    x[5] *= 1e6
    packed = kernels.pack_linear(weight)
    together = kernels.linear(x, packed)
    for row in (0, 5, 31, 63):
        assert torch.equal(kernels.linear(x[row : row + 1], packed)[0], together[row])
    assert torch.equal(kernels.linear(x[:9], packed), together[:9])


def test_rows_of_zeros_and_broken_rows_harm_nobody(kernels: Kernels) -> None:
    x, weight = random_numbers(4, 64, seed=1), random_numbers(8, 64, seed=2)
    packed = kernels.pack_linear(weight, torch.ones(8))
    expected = kernels.linear(x, packed)
    x[1], x[2, 3] = 0.0, torch.nan
    result = kernels.linear(x, packed)
    assert torch.equal(result[1], torch.ones(8))
    assert result[2].isnan().all()
    assert torch.equal(result[[0, 3]], expected[[0, 3]])


def test_no_rows_give_no_rows(kernels: Kernels) -> None:
    packed = kernels.pack_linear(random_numbers(8, 64, seed=2))
    assert kernels.linear(torch.empty(0, 64), packed).shape == (0, 8)


def test_outlier_columns_are_multiplied_in_float32(kernels: Kernels) -> None:
    x, weight = random_numbers(16, 64, seed=1), random_numbers(24, 64, seed=2)
    x[:, [3, 40]] /= 4096
    weight[:, [3, 40]] *= 4096
    stored = quantize_weight(weight)
    assert stored.outliers.tolist() == [3, 40]
    assert torch.equal(stored.dequantized()[:, [3, 40]], weight[:, [3, 40]])
    packed = kernels.pack_linear(weight)
    assert isinstance(packed, Int8Projection) and packed.outliers is not None
    torch.testing.assert_close(
        kernels.linear(x, packed).double(), exactly(x, weight), atol=2e-5, rtol=2e-6
    )
    # In int8 with the others they would leave nothing of these.
    error = (kernels.linear(x, packed) - x @ weight.t()).abs().max()
    assert error < 0.02 * (x @ weight.t()).abs().max()


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_largest_products_do_not_saturate(kernels: Kernels, sign: float) -> None:
    x = torch.full((2, 256), sign)
    weight = torch.full((4, 256), 0.5)
    expected = torch.full((2, 4), 128.0 * sign)
    torch.testing.assert_close(kernels.linear(x, kernels.pack_linear(weight)), expected)


def test_fewer_levels_round_more_coarsely() -> None:
    weight = random_numbers(96, 64, seed=2)
    fine, coarse = (quantize_weight(weight, levels) for levels in (127, 63))
    assert coarse.values.abs().max() == 63
    assert fine.values.abs().max() == 127
    error = [(q.dequantized() - weight).abs().mean() for q in (fine, coarse)]
    assert 1.5 < error[1] / error[0] < 2.5
