"""A sparse mixture of experts in place of the MLP (Shazeer et al. 2017; Fedus et al. 2022).

A router scores the experts for each row, and the row goes through the best few, whose results are
weighted by their probabilities. Rows are grouped by expert, so that an expert's weights are read
once a step. A row's results are added in the order of its scores: which other rows are in the step,
and which experts those take, does not change its bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sapwood.kernels.interface import Kernels
from sapwood.runtime.model_config import ModelConfig


class Expert(NamedTuple):
    """A gated MLP's projections as the kernels packed them, gate and up side by side."""

    gate_up: object
    down: object


class Routes(NamedTuple):
    """The experts of each row, best first: ids int64 [T, k] and float32 weights [T, k]."""

    expert_ids: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of one layer. Each row takes `num_chosen` experts.

    The weights are the softmax over all experts, made to add up to one if `is_normalized`.
    """

    config: ModelConfig
    kernels: Kernels
    norm: Tensor
    router: object
    experts: tuple[Expert, ...]
    num_chosen: int
    is_normalized: bool

    def __call__(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        rows = self.kernels.rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        routes = self._route(rows)
        parts = self._results(rows, routes.expert_ids) * routes.weights.unsqueeze(-1)
        total = parts[:, 0]
        for rank in range(1, self.num_chosen):
            total = total + parts[:, rank]
        total = total.to(hidden.dtype)
        return total if residual is None else residual + total

    def _route(self, rows: Tensor) -> Routes:
        scores = self.kernels.linear(rows, self.router).to(torch.float32)
        weights, expert_ids = scores.softmax(dim=-1).topk(self.num_chosen, dim=-1)
        if self.is_normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return Routes(expert_ids, weights)

    def _results(self, rows: Tensor, expert_ids: Tensor) -> Tensor:
        """What each row's experts make of it, [T, k, hidden_size]."""
        kernels, activation = self.kernels, self.config.activation
        flat = expert_ids.flatten()
        by_expert = flat.argsort(stable=True)
        counts: list[int] = flat.bincount(minlength=len(self.experts)).tolist()
        gathered = rows[by_expert // self.num_chosen]
        grouped = torch.empty_like(gathered)
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                group = slice(start, start + count)
                gate_up = kernels.linear(gathered[group], expert.gate_up)
                grouped[group] = kernels.gated_linear(gate_up, expert.down, activation=activation)
                start += count
        results = torch.empty_like(grouped)
        results[by_expert] = grouped
        return results.view(len(rows), self.num_chosen, rows.shape[1])
