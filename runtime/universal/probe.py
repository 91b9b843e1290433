"""One forward pass that notes what every layer asks of attention.

The pass runs under a name of its own in transformers' registries, by which a mask function is known
too: so the masks that the model would have under its own attention are made and seen to arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from sapwood.runtime.universal.attention import layer_of

PROBE = "sapwood_probe"
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# What attention functions are handed that changes nothing here: dropout is off in evaluation, and
# the others describe the batch to other implementations.
_HARMLESS = frozenset(
    {
        "dropout",
        "position_ids",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """A mask as it was asked for: which query sees which key, by their positions."""

    made: Tensor  # bool [1, 1, T, T]
    function: MaskFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What one layer gave its attention."""

    layer: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None  # tokens
    mask: Tensor | None
    has_position_bias: bool
    is_causal: bool
    unknown: tuple[str, ...]  # names of further arguments that are not None


@dataclass(slots=True)
class Probe:
    """What was seen in one pass; filled while it runs."""

    masks: list[Mask] = field(default_factory=list)
    calls: list[AttentionCall] = field(default_factory=list)

    def mask_of(self, call: AttentionCall) -> Mask | None:
        """The mask that arrived with a call, as it was asked for; None if it is another tensor."""
        return next((mask for mask in self.masks if mask.made is call.mask), None)


_PROBE: ContextVar[Probe] = ContextVar("sapwood_probe")


@contextmanager
def probing() -> Iterator[Probe]:
    """The forward pass inside is noted down."""
    probe = Probe()
    token = _PROBE.set(probe)
    try:
        yield probe
    finally:
        _PROBE.reset(token)


def register_probe() -> None:
    """Make `PROBE` known to transformers. Doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PROBE, _note_call)
    AttentionMaskInterface.register(PROBE, _note_mask)


def _note_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Stands in for attention: every row's result is its own value."""
    _PROBE.get().calls.append(
        AttentionCall(
            layer=layer_of(module),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[-1],
            value_dim=value.shape[-1],
            window=sliding_window,
            mask=attention_mask,
            has_position_bias=position_bias is not None,
            is_causal=is_causal is not False,
            unknown=tuple(n for n, v in others.items() if v is not None and n not in _HARMLESS),
        )
    )
    repeated = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return repeated.transpose(1, 2).contiguous(), None


def _note_mask(*, mask_function: MaskFunction, **arguments: Any) -> Tensor:
    from transformers.masking_utils import sdpa_mask

    arguments["allow_is_causal_skip"] = arguments["allow_is_bidirectional_skip"] = False
    made: Tensor = sdpa_mask(mask_function=mask_function, **arguments)
    _PROBE.get().masks.append(Mask(made=made, function=mask_function))
    return made
