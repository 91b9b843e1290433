"""Mistral 7B and its kin (Jiang et al. 2023): Llama without biases, whose layers may all see the
last `sliding_window` tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sapwood.kernels.interface import Kernels
from sapwood.runtime.errors import ModelError
from sapwood.runtime.model_config import (
    Fields,
    ModelConfig,
    common_settings,
    layer_windows,
    sliding_layers,
)
from sapwood.runtime.models.attention import attention_of, attention_shapes
from sapwood.runtime.models.decoder import Decoder, PreNormLayer
from sapwood.runtime.models.mlp import mlp_of, mlp_shapes
from sapwood.runtime.models.rope import Rope, parse_rope
from sapwood.runtime.models.tensors import Shapes, Tensors, decoder_shapes, norm_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralConfig(ModelConfig):
    rope: Rope


class MistralForCausalLM(Decoder):
    """A Mistral decoder."""

    def __init__(
        self, config: MistralConfig, weights: Mapping[str, Tensor], kernels: Kernels
    ) -> None:
        tensors = Tensors(weights, kernels)
        layers = [
            PreNormLayer(attention_of(config, layer, index), mlp_of(config, layer))
            for index, layer in enumerate(tensors.layers(config))
        ]
        norm = tensors.weight("model.norm")
        super().__init__(config, tensors, layers=layers, ropes=[config.rope], norm=norm)

    @staticmethod
    def parse_config(fields: Fields) -> MistralConfig:
        settings = common_settings(fields, num_key_value_heads=8, max_position_embeddings=131_072)
        max_position = settings["max_position_embeddings"]
        window = fields.optional("sliding_window", int, absent=4096)
        sliding = (window is not None,) * settings["num_hidden_layers"]
        if sliding_layers(fields, sliding) != sliding:
            # transformers passes over them, so that its code would be no way out.
            raise ModelError(
                "config.json: layer_types are not what sliding_window makes of them, all full or "
                'all sliding; layers that differ are those of model_type "ministral"'
            )
        return MistralConfig(
            **settings,
            layer_windows=layer_windows(sliding, window, max_position),
            rope=parse_rope(fields, head_dim=settings["head_dim"], max_position=max_position),
        )

    @staticmethod
    def weight_shapes(config: MistralConfig) -> Shapes:
        layer = {
            **norm_shapes(config.hidden_size, "input_layernorm", "post_attention_layernorm"),
            **attention_shapes(config),
            **mlp_shapes(config),
        }
        return decoder_shapes(config, [layer] * config.num_hidden_layers)
