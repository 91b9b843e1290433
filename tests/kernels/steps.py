"""Steps of attention to check a backend with, and what exact arithmetic makes of them.

Nothing here imports pytest: a machine with a device checks the same steps without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sapwood.kernels import AttentionPlan, PrivateSegment, SharedSegment
from sapwood.kernels.interface import Kernels, KVCache, KVCacheSpec
from sapwood.kernels.kv_quantization import encode
from tests.kernels.claims import Subject

NUM_LAYERS = 2
LAYER = 1
SCALE = 0.3


def zeroed(kernels: Kernels, spec: KVCacheSpec) -> KVCache:
    """A cache whose contents can be compared; a new one holds anything."""
    kv = kernels.make_kv_cache(spec)
    kv.keys.zero_()
    kv.values.zero_()
    return kv


def write(
    kernels: Kernels, kv: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor
) -> None:
    """`write_kv`; by indexing in a cache that has its rows by blocks and heads.

    Claims about attention need the rows, not the kernel that writes them, which kv_claims.py is
    about: Triton's interpreter takes a second for some hundred of them.
    """
    if kv.keys.dim() != 5:
        kernels.write_kv(kv, layer, key, value, slots)
        return
    at = (layer, slots // kv.spec.block_size, slice(None), slots % kv.spec.block_size)
    for rows, kept, scales in (
        (key, kv.keys, kv.key_scales),
        (value, kv.values, kv.value_scales),
    ):
        if scales is None:
            kept[at] = rows.to(kept.dtype)
        else:
            codes, scales[at] = encode(rows, kv.spec.dtype)
            kept.view(torch.uint8)[at] = codes.view(torch.uint8)


@dataclass(frozen=True)
class Edge:
    """An edge of the tree: whole blocks below `parent`."""

    num_blocks: int
    parent: Edge | None = None

    def path(self) -> list[Edge]:
        return [*(self.parent.path() if self.parent else []), self]


@dataclass(frozen=True)
class Tail:
    """What a sequence has below `edge`: `length` tokens, of which the last `num_rows` are rows."""

    length: int
    num_rows: int = 1
    edge: Edge | None = None


@dataclass
class Step:
    """Keys, values and the plan of one step, and the same keys and values in order per row."""

    plan: AttentionPlan
    spec: KVCacheSpec
    keys: Tensor  # [num_slots, Hkv, D], garbage where nothing was written
    values: Tensor
    slots: Tensor  # int64, all slots that hold something
    query: Tensor  # [T, Hq, D]
    slots_of_row: list[np.ndarray] = field(default_factory=list)

    def fill(self, kernels: Kernels, layer: int = LAYER) -> KVCache:
        kv = zeroed(kernels, self.spec)
        self.write(kernels, kv, layer)
        return kv

    def write(self, kernels: Kernels, kv: KVCache, layer: int) -> None:
        """The step's keys and values into a layer of a cache that has room for them."""
        slots = self.slots
        write(kernels, kv, layer, self.keys[slots], self.values[slots], slots)

    def attend(
        self,
        kernels: Kernels,
        layer: int = LAYER,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        prepared = kernels.plan_attention(self.plan, self.spec)
        kv = self.fill(kernels, layer)
        return kernels.attention(
            self.query, kv, layer, prepared, SCALE, softcap=softcap, sinks=sinks
        )

    def oracle(
        self, layer: int = LAYER, softcap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Row by row: softmax over the last tokens up to the row's own position, in float64."""
        num_groups = self.query.shape[1] // self.keys.shape[1]
        window = self.spec.window(layer)
        rows = []
        for query, all_slots in zip(self.query.double(), self.slots_of_row, strict=True):
            slots = all_slots if window is None else all_slots[-window:]
            key = self.keys[slots].double().repeat_interleave(num_groups, dim=1)
            value = self.values[slots].double().repeat_interleave(num_groups, dim=1)
            scores = torch.einsum("hd,lhd->hl", query, key).mul(SCALE)
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            if sinks is not None:
                scores = torch.cat((scores, sinks.double().unsqueeze(1)), dim=1)
                value = torch.cat((value, torch.zeros_like(value[:1])))
            rows.append(torch.einsum("hl,lhd->hd", scores.softmax(dim=-1), value))
        return torch.stack(rows)


def make_step(
    subject: Subject,
    tails: list[Tail],
    *,
    block_size: int = 16,
    num_kv_heads: int = 2,
    num_groups: int = 3,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    shuffled: bool = True,
    layer_windows: tuple[int | None, ...] = (),
    kv_dtype: torch.dtype | None = None,
) -> Step:
    edges = {edge: [] for tail in tails if tail.edge for edge in tail.edge.path()}
    num_blocks = sum(e.num_blocks for e in edges) + sum(-(-t.length // block_size) for t in tails)
    free = np.arange(num_blocks + 3, dtype=np.int32)
    if shuffled:
        free = np.random.default_rng(0).permutation(free)
    tables = np.split(free, np.cumsum([e.num_blocks for e in edges]))
    table_of_edge = dict(zip(edges, tables, strict=False))
    free = tables[-1]
    private, slots_of_row, first_row = [], [], 0
    for tail in tails:
        path = tail.edge.path() if tail.edge else []
        shared_table = [table_of_edge[edge] for edge in path]
        for edge in path:
            edges[edge] += range(first_row, first_row + tail.num_rows)
        own, free = np.split(free, [-(-tail.length // block_size)])
        start = sum(edge.num_blocks for edge in path) * block_size
        private.append(
            PrivateSegment(
                block_ids=own,
                start=start,
                length=tail.length,
                first_row=first_row,
                num_rows=tail.num_rows,
            )
        )
        table = np.concatenate([*shared_table, own]).astype(np.int64)
        slots = (table[:, None] * block_size + np.arange(block_size)).reshape(-1)
        end = start + tail.length
        slots_of_row += [slots[: end - tail.num_rows + row + 1] for row in range(tail.num_rows)]
        first_row += tail.num_rows
    shared = [
        SharedSegment(
            block_ids=table_of_edge[edge],
            start=sum(e.num_blocks for e in edge.path()[:-1]) * block_size,
            length=edge.num_blocks * block_size,
            rows=np.array(rows, dtype=np.int32),
        )
        for edge, rows in edges.items()
    ]
    plan = AttentionPlan(
        num_rows=first_row, block_size=block_size, shared=tuple(shared), private=tuple(private)
    )
    plan.check()
    spec = KVCacheSpec(
        num_layers=len(layer_windows) or NUM_LAYERS,
        num_blocks=num_blocks + 3,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=kv_dtype or dtype,
        device=subject.device,
        layer_windows=layer_windows,
        group_size=num_groups,
    )
    return Step(
        plan=plan,
        spec=spec,
        keys=subject.random(spec.num_slots, num_kv_heads, head_dim, dtype=dtype),
        values=subject.random(spec.num_slots, num_kv_heads, head_dim, dtype=dtype),
        slots=torch.from_numpy(np.unique(np.concatenate(slots_of_row))).to(subject.device),
        query=subject.random(first_row, num_kv_heads * num_groups, head_dim, dtype=dtype),
        slots_of_row=slots_of_row,
    )


def forest(block_size: int) -> list[Tail]:
    """Three levels of sharing; decode rows of many lengths, a draft, cold and resumed chunks."""
    system = Edge(num_blocks=4 * (16 // block_size))
    tools = Edge(num_blocks=block_size % 16 + 1, parent=system)
    few_shot = Edge(num_blocks=2, parent=tools)
    other = Edge(num_blocks=3, parent=system)
    return [
        Tail(length=1, edge=few_shot),
        Tail(length=33, edge=few_shot),
        Tail(length=40, num_rows=40),
        Tail(length=5, num_rows=3, edge=other),
        Tail(length=20, num_rows=3, edge=tools),
        Tail(length=70, num_rows=25, edge=other),
        Tail(length=17, num_rows=17, edge=system),
        Tail(length=9),
        Tail(length=600),
        Tail(length=2, edge=system),
    ]
