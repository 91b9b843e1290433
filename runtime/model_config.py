"""What a checkpoint's config.json says, for the Llama family, as a checked value.

Knows the two ways in which rotary embedding is written down (`rope_parameters`, and `rope_theta`
with `rope_scaling` before it) and nothing of tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from sapwood.runtime.errors import ModelError, UnsupportedModelError
from sapwood.runtime.models import MODELS

DTYPES = ("float32", "bfloat16", "float16")


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
        for name in ("theta", "factor", "original_max_position"):
            if getattr(self, name) <= 0:
                raise ModelError(f"config.json: rope {name} is {getattr(self, name)}, not positive")
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
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) <= 0:
                raise ModelError(f"config.json: {name} is {getattr(self, name)}, not positive")
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


def parse_model_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The same from the parsed files. Missing optional fields take transformers' defaults."""
    model_type = str(raw.get("model_type"))
    if model_type not in MODELS:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not served; served are {', '.join(MODELS)}"
        )
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "an unnamed method")
        raise UnsupportedModelError(
            f"weights quantised by {method} are not served; load the model's float weights"
        )
    if (hidden_act := raw.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"hidden_act {hidden_act!r} is not served; served is silu")
    try:
        num_heads = int(raw["num_attention_heads"])
        return ModelConfig(
            model_type=model_type,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_hidden_layers=int(raw["num_hidden_layers"]),
            num_attention_heads=num_heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or num_heads),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // num_heads),
            max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_parse_rope(raw),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=_eos_token_ids(raw, generation or {}),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        )
    except KeyError as error:
        raise ModelError(f"config.json lacks {error.args[0]!r}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"config.json is malformed: {error}") from error


def _parse_rope(raw: Mapping[str, Any]) -> RopeConfig:
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in tuple(RopeKind):
        raise UnsupportedModelError(
            f"rotary embedding scaled by {kind!r} is not served; served are {', '.join(RopeKind)}"
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("rotary embedding of a part of each head is not served")
    theta = float(parameters.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    if kind == RopeKind.DEFAULT:
        return RopeConfig(theta=theta)
    if kind == RopeKind.LINEAR:
        return RopeConfig(theta=theta, kind=RopeKind.LINEAR, factor=float(parameters["factor"]))
    return RopeConfig(
        theta=theta,
        kind=RopeKind.LLAMA3,
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_position=int(
            parameters.get("original_max_position_embeddings") or raw["max_position_embeddings"]
        ),
    )


def _eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for source in (raw, generation):
        ids = source.get("eos_token_id")
        if ids is not None:
            found.update(dict.fromkeys(int(i) for i in (ids if isinstance(ids, list) else [ids])))
    return tuple(found)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}: it is not a model's folder") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} holds {type(parsed).__name__}, a JSON object was expected")
    return parsed
