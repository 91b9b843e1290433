"""What native.c promises beyond the suite that it shares with the other kernels."""

import logging
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood.kernels import AttentionPlan, PrivateSegment, SharedSegment, load_kernels, native
from sapwood.kernels.interface import Activation, Kernels, KVCacheSpec
from sapwood.kernels.native import Native
from sapwood.kernels.native_attention import NativeAttention
from sapwood.kernels.reference import ReferenceAttention, ReferenceKernels
from sapwood.kernels.torch_attention import TorchAttention

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def functions() -> Native:
    found = native.load()
    if found is None:
        pytest.skip("there is no C compiler")
    return found


def random_numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_it_is_built_once(
    functions: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path))
    assert native.load() is not None
    assert len(list((tmp_path / "native").iterdir())) == 1

    def run(*_: object, **__: object) -> None:
        raise AssertionError("compiled twice")

    monkeypatch.setattr(subprocess, "run", run)
    assert native.load() is not None


@pytest.mark.parametrize("compiler", [None, "/bin/false"])
def test_without_a_working_compiler_torch_does_the_work(
    compiler: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path))
    monkeypatch.setattr(native.shutil, "which", lambda _: compiler)
    with caplog.at_level(logging.INFO):
        assert native.load() is None
        kernels = load_kernels("cpu")
    assert "torch's operations are used" in caplog.text
    x = random_numbers(3, 8)
    torch.testing.assert_close(
        kernels.rms_norm(x, torch.ones(8), 1e-5), torch.nn.functional.rms_norm(x, (8,), eps=1e-5)
    )
    assert isinstance(kernels.plan_attention(decode_plan(2, 5), spec()), TorchAttention)


def spec(
    num_kv_heads: int = 2, head_dim: int = 64, layer_windows: tuple[int | None, ...] = (None,)
) -> KVCacheSpec:
    return KVCacheSpec(
        num_layers=len(layer_windows),
        num_blocks=160,
        block_size=BLOCK_SIZE,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
        layer_windows=layer_windows,
    )


def decode_plan(num_rows: int, length: int, shared: int = 0) -> AttentionPlan:
    """Rows of `length` private tokens each behind `shared` blocks of all."""
    num_blocks = -(-length // BLOCK_SIZE)
    blocks = np.arange(num_rows * num_blocks, dtype=np.int32).reshape(num_rows, -1) + shared
    private = tuple(
        PrivateSegment(
            block_ids=blocks[row],
            start=shared * BLOCK_SIZE,
            length=length,
            first_row=row,
            num_rows=1,
        )
        for row in range(num_rows)
    )
    edges: tuple[SharedSegment, ...] = ()
    if shared:
        edge = SharedSegment(
            block_ids=np.arange(shared, dtype=np.int32),
            start=0,
            length=shared * BLOCK_SIZE,
            rows=np.arange(num_rows, dtype=np.int32),
        )
        edges = (edge,)
    return AttentionPlan(num_rows=num_rows, block_size=BLOCK_SIZE, shared=edges, private=private)


def attend(
    kernels: Kernels,
    plan: AttentionPlan,
    query: Tensor,
    cache: KVCacheSpec,
    softcap: float | None = None,
) -> Tensor:
    kv = kernels.make_kv_cache(cache)
    for index, tensor in enumerate((kv.keys, kv.values)):
        tensor.copy_(random_numbers(*tensor.shape, seed=7 + index))
    prepared = kernels.plan_attention(plan, cache)
    return kernels.attention(query, kv, 0, prepared, 0.125, softcap=softcap)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(20, 1, 64), (40, 1, 8), (5, 1, 128), (14, 2, 64), (3, 3, 256), (6, 2, 80), (4, 2, 12)],
)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 700])
def test_every_head_layout_is_served(
    functions: Native, num_heads: int, num_kv_heads: int, head_dim: int, length: int
) -> None:
    cache = spec(num_kv_heads, head_dim)
    plan = decode_plan(3, length, shared=5)
    query = random_numbers(3, num_heads, head_dim)
    expected = attend(load_kernels("reference"), plan, query, cache)
    actual = attend(load_kernels("cpu"), plan, query, cache)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_head_dims_that_do_not_fit_are_left_to_torch(functions: Native) -> None:
    kernels = load_kernels("cpu")
    plan = decode_plan(2, 5)
    assert isinstance(kernels.plan_attention(plan, spec(2, 64)), NativeAttention)
    assert isinstance(kernels.plan_attention(plan, spec(2, 12)), TorchAttention)
    assert isinstance(kernels.plan_attention(plan, spec(2, 264)), TorchAttention)


def test_windows_that_hide_nothing_are_planned_as_none(functions: Native) -> None:
    cache = spec(2, 64, (None, 8, 44, 45, 46))
    prepared = load_kernels("cpu").plan_attention(decode_plan(3, 45), cache)
    assert isinstance(prepared, NativeAttention)
    calls = prepared.calls_by_window
    assert calls[None] is calls[45] is calls[46]
    assert not calls[None].is_windowed
    assert calls[44].is_windowed and calls[44].num_kv_tokens == 3 * 44
    assert calls[8].num_kv_tokens == 3 * 8


def test_what_torch_lacks_is_planned_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[AttentionPlan] = []
    original = ReferenceKernels.plan_attention

    def plan_attention(
        self: ReferenceKernels, plan: AttentionPlan, spec: KVCacheSpec
    ) -> ReferenceAttention:
        planned.append(plan)
        return original(self, plan, spec)

    monkeypatch.setattr(ReferenceKernels, "plan_attention", plan_attention)
    kernels, plan, cache = load_kernels("cpu-torch"), decode_plan(3, 45), spec()
    kv = kernels.make_kv_cache(cache)
    prepared = kernels.plan_attention(plan, cache)
    for softcap in (None, 5.0, 5.0):
        kernels.attention(random_numbers(3, 6, 64), kv, 0, prepared, 0.125, softcap=softcap)
    assert planned == [plan]


@pytest.mark.parametrize("shared", [0, 64])
def test_a_rows_attention_has_the_same_bits_in_every_batch(functions: Native, shared: int) -> None:
    kernels, cache = load_kernels("cpu"), spec(2, 64)
    query = random_numbers(24, 6, 64)
    together = attend(kernels, decode_plan(24, 40, shared), query, cache)
    few = attend(kernels, decode_plan(3, 40, shared), query[:3], cache)
    assert torch.equal(few, together[:3])


@pytest.mark.parametrize(
    ("activation", "exact"),
    [
        (Activation.SILU, torch.nn.functional.silu),
        (Activation.GELU_TANH, partial(torch.nn.functional.gelu, approximate="tanh")),
    ],
)
def test_activations_hold_at_the_ends(
    functions: Native, activation: Activation, exact: Callable[[Tensor], Tensor]
) -> None:
    x = torch.tensor([[-1e4, -100.0, -20.0, -1.0, 0.0, 1.0, 20.0, 1e4, torch.nan]])
    up = torch.full_like(x, 2.0)
    actual = functions.activate_and_mul(torch.cat((x, up), dim=1), activation)
    expected = exact(x.double()).float() * up
    torch.testing.assert_close(actual, expected, equal_nan=True, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("window", [None, 20, 60])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_broken_score_shows_in_its_own_row_only(
    functions: Native, softcap: float | None, window: int | None
) -> None:
    kernels, cache = load_kernels("cpu"), spec(2, 64, (window,))
    query = random_numbers(4, 6, 64)
    expected = attend(kernels, decode_plan(4, 40, shared=4), query, cache, softcap)
    query[1] = torch.nan
    actual = attend(kernels, decode_plan(4, 40, shared=4), query, cache, softcap)
    assert actual[1].isnan().all()
    assert torch.equal(actual[[0, 2, 3]], expected[[0, 2, 3]])
