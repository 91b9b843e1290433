"""The models that are served natively: one file per `model_type` of a checkpoint's config.json.

To add one, write `runtime/models/<model_type>.py` with a class like `Model` and name it in
`MODELS`. Architectures that are not named run through transformers (sapwood/runtime/universal).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from torch import Tensor

    from sapwood.kernels.interface import Kernels, KVCache, KVCacheSpec
    from sapwood.runtime.batch import ForwardBatch
    from sapwood.runtime.model_config import ModelConfig

MODELS: MappingProxyType[str, str] = MappingProxyType(
    {
        "llama": "sapwood.runtime.models.llama:LlamaForCausalLM",
    }
)


class ServedConfig(Protocol):
    """What the runtime reads of a model's configuration, whoever runs its layers."""

    @property
    def model_type(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int:
        """Tokens of prompt and answer that the model takes."""
        ...

    @property
    def dtype(self) -> str:
        """What the checkpoint's weights are in, as torch names it."""
        ...


class Model(Protocol):
    """A decoder over paged keys and values. It reads only what it is passed."""

    @property
    def config(self) -> ServedConfig: ...

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Write the batch's keys and values into `kv` and return float32 logits.

        The logits are `[num_logits, vocab_size]`, one row for each of `batch.logits_rows`.
        """
        ...

    def kv_spec(self, num_blocks: int, block_size: int) -> KVCacheSpec:
        """The cache this model needs, for the backend's `make_kv_cache`."""
        ...


class ModelClass(Protocol):
    """What loading needs of a model's class."""

    def __call__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], kernels: Kernels
    ) -> Model:
        """Build the model from the tensors that `weight_shapes` names."""
        ...

    def weight_shapes(self, config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every tensor of a checkpoint that the model is built from."""
        ...

    def unused_weights(self, config: ModelConfig, names: Iterable[str]) -> frozenset[str]:
        """Those of a checkpoint's tensors that are known and carry nothing the model needs."""
        ...


def load_model_class(model_type: str) -> ModelClass:
    """The class that serves `model_type`, imported on use. Raises KeyError for an unknown one."""
    module_name, class_name = MODELS[model_type].split(":")
    return cast(ModelClass, getattr(importlib.import_module(module_name), class_name))
