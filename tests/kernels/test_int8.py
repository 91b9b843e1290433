"""Projections in int8 against the arithmetic they stand for, done in float64."""

import ctypes
import shutil
from functools import partial

import pytest
import torch
from torch import Tensor

from sapwood.kernels import load_kernels
from sapwood.kernels.interface import Activation, Kernels
from sapwood.kernels.native import Native, build
from sapwood.kernels.projections import (
    GROUP,
    Int8Projection,
    linear,
    pack_int8,
    unpack_int8,
)

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

SHAPES = [(1, 1), (3, 5), (31, 47), (32, 48), (64, 17), (33, 49), (576, 100)]  # in, out
LEVELS, FINER = 127, 254


@pytest.fixture
def kernels() -> Kernels:
    found = load_kernels("cpu").quantized()
    assert found is not None
    return found


def random_numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grouped(x: Tensor) -> Tensor:
    """[rows, in] as [rows, groups, GROUP], zeros behind."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP))
    return padded.view(len(x), -1, GROUP)


def rounded(x: Tensor, num_planes: int) -> Tensor:
    """Float64 rows as they are multiplied: each group in 127 steps, the rest in finer ones."""
    groups = grouped(x)
    scales = groups.abs().amax(dim=-1, keepdim=True) / LEVELS
    steps = torch.where(scales > 0, 1 / scales, 0.0)
    values = (groups * steps).round()
    result = values.double()
    if num_planes == 2:
        result += ((groups * steps - values) * FINER).round().double() / FINER
    return (result * scales.double()).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("num_planes", [1, 2])
def test_rows_and_weights_are_rounded_and_nothing_else(
    native: Native, num_inputs: int, num_outputs: int, num_rows: int, num_planes: int
) -> None:
    x = random_numbers(num_rows, num_inputs, seed=1)
    weight = random_numbers(num_outputs, num_inputs, seed=2)
    bias, residual = (random_numbers(n, num_outputs, seed=3 + n) for n in (1, num_rows))
    bare = pack_int8(native, weight, None, num_planes=num_planes)
    stored = unpack_int8(native, bare)
    expected = rounded(x, num_planes) @ stored.double().t()
    # Rounding of float32 sums: of at most 18 groups, and of the offsets that cancel in them.
    close = partial(torch.testing.assert_close, atol=2e-5, rtol=2e-6)
    close(linear(native, x, bare, None).double(), expected)
    biased = pack_int8(native, weight, bias[0], num_planes=num_planes)
    kept = residual.clone()
    actual = linear(native, x, biased, residual)
    close(actual.double(), expected + bias.double() + residual.double())
    assert torch.equal(residual, kept)


@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_a_weight_is_within_half_a_step_of_its_group(
    native: Native, num_inputs: int, num_outputs: int
) -> None:
    weight = random_numbers(num_outputs, num_inputs, seed=2)
    weight[:, ::7] *= 20
    stored = unpack_int8(native, pack_int8(native, weight, None))
    # A last group that is not full spans its own inputs only.
    pad = -num_inputs % GROUP
    low = torch.nn.functional.pad(weight, (0, pad), value=torch.inf).view(num_outputs, -1, GROUP)
    high = torch.nn.functional.pad(weight, (0, pad), value=-torch.inf).view(num_outputs, -1, GROUP)
    steps = (high.amax(dim=-1) - low.amin(dim=-1)) / 255
    largest = weight.abs().amax(dim=1, keepdim=True)
    # Scale and offset are float16 of the output's largest weight.
    bound = (0.5 * steps + 255 * steps * 2**-11 + largest * 2**-11).unsqueeze(-1)
    assert (grouped(stored - weight).abs() <= bound).all()


def four_bit_weight(num_outputs: int, num_inputs: int) -> Tensor:
    """On a grid of 15 steps in each group, whose ends it has."""
    generator = torch.Generator().manual_seed(3)
    num_groups = -(-num_inputs // GROUP)
    shape = (num_outputs, num_groups, GROUP)
    values = torch.randint(0, 16, shape, generator=generator).float()
    values[..., 0], values[..., 1] = 0.0, 15.0
    scales, offsets = (random_numbers(*shape[:2], 1, seed=seed) for seed in (4, 5))
    grid = values * (scales.abs() + 0.1) + offsets
    return grid.flatten(1)[:, :num_inputs].contiguous()


def test_weights_of_4_bits_take_4_and_come_out_as_they_were(native: Native) -> None:
    weight = four_bit_weight(50, 322)
    packed = pack_int8(native, weight, None)
    assert packed.num_bits == 4
    assert (
        packed.num_bytes < 0.6 * pack_int8(native, random_numbers(50, 322, seed=6), None).num_bytes
    )
    largest = weight.abs().amax(dim=1, keepdim=True)
    stored = unpack_int8(native, packed)
    # Nothing but the float16 of scale and offset.
    assert ((stored - weight).abs() <= largest * 2**-10).all()
    weight[7, 40] += 0.05 * (weight[7].amax() - weight[7].amin())  # off the grid
    packed = pack_int8(native, weight, None)
    assert packed.num_bits == 8
    assert unpack_int8(native, packed)[7, 40] == pytest.approx(weight[7, 40].item(), abs=0.03)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("num_planes", [1, 2])
def test_4_bits_are_multiplied_as_stored(native: Native, num_rows: int, num_planes: int) -> None:
    packed = pack_int8(native, four_bit_weight(50, 322), None, num_planes=num_planes)
    assert packed.num_bits == 4
    x = random_numbers(num_rows, 322, seed=1)
    expected = rounded(x, num_planes) @ unpack_int8(native, packed).double().t()
    actual = linear(native, x, packed, None).double()
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=2e-6)


def test_a_second_plane_takes_away_the_rows_error(native: Native) -> None:
    x, weight = random_numbers(32, 576, seed=1), random_numbers(96, 576, seed=2)
    stored = unpack_int8(native, pack_int8(native, weight, None)).double()
    exact = x.double() @ stored.t()
    one, two = (
        (linear(native, x, pack_int8(native, weight, None, num_planes=n), None) - exact)
        .abs()
        .max()
        .item()
        for n in (1, 2)
    )
    assert 0 < two < one / 50


def test_ways_round_weights_alike(native: Native) -> None:
    weight = random_numbers(77, 320, seed=2)
    own = Native(ctypes.CDLL(str(build(COMPILER or "cc"))))
    mine, theirs = (unpack_int8(n, pack_int8(n, weight, None)) for n in (native, own))
    # One that lies between two steps may fall to either side, and all steps by their last bits.
    assert ((mine - theirs).abs() > 1e-5).float().mean() < 0.01


@pytest.mark.parametrize("is_last", [False, True])
def test_a_row_does_not_depend_on_its_batch(kernels: Kernels, is_last: bool) -> None:
    x, weight = random_numbers(64, 576, seed=1), random_numbers(960, 576, seed=2)
    x[5] *= 1e6
    packed = kernels.pack_linear(weight, is_last=is_last)
    together = kernels.linear(x, packed)
    for row in (0, 5, 31, 63):
        assert torch.equal(kernels.linear(x[row : row + 1], packed)[0], together[row])
    for num_rows in (2, 3, 5, 6, 7, 9):
        assert torch.equal(kernels.linear(x[:num_rows], packed), together[:num_rows])


def test_rows_of_zeros_and_broken_rows_harm_nobody(native: Native) -> None:
    x, weight = random_numbers(7, 64, seed=1), random_numbers(8, 64, seed=2)
    for num_planes in (1, 2):
        packed = pack_int8(native, weight, torch.ones(8), num_planes=num_planes)
        expected = linear(native, x, packed, None)
        broken = x.clone()
        broken[1], broken[2, 3], broken[4, 63], broken[5, 0] = 0.0, torch.nan, torch.inf, -torch.inf
        result = linear(native, broken, packed, None)
        assert torch.equal(result[1], torch.ones(8))
        assert result[[2, 4, 5]].isnan().all()
        assert torch.equal(result[[0, 3, 6]], expected[[0, 3, 6]])


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_weight_breaks_its_output_and_no_other(native: Native, broken: float) -> None:
    x, weight = random_numbers(5, 64, seed=1), random_numbers(8, 64, seed=2)
    expected = linear(native, x, pack_int8(native, weight, None), None)
    weight[3, 40] = broken
    result = linear(native, x, pack_int8(native, weight, None), None)
    assert result[:, 3].isnan().all()
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(result[:, others], expected[:, others])


def test_other_dtypes_and_shapes_are_refused(kernels: Kernels) -> None:
    packed = kernels.pack_linear(random_numbers(8, 64, seed=2))
    with pytest.raises(TypeError, match="float32 weights"):
        kernels.pack_linear(torch.zeros(8, 64, dtype=torch.bfloat16))
    rows = torch.zeros(2, 64, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="float32 rows"):
        kernels.linear(rows, packed)
    with pytest.raises(TypeError, match="float32 rows"):
        kernels.norm_linear(rows, torch.ones(64), 1e-5, packed)
    with pytest.raises(ValueError, match="the residual"):
        kernels.linear(torch.zeros(2, 64), packed, torch.zeros(2, 7))


def test_tiny_and_huge_rows_keep_their_scale(native: Native) -> None:
    x, weight = random_numbers(2, 64, seed=1), random_numbers(8, 64, seed=2)
    packed = pack_int8(native, weight, None)
    expected = linear(native, x, packed, None)
    for factor in (2.0**-60, 2.0**60):
        scaled = linear(native, x * factor, packed, None)
        torch.testing.assert_close(scaled / factor, expected)
    for factor in (2.0**-125, 2.0**-140):
        vanished = linear(native, x * factor, packed, None)
        assert (vanished.abs() <= 2.0**-110).all()


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 64])
def test_what_is_fused_has_the_bits_of_its_parts(
    kernels: Kernels, num_rows: int, is_last: bool
) -> None:
    x, gate_up = random_numbers(num_rows, 100, seed=1), random_numbers(num_rows, 200, seed=2)
    norm, residual = random_numbers(100, seed=3), random_numbers(num_rows, 50, seed=4)
    packed = kernels.pack_linear(random_numbers(50, 100, seed=5), is_last=is_last)
    apart = kernels.linear(kernels.rms_norm(x, norm, 1e-5), packed)
    assert torch.equal(kernels.norm_linear(x, norm, 1e-5, packed), apart)
    with_nan = gate_up.clone()
    with_nan[0, 7] = torch.nan
    for activation in Activation:
        apart = kernels.linear(kernels.activate_and_mul(gate_up, activation), packed, residual)
        together = kernels.gated_linear(gate_up, packed, residual, activation=activation)
        assert torch.equal(together, apart)
        broken = kernels.gated_linear(with_nan, packed, residual, activation=activation)
        assert broken[0].isnan().all() and torch.equal(broken[1:], apart[1:])


def test_no_rows_give_no_rows(kernels: Kernels) -> None:
    packed = kernels.pack_linear(random_numbers(8, 64, seed=2))
    assert kernels.linear(torch.empty(0, 64), packed).shape == (0, 8)


def test_rows_of_another_width_are_refused(kernels: Kernels) -> None:
    packed = kernels.pack_linear(random_numbers(8, 64, seed=2))
    with pytest.raises(ValueError, match="63 inputs, the projection 64"):
        kernels.linear(torch.zeros(2, 63), packed)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_largest_products_do_not_saturate(native: Native, sign: float) -> None:
    x = torch.full((2, 256), sign)
    weight = torch.tensor([0.5, -0.5] * 128).expand(4, -1).clone()
    weight[:, 1::2] = 0.5 * torch.tensor([1.0, 1.0, 1.0, -1.0]).unsqueeze(1)
    expected = (x.double() @ weight.double().t()).float()
    actual = linear(native, x, pack_int8(native, weight, None), None)
    torch.testing.assert_close(actual, expected, atol=0.05, rtol=1e-3)


def test_a_model_packs_its_last_projection_more_finely(kernels: Kernels) -> None:
    weight = random_numbers(8, 64, seed=2)
    planes = []
    for is_last in (False, True):
        packed = kernels.pack_linear(weight, is_last=is_last)
        assert isinstance(packed, Int8Projection)
        planes.append(packed.num_planes)
    assert planes == [1, 2]
