"""Copies from a device to its host, as far as a machine without one can tell."""

import numpy as np
import torch

from sapwood.kernels.host_copies import HostCopy, pack, unpack

TENSORS = [
    torch.tensor([2**40, -1]),
    torch.tensor([True, False, True]),
    torch.empty(0, 4),
    torch.arange(6, dtype=torch.float32).view(2, 3).t(),
    torch.tensor([[7, 8]], dtype=torch.int64),
]


def test_what_is_packed_comes_back_with_its_dtype_and_shape() -> None:
    arrays = unpack(pack(TENSORS).numpy(), TENSORS)
    for array, tensor in zip(arrays, TENSORS, strict=True):
        assert array.dtype == tensor.numpy().dtype
        assert np.array_equal(array, tensor.numpy())


def test_a_copy_on_a_cpu_has_what_it_was_made_of() -> None:
    for array, tensor in zip(HostCopy.of(TENSORS).arrays(), TENSORS, strict=True):
        assert np.array_equal(array, tensor.numpy())
