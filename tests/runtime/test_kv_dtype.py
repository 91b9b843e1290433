"""What an engine keeps keys and values in: bfloat16 beside int8 projections, where it can."""

from pathlib import Path

import pytest
import torch

from sapwood import Engine, SamplingParams
from sapwood.kernels import load_kernels
from sapwood.kernels.interface import KVCacheSpec
from sapwood.runtime.weights import load_model

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def skip_without_bf16() -> None:
    quantized = load_kernels("cpu").quantized()
    if quantized is None:
        pytest.skip("there is no C compiler")
    if quantized.kv_dtype(torch.float32, 16) != torch.bfloat16:
        pytest.skip("the processor has no AVX512_BF16")


def kv_spec(folder: Path, **options: str) -> KVCacheSpec:
    return load_model(folder, kernels=load_kernels("cpu"), **options).model.kv_spec(2, 16)


def test_int8_halves_the_bytes_of_a_token(tiny_model: Path) -> None:
    skip_without_bf16()
    plain, int8 = kv_spec(tiny_model, quantize="none"), kv_spec(tiny_model, quantize="int8")
    assert (plain.dtype, int8.dtype) == (torch.float32, torch.bfloat16)
    assert int8.num_bytes_per_token * 2 == plain.num_bytes_per_token


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_without_int8_keys_and_values_are_what_activations_are(
    tiny_model: Path, dtype: str
) -> None:
    assert kv_spec(tiny_model, quantize="none", dtype=dtype).dtype == getattr(torch, dtype)


def test_an_engine_with_int8_holds_twice_the_tokens_and_says_so(tiny_model: Path) -> None:
    skip_without_bf16()
    capacity = {}
    for mode in ("none", "int8"):
        with Engine(str(tiny_model), quantize=mode, kv_cache_memory=2**20) as engine:
            info = engine.info
            capacity[mode] = info.kv_capacity_tokens
            assert info.dtype == "float32"
            assert engine.generate("The quick", GREEDY)[0].outputs[0].token_ids
            if mode == "int8":
                assert info.kv_dtype == "bfloat16"
                assert info.precision == "float32 and int8, keys and values in bfloat16"
            else:
                assert (info.kv_dtype, info.precision) == ("float32", "float32")
    assert capacity["int8"] == 2 * capacity["none"]
