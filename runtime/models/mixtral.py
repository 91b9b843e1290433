"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts in place of every MLP."""

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
from sapwood.runtime.models.attention import attention_of, attention_shapes
from sapwood.runtime.models.decoder import Decoder, PreNormLayer
from sapwood.runtime.models.experts import Expert, Experts
from sapwood.runtime.models.rope import Rope, parse_rope
from sapwood.runtime.models.tensors import (
    Shapes,
    Tensors,
    decoder_shapes,
    norm_shapes,
    projection_shapes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(ModelConfig):
    """Each row goes through `num_experts_per_tok` of `num_local_experts`."""

    rope: Rope
    num_local_experts: int
    num_experts_per_tok: int

    def __post_init__(self) -> None:
        super(MixtralConfig, self).__post_init__()
        check_range("num_local_experts", self.num_local_experts, 1, 100_000)
        check_range("num_experts_per_tok", self.num_experts_per_tok, 1, self.num_local_experts)


class MixtralForCausalLM(Decoder):
    """A Mixtral decoder."""

    def __init__(
        self, config: MixtralConfig, weights: Mapping[str, Tensor], kernels: Kernels
    ) -> None:
        tensors = Tensors(weights, kernels)
        layers = [
            PreNormLayer(attention_of(config, layer, index), _experts(config, layer))
            for index, layer in enumerate(tensors.layers(config))
        ]
        norm = tensors.weight("model.norm")
        super().__init__(config, tensors, layers=layers, ropes=[config.rope], norm=norm)

    @property
    def can_be_recorded(self) -> bool:
        return False  # the rows of each expert are counted on the host

    @staticmethod
    def parse_config(fields: Fields) -> MixtralConfig:
        settings = common_settings(
            fields, num_key_value_heads=8, max_position_embeddings=131_072, rms_norm_eps=1e-5
        )
        max_position = settings["max_position_embeddings"]
        window = fields.optional("sliding_window", int)
        sliding = (window is not None,) * settings["num_hidden_layers"]
        return MixtralConfig(
            **settings,
            layer_windows=layer_windows(sliding, window, max_position),
            rope=parse_rope(
                fields, head_dim=settings["head_dim"], max_position=max_position, theta=1_000_000.0
            ),
            num_local_experts=fields.take("num_local_experts", int, 8),
            num_experts_per_tok=fields.take("num_experts_per_tok", int, 2),
        )

    @staticmethod
    def weight_shapes(config: MixtralConfig) -> Shapes:
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        layer = {
            **norm_shapes(hidden_size, "input_layernorm", "post_attention_layernorm"),
            **attention_shapes(config),
            **projection_shapes("block_sparse_moe.gate", config.num_local_experts, hidden_size),
        }
        for index in range(config.num_local_experts):
            name = f"block_sparse_moe.experts.{index}"
            layer |= projection_shapes(f"{name}.w1", intermediate_size, hidden_size)
            layer |= projection_shapes(f"{name}.w2", hidden_size, intermediate_size)
            layer |= projection_shapes(f"{name}.w3", intermediate_size, hidden_size)
        return decoder_shapes(config, [layer] * config.num_hidden_layers)


def _experts(config: MixtralConfig, tensors: Tensors) -> Experts:
    names = [f"block_sparse_moe.experts.{index}" for index in range(config.num_local_experts)]
    return Experts(
        config=config,
        kernels=tensors.kernels,
        norm=tensors.weight("post_attention_layernorm"),
        router=tensors.projection("block_sparse_moe.gate"),
        experts=tuple(
            Expert(
                gate_up=tensors.projection(f"{name}.w1", f"{name}.w3"),
                down=tensors.projection(f"{name}.w2"),
            )
            for name in names
        ),
        num_chosen=config.num_experts_per_tok,
        is_normalized=True,
    )
