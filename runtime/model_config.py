"""What a checkpoint's config.json says, for the Llama family, as a checked value.

Knows the two ways in which rotary embedding is written down (`rope_parameters`, and `rope_theta`
with `rope_scaling` before it) and nothing of tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from sapwood.runtime.checkpoint_json import field_of, token_ids_of
from sapwood.runtime.errors import ModelError, UnsupportedModelError
from sapwood.runtime.models import MODELS

DTYPES = ("float32", "bfloat16", "float16")
_MAX_COUNT = 100_000  # layers, heads: far above any model, and nothing is built in vain
_MAX_SIZE = 2**31


class RopeKind(StrEnum):
    """How the frequencies of rotary embedding are scaled for long contexts."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding (Su et al. 2021): base `theta` and the scaling of its frequencies.

    `factor` belongs to LINEAR and LLAMA3, the last three fields to LLAMA3 alone.
    """

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        for name in ("theta", "factor"):
            if getattr(self, name) <= 0:
                raise ModelError(f"config.json: rope {name} is {getattr(self, name)}, not positive")
        _check_range("rope original_max_position", self.original_max_position, 1, _MAX_SIZE)
        if self.kind is RopeKind.LLAMA3 and self.low_freq_factor >= self.high_freq_factor:
            raise ModelError(
                f"config.json: rope low_freq_factor {self.low_freq_factor} is not below "
                f"high_freq_factor {self.high_freq_factor}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and settings of a decoder of the Llama family. Names as in config.json.

    `dtype` is the one the checkpoint was saved in. `eos_token_ids` holds those of config.json and
    of generation_config.json, in this order and without repetition.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
            _check_range(name, getattr(self, name), 1, _MAX_COUNT)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim"):
            _check_range(name, getattr(self, name), 1, _MAX_SIZE)
        # A prompt of one token and an answer of one.
        _check_range("max_position_embeddings", self.max_position_embeddings, 2, _MAX_SIZE)
        if self.rms_norm_eps <= 0:
            raise UnsupportedModelError(
                f"config.json: rms_norm_eps is {self.rms_norm_eps}, not positive"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"config.json: num_attention_heads {self.num_attention_heads} is not a multiple "
                f"of num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"config.json: head_dim is {self.head_dim}, it must be even")
        if self.dtype not in DTYPES:
            raise UnsupportedModelError(
                f"config.json: dtype {self.dtype} is not served; served are {', '.join(DTYPES)}"
            )


def read_model_config(folder: Path) -> ModelConfig:
    """Read config.json and, for more end tokens, generation_config.json.

    Raises ModelError for what is missing or malformed, UnsupportedModelError for what is not
    served.
    """
    raw = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    return parse_model_config(raw, generation)


def is_native(folder: Path) -> bool:
    """Whether the model in a folder has a file of its own in runtime/models.

    Raises ModelError where there is no config.json to say so.
    """
    return _read_json(folder / "config.json").get("model_type") in MODELS


def parse_model_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The same from the parsed files. Missing optional fields take transformers' defaults."""
    model_type = str(raw.get("model_type"))
    if model_type not in MODELS:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not served; served are {', '.join(MODELS)}"
        )
    if (hidden_act := raw.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"hidden_act {hidden_act!r} is not served; served is silu")
    field = partial(field_of, raw, where="config.json")
    hidden_size = field("hidden_size", int)
    num_heads = field("num_attention_heads", int)
    return ModelConfig(
        model_type=model_type,
        vocab_size=field("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=field("intermediate_size", int),
        num_hidden_layers=field("num_hidden_layers", int),
        num_attention_heads=num_heads,
        num_key_value_heads=field("num_key_value_heads", int, num_heads),
        head_dim=field("head_dim", int, hidden_size // max(num_heads, 1)),
        max_position_embeddings=field("max_position_embeddings", int, 2048),
        rms_norm_eps=field("rms_norm_eps", float, 1e-6),
        rope=_parse_rope(raw),
        tie_word_embeddings=field("tie_word_embeddings", bool, False),
        attention_bias=field("attention_bias", bool, False),
        mlp_bias=field("mlp_bias", bool, False),
        bos_token_id=next(iter(token_ids_of(raw, "bos_token_id", where="config.json")), None),
        eos_token_ids=_eos_token_ids(raw, generation or {}),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


def _parse_rope(raw: Mapping[str, Any]) -> RopeConfig:
    name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    parameters: dict[str, Any] = field_of(raw, name, dict, {}, where="config.json")
    field = partial(field_of, parameters, where=f"config.json: {name}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in tuple(RopeKind):
        raise UnsupportedModelError(
            f"rotary embedding scaled by {kind!r} is not served; served are {', '.join(RopeKind)}"
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("rotary embedding of a part of each head is not served")
    theta = field("rope_theta", float, field_of(raw, "rope_theta", float, 1e4, where="config.json"))
    if kind == RopeKind.DEFAULT:
        return RopeConfig(theta=theta)
    if kind == RopeKind.LINEAR:
        return RopeConfig(theta=theta, kind=RopeKind.LINEAR, factor=field("factor", float))
    context = field_of(raw, "max_position_embeddings", int, 2048, where="config.json")
    return RopeConfig(
        theta=theta,
        kind=RopeKind.LLAMA3,
        factor=field("factor", float),
        low_freq_factor=field("low_freq_factor", float),
        high_freq_factor=field("high_freq_factor", float),
        original_max_position=field("original_max_position_embeddings", int, context),
    )


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UnsupportedModelError(
            f"config.json: {name} is {value!r:.40}; it must be {low} to {high}"
        )


def _eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    found = token_ids_of(raw, "eos_token_id", where="config.json")
    more = token_ids_of(generation, "eos_token_id", where="generation_config.json")
    return tuple(dict.fromkeys([*found, *more]))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}: it is not a model's folder") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} holds {type(parsed).__name__}, a JSON object was expected")
    return parsed
