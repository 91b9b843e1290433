"""The function that transformers calls in place of its own attention.

transformers keeps attention functions in a registry by name, for the whole process, and hands them
a module and tensors and nothing else. What they need besides, the kernels and the cache of the step
in progress, is in a context variable for as long as the forward pass runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from sapwood.kernels.interface import Kernels, KVCache
from sapwood.runtime.batch import ForwardBatch
from sapwood.runtime.errors import UnsupportedModelError

# No mask function is registered by this name: transformers then builds no mask at all, where else
# it would build a dense one of all rows by all rows.
PAGED = "sapwood"


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedStep:
    """What attention needs of the forward pass in progress."""

    kernels: Kernels
    kv: KVCache
    batch: ForwardBatch

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Store the rows' keys and values and attend. Heads [T, H, D], result [T, Hq, Dv].

        All is computed in the cache's dtype, whatever the model made of its heads, unless that is
        a quantized one. Where keys are wider than values, or the other way round, zeros make up for
        it: they add nothing to a score, and what they add to a result is cut off.
        """
        value_dim, dtype, spec = value.shape[-1], query.dtype, self.kv.spec
        computed = dtype if spec.is_quantized else spec.dtype
        query, key, value = (
            _widened(heads.to(computed), spec.head_dim) for heads in (query, key, value)
        )
        self.kernels.write_kv(self.kv, layer, key, value, self.batch.slots)
        prepared = self.batch.attention
        attended = self.kernels.attention(
            query, self.kv, layer, prepared, scale, softcap=softcap, sinks=sinks
        )
        return attended[..., :value_dim].to(dtype)


def _widened(heads: Tensor, head_dim: int) -> Tensor:
    missing = head_dim - heads.shape[-1]
    return functional.pad(heads, (0, missing)) if missing else heads.contiguous()


_STEP: ContextVar[PagedStep] = ContextVar("sapwood_paged_step")


@contextmanager
def attending(step: PagedStep) -> Iterator[None]:
    """The forward pass inside attends to `step`."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """transformers' attention over the step's cache: heads [1, H, T, D], result [1, T, Hq, Dv].

    What else it may be given (windows, biases) is looked at once, by the gate. Raises
    UnsupportedModelError for a mask, which only the plan of the step may take the place of.
    """
    if attention_mask is not None:
        raise UnsupportedModelError(
            "it makes an attention mask of its own, which paging cannot see"
        )
    rows = (heads[0].transpose(0, 1) for heads in (query, key, value))
    scale = scale_of(query, scaling)
    attended = _STEP.get().attend(
        layer_of(module), *rows, scale=scale, softcap=softcap, sinks=s_aux
    )
    return attended.unsqueeze(0), None


def layer_of(module: nn.Module) -> int:
    """The number of the layer that an attention module belongs to."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedModelError(f"its {type(module).__name__} does not know its layer's number")
    return layer


def scale_of(query: Tensor, scaling: float | None) -> float:
    """What scores are multiplied with: as given, or one over the root of the head dimension."""
    return float(query.shape[-1] ** -0.5 if scaling is None else scaling)


def register_paged_attention() -> None:
    """Make `PAGED` known to transformers. Doing it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, paged_attention)


@contextmanager
def using_attention(network: nn.Module, name: str) -> Iterator[None]:
    """Every part of `network` looks up its attention by `name` meanwhile, by `PAGED` afterwards."""
    _use_attention(network, name)
    try:
        yield
    finally:
        _use_attention(network, PAGED)


def _use_attention(network: nn.Module, name: str) -> None:
    for module in network.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name
