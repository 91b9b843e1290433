"""Kernels with a static attention, and a recorder that holds a replay to what was recorded.

A CUDA graph repeats operations with the addresses and numbers that they had when it was recorded.
`CheckedRecorder` replays by calling the function again, and checks operation by operation that a
graph would have done the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sapwood.kernels.interface import Activation, KVCache, KVCacheSpec
from sapwood.kernels.reference import ReferenceKernels
from sapwood.kernels.segments import AttentionPlan
from sapwood.kernels.staging import Staging
from sapwood.kernels.windows import seen_private, seen_shared


@dataclass(eq=False)
class DenseAttention:
    """Which row sees which slot of the whole cache: bool [num_rows, num_slots] by window."""

    spec: KVCacheSpec
    visible: dict[int | None, Tensor]
    staging: Staging
    max_tokens: int  # of a plan's segments together, or it has no room
    num_kv_tokens_read: int = 0
    num_loads: int = 0

    @classmethod
    def of(
        cls, spec: KVCacheSpec, num_rows: int, staging: Staging, max_tokens: int
    ) -> DenseAttention:
        shape = (num_rows, spec.num_slots)
        visible = {window: torch.zeros(shape, dtype=torch.bool) for window in spec.windows}
        return cls(spec, visible, staging, max_tokens)

    def load(self, plan: AttentionPlan) -> DenseAttention:
        if plan.num_kv_tokens > self.max_tokens:
            return self.of(self.spec, plan.num_rows, self.staging, 10**9).load(plan)
        for window, static in self.visible.items():
            rows = np.zeros(static.shape, np.bool_)
            private = (seen_private(segment, plan.block_size, window) for segment in plan.private)
            for seen in (*seen_shared(plan, window), *private):
                rows[np.ix_(seen.rows, seen.slots)] |= seen.visible
            self.staging.send_into(static, rows)
        self.num_kv_tokens_read = plan.num_kv_tokens
        self.num_loads += 1
        return self


class RowwiseKernels(ReferenceKernels):
    """Plain torch, one row at a time, so that a row's bits do not depend on how many there are."""

    def __init__(self, *, max_tokens: int = 10**9) -> None:
        super().__init__()
        self.max_tokens = max_tokens

    @property
    def name(self) -> str:
        return "rowwise"

    def make_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        """With a block of scratch, and what is not written is not a number."""
        num_slots = spec.num_slots + spec.block_size
        shape = (spec.num_layers, num_slots, spec.num_kv_heads, spec.head_dim)
        return KVCache(spec, torch.full(shape, torch.nan), torch.full(shape, torch.nan))

    def plan_attention(self, plan: AttentionPlan, spec: KVCacheSpec) -> Any:
        prepared = DenseAttention.of(spec, plan.num_rows, Staging(torch.device("cpu")), 10**9)
        return prepared.load(plan)

    def static_attention(
        self, spec: KVCacheSpec, num_rows: int, max_context_len: int, staging: Staging
    ) -> Any:
        return DenseAttention.of(spec, num_rows, staging, self.max_tokens)

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
        assert isinstance(prepared, DenseAttention) and sinks is None
        keys, values = (cache[layer, : kv.spec.num_slots] for cache in (kv.keys, kv.values))
        rows = prepared.visible[kv.spec.window(layer)]
        return torch.stack(
            [
                _attend(one, keys, values, row, scale, softcap)
                for one, row in zip(query, rows, strict=True)
            ]
        )

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        rows = [super(RowwiseKernels, self).rms_norm(row, weight, eps) for row in x.split(1)]
        return torch.cat(rows) if residual is None else torch.cat(rows) + residual

    def activate_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        rows = [
            super(RowwiseKernels, self).activate_and_mul(r, activation) for r in gate_up.split(1)
        ]
        return torch.cat(rows)

    def linear(self, x: Tensor, packed: object, residual: Tensor | None = None) -> Tensor:
        out = torch.cat([super(RowwiseKernels, self).linear(row, packed) for row in x.split(1)])
        return out if residual is None else out + residual


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """One row [Hq, D] over all slots [L, Hkv, D]; not a number where it sees none."""
    group_size = query.shape[0] // keys.shape[1]
    grouped = query.unflatten(0, (-1, group_size)).unsqueeze(2)  # [Hkv, G, 1, D]
    scores = (grouped * keys.transpose(0, 1).unsqueeze(1)).sum(dim=-1) * scale  # [Hkv, G, L]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    seen = values.masked_fill(~visible[:, None, None], 0.0).transpose(0, 1).unsqueeze(1)
    attended = (weights.unsqueeze(-1) * seen).sum(dim=2).flatten(0, 1)
    return attended.masked_fill(~visible.any(), torch.nan)


@dataclass
class Operations(TorchDispatchMode):
    """Every operation inside: what it is, its numbers, its shapes, and the addresses that it reads
    or writes of memory that was there before."""

    noted: list[tuple[object, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._made: dict[int, Tensor] = {}  # kept, so that no address is given twice

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        arguments = self.note(str(function), (args, kwargs))
        results = function(*args, **kwargs)
        addresses = {_address(a) for a in arguments if isinstance(a, Tensor)}
        for result in _leaves(results):
            if isinstance(result, Tensor) and _address(result) not in addresses:
                self._made[_address(result)] = result
        return results

    def note(self, name: str, nested_arguments: object) -> list[object]:
        """One operation; its arguments one by one."""
        arguments = list(_leaves(nested_arguments))
        self.noted.append((name, *map(self._noted, arguments)))
        return arguments

    def _noted(self, argument: object) -> object:
        if not isinstance(argument, Tensor):
            return str(argument)
        where = "made here" if _address(argument) in self._made else argument.data_ptr()
        return where, tuple(argument.shape), argument.stride(), argument.dtype


def _leaves(value: Any) -> Iterator[object]:
    """What is in nested arguments, in their order."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        yield len(value)
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def operations() -> Iterator[list[tuple[object, ...]]]:
    mode = Operations()
    with mode:
        yield mode.noted


@dataclass(eq=False)
class CheckedRecorder:
    """Replays by calling; fails where that does something else than what was recorded."""

    num_replays: int = 0

    def record(self, run: Callable[[], None]) -> CheckedRecording:
        run()
        with operations() as recorded:
            run()
        return CheckedRecording(self, run, recorded)


@dataclass(eq=False)
class CheckedRecording:
    recorder: CheckedRecorder
    run: Callable[[], None]
    recorded: list[tuple[object, ...]]

    def replay(self) -> None:
        with operations() as replayed:
            self.run()
        assert len(replayed) == len(self.recorded), "a replay has other operations"
        for before, now in zip(self.recorded, replayed, strict=True):
            assert before == now, f"recorded was {before}, replayed is {now}"
        self.recorder.num_replays += 1
