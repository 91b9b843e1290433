"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases of queries, keys and values, and a
window in the upper layers if `use_sliding_window` says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sapwood.kernels.interface import Kernels
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

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Config(ModelConfig):
    rope: Rope


class Qwen2ForCausalLM(Decoder):
    """A Qwen2 decoder."""

    def __init__(
        self, config: Qwen2Config, weights: Mapping[str, Tensor], kernels: Kernels
    ) -> None:
        tensors = Tensors(weights, kernels)
        layers = [
            PreNormLayer(attention_of(config, layer, index), mlp_of(config, layer))
            for index, layer in enumerate(tensors.layers(config))
        ]
        norm = tensors.weight("model.norm")
        super().__init__(config, tensors, layers=layers, ropes=[config.rope], norm=norm)

    @staticmethod
    def parse_config(fields: Fields) -> Qwen2Config:
        if fields.object("dual_chunk_attention_config").values:
            # Of the models for 1M tokens; transformers has not got it either.
            logger.warning(
                "dual_chunk_attention_config is not applied: answers may get worse beyond the "
                "context that it calls original_max_position_embeddings"
            )
        settings = common_settings(fields, num_key_value_heads=32, max_position_embeddings=32_768)
        max_position = settings["max_position_embeddings"]
        return Qwen2Config(
            **settings,
            layer_windows=upper_layer_windows(fields, settings["num_hidden_layers"], max_position),
            rope=parse_rope(fields, head_dim=settings["head_dim"], max_position=max_position),
        )

    @staticmethod
    def weight_shapes(config: Qwen2Config) -> Shapes:
        layer = {
            **norm_shapes(config.hidden_size, "input_layernorm", "post_attention_layernorm"),
            **attention_shapes(config, qkv_bias=True),
            **mlp_shapes(config),
        }
        return decoder_shapes(config, [layer] * config.num_hidden_layers)


def upper_layer_windows(
    fields: Fields, num_layers: int, max_position: int
) -> tuple[int | None, ...]:
    """Windows in the layers that `layer_types` names, or in those from `max_window_layers` up.

    In none unless `use_sliding_window` is true. Qwen3 has the same.
    """
    window = None
    if fields.take("use_sliding_window", bool, False):
        window = fields.optional("sliding_window", int, absent=4096)
    first = fields.take("max_window_layers", int, 28)
    default = [window is not None and index >= first for index in range(num_layers)]
    return layer_windows(sliding_layers(fields, default), window, max_position)
