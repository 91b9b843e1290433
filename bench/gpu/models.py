"""Shapes of models, for random weights."""

from __future__ import annotations

from sapwood.runtime.model_config import ModelConfig, parse_model_config

_QWEN3 = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
    "eos_token_id": 151_645,
}


def _config(**fields: object) -> ModelConfig:
    return parse_model_config({**_QWEN3, **fields})


QWEN3_0_6B = _config(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    tie_word_embeddings=True,
)
QWEN3_8B = _config(
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    tie_word_embeddings=False,
)
LLAMA3_8B = parse_model_config(
    {
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eos_token_id": 128_001,
    }
)
TINY_QWEN3 = _config(
    vocab_size=160,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    dtype="float32",
    eos_token_id=1,
)
