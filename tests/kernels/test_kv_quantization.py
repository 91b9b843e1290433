"""Rounding of keys and values: the bounds that kv_quantization.py states, and its rare rows."""

import pytest
import torch

from sapwood.kernels import KERNELS, load_kernels
from sapwood.kernels.interface import QUANTIZED_KV_DTYPES, KVCacheSpec
from sapwood.kernels.kv_quantization import LARGEST_CODE, SMALLEST_SCALE, decode, encode

quantized = pytest.mark.parametrize("dtype", QUANTIZED_KV_DTYPES, ids=str)


def spec(dtype: torch.dtype) -> KVCacheSpec:
    return KVCacheSpec(
        num_layers=3,
        num_blocks=5,
        block_size=16,
        num_kv_heads=2,
        head_dim=64,
        dtype=dtype,
        device=torch.device("cpu"),
    )


@quantized
def test_the_largest_number_of_a_row_has_the_largest_code(dtype: torch.dtype) -> None:
    rows = torch.randn(500, 3, 16) * torch.logspace(-30, 30, 500)[:, None, None]
    codes, scales = encode(rows, dtype)
    assert (codes.float().abs().amax(dim=-1) == LARGEST_CODE[dtype]).all()
    torch.testing.assert_close(scales * LARGEST_CODE[dtype], rows.abs().amax(dim=-1))


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e5, 1e30])
def test_int8_is_off_by_half_a_step(size: float) -> None:
    rows = torch.randn(2000, 16) * size
    error = (decode(*encode(rows, torch.int8)).double() - rows.double()).abs()
    largest = rows.double().abs().amax(dim=-1, keepdim=True)
    assert (error <= largest / 254 * (1 + 1e-4)).all()
    assert (error / largest).max() > 1 / 260, "the bound is reached"


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e5, 1e30])
def test_e4m3_is_off_by_a_sixteenth_of_a_number(size: float) -> None:
    rows = torch.randn(2000, 16) * torch.logspace(-6, 0, 16) * size
    error = (decode(*encode(rows, torch.float8_e4m3fn)).double() - rows.double()).abs()
    largest = rows.double().abs().amax(dim=-1, keepdim=True)
    allowed = torch.maximum(rows.double().abs() / 16, largest / (448 * 1024))
    assert (error <= allowed * (1 + 1e-4)).all()
    assert (error / rows.double().abs())[:, 8:].max() > 1 / 18, "the bound is reached"


@quantized
def test_zeros_and_what_is_too_small_to_divide_by_stay_finite(dtype: torch.dtype) -> None:
    rows = torch.zeros(3, 8)
    rows[1, 2], rows[2] = 1e-45, -2e-40
    codes, scales = encode(rows, dtype)
    assert (scales == SMALLEST_SCALE).all()
    assert (decode(codes, scales)[0] == 0).all()
    assert (decode(codes, scales) - rows).abs().max() <= SMALLEST_SCALE


@quantized
def test_a_row_with_a_number_that_is_not_finite_is_nan(dtype: torch.dtype) -> None:
    rows = torch.randn(4, 8)
    rows[0, 3], rows[1, 0], rows[2, 7] = torch.nan, torch.inf, -torch.inf
    is_nan = decode(*encode(rows, dtype)).isnan()
    assert is_nan[:3].all()
    assert not is_nan[3].any()


@quantized
def test_rows_are_rounded_each_by_itself(dtype: torch.dtype) -> None:
    rows = torch.randn(33, 3, 16)
    together = encode(rows, dtype)
    for index in range(33):
        alone = encode(rows[index : index + 1], dtype)
        assert torch.equal(together.codes[index].float(), alone.codes[0].float())
        assert torch.equal(together.scales[index], alone.scales[0])


@quantized
def test_the_bytes_of_a_token_count_its_scales(dtype: torch.dtype) -> None:
    for name in KERNELS:
        kernels = load_kernels(name).with_kv_dtype(dtype)
        assert kernels is not None
        assert kernels.kv_dtype(torch.bfloat16, 64) == dtype
        kv = kernels.make_kv_cache(spec(dtype))
        blocks = kv.keys.shape[1] if kv.keys.dim() == 5 else 5  # some have more than the spec's
        num_bytes = sum(tensor.nbytes for tensor in kv.tensors)
        assert num_bytes == spec(dtype).num_bytes_per_token * 16 * blocks
    assert spec(dtype).num_bytes_per_token == 2 * 3 * 2 * (64 + 4)
    assert spec(torch.bfloat16).num_bytes_per_token == 2 * 3 * 2 * 64 * 2


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_other_dtypes_are_not_kept_with_scales(name: str) -> None:
    assert load_kernels(name).with_kv_dtype(torch.float16) is None
    assert load_kernels(name).with_kv_dtype(torch.float8_e5m2) is None


def test_int8_projections_keep_keys_and_values_as_they_were_told() -> None:
    kernels = load_kernels("cpu").with_kv_dtype(torch.int8)
    assert kernels is not None
    with_projections = kernels.quantized()
    if with_projections is None:
        pytest.skip("there is no C compiler")
    assert with_projections.kv_dtype(torch.float32, 64) == torch.int8
