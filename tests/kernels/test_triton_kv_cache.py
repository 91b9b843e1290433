"""Blocks that leave the device and come back, and how kernels are cut for shapes of heads."""

import pytest
import torch

from sapwood.kernels import load_kernels
from sapwood.kernels.interface import QUANTIZED_KV_DTYPES, KVCache, KVCacheSpec, RowCopy
from sapwood.kernels.triton_kv_cache import (
    copy_rows,
    gather_blocks,
    num_block_bytes,
    scatter_blocks,
    specializations,
)
from tests.kernels.test_kernels import device_of

DTYPES = (torch.float32, torch.bfloat16, *QUANTIZED_KV_DTYPES)


def filled(dtype: torch.dtype, seed: int) -> KVCache:
    """A cache of random bytes."""
    spec = KVCacheSpec(
        num_layers=3,
        num_blocks=6,
        block_size=4,
        num_kv_heads=2,
        head_dim=20,
        dtype=dtype,
        device=device_of("triton"),
    )
    kv = load_kernels("triton").make_kv_cache(spec)
    generator = torch.Generator().manual_seed(seed)
    for tensor in kv.tensors:
        some = torch.randint(0, 100, (tensor.nbytes,), generator=generator, dtype=torch.uint8)
        tensor.view(torch.uint8).copy_(some.view(tensor.view(torch.uint8).shape))
    return kv


def bytes_of(kv: KVCache, block: int) -> torch.Tensor:
    return torch.cat([t[:, block].contiguous().view(torch.uint8).flatten() for t in kv.tensors])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gathered_block_is_all_its_layers_in_one_run(dtype: torch.dtype) -> None:
    kv = filled(dtype, seed=1)
    buffer = gather_blocks(kv, [4, 0, 5])
    assert buffer.shape == (3, num_block_bytes(kv))
    for row, block in zip(buffer, (4, 0, 5), strict=True):
        assert torch.equal(row, bytes_of(kv, block))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scattered_blocks_are_those_that_were_gathered(dtype: torch.dtype) -> None:
    kv, other, untouched = filled(dtype, seed=1), filled(dtype, seed=2), filled(dtype, seed=2)
    scatter_blocks(other, [1, 3, 0], gather_blocks(kv, [4, 0, 5]))
    for block, source in ((1, 4), (3, 0), (0, 5)):
        assert torch.equal(bytes_of(other, block), bytes_of(kv, source))
    for block in (2, 4, 5, 6):
        assert torch.equal(bytes_of(other, block), bytes_of(untouched, block))


def test_no_blocks_are_an_empty_buffer() -> None:
    kv, untouched = filled(torch.float32, seed=1), filled(torch.float32, seed=1)
    scatter_blocks(kv, [], gather_blocks(kv, []))
    assert torch.equal(kv.keys, untouched.keys)


def test_a_buffer_of_another_cache_is_refused() -> None:
    wide, narrow = filled(torch.float32, seed=1), filled(torch.bfloat16, seed=1)
    with pytest.raises(ValueError, match=r"1 blocks are uint8 \[1, 1920\]"):
        scatter_blocks(narrow, [0], gather_blocks(wide, [0]))


def test_a_copy_longer_than_a_program_moves_at_a_time_is_whole() -> None:
    spec = KVCacheSpec(
        num_layers=1,
        num_blocks=2,
        block_size=32,
        num_kv_heads=1,
        head_dim=72,  # runs of 2304 words
        dtype=torch.float32,
        device=device_of("triton"),
    )
    kv = load_kernels("triton").make_kv_cache(spec)
    kv.keys.copy_(torch.randn(kv.keys.shape))
    kv.values.copy_(torch.randn(kv.values.shape))
    kept = kv.keys[:, 1, :, 31].clone()
    copy_rows(kv, [RowCopy(0, 1, 31)])
    assert torch.equal(kv.keys[:, 1, :, :31], kv.keys[:, 0, :, :31])
    assert torch.equal(kv.values[:, 1, :, :31], kv.values[:, 0, :, :31])
    assert torch.equal(kv.keys[:, 1, :, 31], kept)


def test_no_two_specializations_have_the_same_name() -> None:
    names = [one.name for one in specializations()]
    assert len(set(names)) == len(names)
