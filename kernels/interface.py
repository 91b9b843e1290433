"""The seam between a model and the code that computes for it.

`Kernels` is a protocol of few functions of tensors. A backend owns the layout of the KV cache and
of what it prepares for a step; its callers pass both through unread. One suite in tests/kernels
runs over every backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sapwood.kernels.segments import AttentionPlan
from sapwood.kernels.staging import Staging

QUANTIZED_KV_DTYPES = (torch.int8, torch.float8_e4m3fn)
"""What keys and values are kept in with a scale for each row and head (kv_quantization.py)."""


class Activation(StrEnum):
    """The nonlinearity of a gated MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"  # the approximation by tanh (Hendrycks and Gimpel 2016)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The size and place of a KV cache. A block holds `block_size` tokens in every layer.

    `layer_windows` has an entry for each layer, or none at all where every layer is full: how many
    tokens a row sees, itself and those just before it, or None for all of them (Beltagy et al.
    2020). Windowed layers keep all tokens as well: a prefix is shared whole. `group_size` is how
    many query heads read each KV head at most, which a backend may make its plans for.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    layer_windows: tuple[int | None, ...] = ()
    group_size: int = 1

    def __post_init__(self) -> None:
        for name in (
            *("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim"),
            "group_size",
        ):
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
    def is_quantized(self) -> bool:
        """Whether each row of a head has a scale, float32, for its keys and one for its values."""
        return self.dtype in QUANTIZED_KV_DTYPES

    @property
    def num_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers, with their scales."""
        scale_bytes = torch.float32.itemsize if self.is_quantized else 0
        head_bytes = self.head_dim * self.dtype.itemsize + scale_bytes
        return 2 * self.num_layers * self.num_kv_heads * head_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_slots * self.num_bytes_per_token


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of all layers. The first axis is the layer, the others are the backend's.

    Scales are there where the spec is quantized: float32, shaped as keys without the head's axis.
    """

    spec: KVCacheSpec
    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that belongs to the tokens, scales behind what they scale."""
        tensors = (self.keys, self.values, self.key_scales, self.value_scales)
        return tuple(tensor for tensor in tensors if tensor is not None)


class RowCopy(NamedTuple):
    """The first `num_rows` tokens of block `source` go to block `target`, in all layers."""

    source: int
    target: int
    num_rows: int


class HeadNorms(NamedTuple):
    """Weights [D] of norms over each query's and each key's head (Henry et al. 2020)."""

    query: Tensor
    key: Tensor
    eps: float


NUM_DRAW_PARAMS = 5  # float64 numbers for each row, see `DrawParams`


@dataclass(frozen=True, slots=True, eq=False)
class DrawParams:
    """How each of n rows is drawn from, twice: where the host reads it, and where the device does.

    float64 [5, n]: of each row its temperature (0: the best token), top_k (at least 1; as many as
    there are tokens, or more: all), top_p in (0, 1], min_p in [0, 1], and the uniform number in
    [0, 1) that picks the token.
    """

    on_host: NDArray[np.float64]
    on_device: Tensor

    @property
    def drawn_rows(self) -> NDArray[np.int64]:
        """Those that are not greedy."""
        return np.flatnonzero(self.on_host[0])

    def ranked_rows(self, vocab_size: int) -> NDArray[np.int64]:
        """Of those that are not greedy the ones with top_k or top_p: their tokens have an order."""
        temperature, top_k, top_p, _, _ = self.on_host
        return np.flatnonzero((temperature > 0.0) & ((top_k < vocab_size) | (top_p < 1.0)))

    def part(self, rows: slice) -> DrawParams:
        """Those of some rows that stand next to each other."""
        if rows == slice(0, self.on_host.shape[1]):
            return self
        return DrawParams(self.on_host[:, rows], self.on_device[:, rows].contiguous())

    def of(self, rows: NDArray[np.int64], index: Tensor) -> DrawParams:
        """The parameters of some rows; `index` names the same rows on the device."""
        return DrawParams(self.on_host[:, rows], self.on_device[:, index])


class DrawnTokens(NamedTuple):
    """`token_ids` int64 [n], and `is_sound` bool [n]: whether the row has a finite maximum.

    Of a row that has none the token is some token of the vocabulary.
    """

    token_ids: Tensor
    is_sound: Tensor


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

    def load(self, plan: AttentionPlan) -> PreparedAttention:
        """Become `plan`, and return this one; where that does not fit, nothing has changed, and
        what is returned is what `Kernels.plan_attention` gives.

        Rows beyond the plan's attend to nothing, their results are undefined. What is queued on the
        current stream before still sees the old plan. Before the first, there is a plan of no rows.
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

    def with_kv_dtype(self, dtype: torch.dtype) -> Kernels | None:
        """The same backend with keys and values kept in `dtype`, one of QUANTIZED_KV_DTYPES; None
        where it has no such thing."""
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

    def copy_rows(self, kv: KVCache, copies: Sequence[RowCopy]) -> None:
        """Make the copies, in any order: no block is the target of two, nor a target and a source.

        Scales are copied with what they scale, so that copied rows are the same to the bit.
        """
        ...

    def plan_attention(self, plan: AttentionPlan, spec: KVCacheSpec) -> PreparedAttention:
        """Turn a plan into what `attention` reads in a cache like `spec`, of whatever size.

        Once per step, used by every layer.
        """
        ...

    def static_attention(
        self, spec: KVCacheSpec, num_rows: int, max_context_len: int, staging: Staging
    ) -> StaticAttention | None:
        """Room for plans of up to `num_rows` rows that see up to `max_context_len` tokens each,
        sent there by `staging`.

        None where the backend has no such thing. One that has it allocates caches of one block more
        than their spec says: slot `spec.scratch_slot` is for rows that are nobody's.
        """
        ...

    def write_kv(self, kv: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Store `key` and `value` [T, Hkv, D] of one layer at `slots` int64 [T]."""
        ...

    def rotary_and_write(
        self,
        heads: Tensor,
        num_heads: int,
        cos: Tensor,
        sin: Tensor,
        kv: KVCache,
        layer: int,
        slots: Tensor,
        *,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """`write_kv` of a step's keys and values; returns the queries [T, Hq, D] to attend with.

        heads [T, Hq + 2 Hkv, D] are the `num_heads` queries, the keys and the values side by side.
        Queries and keys are normed, where there are `norms`, and turned as by `rotary`.
        """
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

    def draw_tokens(self, logits: Tensor, params: DrawParams) -> DrawnTokens:
        """Draw from each row of `logits` float32 [n, vocab_size], which stay as they are.

        Tokens with a row's highest logit `m` weigh most: `exp((logit - m) / temperature)` of it,
        rounded to a whole multiple of 2**-b for vocabularies below 2**(62 - b) tokens. top_k keeps
        the most likely tokens, top_p the fewest of those left that have that share of their sum, of
        equal ones at an edge the lower ids; then min_p those with at least that share of the
        best one's weight, rounded or not. Token `i` is drawn where the sum over tokens `<= i` that
        are left first passes `noise` times the whole sum. Sums are exact, so a row's token depends
        on no other row.

        O(n * vocab_size). Does not wait for the device.
        """
        ...

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """`x / rms(x) * weight` over the last axis (Zhang and Sennrich 2019), plus `residual` like
        x; a new tensor.

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
        """`x @ weight.T + bias` for [rows, in], plus `residual` [rows, out].

        `packed` is what `pack_linear` returned. A backend may put the sum in `residual`, which is
        not read any more once it is passed: a product that adds in its epilogue spares the pass
        over memory that an addition takes.
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
