"""Qwen3 (Yang et al. 2025): Llama with norms over each head of queries and keys, heads of a size of
their own, and a window in the upper layers if `use_sliding_window` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from sapwood.kernels.interface import HeadNorms, Kernels
from sapwood.runtime.model_config import Fields, ModelConfig, common_settings
from sapwood.runtime.models.attention import (
    Attention,
    attention_of,
    attention_shapes,
)
from sapwood.runtime.models.decoder import Decoder, PreNormLayer
from sapwood.runtime.models.mlp import mlp_of, mlp_shapes
from sapwood.runtime.models.qwen2 import upper_layer_windows
from sapwood.runtime.models.rope import Rope, parse_rope
from sapwood.runtime.models.tensors import Shapes, Tensors, decoder_shapes, norm_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(ModelConfig):
    """`attention_bias` is of all four projections."""

    rope: Rope
    attention_bias: bool


class Qwen3ForCausalLM(Decoder):
    """A Qwen3 decoder."""

    def __init__(
        self, config: Qwen3Config, weights: Mapping[str, Tensor], kernels: Kernels
    ) -> None:
        tensors = Tensors(weights, kernels)
        layers = [
            PreNormLayer(normed_attention_of(config, layer, index), mlp_of(config, layer))
            for index, layer in enumerate(tensors.layers(config))
        ]
        norm = tensors.weight("model.norm")
        super().__init__(config, tensors, layers=layers, ropes=[config.rope], norm=norm)

    @staticmethod
    def parse_config(fields: Fields) -> Qwen3Config:
        settings = common_settings(
            fields, num_key_value_heads=32, head_dim=128, max_position_embeddings=32_768
        )
        max_position = settings["max_position_embeddings"]
        return Qwen3Config(
            **settings,
            layer_windows=upper_layer_windows(fields, settings["num_hidden_layers"], max_position),
            rope=parse_rope(fields, head_dim=settings["head_dim"], max_position=max_position),
            attention_bias=fields.take("attention_bias", bool, False),
        )

    @staticmethod
    def weight_shapes(config: Qwen3Config) -> Shapes:
        layer = {
            **normed_attention_shapes(config, bias=config.attention_bias),
            **norm_shapes(config.hidden_size, "post_attention_layernorm"),
            **mlp_shapes(config),
        }
        return decoder_shapes(config, [layer] * config.num_hidden_layers)


def normed_attention_of(config: ModelConfig, tensors: Tensors, layer: int) -> Attention:
    """Llama's attention with norms over heads. Qwen3's mixtures of experts have the same."""
    query_norm = tensors.weight("self_attn.q_norm")
    key_norm = tensors.weight("self_attn.k_norm")
    attention = attention_of(config, tensors, layer)
    norms = HeadNorms(query_norm, key_norm, config.rms_norm_eps)
    return replace(attention, head_norms=norms)


def normed_attention_shapes(config: ModelConfig, *, bias: bool) -> Shapes:
    """The tensors of `normed_attention_of`, and the norm before it."""
    return {
        **norm_shapes(config.hidden_size, "input_layernorm"),
        **attention_shapes(config, qkv_bias=bias, output_bias=bias),
        **norm_shapes(config.head_dim, "self_attn.q_norm", "self_attn.k_norm"),
    }
