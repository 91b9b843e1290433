"""Gemma 2 (Gemma Team 2024).

Every other layer is local: it sees a window only. Attention and MLP have a norm before and one
after them, and all norms multiply by one more than their weight. Attention's scores and the logits
have soft caps, and embedded rows are times the square root of their size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sapwood.kernels.interface import Kernels
from sapwood.runtime.errors import UnsupportedModelError
from sapwood.runtime.model_config import (
    Fields,
    ModelConfig,
    check_positive,
    common_settings,
    layer_windows,
    sliding_layers,
)
from sapwood.runtime.models.attention import Attention, Step, attention_shapes
from sapwood.runtime.models.decoder import Decoder
from sapwood.runtime.models.mlp import GatedMlp, mlp_shapes
from sapwood.runtime.models.rope import Rope, parse_rope
from sapwood.runtime.models.tensors import Shapes, Tensors, decoder_shapes, norm_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config(ModelConfig):
    """Scores are divided by the root of `query_pre_attn_scalar`."""

    rope: Rope
    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    attention_bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaLayer:
    """Attention and MLP, each normed before, and once more before it is added to the residual
    stream. Gemma 3 has the same."""

    attention: Attention
    after_attention: Tensor
    mlp: GatedMlp
    after_mlp: Tensor

    def attend(self, hidden: Tensor, step: Step) -> Tensor:
        return self.attention.attend(hidden, step)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        eps, rms_norm = self.mlp.config.rms_norm_eps, self.mlp.kernels.rms_norm
        projected = self.attention.project(attended, None)
        hidden = rms_norm(projected, self.after_attention, eps, hidden)
        return rms_norm(self.mlp(hidden, None), self.after_mlp, eps, hidden)


class Gemma2ForCausalLM(Decoder):
    """A Gemma 2 decoder."""

    def __init__(
        self, config: Gemma2Config, weights: Mapping[str, Tensor], kernels: Kernels
    ) -> None:
        tensors = Tensors(weights, kernels)
        layers = [
            gemma_layer(_attention(config, layer, index), layer)
            for index, layer in enumerate(tensors.layers(config))
        ]
        norm = offset_norm(tensors, "model.norm")
        super().__init__(
            config,
            tensors,
            layers=layers,
            ropes=[config.rope],
            norm=norm,
            embedding_scale=embedding_scale(config, norm.dtype),
            logits_softcap=config.final_logit_softcapping,
        )

    @staticmethod
    def parse_config(fields: Fields) -> Gemma2Config:
        settings = gemma_settings(fields, max_position_embeddings=8192)
        max_position = settings["max_position_embeddings"]
        local = [index % 2 == 0 for index in range(settings["num_hidden_layers"])]
        window = fields.optional("sliding_window", int, absent=4096)
        return Gemma2Config(
            **settings,
            layer_windows=layer_windows(sliding_layers(fields, local), window, max_position),
            rope=parse_rope(fields, head_dim=settings["head_dim"], max_position=max_position),
            query_pre_attn_scalar=query_pre_attn_scalar(fields),
            attn_logit_softcapping=softcap(fields, "attn_logit_softcapping", absent=50.0),
            final_logit_softcapping=softcap(fields, "final_logit_softcapping", absent=30.0),
            attention_bias=fields.take("attention_bias", bool, False),
        )

    @staticmethod
    def weight_shapes(config: Gemma2Config) -> Shapes:
        layer = gemma_layer_shapes(config, bias=config.attention_bias)
        return decoder_shapes(config, [layer] * config.num_hidden_layers)


def gemma_settings(fields: Fields, *, max_position_embeddings: int) -> dict[str, Any]:
    """`common_settings` with the defaults of Gemma 2 and 3."""
    if fields.take("use_bidirectional_attention", bool, False):
        raise UnsupportedModelError(
            "config.json: use_bidirectional_attention is true; served are causal decoders"
        )
    return common_settings(
        fields,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=max_position_embeddings,
        activation_field="hidden_activation",
        activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    )


def query_pre_attn_scalar(fields: Fields) -> float:
    """What attention's scores are divided by the root of."""
    scalar = fields.take("query_pre_attn_scalar", float, 256.0)
    check_positive("query_pre_attn_scalar", scalar)
    return scalar


def softcap(fields: Fields, name: str, *, absent: float | None = None) -> float | None:
    """A soft cap, None for none."""
    cap = fields.optional(name, float, absent=absent)
    if cap is not None:
        check_positive(name, cap)
    return cap


def embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """The root of the hidden size, rounded to the model's dtype as in training."""
    return torch.tensor(math.sqrt(config.hidden_size)).to(dtype).item()


def offset_norm(tensors: Tensors, name: str) -> Tensor:
    """What a norm multiplies by: checkpoints have it less one."""
    return 1.0 + tensors.weight(name)


def gemma_layer(attention: Attention, tensors: Tensors) -> GemmaLayer:
    """The layer with `attention`."""
    mlp = GatedMlp(
        config=attention.config,
        kernels=tensors.kernels,
        norm=offset_norm(tensors, "pre_feedforward_layernorm"),
        gate_up=tensors.projection("mlp.gate_proj", "mlp.up_proj"),
        down=tensors.projection("mlp.down_proj"),
    )
    return GemmaLayer(
        attention=attention,
        after_attention=offset_norm(tensors, "post_attention_layernorm"),
        mlp=mlp,
        after_mlp=offset_norm(tensors, "post_feedforward_layernorm"),
    )


def gemma_layer_shapes(config: ModelConfig, *, bias: bool) -> Shapes:
    """The tensors of a layer; `bias` is of attention's projections."""
    return {
        **norm_shapes(
            config.hidden_size,
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        **attention_shapes(config, qkv_bias=bias, output_bias=bias),
        **mlp_shapes(config),
    }


def _attention(config: Gemma2Config, tensors: Tensors, index: int) -> Attention:
    return Attention(
        config=config,
        kernels=tensors.kernels,
        layer=index,
        norm=offset_norm(tensors, "input_layernorm"),
        qkv=tensors.projection("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=tensors.projection("self_attn.o_proj"),
        scale=config.query_pre_attn_scalar**-0.5,
        softcap=config.attn_logit_softcapping,
    )
