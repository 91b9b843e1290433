"""Rotary scalings that look at the whole batch, pinned to one set of frequencies.

transformers recomputes the frequencies of "dynamic" (NTK-aware) and "longrope" (Ding et al. 2024)
from the largest position of each forward pass. In a batch of many requests one would change the
answers of the others, and a key would no longer fit the queries of later steps.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_DYNAMIC, _LONGROPE, _FIXED = "dynamic", "longrope", "default"


def pin_rotary_frequencies(network: nn.Module) -> None:
    """Give every rotary embedding the frequencies it has at the model's full context, for good.

    "dynamic" keeps those it was built with, "longrope" takes its long factors where the context is
    longer than the one it was first trained for. Others depend on no batch and stay untouched.
    """
    for module in network.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            _pin(module, kinds, None)
            if _depends_on_batch(kinds):
                module.rope_type = _FIXED  # type: ignore[assignment]  # a string beside modules
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                _pin(module, kind, layer_type)
            fixed = {n: _FIXED if _depends_on_batch(k) else k for n, k in kinds.items()}
            module.rope_type = fixed  # type: ignore[assignment]


def _depends_on_batch(kind: str) -> bool:
    return kind == _LONGROPE or _DYNAMIC in kind


def _pin(module: nn.Module, kind: str, layer_type: str | None) -> None:
    """Overwrite the frequencies of one kind of layer, or of all where `layer_type` is None."""
    if kind != _LONGROPE:
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = module.config
    parameters = (
        config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    )
    trained_len = parameters["original_max_position_embeddings"]
    if config.max_position_embeddings > trained_len:
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        buffer = getattr(module, name)
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](
            config, buffer.device, seq_len=trained_len + 1, layer_type=layer_type
        )
        buffer.copy_(frequencies)
