"""How copies of blocks are cut, and the forms that are listed."""

import torch

from sapwood.kernels import load_kernels
from sapwood.kernels.interface import KVCacheSpec, RowCopy
from sapwood.kernels.triton_kv_cache import copy_rows, specializations
from tests.kernels.test_kernels import device_of


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
