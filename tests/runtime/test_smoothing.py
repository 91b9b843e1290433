"""Smoothing changes no answer; it only moves magnitudes."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood.kernels import AttentionPlan, PrivateSegment, load_kernels
from sapwood.kernels.interface import Kernels
from sapwood.runtime.batch import ForwardBatch
from sapwood.runtime.model_config import ModelConfig, parse_model_config
from sapwood.runtime.models.llama import LlamaForCausalLM
from sapwood.runtime.smoothing import (
    MagnitudeRecorder,
    SmoothedWeights,
    SmoothingGroup,
    smoothing_scales,
)

NUM_TOKENS = 24


def config_of(**changes: object) -> ModelConfig:
    raw = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    return parse_model_config({**raw, **changes})


def random_weights(config: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = LlamaForCausalLM.weight_shapes(config)
    return {
        name: torch.empty(shape).normal_(1.0 if "norm" in name else 0.0, 0.15, generator=generator)
        for name, shape in shapes.items()
    }


def logits_of(config: ModelConfig, weights: Mapping[str, Tensor], kernels: Kernels) -> Tensor:
    model = LlamaForCausalLM(config, weights, kernels)
    return forward(model, kernels)


def forward(model: LlamaForCausalLM, kernels: Kernels) -> Tensor:
    spec = model.kv_spec(1, NUM_TOKENS)
    segment = PrivateSegment(
        block_ids=np.zeros(1, np.int32),
        start=0,
        length=NUM_TOKENS,
        first_row=0,
        num_rows=NUM_TOKENS,
    )
    plan = AttentionPlan(num_rows=NUM_TOKENS, block_size=NUM_TOKENS, shared=(), private=(segment,))
    rows = torch.arange(NUM_TOKENS)
    batch = ForwardBatch(
        input_ids=rows + 3,
        positions=rows,
        slots=rows,
        logits_rows=rows,
        attention=kernels.plan_attention(plan, spec),
    )
    return model.forward(batch, kernels.make_kv_cache(spec))


@pytest.mark.parametrize("biases", [False, True])
def test_the_model_computes_the_same(biases: bool) -> None:
    config = config_of(attention_bias=biases, mlp_bias=biases)
    weights, kernels = random_weights(config), load_kernels("cpu")
    recorder = MagnitudeRecorder(kernels)
    model = LlamaForCausalLM(config, weights, recorder)  # type: ignore[arg-type]
    expected = forward(model, kernels)
    groups = tuple(LlamaForCausalLM.smoothing_groups(config))
    magnitudes = {name: recorder.magnitudes(p) for name, p in model.projections.items()}
    assert {group.name for group in groups} == set(magnitudes)
    scales = smoothing_scales(weights, groups, magnitudes)
    assert all(scale.max() / scale.min() > 1000 for scale in scales.values())
    smoothed = SmoothedWeights(weights, groups, scales)
    assert set(smoothed) == set(weights)
    assert len(smoothed) == len(weights)
    actual = logits_of(config, smoothed, kernels)
    error = (actual - expected).abs().max() / expected.std()
    assert error < 1e-4


def test_magnitudes_are_the_largest_over_all_rows_of_all_calls() -> None:
    recorder = MagnitudeRecorder(load_kernels("cpu"))
    one, other = (recorder.pack_linear(torch.eye(3)) for _ in range(2))
    recorder.linear(torch.tensor([[1.0, -5.0, 0.0], [-2.0, 4.0, 0.0]]), one)
    recorder.linear(torch.tensor([[3.0, 0.0, 0.0]]), one)
    recorder.linear(torch.empty(0, 3), one)
    assert recorder.magnitudes(one).tolist() == [3.0, 5.0, 0.0]
    with pytest.raises(KeyError):
        recorder.magnitudes(other)


def test_activations_and_weights_share_the_difficulty() -> None:
    group = SmoothingGroup(name="g", producers=("norm",), consumers=("weight",))
    weights = {"norm": torch.ones(4), "weight": torch.ones(2, 4)}
    scales = smoothing_scales(weights, [group], {"g": torch.tensor([1.0, 4.0, 16.0, 1.0])})["g"]
    torch.testing.assert_close(scales / scales[0], torch.tensor([1.0, 2.0, 4.0, 1.0]))


def test_inputs_that_come_from_one_channel_are_scaled_alike() -> None:
    channels = torch.tensor([0, 1, 0, 1])
    group = SmoothingGroup(
        name="g", producers=("value",), consumers=("weight",), channel_of_input=channels
    )
    weights = {"value": torch.ones(2, 3), "weight": torch.ones(5, 4)}
    scales = smoothing_scales(weights, [group], {"g": torch.tensor([1.0, 2.0, 9.0, 4.0])})
    smoothed = SmoothedWeights(weights, [group], scales)
    assert scales["g"][0] == scales["g"][2] != scales["g"][1] == scales["g"][3]
    torch.testing.assert_close(
        smoothed["weight"][:, :2] * smoothed["value"][:, 0], torch.ones(5, 2)
    )
