"""A model of transformers over paged keys and values, as the runtime sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sapwood.kernels.interface import Kernels, KVCache, KVCacheSpec
from sapwood.runtime.batch import ForwardBatch
from sapwood.runtime.universal.attention import PagedStep, attending
from sapwood.runtime.universal.network import Network


@dataclass(frozen=True, slots=True, kw_only=True)
class UniversalConfig:
    """What the runtime needs of a checkpoint's configuration; `source` is transformers' own."""

    model_type: str
    vocab_size: int
    num_hidden_layers: int
    max_position_embeddings: int  # tokens
    dtype: str
    source: Any = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayout:
    """What all layers keep of a token, and how far each looks back."""

    num_kv_heads: int
    head_dim: int  # of keys or values, whichever is larger
    layer_windows: tuple[int | None, ...]  # tokens
    group_size: int  # query heads of a key-value head, of the layer that has most


class UniversalModel:
    """A `Model` whose layers are transformers'. `forward` writes nothing but the KV cache."""

    def __init__(
        self, config: UniversalConfig, network: Network, layout: AttentionLayout, kernels: Kernels
    ) -> None:
        self._config = config
        self._network = network
        self._layout = layout
        self._kernels = kernels

    @property
    def config(self) -> UniversalConfig:
        return self._config

    @property
    def can_be_recorded(self) -> bool:
        return False  # nothing tells whether transformers' code waits for the device

    def kv_spec(self, num_blocks: int, block_size: int) -> KVCacheSpec:
        layout, dtype = self._layout, self._network.dtype
        has_windows = any(layout.layer_windows)
        return KVCacheSpec(
            num_layers=len(layout.layer_windows),
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            dtype=self._kernels.kv_dtype(dtype, layout.head_dim),
            device=self._network.device,
            layer_windows=layout.layer_windows if has_windows else (),
            group_size=layout.group_size,
        )

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        step = PagedStep(kernels=self._kernels, kv=kv, batch=batch)
        with torch.inference_mode(), attending(step):
            return self._network.logits(batch.input_ids, batch.positions, batch.logits_rows)
