"""The Llama family (Touvron et al. 2023; SmolLM2, Llama 2 and 3 and what is built like them).

Root-mean-square norm before attention and before the gated MLP, rotary embedding of queries and
keys, grouped KV heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sapwood.kernels.interface import Kernels
from sapwood.runtime.model_config import Fields, ModelConfig, common_settings
from sapwood.runtime.models.attention import attention_of, attention_shapes
from sapwood.runtime.models.decoder import Decoder, PreNormLayer
from sapwood.runtime.models.mlp import mlp_of, mlp_shapes
from sapwood.runtime.models.rope import Rope, parse_rope
from sapwood.runtime.models.tensors import Shapes, Tensors, decoder_shapes, norm_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """`attention_bias` and `mlp_bias` are of all projections there."""

    rope: Rope
    attention_bias: bool
    mlp_bias: bool


class LlamaForCausalLM(Decoder):
    """A Llama decoder."""

    def __init__(
        self, config: LlamaConfig, weights: Mapping[str, Tensor], kernels: Kernels
    ) -> None:
        tensors = Tensors(weights, kernels)
        layers = [
            PreNormLayer(attention_of(config, layer, index), mlp_of(config, layer))
            for index, layer in enumerate(tensors.layers(config))
        ]
        norm = tensors.weight("model.norm")
        super().__init__(config, tensors, layers=layers, ropes=[config.rope], norm=norm)

    @staticmethod
    def parse_config(fields: Fields) -> LlamaConfig:
        settings = common_settings(fields, max_position_embeddings=2048)
        return LlamaConfig(
            **settings,
            rope=parse_rope(
                fields,
                head_dim=settings["head_dim"],
                max_position=settings["max_position_embeddings"],
            ),
            attention_bias=fields.take("attention_bias", bool, False),
            mlp_bias=fields.take("mlp_bias", bool, False),
        )

    @staticmethod
    def weight_shapes(config: LlamaConfig) -> Shapes:
        bias = config.attention_bias
        layer = {
            **norm_shapes(config.hidden_size, "input_layernorm", "post_attention_layernorm"),
            **attention_shapes(config, qkv_bias=bias, output_bias=bias),
            **mlp_shapes(config, bias=config.mlp_bias),
        }
        return decoder_shapes(config, [layer] * config.num_hidden_layers)
