"""Quantised checkpoints become the float weights that their formats define, to the last bit.

The formats are written here value by value, from their definitions: a list of levels becomes bits,
bits become words. What a weight is worth is computed in float64 from the levels themselves.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sapwood.kernels import load_kernels
from sapwood.runtime.checkpoint_tensors import SafetensorsFolder, TensorHeader
from sapwood.runtime.errors import ModelError, UnsupportedModelError
from sapwood.runtime.quantize import Quantize, _log_probabilities
from sapwood.runtime.quantized_checkpoint import (
    FloatWeights,
    float_weights,
    quantization_settings,
)
from sapwood.runtime.weights import load_model

MODULE = "model.layers.0.mlp.up_proj"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight values a word's nibbles hold
Levels = np.ndarray  # whole numbers, int64


@dataclass(frozen=True)
class Quantized:
    """A weight as levels [O, I] with scales and zero points [O, G] and each input's group [I]."""

    levels: Levels
    scales: Tensor
    zeros: Levels
    groups: list[int]

    def expected(self) -> Tensor:
        """Float64 arithmetic, one value at a time, rounded to float32 at the end."""
        num_outputs, num_inputs = self.levels.shape
        weight = torch.empty(num_outputs, num_inputs, dtype=torch.float64)
        for o in range(num_outputs):
            for i in range(num_inputs):
                group = self.groups[i]
                level = float(int(self.levels[o, i]) - int(self.zeros[o, group]))
                weight[o, i] = level * float(self.scales[o, group])
        return weight.to(torch.float32)


def random_weight(
    bits: int, num_outputs: int, num_inputs: int, group_size: int, *, is_ordered: bool = False
) -> Quantized:
    rng = np.random.default_rng(num_outputs * num_inputs + bits)
    num_groups = -(-num_inputs // group_size)
    groups = [i // group_size for i in range(num_inputs)]
    if is_ordered:
        groups = [int(g) for g in rng.permutation(groups)]
    scales = torch.from_numpy(rng.uniform(0.001, 0.1, (num_outputs, num_groups)))
    return Quantized(
        levels=rng.integers(0, 2**bits, (num_outputs, num_inputs)),
        scales=scales.to(torch.float16),
        zeros=rng.integers(1, 2**bits, (num_outputs, num_groups)),
        groups=groups,
    )


def words_of(values: list[int], bits: int) -> list[int]:
    """Values side by side from the lowest bit up, cut into signed words of 32 bits."""
    stream = sum(int(value) << (index * bits) for index, value in enumerate(values))
    words = [(stream >> (32 * n)) & 0xFFFFFFFF for n in range(-(-len(values) * bits // 32))]
    return [word - 2**32 if word >= 2**31 else word for word in words]


def packed_rows(values: Levels, bits: int) -> Tensor:
    return torch.tensor([words_of(list(row), bits) for row in values], dtype=torch.int32)


def gptq_tensors(weight: Quantized, bits: int, *, zero_offset: int = 1) -> dict[str, Tensor]:
    return {
        "qweight": packed_rows(weight.levels, bits).t().contiguous(),
        "qzeros": packed_rows(weight.zeros.T - zero_offset, bits),
        "scales": weight.scales.t().contiguous(),
        "g_idx": torch.tensor(weight.groups, dtype=torch.int32),
    }


def awq_rows(values: Levels) -> Tensor:
    """Eight values a word, the nibbles in AWQ's order."""
    rows = [
        [row[start + n] for start in range(0, len(row), 8) for n in AWQ_ORDER] for row in values
    ]
    return packed_rows(np.array(rows), 4)


def awq_tensors(weight: Quantized) -> dict[str, Tensor]:
    return {
        "qweight": awq_rows(weight.levels.T),
        "qzeros": awq_rows(weight.zeros.T),
        "scales": weight.scales.t().contiguous(),
    }


class Tensors:
    """A TensorSource of tensors in memory."""

    NAMES: Mapping[torch.dtype, str] = {
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int8: "I8",
        torch.int32: "I32",
        torch.int64: "I64",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.float8_e8m0fnu: "F8_E8M0",
    }

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        return {n: TensorHeader(self.NAMES[t.dtype], tuple(t.shape)) for n, t in self.named()}

    def named(self) -> list[tuple[str, Tensor]]:
        return list(self.tensors.items())

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def opened(parts: Mapping[str, Tensor], settings: Mapping[str, Any]) -> FloatWeights:
    return float_weights(Tensors({f"{MODULE}.{n}": t for n, t in parts.items()}), settings)


def weight_from(parts: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Tensor:
    """The one weight that is made of `parts`, which leave nothing else behind."""
    source = opened(parts, settings)
    header = source.headers[f"{MODULE}.weight"]
    weight = source.read(f"{MODULE}.weight")
    assert list(source.headers) == [f"{MODULE}.weight"]
    assert header == ("F32", tuple(weight.shape))
    assert weight.dtype == torch.float32
    return weight


def gptq(bits: int = 4, group_size: int = 8, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, **more}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_gptq_weights_are_exact_in_every_width_and_order(bits: int, is_ordered: bool) -> None:
    weight = random_weight(bits, 32, 64, 8, is_ordered=is_ordered)
    found = weight_from(gptq_tensors(weight, bits), gptq(bits))
    assert torch.equal(found, weight.expected())


def test_gptq_zero_points_are_stored_less_one_and_in_the_second_format_as_they_are() -> None:
    weight = random_weight(4, 16, 16, 8)
    second = gptq_tensors(weight, 4, zero_offset=0)
    expected = weight.expected()
    assert torch.equal(weight_from(second, gptq(checkpoint_format="gptq_v2")), expected)
    assert not torch.equal(weight_from(second, gptq()), expected)


def test_a_gptq_weight_without_an_order_has_its_groups_one_after_another() -> None:
    weight = random_weight(4, 8, 32, 16)
    parts = gptq_tensors(weight, 4)
    del parts["g_idx"]
    assert torch.equal(weight_from(parts, gptq(group_size=16)), weight.expected())


def test_group_size_minus_one_is_one_group_for_all_inputs() -> None:
    weight = random_weight(4, 8, 32, 32)
    assert torch.equal(weight_from(gptq_tensors(weight, 4), gptq(group_size=-1)), weight.expected())
    settings = {"quant_method": "awq", "bits": 4, "group_size": -1}
    assert torch.equal(weight_from(awq_tensors(weight), settings), weight.expected())


def test_a_last_group_may_be_smaller() -> None:
    weight = random_weight(4, 8, 24, 16)
    assert torch.equal(weight_from(gptq_tensors(weight, 4), gptq(group_size=16)), weight.expected())


def test_awq_weights_are_exact() -> None:
    weight = random_weight(4, 24, 32, 16)
    settings = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "GEMM"}
    assert torch.equal(weight_from(awq_tensors(weight), settings), weight.expected())


def scaled(levels: Tensor, scale_of: Callable[[int, int], float]) -> Tensor:
    expected = torch.empty(levels.shape, dtype=torch.float64)
    for o in range(levels.shape[0]):
        for i in range(levels.shape[1]):
            expected[o, i] = float(levels[o, i]) * scale_of(o, i)
    return expected.to(torch.float32)


def random_float8(num_outputs: int, num_inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(num_outputs, num_inputs, generator=generator) * 50
    return values.to(torch.float8_e4m3fn)


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
@pytest.mark.parametrize("shape", [(), (1,), (10, 1)])
def test_float8_weights_have_a_scale_for_all_or_for_each_row(
    method: str, shape: tuple[int, ...]
) -> None:
    levels = random_float8(10, 6)
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.01
    strategy = "channel" if len(shape) == 2 else "tensor"
    settings: dict[str, Any] = {"quant_method": method, "activation_scheme": "static"}
    if method == "compressed-tensors":
        settings = compressed("float-quantized", type="float", num_bits=8, strategy=strategy)
    rows = scales.reshape(-1).expand(10)
    found = weight_from({"weight": levels, "weight_scale": scales}, settings)
    assert torch.equal(found, scaled(levels, lambda o, i: float(rows[o])))


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_float8_blocks_have_a_scale_each_also_those_that_are_cut_off(method: str) -> None:
    levels = random_float8(10, 6)
    scales = torch.rand(3, 2, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    settings: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 4]}
    name = "weight_scale_inv"
    if method == "compressed-tensors":
        name = "weight_scale"
        block = {"strategy": "block", "block_structure": [4, 4]}
        settings = compressed("float-quantized", type="float", num_bits=8, **block)
    found = weight_from({"weight": levels, name: scales}, settings)
    assert torch.equal(found, scaled(levels, lambda o, i: float(scales[o // 4, i // 4])))


def test_float8_scales_may_be_powers_of_two_in_a_byte() -> None:
    levels = random_float8(8, 8)
    scales = torch.tensor([[0.5, 4.0], [0.0625, 1.0]])
    settings = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    parts = {"weight": levels, "weight_scale_inv": scales.to(torch.float8_e8m0fnu)}
    found = weight_from(parts, settings)
    assert torch.equal(found, scaled(levels, lambda o, i: float(scales[o // 4, i // 4])))


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def test_int8_weights_have_a_scale_for_each_row() -> None:
    rng = np.random.default_rng(0)
    levels = torch.from_numpy(rng.integers(-128, 128, (8, 12))).to(torch.int8)
    scales = torch.from_numpy(rng.uniform(0.001, 0.1, (8, 1))).to(torch.bfloat16)
    settings = compressed("int-quantized", num_bits=8, strategy="channel", symmetric=True)
    found = weight_from({"weight": levels, "weight_scale": scales}, settings)
    assert torch.equal(found, scaled(levels, lambda o, i: float(scales[o, 0])))


def test_asymmetric_int8_weights_have_zero_points_for_each_group() -> None:
    rng = np.random.default_rng(1)
    levels = rng.integers(-128, 128, (4, 16))
    zeros = rng.integers(-128, 128, (4, 2))
    scales = torch.from_numpy(rng.uniform(0.001, 0.1, (4, 2))).to(torch.bfloat16)
    weight = Quantized(levels, scales, zeros, [i // 8 for i in range(16)])
    parts = {
        "weight": torch.from_numpy(levels).to(torch.int8),
        "weight_scale": scales,
        "weight_zero_point": torch.from_numpy(zeros).to(torch.int8),
    }
    group = {"strategy": "group", "group_size": 8, "symmetric": False}
    found = weight_from(parts, compressed("naive-quantized", num_bits=8, **group))
    assert torch.equal(found, weight.expected())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_packed_weights_are_exact(bits: int, is_symmetric: bool, is_ordered: bool) -> None:
    weight = random_weight(bits, 20, 40, 8, is_ordered=is_ordered)
    half = 1 << (bits - 1)
    if is_symmetric:
        weight = Quantized(
            weight.levels, weight.scales, np.full_like(weight.zeros, half), weight.groups
        )
    parts = {
        "weight_packed": packed_rows(weight.levels, bits),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor([20, 40]),
    }
    if not is_symmetric:
        parts["weight_zero_point"] = packed_rows(weight.zeros.T, bits).t().contiguous()
    if is_ordered:
        parts["weight_g_idx"] = torch.tensor(weight.groups, dtype=torch.int32)
    scheme = {
        "num_bits": bits,
        "type": "int",
        "strategy": "group",
        "group_size": 8,
        "symmetric": is_symmetric,
        "actorder": "group" if is_ordered else None,
    }
    assert torch.equal(
        weight_from(parts, compressed("pack-quantized", **scheme)), weight.expected()
    )


def test_packed_weights_may_have_a_scale_for_each_row_and_inputs_that_fill_no_word() -> None:
    weight = random_weight(4, 3, 13, 13)
    parts = {
        "weight_packed": packed_rows(weight.levels, 4),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor([3, 13]),
        "weight_zero_point": packed_rows(weight.zeros.T, 4).t().contiguous(),
    }
    scheme = compressed("pack-quantized", num_bits=4, strategy="channel", symmetric=False)
    assert torch.equal(weight_from(parts, scheme), weight.expected())


def test_what_only_concerns_activations_and_the_kv_cache_is_passed_over() -> None:
    parts = {
        "weight": random_float8(4, 4),
        "weight_scale": torch.ones(1),
        "input_scale": torch.ones(1),
        "k_scale": torch.ones(1),
    }
    assert torch.equal(weight_from(parts, {"quant_method": "fp8"}), parts["weight"].float())


def test_modules_that_are_not_quantised_stay_as_they_are() -> None:
    weight = random_weight(4, 8, 16, 8)
    tensors = {f"{MODULE}.{n}": t for n, t in gptq_tensors(weight, 4).items()}
    plain = torch.randn(3, 5, dtype=torch.bfloat16)
    source = float_weights(Tensors(tensors | {"lm_head.weight": plain}), gptq())
    assert source.headers["lm_head.weight"] == ("BF16", (3, 5))
    assert torch.equal(source.read("lm_head.weight"), plain)
    assert source.num_quantized == 1


def test_biases_of_zeros_that_the_model_lacks_are_dropped_and_no_others() -> None:
    parts = gptq_tensors(random_weight(4, 8, 16, 8), 4)
    name = f"{MODULE}.bias"
    idle = opened(parts | {"bias": torch.zeros(8)}, gptq())
    assert name not in idle.without_idle_biases({}).headers
    assert name in idle.without_idle_biases({name: (8,)}).headers
    busy = opened(parts | {"bias": torch.ones(8)}, gptq())
    assert name in busy.without_idle_biases({}).headers


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "quantised by bitsandbytes are not served; served are"),
        ({"quant_method": "hqq"}, "hqq are not served.*float weights"),
        ({}, "an unnamed method"),
        (gptq(bits=5), "bits is 5; served is 2 or 3 or 4 or 8"),
        (gptq(group_size=0), "group_size is 0"),
        (gptq(checkpoint_format="marlin"), "checkpoint_format is marlin"),
        (gptq(dynamic={"+:layers.0": {"bits": 8}}), "dynamic is settings of its own"),
        (gptq(pack_dtype="int64"), "pack_dtype is int64"),
        ({"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemv"}, "version is gemv"),
        ({"quant_method": "awq", "bits": 8, "group_size": 8}, "bits is 8; served is 4"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": False},
            "zero_point is False",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [0, 4]}, "weight_block_size is"),
        (compressed("marlin-24", num_bits=4, strategy="channel"), "marlin-24; served is pack"),
        (
            compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group"),
            "num_bits is 4; served is 8",
        ),
        (compressed("pack-quantized", num_bits=3, strategy="channel"), "num_bits is 3"),
        (compressed("int-quantized", num_bits=4, strategy="channel"), "format of 4 bits"),
        (compressed("int-quantized", num_bits=8, strategy="token"), "strategy is token"),
        (
            compressed("int-quantized", num_bits=8, strategy="channel")
            | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config is set",
        ),
        (
            compressed("int-quantized", num_bits=8, strategy="channel")
            | {"transform_config": {"config_groups": {"a": {}}}},
            "transform_config is set",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {
                    "a": {"weights": {"num_bits": 8, "strategy": "channel"}},
                    "b": {"weights": {"num_bits": 8, "strategy": "tensor"}},
                },
            },
            "several ways to store weights",
        ),
    ],
)
def test_settings_that_are_not_served_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        opened({}, settings)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8}
PACKED = compressed("pack-quantized", num_bits=4, strategy="group", group_size=8)


@pytest.mark.parametrize(
    ("settings", "change", "said"),
    [
        (gptq(), {"qzeros": None}, f"quantised {MODULE} and lacks {MODULE}.qzeros"),
        (gptq(), {"scales": torch.ones(3, 8)}, r"scales of shape \[3, 8\] where \[2, 8\]"),
        (gptq(), {"qzeros": torch.ones(2, 9).int()}, r"qzeros of shape \[2, 9\]"),
        (gptq(), {"g_idx": torch.ones(15).int()}, r"g_idx of shape \[15\]"),
        (gptq(), {"qweight": torch.ones(2, 8)}, "qweight as F32; served is I32"),
        (gptq(), {"qweight": torch.ones(0, 8).int()}, r"qweight of shape \[0, 8\]"),
        (gptq(), {"qweight": torch.ones(8).int()}, r"qweight of shape \[8\]"),
        (gptq(3), {"qweight": torch.ones(2, 8).int()}, "2 words of 3-bit values"),
        (gptq(), {"weight": torch.ones(8, 16)}, "both plain and quantised"),
        (AWQ, {"qweight": torch.ones(16, 2).int()}, r"qzeros of shape \[2, 1\] where \[2, 2\]"),
        (AWQ, {"scales": None}, "lacks .*scales"),
        ({"quant_method": "fp8"}, {"weight_scale": torch.ones(5)}, "lacks .*weight"),
        (
            {"quant_method": "fp8"},
            {"weight": random_float8(4, 4), "weight_scale": torch.ones(3)},
            r"weight_scale of shape \[3, 1\] where \[4, 1\]",
        ),
        (
            {"quant_method": "fp8"},
            {"weight": torch.ones(4, 4).to(torch.float8_e5m2), "weight_scale": torch.ones(1)},
            "weight as F8_E5M2; served is F8_E4M3",
        ),
        (PACKED, {"weight_packed": torch.ones(4, 2).int()}, "lacks .*weight_shape"),
        (
            PACKED,
            {"weight_packed": torch.ones(4, 2).int(), "weight_shape": torch.tensor([4, 10**12])},
            r"weight_shape is \[4, 1000000000000\]",
        ),
        (
            compressed(
                "pack-quantized", num_bits=4, strategy="group", group_size=8, actorder="group"
            ),
            {
                "weight_packed": torch.ones(4, 2).int(),
                "weight_shape": torch.tensor([4, 16]),
                "weight_scale": torch.ones(4, 2),
            },
            "lacks .*weight_g_idx",
        ),
    ],
)
def test_tensors_that_are_missing_or_do_not_fit_are_named(
    settings: dict[str, Any], change: dict[str, Tensor | None], said: str
) -> None:
    parts: dict[str, Tensor | None] = {}
    if settings["quant_method"] == "gptq":
        parts |= gptq_tensors(random_weight(4, 8, 16, 8), 4)
    if settings["quant_method"] == "awq":
        parts |= awq_tensors(random_weight(4, 8, 16, 8))
    present = {name: tensor for name, tensor in (parts | change).items() if tensor is not None}
    with pytest.raises(ModelError, match=said):
        opened(present, settings)


@pytest.mark.parametrize("group", [-2, 2, 1000])
def test_an_input_in_a_group_that_there_is_not_is_named(group: int) -> None:
    parts = gptq_tensors(random_weight(4, 8, 16, 8), 4)
    parts["g_idx"][3] = group
    source = opened(parts, gptq())
    with pytest.raises(ModelError, match="names groups .* and there are 0 to 1"):
        source.read(f"{MODULE}.weight")


@pytest.mark.parametrize("config", [{"quantization_config": "awq"}, {"quantization_config": 4}])
def test_settings_of_another_kind_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="quantization_config"):
        quantization_settings(config)


def test_the_older_name_of_the_settings_is_read_too() -> None:
    assert quantization_settings({"compression_config": {"format": "x"}}) == {"format": "x"}
    assert quantization_settings({"quantization_config": {}}) is None


@pytest.fixture
def quantized_model(tiny_model: Path, tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """Two folders of the same model: quantised by a method, and with what its weights are worth."""

    def quantize(method: str) -> tuple[Path, Path]:
        rng = np.random.default_rng(0)
        worth = load_file(tiny_model / "model.safetensors")
        stored = dict(worth)
        for name in [n for n in worth if "_proj.weight" in n]:
            num_outputs, num_inputs = worth[name].shape
            scales = worth[name].view(num_outputs, -1, 32).abs().amax(-1).div(7).half()
            zeros = rng.integers(7, 10, tuple(scales.shape))
            groups = [i // 32 for i in range(num_inputs)]
            spread = scales.double().numpy()[:, groups]
            levels = np.rint(worth[name].double().numpy() / spread) + zeros[:, groups]
            levels = np.clip(levels, 0, 15).astype(np.int64)
            quantized = Quantized(levels, scales, zeros, groups)
            parts = awq_tensors(quantized) if method == "awq" else gptq_tensors(quantized, 4)
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
            stored[f"{module}.bias"] = torch.zeros(num_outputs)
            del stored[name]
            exact = (levels - zeros[:, groups]) * spread
            worth[name] = torch.from_numpy(exact).to(torch.float32)
        settings = {"quant_method": method, "bits": 4, "group_size": 32, "desc_act": False}
        folders = tmp_path / "quantised", tmp_path / "worth"
        for folder, weights in zip(folders, (stored, worth), strict=True):
            folder.mkdir()
            for path in tiny_model.glob("*.json"):
                (folder / path.name).write_bytes(path.read_bytes())
            save_file(weights, folder / "model.safetensors")
        config = json.loads((folders[0] / "config.json").read_text())
        text = json.dumps(config | {"quantization_config": settings})
        (folders[0] / "config.json").write_text(text)
        return folders

    return quantize


def logits_of(folder: Path, **options: str) -> Tensor:
    kernels = load_kernels("reference")
    model = load_model(folder, kernels=kernels, **options).model
    return _log_probabilities(model, kernels, np.arange(30, dtype=np.int32))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_quantised_model_answers_as_the_model_that_its_weights_are_worth(
    quantized_model: Callable[[str], tuple[Path, Path]],
    method: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    quantised, worth = quantized_model(method)
    with caplog.at_level(logging.WARNING):
        found = logits_of(quantised)
    assert torch.equal(found, logits_of(worth))
    assert f"14 weights quantised by {method} become float32" in caplog.text
    assert torch.equal(logits_of(quantised, dtype="bfloat16"), logits_of(worth, dtype="bfloat16"))


@pytest.mark.skipif(load_kernels("cpu").quantized() is None, reason="int8 takes a C compiler")
def test_a_quantised_checkpoint_may_be_computed_in_int8(
    quantized_model: Callable[[str], tuple[Path, Path]],
) -> None:
    quantised, worth = quantized_model("gptq")
    kernels = load_kernels("cpu")
    found, expected = (
        load_model(folder, kernels=kernels, quantize="int8") for folder in (quantised, worth)
    )
    assert found.quantize is expected.quantize is Quantize.INT8
    int8 = kernels.quantized()
    assert int8 is not None
    ids = np.arange(30, dtype=np.int32)
    first, second = (_log_probabilities(m.model, int8, ids) for m in (found, expected))
    assert torch.equal(first, second)


def test_stored_tensors_are_read_as_headers_say(
    quantized_model: Callable[[str], tuple[Path, Path]],
) -> None:
    folder, _ = quantized_model("gptq")
    stored = SafetensorsFolder(folder, torch.device("cpu"))
    name = f"{MODULE}.qweight"
    assert stored.headers[name] == ("I32", tuple(stored.read(name).shape))


def test_method_and_tensors_that_do_not_match_are_refused(
    quantized_model: Callable[[str], tuple[Path, Path]],
) -> None:
    folder, _ = quantized_model("gptq")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="lacks .*has .*which the model has no place for"):
        load_model(folder, kernels=load_kernels("reference"))
