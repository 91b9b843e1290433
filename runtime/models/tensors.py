"""A checkpoint's tensors as a model's parts take them, and the shapes that they must have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sapwood.kernels.interface import Kernels
from sapwood.runtime.model_config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors whose names begin with `prefix`, all of one dtype on one device.

    What the kernels do not pack is copied, so that a checkpoint that is mapped from disk can go.
    """

    weights: Mapping[str, Tensor]
    kernels: Kernels
    prefix: str = ""

    def below(self, name: str) -> Tensors:
        """The tensors of one part."""
        return Tensors(self.weights, self.kernels, f"{self.prefix}{name}.")

    def layers(self, config: ModelConfig) -> list[Tensors]:
        """Those of each layer, by its index."""
        return [self.below(f"model.layers.{index}") for index in range(config.num_hidden_layers)]

    def weight(self, name: str) -> Tensor:
        """The weight of a norm or an embedding."""
        return self.weights[f"{self.prefix}{name}.weight"].clone()

    def projection(self, *names: str, scale: float = 1.0, is_last: bool = False) -> object:
        """Projections of the same input as one matrix, outputs side by side, as the kernels pack
        it; with biases where the checkpoint has them, and its outputs times `scale`."""
        weight = _joined([self.weights[f"{self.prefix}{name}.weight"] for name in names])
        biases = [f"{self.prefix}{name}.bias" for name in names]
        bias = _joined([self.weights[b] for b in biases]) if biases[0] in self.weights else None
        if scale != 1.0:
            weight, bias = weight * scale, None if bias is None else bias * scale
        return self.kernels.pack_linear(weight, bias, is_last=is_last)


def projection_shapes(
    name: str, num_outputs: int, num_inputs: int, *, bias: bool = False
) -> Shapes:
    """Weight and, if there is one, bias of a projection."""
    weight: Shapes = {f"{name}.weight": (num_outputs, num_inputs)}
    return weight | {f"{name}.bias": (num_outputs,)} if bias else weight


def norm_shapes(size: int, *names: str) -> Shapes:
    """The weights of norms over `size` values."""
    return {f"{name}.weight": (size,) for name in names}


def decoder_shapes(config: ModelConfig, layers: Iterable[Shapes]) -> Shapes:
    """All tensors of a decoder: those around its layers, and `layers` with their names in each."""
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    shapes |= norm_shapes(config.hidden_size, "model.norm")
    if not config.tie_word_embeddings:
        shapes |= projection_shapes("lm_head", config.vocab_size, config.hidden_size)
    for index, layer in enumerate(layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]
