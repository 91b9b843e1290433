"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024): Llama whose checkpoints have queries, keys and
values in one matrix, gate and up in another, and which may turn a part of each head only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sapwood.kernels.interface import Kernels
from sapwood.runtime.model_config import (
    Fields,
    ModelConfig,
    common_settings,
    layer_windows,
)
from sapwood.runtime.models.attention import Attention
from sapwood.runtime.models.decoder import Decoder, PreNormLayer
from sapwood.runtime.models.mlp import GatedMlp
from sapwood.runtime.models.rope import Rope, parse_rope, partial_rotary_factor
from sapwood.runtime.models.tensors import (
    Shapes,
    Tensors,
    decoder_shapes,
    norm_shapes,
    projection_shapes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi3Config(ModelConfig):
    rope: Rope


class Phi3ForCausalLM(Decoder):
    """A Phi-3 decoder."""

    def __init__(self, config: Phi3Config, weights: Mapping[str, Tensor], kernels: Kernels) -> None:
        tensors = Tensors(weights, kernels)
        layers = [
            _layer(config, layer, index) for index, layer in enumerate(tensors.layers(config))
        ]
        norm = tensors.weight("model.norm")
        super().__init__(config, tensors, layers=layers, ropes=[config.rope], norm=norm)

    @staticmethod
    def parse_config(fields: Fields) -> Phi3Config:
        settings = common_settings(fields, max_position_embeddings=4096, rms_norm_eps=1e-5)
        max_position = settings["max_position_embeddings"]
        window = fields.optional("sliding_window", int)
        sliding = (window is not None,) * settings["num_hidden_layers"]
        return Phi3Config(
            **settings,
            layer_windows=layer_windows(sliding, window, max_position),
            rope=parse_rope(
                _named_as_today(fields),
                head_dim=settings["head_dim"],
                max_position=max_position,
                share=partial_rotary_factor(fields),
            ),
        )

    @staticmethod
    def weight_shapes(config: Phi3Config) -> Shapes:
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        layer = {
            **norm_shapes(hidden_size, "input_layernorm", "post_attention_layernorm"),
            **projection_shapes("self_attn.qkv_proj", query_size + 2 * kv_size, hidden_size),
            **projection_shapes("self_attn.o_proj", hidden_size, query_size),
            **projection_shapes("mlp.gate_up_proj", 2 * intermediate_size, hidden_size),
            **projection_shapes("mlp.down_proj", hidden_size, intermediate_size),
        }
        return decoder_shapes(config, [layer] * config.num_hidden_layers)


def _layer(config: Phi3Config, tensors: Tensors, index: int) -> PreNormLayer:
    attention = Attention(
        config=config,
        kernels=tensors.kernels,
        layer=index,
        norm=tensors.weight("input_layernorm"),
        qkv=tensors.projection("self_attn.qkv_proj"),
        output=tensors.projection("self_attn.o_proj"),
        scale=config.head_dim**-0.5,
    )
    mlp = GatedMlp(
        config=config,
        kernels=tensors.kernels,
        norm=tensors.weight("post_attention_layernorm"),
        gate_up=tensors.projection("mlp.gate_up_proj"),
        down=tensors.projection("mlp.down_proj"),
    )
    return PreNormLayer(attention, mlp)


def _named_as_today(fields: Fields) -> Fields:
    """The fields with `longrope` called so: early checkpoints name it su, or yarn, which it is not.

    The original context is a field of config.json itself, with a default.
    """
    values: dict[str, Any] = {"original_max_position_embeddings": 4096, **fields.values}
    for name in ("rope_scaling", "rope_parameters"):
        parameters = dict(fields.object(name).values)
        if parameters.get("rope_type", parameters.get("type")) in ("su", "yarn"):
            values[name] = {**parameters, "rope_type": "longrope"}
    return Fields(values, fields.where)
