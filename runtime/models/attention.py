"""Self-attention as the models here share it: norm, one product for queries, keys and values,
rotary embedding, attention over the cache, output projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from sapwood.kernels.interface import HeadNorms, Kernels, KVCache
from sapwood.runtime.batch import ForwardBatch
from sapwood.runtime.model_config import ModelConfig
from sapwood.runtime.models.rope import RopeAngles
from sapwood.runtime.models.tensors import Shapes, Tensors, projection_shapes


class Step(NamedTuple):
    """What all layers read in one forward pass. `angles` has the rows' angles of each rope."""

    batch: ForwardBatch
    kv: KVCache
    angles: tuple[RopeAngles, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One layer's attention. Scores are times `scale`; the rope is the decoder's `rope`-th.

    `qkv` and `output` are as the kernels packed them, the heads of queries, keys and values in
    `qkv` side by side.
    """

    config: ModelConfig
    kernels: Kernels
    layer: int
    norm: Tensor
    qkv: object
    output: object
    scale: float
    head_norms: HeadNorms | None = None
    rope: int = 0
    softcap: float | None = None

    def attend(self, hidden: Tensor, step: Step) -> Tensor:
        """Heads' results side by side, [T, Hq * D]; writes the rows' keys and values."""
        config, kernels = self.config, self.kernels
        heads = kernels.norm_linear(hidden, self.norm, config.rms_norm_eps, self.qkv)
        query = kernels.rotary_and_write(
            heads.view(len(heads), -1, config.head_dim),
            config.num_attention_heads,
            *step.angles[self.rope],
            step.kv,
            self.layer,
            step.batch.slots,
            norms=self.head_norms,
        )
        attended = kernels.attention(
            query, step.kv, self.layer, step.batch.attention, self.scale, softcap=self.softcap
        )
        return attended.flatten(1)

    def project(self, attended: Tensor, residual: Tensor | None) -> Tensor:
        """What `attend` returned, back in the residual stream."""
        return self.kernels.linear(attended, self.output, residual)


def attention_of(
    config: ModelConfig,
    tensors: Tensors,
    layer: int,
    *,
    output_scale: float = 1.0,
    scale: float | None = None,
) -> Attention:
    """The attention of a layer whose tensors are named and used as Llama's.

    Scores are times `scale`, or as usual. What attention adds to the residual stream is times
    `output_scale`.
    """
    return Attention(
        config=config,
        kernels=tensors.kernels,
        layer=layer,
        norm=tensors.weight("input_layernorm"),
        qkv=tensors.projection("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=tensors.projection("self_attn.o_proj", scale=output_scale),
        scale=config.head_dim**-0.5 if scale is None else scale,
    )


def attention_shapes(
    config: ModelConfig, *, qkv_bias: bool = False, output_bias: bool = False
) -> Shapes:
    """The projections that `attention_of` takes, as checkpoints name them."""
    query_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    hidden_size = config.hidden_size
    return {
        **projection_shapes("self_attn.q_proj", query_size, hidden_size, bias=qkv_bias),
        **projection_shapes("self_attn.k_proj", kv_size, hidden_size, bias=qkv_bias),
        **projection_shapes("self_attn.v_proj", kv_size, hidden_size, bias=qkv_bias),
        **projection_shapes("self_attn.o_proj", hidden_size, query_size, bias=output_bias),
    }
