"""The seam between a model and the code that computes for it.

`Kernels` is a protocol of few functions of tensors. A backend owns the layout of the KV cache and
of what it prepares for a step; its callers pass both through unread. One suite in tests/kernels
runs over every backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from sapwood.kernels.segments import AttentionPlan


class Activation(StrEnum):
    """The nonlinearity of a gated MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"  # the approximation by tanh (Hendrycks and Gimpel 2016)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The size and place of a KV cache. A block holds `block_size` tokens in every layer.

    `layer_windows` has an entry for each layer, or none at all where every layer is full: how many
    tokens a row sees, itself and those just before it, or None for all of them (Beltagy et al.
    2020). Windowed layers keep all tokens as well: a prefix is shared whole.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    layer_windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be positive")
        if self.layer_windows and len(self.layer_windows) != self.num_layers:
            raise ValueError(
                f"{len(self.layer_windows)} windows were given for {self.num_layers} layers"
            )
        if any(window is not None and window < 1 for window in self.layer_windows):
            raise ValueError(f"a window is below one token: {self.layer_windows}")

    def window(self, layer: int) -> int | None:
        """Tokens that a row of `layer` sees; None for all up to itself."""
        return self.layer_windows[layer] if self.layer_windows else None

    @property
    def windows(self) -> frozenset[int | None]:
        """The different windows of the layers."""
        return frozenset(self.layer_windows or (None,))

    @property
    def num_slots(self) -> int:
        """Tokens that fit."""
        return self.num_blocks * self.block_size

    @property
    def scratch_slot(self) -> int:
        """The first slot behind all blocks, where a backend has room for rows that are padding."""
        return self.num_slots

    @property
    def num_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_slots * self.num_bytes_per_token


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of all layers. The first axis is the layer, the others are the backend's."""

    spec: KVCacheSpec
    keys: Tensor
    values: Tensor


class PreparedAttention(Protocol):
    """A plan made ready for one backend, once per step and for all layers."""

    @property
    def num_kv_tokens_read(self) -> int:
        """Tokens whose keys and values attention reads in one layer, repetitions counted: in one
        with the widest window, or without any, where layers differ."""
        ...


class StaticAttention(PreparedAttention, Protocol):
    """A plan in memory of the device whose address stays, to be replaced by the next one.

    For steps that are recorded once and replayed: what is launched for it does not depend on the
    plan, only what is computed.
    """

    def load(self, plan: AttentionPlan) -> bool:
        """Become `plan`; False, and nothing has changed, where that does not fit.

        Rows beyond the plan's attend to nothing and result in zeros. What is queued on the current
        stream before still sees the old plan.
        """
        ...


class Kernels(Protocol):
    """What a model computes with. Backends keep no state between calls but memory for weights.

    Shapes use T for the rows of a step, Hq and Hkv for query and key-value heads (Hq a multiple of
    Hkv, head `h` reads KV head `h // (Hq / Hkv)`), D for the head dimension. A slot is
    `block_id * block_size + offset`. Results have the dtype of their input; reductions are float32.
    Keys and values are kept in `kv_dtype`, rounded if it is another than theirs.
    A row's result depends on other rows of the step by no more than rounding.
    """

    @property
    def name(self) -> str: ...

    def quantized(self) -> Kernels | None:
        """The same backend with its projections in int8; None where it has no such thing."""
        ...

    @property
    def min_saved_tokens(self) -> int:
        """Token reads that a shared edge must save before a segment of its own pays; measured."""
        ...

    def kv_dtype(self, dtype: torch.dtype, head_dim: int) -> torch.dtype:
        """What keys and values are kept in, of activations of `dtype`; a spec of that is taken."""
        ...

    def make_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        """Allocate an empty cache; its contents are undefined until written."""
        ...

    def copy_rows(self, kv: KVCache, source: int, target: int, num_rows: int) -> None:
        """Copy the first `num_rows` tokens of block `source` to block `target`, in all layers."""
        ...

    def plan_attention(self, plan: AttentionPlan, spec: KVCacheSpec) -> PreparedAttention:
        """Turn a plan into what `attention` reads in a cache like `spec`, of whatever size.

        Once per step, used by every layer.
        """
        ...

    def static_attention(
        self, spec: KVCacheSpec, num_rows: int, max_context_len: int
    ) -> StaticAttention | None:
        """Room for plans of up to `num_rows` rows that see up to `max_context_len` tokens each.

        None where the backend has no such thing. One that has it allocates caches of one block more
        than their spec says: slot `spec.scratch_slot` is for rows that are nobody's.
        """
        ...

    def write_kv(self, kv: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Store `key` and `value` [T, Hkv, D] of one layer at `slots` int64 [T]."""
        ...

    def attention(
        self,
        query: Tensor,
        kv: KVCache,
        layer: int,
        prepared: object,
        scale: float,
        *,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend with `query` [T, Hq, D] to the segments of the step, within the layer's window.

        Scores are times `scale`, and then `softcap * tanh(score / softcap)` if one is given (Gemma
        Team 2024). `sinks` [Hq] are scores of one more token for each head that has no value (Xiao
        et al. 2023). `prepared` is what this backend's `plan_attention` returned, anything else
        raises TypeError. The step's own keys and values are written before. Returns [T, Hq, D].
        """
        ...

    def mask_logits(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        """Set to minus infinity, in place, what `allowed` has no bit for.

        logits float32 [*, vocab_size]; `rows` int64 [m] names those that are masked, each once;
        allowed int32 [m, words], of which bit `i % 32` of word `i // 32` stands for token `i`, and
        words reach at least as far as the vocabulary.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / rms(x) * weight` over the last axis (Zhang and Sennrich 2019); a new tensor.

        x [T, n], or [T, H, n] for a norm of each head, its rows any stride apart.
        """
        ...

    def rotary(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate each head by its row's angles (Su et al. 2021). Returns a new tensor.

        heads [T, H, D], queries and keys side by side. The first R <= D dimensions are rotated, the
        others go through. Dimensions `i` and `i + R / 2` are the two coordinates of frequency `i`,
        so each dimension takes its cosine and its partner's sine, negative in the first half: cos
        float32 [T, 1, R] holds the R / 2 cosines twice, sin float32 [T, 1, R] the R / 2 sines
        negated and then as they are.
        """
        ...

    def activate_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """`activation(gate) * up`, gate and up side by side: [T, 2 I] to [T, I] (Shazeer 2020)."""
        ...

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, is_last: bool = False
    ) -> object:
        """A projection made ready for `linear`, from weight [out, in] and bias [out].

        Once per weight, when a model is built; may copy the weight into the backend's own layout.
        `is_last` says that nothing follows which would even out its rounding errors: the head.
        """
        ...

    def linear(self, x: Tensor, packed: object, residual: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias` for [rows, in], plus `residual` [rows, out]; a new tensor.

        `packed` is what `pack_linear` returned.
        """
        ...

    def norm_linear(self, x: Tensor, weight: Tensor, eps: float, packed: object) -> Tensor:
        """`linear(rms_norm(x, weight, eps), packed)`, what is between not necessarily stored."""
        ...

    def gated_linear(
        self,
        gate_up: Tensor,
        packed: object,
        residual: Tensor | None = None,
        *,
        activation: Activation = Activation.SILU,
    ) -> Tensor:
        """`linear(activate_and_mul(gate_up, activation), packed, residual)`, likewise."""
        ...
