"""IBM's Granite 3 (2024): Llama with four multipliers, of embedded rows, of attention's scores, of
what a layer adds to the residual stream, and (as a divisor) of logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sapwood.kernels.interface import Kernels
from sapwood.runtime.model_config import Fields, ModelConfig, check_positive, common_settings
from sapwood.runtime.models.attention import attention_of, attention_shapes
from sapwood.runtime.models.decoder import Decoder, PreNormLayer
from sapwood.runtime.models.mlp import mlp_of, mlp_shapes
from sapwood.runtime.models.rope import Rope, parse_rope
from sapwood.runtime.models.tensors import Shapes, Tensors, decoder_shapes, norm_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(ModelConfig):
    """Scores are times `attention_multiplier`, in place of the usual root of the head's size."""

    rope: Rope
    attention_bias: bool
    mlp_bias: bool
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float


class GraniteForCausalLM(Decoder):
    """A Granite decoder.

    The residual multiplier is part of the projections that it follows, the logits' divisor of the
    last norm: neither costs anything.
    """

    def __init__(
        self, config: GraniteConfig, weights: Mapping[str, Tensor], kernels: Kernels
    ) -> None:
        tensors = Tensors(weights, kernels)
        added = config.residual_multiplier
        layers = [
            PreNormLayer(
                attention_of(
                    config, layer, index, scale=config.attention_multiplier, output_scale=added
                ),
                mlp_of(config, layer, output_scale=added),
            )
            for index, layer in enumerate(tensors.layers(config))
        ]
        super().__init__(
            config,
            tensors,
            layers=layers,
            ropes=[config.rope],
            norm=tensors.weight("model.norm") / config.logits_scaling,
            embedding_scale=config.embedding_multiplier,
        )

    @staticmethod
    def parse_config(fields: Fields) -> GraniteConfig:
        settings = common_settings(fields, max_position_embeddings=2048)
        logits_scaling = fields.take("logits_scaling", float, 1.0)
        check_positive("logits_scaling", logits_scaling)
        return GraniteConfig(
            **settings,
            rope=parse_rope(
                fields,
                head_dim=settings["head_dim"],
                max_position=settings["max_position_embeddings"],
            ),
            attention_bias=fields.take("attention_bias", bool, False),
            mlp_bias=fields.take("mlp_bias", bool, False),
            embedding_multiplier=fields.take("embedding_multiplier", float, 1.0),
            attention_multiplier=fields.take("attention_multiplier", float, 1.0),
            residual_multiplier=fields.take("residual_multiplier", float, 1.0),
            logits_scaling=logits_scaling,
        )

    @staticmethod
    def weight_shapes(config: GraniteConfig) -> Shapes:
        bias = config.attention_bias
        layer = {
            **norm_shapes(config.hidden_size, "input_layernorm", "post_attention_layernorm"),
            **attention_shapes(config, qkv_bias=bias, output_bias=bias),
            **mlp_shapes(config, bias=config.mlp_bias),
        }
        return decoder_shapes(config, [layer] * config.num_hidden_layers)
