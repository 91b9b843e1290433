"""Rotary embedding (Su et al. 2021) and the ways to stretch it over long contexts.

A rope is a value: which frequencies the pairs of a head's dimensions turn at. They are fixed when
the model is built. Two scalings that look at the length of what they are given are pinned, since a
request's keys must depend neither on its neighbours nor on what comes later, or they could not be
shared: dynamic scaling leaves a context alone up to `max_position_embeddings`, and no request is
longer; longrope takes its long factors if `max_position_embeddings` is beyond the original context,
for short requests as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from sapwood.runtime.errors import ModelError, UnsupportedModelError
from sapwood.runtime.model_config import Fields, check_positive, check_range


class RopeKind(StrEnum):
    """How config.json names the scaling of frequencies."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Frequencies `theta ** (-2 i / dim)`, for `dim` dimensions of each head.

    Cosines and sines are times `attention_factor`, which makes attention sharper or flatter.
    """

    theta: float
    dim: int
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        check_positive("rope_theta", self.theta)
        check_positive("rope attention_factor", self.attention_factor)
        if self.dim % 2 or self.dim < 2:
            raise ModelError(f"config.json: rope turns {self.dim} dimensions, it must be even")

    def frequencies(self) -> Tensor:
        """Radians per position, float32 [dim / 2]."""
        return 1.0 / self.wavelengths()

    def wavelengths(self) -> Tensor:
        """Positions per radian before any scaling, float32 [dim / 2]."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        return torch.as_tensor(self.theta**exponents)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRope(Rope):
    """All frequencies divided by `factor` (Chen et al. 2023)."""

    factor: float

    def __post_init__(self) -> None:
        super(LinearRope, self).__post_init__()
        check_positive("rope factor", self.factor)

    def frequencies(self) -> Tensor:
        return 1.0 / self.wavelengths() / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope(Rope):
    """As Llama 3.1 does: waves that turn often within the original context stay, those that turn
    rarely are stretched by `factor`, and between the two the scaling is interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        super(Llama3Rope, self).__post_init__()
        check_positive("rope factor", self.factor)
        check_range("rope original_max_position_embeddings", self.original_max_position, 1)
        if self.low_freq_factor >= self.high_freq_factor:
            raise ModelError(
                f"config.json: rope low_freq_factor {self.low_freq_factor} is not below "
                f"high_freq_factor {self.high_freq_factor}"
            )

    def frequencies(self) -> Tensor:
        frequencies = 1.0 / self.wavelengths()
        turns = self.original_max_position * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRope(Rope):
    """YaRN (Peng et al. 2023): stretched by `factor` but for waves that turn often.

    Dimensions whose waves turn more than `beta_fast` times within the original context stay, those
    below `beta_slow` are stretched; in between a ramp over the dimensions, whose ends are whole
    dimensions if `is_truncated`.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position: int
    is_truncated: bool

    def __post_init__(self) -> None:
        super(YarnRope, self).__post_init__()
        for name in ("factor", "beta_fast", "beta_slow"):
            check_positive(f"rope {name}", getattr(self, name))
        check_range("rope original_max_position_embeddings", self.original_max_position, 1)
        if self.theta == 1.0:
            raise ModelError("config.json: rope_theta is 1.0: every wave would be the same")

    def frequencies(self) -> Tensor:
        wavelengths = self.wavelengths()
        first, last = self._dimension_of(self.beta_fast), self._dimension_of(self.beta_slow)
        if self.is_truncated:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.dim - 1)
        if first == last:
            last += 0.001
        ramp = (torch.arange(self.dim // 2, dtype=torch.float32) - first) / (last - first)
        kept = 1 - ramp.clamp(0, 1)
        return 1.0 / (self.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept

    def _dimension_of(self, num_turns: float) -> float:
        """The pair of dimensions that turns so often within the original context."""
        wavelength = self.original_max_position / (num_turns * 2 * math.pi)
        return self.dim * math.log(wavelength) / (2 * math.log(self.theta))


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRope(Rope):
    """LongRoPE (Ding et al. 2024): each frequency divided by a factor of its own."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        super(LongRope, self).__post_init__()
        if len(self.factors) != self.dim // 2:
            raise ModelError(
                f"config.json: rope has {len(self.factors)} factors for {self.dim // 2} frequencies"
            )
        check_positive("rope factor", min(self.factors))

    def frequencies(self) -> Tensor:
        return 1.0 / (torch.tensor(self.factors, dtype=torch.float32) * self.wavelengths())


class RopeAngles(NamedTuple):
    """Cosines and signed sines of a step's rows, as `Kernels.rotary` takes them: [T, 1, dim]."""

    cos: Tensor
    sin: Tensor


class RopeTable(NamedTuple):
    """Cosines and sines by position, float32 [max_position, dim / 2]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, rope: Rope, max_position: int, device: torch.device) -> RopeTable:
        positions = torch.arange(max_position, dtype=torch.float32)
        angles = torch.outer(positions, rope.frequencies()).to(device)
        cos = angles.cos().mul_(rope.attention_factor)
        return cls(cos, angles.sin_().mul_(rope.attention_factor))

    def rows(self, positions: Tensor) -> RopeAngles:
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        return RopeAngles(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def parse_rope(
    fields: Fields, *, head_dim: int, max_position: int, theta: float = 10_000.0, share: float = 1.0
) -> Rope:
    """The rope of config.json: `rope_parameters`, or `rope_theta` with `rope_scaling` before it.

    `theta` is the model's default. `share` of each head's dimensions are turned; config.json may
    not name another. `max_position` is the longest context.
    """
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    parameters = fields.object(name)
    written = parameters.values.get("rope_type", parameters.values.get("type", "default"))
    kind = RopeKind.LONGROPE if written == "su" else written
    if kind not in tuple(RopeKind):
        raise UnsupportedModelError(
            f"rotary embedding scaled by {written!r:.80} is not served; served are "
            f"{', '.join(RopeKind)}"
        )
    # transformers passes over the next two, so that its code would be no way out.
    if nested := [key for key, value in parameters.values.items() if isinstance(value, dict)]:
        raise ModelError(
            f"{parameters.where} is of its own for {nested[0]!r:.80}, and this architecture has "
            "one for all layers"
        )
    if (written_share := partial_rotary_factor(fields)) != share:
        raise ModelError(
            f"config.json: partial_rotary_factor is {written_share}, and this architecture turns "
            "all of each head"
        )
    theta = parameters.take("rope_theta", float, fields.take("rope_theta", float, theta))
    return _scaled(
        RopeKind(kind),
        Rope(theta=theta, dim=int(head_dim * share)),
        fields,
        parameters,
        max_position,
    )


def partial_rotary_factor(fields: Fields) -> float:
    """The share of each head's dimensions that config.json says are turned."""
    outer = fields.take("partial_rotary_factor", float, 1.0)
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    return fields.object(name).take("partial_rotary_factor", float, outer)


def _scaled(
    kind: RopeKind, rope: Rope, fields: Fields, parameters: Fields, max_position: int
) -> Rope:
    theta, dim = rope.theta, rope.dim
    if kind in (RopeKind.DEFAULT, RopeKind.DYNAMIC):
        return rope
    if kind is RopeKind.LINEAR:
        return LinearRope(theta=theta, dim=dim, factor=parameters.take("factor", float))
    original = fields.take(
        "original_max_position_embeddings",
        int,
        parameters.take("original_max_position_embeddings", int, max_position),
    )
    if kind is RopeKind.LLAMA3:
        return Llama3Rope(
            theta=theta,
            dim=dim,
            factor=parameters.take("factor", float),
            low_freq_factor=parameters.take("low_freq_factor", float),
            high_freq_factor=parameters.take("high_freq_factor", float),
            original_max_position=original,
        )
    factor = parameters.take("factor", float, max_position / max(original, 1))
    if kind is RopeKind.YARN:
        return YarnRope(
            theta=theta,
            dim=dim,
            attention_factor=_yarn_attention_factor(parameters, factor),
            factor=factor,
            beta_fast=parameters.optional("beta_fast", float) or 32.0,
            beta_slow=parameters.optional("beta_slow", float) or 1.0,
            original_max_position=original,
            is_truncated=parameters.take("truncate", bool, True),
        )
    length = "long_factor" if max_position > original else "short_factor"
    factors = parameters.list_of(length, float)
    if factors is None:
        raise ModelError(f"{parameters.where} lacks {length!r}")
    return LongRope(
        theta=theta,
        dim=dim,
        attention_factor=parameters.take(
            "attention_factor", float, _long_attention_factor(factor, original)
        ),
        factors=tuple(factors),
    )


def _yarn_attention_factor(parameters: Fields, factor: float) -> float:
    """As given, or by the rule of the paper, times `mscale` over that of `mscale_all_dim`."""
    given = parameters.optional("attention_factor", float)
    if given is not None:
        return given

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale = parameters.optional("mscale", float)
    scale_all = parameters.optional("mscale_all_dim", float)
    return magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)


def _long_attention_factor(factor: float, original_max_position: int) -> float:
    if factor <= 1.0:
        return 1.0
    check_range("rope original_max_position_embeddings", original_max_position, 2)
    return math.sqrt(1 + math.log(factor) / math.log(original_max_position))
