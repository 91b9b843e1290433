"""A decoder: embedding, layers, final norm and head. What every model here has in common.

All arithmetic goes through `Kernels`. A model's file says which tensors its checkpoints have and
builds its layers of the parts beside this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from sapwood.kernels.interface import KVCache, KVCacheSpec
from sapwood.runtime.batch import ForwardBatch
from sapwood.runtime.model_config import ModelConfig
from sapwood.runtime.models.attention import Attention, Step
from sapwood.runtime.models.mlp import Mlp
from sapwood.runtime.models.rope import Rope, RopeTable
from sapwood.runtime.models.tensors import Tensors


class Layer(Protocol):
    """One layer, in two halves: between them rows that are wanted no more are left out."""

    def attend(self, hidden: Tensor, step: Step) -> Tensor:
        """What each row of the residual stream [T, hidden_size] sees of others, [T, Hq * D].

        Writes the rows' keys and values.
        """
        ...

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The residual stream after the layer; no row sees another."""
        ...


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    """Attention and MLP, each added to the residual stream that it takes normed."""

    attention: Attention
    mlp: Mlp

    def attend(self, hidden: Tensor, step: Step) -> Tensor:
        return self.attention.attend(hidden, step)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = self.attention.project(attended, hidden)
        return self.mlp(hidden, hidden)


class Decoder:
    """Immutable once built; `forward` writes nothing but the KV cache."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Tensors,
        *,
        layers: Sequence[Layer],
        ropes: Sequence[Rope],
        norm: Tensor,
        embedding_scale: float = 1.0,
        logits_softcap: float | None = None,
    ) -> None:
        """Put `layers` between the embedding and the head of `tensors`.

        Attention names its rope by the index in `ropes`. `norm` is the last norm's weight. Embedded
        rows are times `embedding_scale`; logits `x` become `c * tanh(x / c)` with a soft cap `c`.
        """
        self._config = config
        self._kernels = tensors.kernels
        self._layers = tuple(layers)
        self._norm = norm
        self._embedding = tensors.weight("model.embed_tokens")
        self._embedding_scale = embedding_scale
        self._logits_softcap = logits_softcap
        if config.tie_word_embeddings:
            self._head = tensors.kernels.pack_linear(self._embedding, is_last=True)
        else:
            self._head = tensors.projection("lm_head", is_last=True)
        device, max_position = self._embedding.device, config.max_position_embeddings
        self._rope_tables = tuple(RopeTable.of(rope, max_position, device) for rope in ropes)

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def can_be_recorded(self) -> bool:
        return True

    def kv_spec(self, num_blocks: int, block_size: int) -> KVCacheSpec:
        """The cache this model needs, for the backend's `make_kv_cache`."""
        config = self._config
        return KVCacheSpec(
            num_layers=config.num_hidden_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=self._kernels.kv_dtype(self._embedding.dtype, config.head_dim),
            device=self._embedding.device,
            layer_windows=config.layer_windows,
            group_size=config.num_attention_heads // config.num_key_value_heads,
        )

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Write the batch's keys and values into `kv` and return float32 logits.

        The logits are `[num_logits, vocab_size]`, one row for each of `batch.logits_rows`.
        """
        with torch.inference_mode():
            return self._logits(self._hidden(batch, kv))

    def _hidden(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """The residual stream after all layers, for the rows whose logits are wanted."""
        angles = tuple(table.rows(batch.positions) for table in self._rope_tables)
        step = Step(batch, kv, angles)
        hidden = functional.embedding(batch.input_ids, self._embedding)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attended = layer.attend(hidden, step)
            if index == last:
                # From here on no row sees another: the rows without logits have done their part.
                hidden, attended = hidden[batch.logits_rows], attended[batch.logits_rows]
            hidden = layer.finish(hidden, attended)
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        eps, cap = self._config.rms_norm_eps, self._logits_softcap
        logits = self._kernels.norm_linear(hidden, self._norm, eps, self._head).to(torch.float32)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @staticmethod
    def unused_weights(config: ModelConfig, names: Iterable[str]) -> frozenset[str]:
        """Rotary frequencies, which old checkpoints store, and the second copy of a tied head."""
        return frozenset(
            name
            for name in names
            if name.endswith(".rotary_emb.inv_freq")
            or (name == "lm_head.weight" and config.tie_word_embeddings)
        )
