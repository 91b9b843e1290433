"""Shapes of models that kernels are compiled and measured for ahead of time.

Kernels take any shape; these are the ones that this project's figures are of, and between them the
head sizes 64, 80, 96, 128 and 256. Facts of the published configurations.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a model decides how its kernels are compiled."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    has_head_norms: bool = False
    has_post_norms: bool = False
    has_score_cap: bool = False
    is_gelu: bool = False


MODEL_SHAPES = (
    ModelShape(
        name="smollm2-135m",
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rotary_dim=64,
    ),
    ModelShape(
        name="qwen3-0.6b",
        hidden_size=1024,
        intermediate_size=3072,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rotary_dim=128,
        has_head_norms=True,
    ),
    ModelShape(
        name="qwen3-8b",
        hidden_size=4096,
        intermediate_size=12288,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rotary_dim=128,
        has_head_norms=True,
    ),
    ModelShape(
        name="llama-3-8b",
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rotary_dim=128,
    ),
    ModelShape(
        name="stablelm-3b",
        hidden_size=2560,
        intermediate_size=6912,
        num_heads=32,
        num_kv_heads=32,
        head_dim=80,
        rotary_dim=20,
    ),
    ModelShape(
        name="phi-3-mini",
        hidden_size=3072,
        intermediate_size=8192,
        num_heads=32,
        num_kv_heads=32,
        head_dim=96,
        rotary_dim=96,
    ),
    ModelShape(
        name="gemma-2-9b",
        hidden_size=3584,
        intermediate_size=14336,
        num_heads=16,
        num_kv_heads=8,
        head_dim=256,
        rotary_dim=256,
        has_post_norms=True,
        has_score_cap=True,
        is_gelu=True,
    ),
)
