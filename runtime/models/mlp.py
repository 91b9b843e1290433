"""The gated MLP (Shazeer 2020) behind its norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sapwood.kernels.interface import Kernels
from sapwood.runtime.model_config import ModelConfig
from sapwood.runtime.models.tensors import Shapes, Tensors, projection_shapes


class Mlp(Protocol):
    """What a layer does with each row by itself, after attention."""

    def __call__(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        """The rows [T, hidden_size], normed and transformed, plus `residual`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """`down(activation(gate(x)) * up(x))`; `gate_up` has the outputs of both side by side."""

    config: ModelConfig
    kernels: Kernels
    norm: Tensor
    gate_up: object
    down: object

    def __call__(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        config, kernels = self.config, self.kernels
        gate_up = kernels.norm_linear(hidden, self.norm, config.rms_norm_eps, self.gate_up)
        return kernels.gated_linear(gate_up, self.down, residual, activation=config.activation)


def mlp_of(config: ModelConfig, tensors: Tensors, *, output_scale: float = 1.0) -> GatedMlp:
    """The MLP of a layer whose tensors are named and used as Llama's.

    What it adds to the residual stream is times `output_scale`.
    """
    return GatedMlp(
        config=config,
        kernels=tensors.kernels,
        norm=tensors.weight("post_attention_layernorm"),
        gate_up=tensors.projection("mlp.gate_proj", "mlp.up_proj"),
        down=tensors.projection("mlp.down_proj", scale=output_scale),
    )


def mlp_shapes(config: ModelConfig, *, bias: bool = False) -> Shapes:
    """The projections that `mlp_of` takes, as checkpoints name them."""
    hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
    return {
        **projection_shapes("mlp.gate_proj", intermediate_size, hidden_size, bias=bias),
        **projection_shapes("mlp.up_proj", intermediate_size, hidden_size, bias=bias),
        **projection_shapes("mlp.down_proj", hidden_size, intermediate_size, bias=bias),
    }
