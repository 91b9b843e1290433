"""The Llama family (Touvron et al. 2023; SmolLM2, Llama 2 and 3 and what is built like them).

Root-mean-square norm before attention and before the gated MLP, rotary embedding of queries and
keys, grouped KV heads. All arithmetic goes through `Kernels`; this file knows which tensors a
checkpoint has and in which order they are applied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sapwood.kernels.interface import Kernels, KVCache, KVCacheSpec
from sapwood.runtime.batch import ForwardBatch
from sapwood.runtime.model_config import ModelConfig, RopeConfig, RopeKind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One block's tensors; the projections are as the kernels packed them.

    Projections of the same input are one matrix, outputs side by side.
    """

    attention_norm: Tensor
    qkv: object
    output: object
    mlp_norm: Tensor
    gate_up: object
    down: object


class LlamaForCausalLM:
    """A Llama decoder. Immutable once built; `forward` writes nothing but the KV cache."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], kernels: Kernels
    ) -> None:
        """Fuse the projections of `weights`, which has exactly the tensors of `weight_shapes`.

        All of one dtype on one device. What the kernels do not pack is copied, so that a checkpoint
        that is mapped from disk can go.
        """
        self._config = config
        self._kernels = kernels
        self._embedding = weights["model.embed_tokens.weight"].clone()
        self._layers = tuple(_build_layer(config, weights, kernels, i) for i in _layer_ids(config))
        self._norm = weights["model.norm.weight"].clone()
        tied = config.tie_word_embeddings
        head = self._embedding if tied else weights["lm_head.weight"]
        self._head = kernels.pack_linear(head, is_last=True)
        self._angles = _rope_angles(config, self._embedding.device)

    @property
    def config(self) -> ModelConfig:
        return self._config

    def kv_spec(self, num_blocks: int, block_size: int) -> KVCacheSpec:
        head_dim = self._config.head_dim
        return KVCacheSpec(
            num_layers=self._config.num_hidden_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=self._config.num_key_value_heads,
            head_dim=head_dim,
            dtype=self._kernels.kv_dtype(self._embedding.dtype, head_dim),
            device=self._embedding.device,
        )

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        with torch.inference_mode():
            return self._logits(self._hidden(batch, kv))

    def _hidden(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """The residual stream after all layers, for the rows whose logits are wanted."""
        cos, sin = self._angles.cos[batch.positions], self._angles.sin[batch.positions]
        residual = functional.embedding(batch.input_ids, self._embedding)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, residual, cos, sin, batch, kv)
            if index == last:
                # From here on no row sees another: the rows without logits have done their part.
                residual, attended = residual[batch.logits_rows], attended[batch.logits_rows]
            residual = self._kernels.linear(attended, layer.output, residual)
            residual = self._mlp(layer, residual)
        return residual

    def _attend(
        self,
        index: int,
        layer: _Layer,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        kv: KVCache,
    ) -> Tensor:
        """Heads' results of one layer side by side, [T, Hq * D]; writes the rows' keys, values."""
        config, kernels = self._config, self._kernels
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        norm, eps = layer.attention_norm, config.rms_norm_eps
        heads = kernels.norm_linear(residual, norm, eps, layer.qkv)
        heads = heads.view(len(heads), -1, config.head_dim)
        rotated = kernels.rotary(heads[:, : num_heads + num_kv_heads], cos, sin)
        query, key = rotated[:, :num_heads], rotated[:, num_heads:]
        value = heads[:, num_heads + num_kv_heads :]
        kernels.write_kv(kv, index, key, value, batch.slots)
        scale = config.head_dim**-0.5
        return kernels.attention(query, kv, index, batch.attention, scale).flatten(1)

    def _mlp(self, layer: _Layer, residual: Tensor) -> Tensor:
        """The residual stream after the gated MLP."""
        kernels, eps = self._kernels, self._config.rms_norm_eps
        gate_up = kernels.norm_linear(residual, layer.mlp_norm, eps, layer.gate_up)
        return kernels.gated_linear(gate_up, layer.down, residual)

    def _logits(self, hidden: Tensor) -> Tensor:
        eps = self._config.rms_norm_eps
        return self._kernels.norm_linear(hidden, self._norm, eps, self._head).to(torch.float32)

    @staticmethod
    def weight_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every tensor the model is built from, as checkpoints name them."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
            "model.norm.weight": (config.hidden_size,),
        }
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
        for index in _layer_ids(config):
            shapes |= {f"model.layers.{index}.{n}": s for n, s in _layer_shapes(config).items()}
        return shapes

    @staticmethod
    def unused_weights(config: ModelConfig, names: Iterable[str]) -> frozenset[str]:
        """Rotary frequencies, which old checkpoints store, and the second copy of a tied head."""
        return frozenset(
            name
            for name in names
            if name.endswith(".rotary_emb.inv_freq")
            or (name == "lm_head.weight" and config.tie_word_embeddings)
        )


def _layer_ids(config: ModelConfig) -> range:
    return range(config.num_hidden_layers)


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (query_size, hidden, config.attention_bias),
        "self_attn.k_proj": (kv_size, hidden, config.attention_bias),
        "self_attn.v_proj": (kv_size, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, query_size, config.attention_bias),
        "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (num_outputs, num_inputs, has_bias) in projections.items():
        shapes[f"{name}.weight"] = (num_outputs, num_inputs)
        if has_bias:
            shapes[f"{name}.bias"] = (num_outputs,)
    return shapes


def _build_layer(
    config: ModelConfig, weights: Mapping[str, Tensor], kernels: Kernels, index: int
) -> _Layer:
    prefix = f"model.layers.{index}"

    def fused(has_bias: bool, *names: str) -> object:
        parts = [weights[f"{prefix}.{name}.weight"] for name in names]
        biases = [weights[f"{prefix}.{name}.bias"] for name in names] if has_bias else []
        return kernels.pack_linear(
            torch.cat(parts) if len(parts) > 1 else parts[0],
            torch.cat(biases) if biases else None,
        )

    attention_bias, mlp_bias = config.attention_bias, config.mlp_bias
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return _Layer(
        attention_norm=weights[f"{prefix}.input_layernorm.weight"].clone(),
        qkv=fused(attention_bias, *attention),
        output=fused(attention_bias, "self_attn.o_proj"),
        mlp_norm=weights[f"{prefix}.post_attention_layernorm.weight"].clone(),
        gate_up=fused(mlp_bias, "mlp.gate_proj", "mlp.up_proj"),
        down=fused(mlp_bias, "mlp.down_proj"),
    )


class _RopeAngles(NamedTuple):
    """Cosines and signed sines by position, for `Kernels.rotary`: [max_position, 1, D]."""

    cos: Tensor
    sin: Tensor


def _rope_angles(config: ModelConfig, device: torch.device) -> _RopeAngles:
    frequencies = _rope_frequencies(config.rope, config.head_dim)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, frequencies).to(device).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    return _RopeAngles(cos=torch.cat((cos, cos), dim=-1), sin=torch.cat((-sin, sin), dim=-1))


def _rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position, float32 [D / 2]; scaled as Llama 3.1 does or by one factor."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind is RopeKind.DEFAULT:
        return frequencies
    if rope.kind is RopeKind.LINEAR:
        return frequencies / rope.factor
    # Waves that turn often within the original context stay, those that turn rarely are
    # stretched by the factor, and between the two the scaling is interpolated.
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / rope.factor)
