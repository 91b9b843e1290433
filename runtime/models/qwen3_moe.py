"""Qwen3's mixtures of experts (Yang et al. 2025): Qwen3 with experts in place of most MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sapwood.kernels.interface import Kernels
from sapwood.runtime.model_config import (
    Fields,
    ModelConfig,
    check_range,
    common_settings,
    layer_windows,
)
from sapwood.runtime.models.decoder import Decoder, PreNormLayer
from sapwood.runtime.models.experts import Expert, Experts
from sapwood.runtime.models.mlp import mlp_of, mlp_shapes
from sapwood.runtime.models.qwen3 import normed_attention_of, normed_attention_shapes
from sapwood.runtime.models.rope import Rope, parse_rope
from sapwood.runtime.models.tensors import (
    Shapes,
    Tensors,
    decoder_shapes,
    norm_shapes,
    projection_shapes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(ModelConfig):
    """Each row goes through `num_experts_per_tok` of `num_experts` in the layers that have them.

    Those are every `decoder_sparse_step`-th, but for `mlp_only_layers`. `norm_topk_prob` makes the
    chosen experts' weights add up to one.
    """

    rope: Rope
    attention_bias: bool
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        super(Qwen3MoeConfig, self).__post_init__()
        check_range("moe_intermediate_size", self.moe_intermediate_size, 1)
        check_range("num_experts", self.num_experts, 1, 100_000)
        check_range("num_experts_per_tok", self.num_experts_per_tok, 1, self.num_experts)
        check_range("decoder_sparse_step", self.decoder_sparse_step, 1)

    def has_experts(self, layer: int) -> bool:
        is_sparse = (layer + 1) % self.decoder_sparse_step == 0
        return is_sparse and layer not in self.mlp_only_layers


class Qwen3MoeForCausalLM(Decoder):
    """A Qwen3 decoder with mixtures of experts."""

    def __init__(
        self, config: Qwen3MoeConfig, weights: Mapping[str, Tensor], kernels: Kernels
    ) -> None:
        tensors = Tensors(weights, kernels)
        layers = [
            PreNormLayer(
                normed_attention_of(config, layer, index),
                _experts(config, layer) if config.has_experts(index) else mlp_of(config, layer),
            )
            for index, layer in enumerate(tensors.layers(config))
        ]
        norm = tensors.weight("model.norm")
        super().__init__(config, tensors, layers=layers, ropes=[config.rope], norm=norm)

    @property
    def can_be_recorded(self) -> bool:
        return False  # the rows of each expert are counted on the host

    @staticmethod
    def parse_config(fields: Fields) -> Qwen3MoeConfig:
        settings = common_settings(fields, num_key_value_heads=4, max_position_embeddings=32_768)
        max_position = settings["max_position_embeddings"]
        window = None
        if fields.take("use_sliding_window", bool, False):
            window = fields.optional("sliding_window", int, absent=4096)
        sliding = (window is not None,) * settings["num_hidden_layers"]
        return Qwen3MoeConfig(
            **settings,
            layer_windows=layer_windows(sliding, window, max_position),
            rope=parse_rope(fields, head_dim=settings["head_dim"], max_position=max_position),
            attention_bias=fields.take("attention_bias", bool, False),
            moe_intermediate_size=fields.take("moe_intermediate_size", int, 768),
            # transformers 5 writes the second name.
            num_experts=fields.take("num_experts", int, fields.take("num_local_experts", int, 128)),
            num_experts_per_tok=fields.take("num_experts_per_tok", int, 8),
            norm_topk_prob=fields.take("norm_topk_prob", bool, False),
            decoder_sparse_step=fields.take("decoder_sparse_step", int, 1),
            mlp_only_layers=tuple(fields.list_of("mlp_only_layers", int) or ()),
        )

    @staticmethod
    def weight_shapes(config: Qwen3MoeConfig) -> Shapes:
        common = {
            **normed_attention_shapes(config, bias=config.attention_bias),
            **norm_shapes(config.hidden_size, "post_attention_layernorm"),
        }
        dense, sparse = common | mlp_shapes(config), common | _expert_shapes(config)
        layers = range(config.num_hidden_layers)
        return decoder_shapes(config, [sparse if config.has_experts(i) else dense for i in layers])


def _expert_shapes(config: Qwen3MoeConfig) -> Shapes:
    hidden_size, intermediate_size = config.hidden_size, config.moe_intermediate_size
    shapes = projection_shapes("mlp.gate", config.num_experts, hidden_size)
    for index in range(config.num_experts):
        name = f"mlp.experts.{index}"
        shapes |= projection_shapes(f"{name}.gate_proj", intermediate_size, hidden_size)
        shapes |= projection_shapes(f"{name}.up_proj", intermediate_size, hidden_size)
        shapes |= projection_shapes(f"{name}.down_proj", hidden_size, intermediate_size)
    return shapes


def _experts(config: Qwen3MoeConfig, tensors: Tensors) -> Experts:
    names = [f"mlp.experts.{index}" for index in range(config.num_experts)]
    return Experts(
        config=config,
        kernels=tensors.kernels,
        norm=tensors.weight("post_attention_layernorm"),
        router=tensors.projection("mlp.gate"),
        experts=tuple(
            Expert(
                gate_up=tensors.projection(f"{name}.gate_proj", f"{name}.up_proj"),
                down=tensors.projection(f"{name}.down_proj"),
            )
            for name in names
        ),
        num_chosen=config.num_experts_per_tok,
        is_normalized=config.norm_topk_prob,
    )
