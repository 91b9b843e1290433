"""Memory for weights: aligned, apart from each other, and given back."""

import gc
import mmap
import weakref

import pytest
import torch

from sapwood.kernels.huge_pages import HugePages, zeros


def test_tensors_are_aligned_and_apart() -> None:
    pages = HugePages()
    taken = [pages.take(size) for size in (1, 63, 64, 65, 1000, 2**25 - 64, 2**26, 7)]
    for index, tensor in enumerate(taken):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(index)
    for index, tensor in enumerate(taken):
        assert (tensor == index).all()


def test_a_chunk_is_given_back_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[weakref.ref[mmap.mmap]] = []

    class Noted(mmap.mmap):
        def __init__(self, *arguments: object, **options: object) -> None:
            chunks.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Noted)
    pages = HugePages()
    first, second = pages.take(100), pages.take(100)
    (chunk,) = chunks
    del pages, first
    gc.collect()
    assert chunk() is not None
    second.fill_(3)
    assert (second == 3).all()
    del second
    gc.collect()
    assert chunk() is None


def test_zeros_and_too_much() -> None:
    made = zeros((3, 5), torch.bfloat16)
    assert made.shape == (3, 5)
    assert not made.any()
    with pytest.raises(MemoryError, match="cannot be had"):
        HugePages().take(2**62)
