"""The models that are served natively: one file per `model_type` of a checkpoint's config.json.

Adding a model
--------------
Write `runtime/models/<model_type>.py` and name its class in `MODELS`. The file says three things,
which `ModelClass` has as methods (mistral.py is the shortest to start from):

1. what config.json says: a frozen dataclass derived from `ModelConfig` for what is the model's
   own, made by `parse_config`, with transformers' defaults for what is left out. What the model
   cannot do is refused there, with the reason.
2. which tensors a checkpoint has: `weight_shapes`, names as in the safetensors files. Loading
   checks them against the checkpoint before it reads one.
3. how a layer is put together: the class derives from `Decoder` and hands it a `Layer` for each
   index. Most are a `PreNormLayer` of an `Attention` and a `GatedMlp` or `Experts`; a model whose
   layers go otherwise has its own small class for that (gemma2.py).

The parts beside the models are shared because their mathematics is: rope.py (rotary embedding and
its scalings), attention.py, mlp.py, experts.py, decoder.py (all that is around the layers) and
tensors.py (a checkpoint's tensors, joined and packed). A model that needs another part brings it
along in its own file, rather than a switch in a shared one. Products, norms and attention go
through `Kernels`, so that a model runs on every backend, in int8 as well.

A row of `CASES` in tests/runtime/tiny_models.py then holds it to transformers' logits, and to the
rule that an answer does not depend on what is cached and who else runs.

Architectures that are not named run through transformers (sapwood/runtime/universal).
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
    from sapwood.runtime.model_config import Fields, ModelConfig

MODELS: MappingProxyType[str, str] = MappingProxyType(
    {
        "llama": "sapwood.runtime.models.llama:LlamaForCausalLM",
        "gemma2": "sapwood.runtime.models.gemma2:Gemma2ForCausalLM",
        "gemma3_text": "sapwood.runtime.models.gemma3_text:Gemma3ForCausalLM",
        "granite": "sapwood.runtime.models.granite:GraniteForCausalLM",
        "mistral": "sapwood.runtime.models.mistral:MistralForCausalLM",
        "mixtral": "sapwood.runtime.models.mixtral:MixtralForCausalLM",
        "phi3": "sapwood.runtime.models.phi3:Phi3ForCausalLM",
        "qwen2": "sapwood.runtime.models.qwen2:Qwen2ForCausalLM",
        "qwen3": "sapwood.runtime.models.qwen3:Qwen3ForCausalLM",
        "qwen3_moe": "sapwood.runtime.models.qwen3_moe:Qwen3MoeForCausalLM",
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

    @property
    def can_be_recorded(self) -> bool:
        """Whether a forward pass never waits for the device, so that a graph can repeat it."""
        ...

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

    def parse_config(self, fields: Fields) -> ModelConfig:
        """Config.json as the model's own config; missing fields take transformers' defaults."""
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
