"""The text models of Gemma 3 (Gemma Team 2025).

As Gemma 2, but: most layers are local, with a short base of their rope, and every sixth sees all,
with a long base that may be scaled. Heads of queries and keys have norms, in place of soft caps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from sapwood.kernels.interface import HeadNorms, Kernels
from sapwood.runtime.errors import ModelError
from sapwood.runtime.model_config import (
    Fields,
    ModelConfig,
    check_range,
    layer_windows,
    sliding_layers,
)
from sapwood.runtime.models.attention import Attention
from sapwood.runtime.models.decoder import Decoder
from sapwood.runtime.models.gemma2 import (
    embedding_scale,
    gemma_layer,
    gemma_layer_shapes,
    gemma_settings,
    offset_norm,
    query_pre_attn_scalar,
    softcap,
)
from sapwood.runtime.models.rope import Rope, parse_rope
from sapwood.runtime.models.tensors import Shapes, Tensors, decoder_shapes, norm_shapes

logger = logging.getLogger(__name__)


class GemmaRopes(NamedTuple):
    """Of the layers that see all and of the local ones, in the decoder's order."""

    full: Rope
    local: Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(ModelConfig):
    """Scores are divided by the root of `query_pre_attn_scalar`. `local_layers` says which layers
    are local; they have no window all the same where it would hold the whole context."""

    ropes: GemmaRopes
    local_layers: tuple[bool, ...]
    query_pre_attn_scalar: float
    final_logit_softcapping: float | None
    attention_bias: bool


class Gemma3ForCausalLM(Decoder):
    """A Gemma 3 decoder."""

    def __init__(
        self, config: Gemma3Config, weights: Mapping[str, Tensor], kernels: Kernels
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
            ropes=config.ropes,
            norm=norm,
            embedding_scale=embedding_scale(config, norm.dtype),
            logits_softcap=config.final_logit_softcapping,
        )

    @staticmethod
    def parse_config(fields: Fields) -> Gemma3Config:
        if fields.optional("attn_logit_softcapping", float) is not None:
            # The field comes from Gemma 2; transformers has it, and does not apply it either.
            logger.warning("attn_logit_softcapping is not applied: Gemma 3 norms heads instead")
        settings = gemma_settings(fields, max_position_embeddings=131_072)
        max_position = settings["max_position_embeddings"]
        local_layers = _local_layers(fields, settings["num_hidden_layers"])
        window = fields.optional("sliding_window", int, absent=4096)
        return Gemma3Config(
            **settings,
            layer_windows=layer_windows(local_layers, window, max_position),
            ropes=_ropes(fields, settings["head_dim"], max_position),
            local_layers=local_layers,
            query_pre_attn_scalar=query_pre_attn_scalar(fields),
            final_logit_softcapping=softcap(fields, "final_logit_softcapping"),
            attention_bias=fields.take("attention_bias", bool, False),
        )

    @staticmethod
    def weight_shapes(config: Gemma3Config) -> Shapes:
        layer = {
            **gemma_layer_shapes(config, bias=config.attention_bias),
            **norm_shapes(config.head_dim, "self_attn.q_norm", "self_attn.k_norm"),
        }
        return decoder_shapes(config, [layer] * config.num_hidden_layers)


def _attention(config: Gemma3Config, tensors: Tensors, index: int) -> Attention:
    rope = config.ropes.local if config.local_layers[index] else config.ropes.full
    return Attention(
        config=config,
        kernels=tensors.kernels,
        layer=index,
        norm=offset_norm(tensors, "input_layernorm"),
        qkv=tensors.projection("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=tensors.projection("self_attn.o_proj"),
        scale=config.query_pre_attn_scalar**-0.5,
        head_norms=HeadNorms(
            offset_norm(tensors, "self_attn.q_norm"),
            offset_norm(tensors, "self_attn.k_norm"),
            config.rms_norm_eps,
        ),
        rope=config.ropes.index(rope),
    )


def _local_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """All but every sixth, unless config.json says otherwise."""
    pattern = fields.take("sliding_window_pattern", int, 6)
    check_range("sliding_window_pattern", pattern, 1)
    return sliding_layers(fields, [(index + 1) % pattern != 0 for index in range(num_layers)])


def _ropes(fields: Fields, head_dim: int, max_position: int) -> GemmaRopes:
    """`rope_parameters` has an object for each kind of layer; before it there were `rope_theta`,
    `rope_local_base_freq` and `rope_scaling`, which is that of layers that see all."""
    parameters = fields.object("rope_parameters")
    names = ("full_attention", "sliding_attention")
    if unknown := parameters.values.keys() - set(names):
        # transformers passes over it, so that its code would be no way out.
        raise ModelError(
            f"{parameters.where} has {min(unknown)!r:.80}; it must be {', '.join(names)}"
        )
    full, local = (dict(parameters.object(name).values) for name in names)
    full |= fields.object("rope_scaling").values
    theta = fields.take("rope_theta", float, 1_000_000.0)
    local_theta = fields.take("rope_local_base_freq", float, 10_000.0)

    def parsed(parameters: dict[str, object], theta: float) -> Rope:
        values = Fields({"rope_parameters": parameters}, fields.where)
        return parse_rope(values, head_dim=head_dim, max_position=max_position, theta=theta)

    return GemmaRopes(full=parsed(full, theta), local=parsed(local, local_theta))
