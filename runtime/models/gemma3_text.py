"""The text models of Gemma 3 (Gemma Team 2025).

Most layers are local: they see a window only, and their rope has a short base. Every sixth sees
all, with a long base that may be scaled. Attention and MLP have a norm before and one after them,
heads of queries and keys have theirs, and all norms multiply by one more than their weight.
Embedded rows are times the square root of their size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sapwood.kernels.interface import Kernels
from sapwood.runtime.errors import UnsupportedModelError
from sapwood.runtime.model_config import (
    Fields,
    ModelConfig,
    check_positive,
    check_range,
    common_settings,
    layer_windows,
    sliding_layers,
)
from sapwood.runtime.models.attention import Attention, HeadNorms, Step, attention_shapes
from sapwood.runtime.models.decoder import Decoder
from sapwood.runtime.models.mlp import GatedMlp, mlp_shapes
from sapwood.runtime.models.rope import Rope, parse_rope
from sapwood.runtime.models.tensors import Shapes, Tensors, decoder_shapes, norm_shapes

logger = logging.getLogger(__name__)

_GLOBAL, _LOCAL = 0, 1  # the ropes' places in the decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(ModelConfig):
    """Scores are divided by the root of `query_pre_attn_scalar`. `local_layers` says which layers
    are local; they have no window all the same where it would hold the whole context."""

    global_rope: Rope
    local_rope: Rope
    local_layers: tuple[bool, ...]
    query_pre_attn_scalar: float
    final_logit_softcapping: float | None
    attention_bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Layer:
    """Attention and MLP, each normed before and after it is added to the residual stream."""

    attention: Attention
    after_attention: Tensor
    mlp: GatedMlp
    after_mlp: Tensor

    def attend(self, hidden: Tensor, step: Step) -> Tensor:
        return self.attention.attend(hidden, step)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        eps, rms_norm = self.mlp.config.rms_norm_eps, self.mlp.kernels.rms_norm
        projected = self.attention.project(attended, None)
        hidden = hidden + rms_norm(projected, self.after_attention, eps)
        return hidden + rms_norm(self.mlp(hidden, None), self.after_mlp, eps)


class Gemma3ForCausalLM(Decoder):
    """A Gemma 3 decoder."""

    def __init__(
        self, config: Gemma3Config, weights: Mapping[str, Tensor], kernels: Kernels
    ) -> None:
        tensors = Tensors(weights, kernels)
        layers = [
            _layer(config, layer, index) for index, layer in enumerate(tensors.layers(config))
        ]
        norm = _norm(tensors, "model.norm")
        # In bfloat16 the factor is rounded to it too, as in training.
        scale = torch.tensor(math.sqrt(config.hidden_size)).to(norm.dtype).item()
        super().__init__(
            config,
            tensors,
            layers=layers,
            ropes=[config.global_rope, config.local_rope],
            norm=norm,
            embedding_scale=scale,
            logits_softcap=config.final_logit_softcapping,
        )

    @staticmethod
    def parse_config(fields: Fields) -> Gemma3Config:
        if fields.take("use_bidirectional_attention", bool, False):
            raise UnsupportedModelError(
                "config.json: use_bidirectional_attention is true; served are causal decoders"
            )
        if fields.optional("attn_logit_softcapping", float) is not None:
            logger.warning("attn_logit_softcapping is not applied: Gemma 3 norms heads instead")
        settings = common_settings(
            fields,
            num_key_value_heads=4,
            head_dim=256,
            max_position_embeddings=131_072,
            activation_field="hidden_activation",
            activation="gelu_pytorch_tanh",
            tie_word_embeddings=True,
        )
        num_layers, max_position = (
            settings["num_hidden_layers"],
            settings["max_position_embeddings"],
        )
        local_layers = _local_layers(fields, num_layers)
        window = fields.optional("sliding_window", int, absent=4096)
        global_rope, local_rope = _ropes(fields, settings["head_dim"], max_position)
        scalar = fields.take("query_pre_attn_scalar", float, 256.0)
        softcap = fields.optional("final_logit_softcapping", float)
        check_positive("query_pre_attn_scalar", scalar)
        if softcap is not None:
            check_positive("final_logit_softcapping", softcap)
        return Gemma3Config(
            **settings,
            layer_windows=layer_windows(local_layers, window, max_position),
            global_rope=global_rope,
            local_rope=local_rope,
            local_layers=local_layers,
            query_pre_attn_scalar=scalar,
            final_logit_softcapping=softcap,
            attention_bias=fields.take("attention_bias", bool, False),
        )

    @staticmethod
    def weight_shapes(config: Gemma3Config) -> Shapes:
        bias = config.attention_bias
        layer = {
            **norm_shapes(
                config.hidden_size,
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
            **attention_shapes(config, qkv_bias=bias, output_bias=bias),
            **norm_shapes(config.head_dim, "self_attn.q_norm", "self_attn.k_norm"),
            **mlp_shapes(config),
        }
        return decoder_shapes(config, [layer] * config.num_hidden_layers)


def _layer(config: Gemma3Config, tensors: Tensors, index: int) -> Gemma3Layer:
    attention = Attention(
        config=config,
        kernels=tensors.kernels,
        layer=index,
        norm=_norm(tensors, "input_layernorm"),
        qkv=tensors.projection("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=tensors.projection("self_attn.o_proj"),
        scale=config.query_pre_attn_scalar**-0.5,
        head_norms=HeadNorms(
            _norm(tensors, "self_attn.q_norm"), _norm(tensors, "self_attn.k_norm")
        ),
        rope=_LOCAL if config.local_layers[index] else _GLOBAL,
    )
    mlp = GatedMlp(
        config=config,
        kernels=tensors.kernels,
        norm=_norm(tensors, "pre_feedforward_layernorm"),
        gate_up=tensors.projection("mlp.gate_proj", "mlp.up_proj"),
        down=tensors.projection("mlp.down_proj"),
    )
    return Gemma3Layer(
        attention=attention,
        after_attention=_norm(tensors, "post_attention_layernorm"),
        mlp=mlp,
        after_mlp=_norm(tensors, "post_feedforward_layernorm"),
    )


def _norm(tensors: Tensors, name: str) -> Tensor:
    """What a norm multiplies by: checkpoints have it less one."""
    return 1.0 + tensors.weight(name)


def _local_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """All but every sixth, unless config.json says otherwise."""
    name = "sliding_window_pattern"
    pattern = fields.take(name, int, fields.take(f"_{name}", int, 6))
    check_range(name, pattern, 1)
    return sliding_layers(fields, [(index + 1) % pattern != 0 for index in range(num_layers)])


def _ropes(fields: Fields, head_dim: int, max_position: int) -> tuple[Rope, Rope]:
    """The global and the local rope.

    `rope_parameters` has an object for each; before it, there were `rope_theta`,
    `rope_local_base_freq` and `rope_scaling`, which is the global one's.
    """
    parameters = fields.object("rope_parameters")
    names = ("full_attention", "sliding_attention")
    if unknown := parameters.values.keys() - set(names):
        raise UnsupportedModelError(
            f"{parameters.where} has {min(unknown)!r:.80}; served are {', '.join(names)}"
        )
    full, sliding = (dict(parameters.object(name).values) for name in names)
    full |= fields.object("rope_scaling").values
    base = fields.take("rope_theta", float, 1_000_000.0)
    local_base = fields.take("rope_local_base_freq", float, 10_000.0)
    global_rope, local_rope = (
        parse_rope(
            Fields({"rope_parameters": values}, fields.where),
            head_dim=head_dim,
            max_position=max_position,
            theta=theta,
        )
        for values, theta in ((full, base), (sliding, local_base))
    )
    return global_rope, local_rope
