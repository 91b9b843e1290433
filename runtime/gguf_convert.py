"""A .gguf file as an ordinary model folder: config.json, model.safetensors, tokenizer.json.

The weights are dequantised to float32 once, with numpy, one tensor in memory at a time. Formats and
names are those of ggml-org/llama.cpp's gguf-py and its converter from transformers checkpoints.
Served is the architecture `llama`; whatever would come out differently is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sapwood.runtime.errors import ModelError, UnsupportedModelError
from sapwood.runtime.gguf_tokenizer import write_tokenizer

CONVERTER_VERSION = 1
"""Part of the key of a converted folder: raise it when the conversion's output changes."""

_TENSOR_NAMES = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
_LAYER_MODULE_NAMES = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
# Llama 3.1 and later: the file holds the divisors of the rotary frequencies instead of the
# settings they come from, of which only the factor differs between the released models.
_ROPE_DIVISORS = "rope_freqs.weight"
_LLAMA3_ROPE = MappingProxyType(
    {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
)

Metadata = Mapping[str, Any]


class _StoredTensor(NamedTuple):
    """A tensor under its transformers name, still quantised."""

    name: str
    shape: tuple[int, ...]
    stored: Any  # gguf.ReaderTensor


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the model in `path` to the empty `folder`.

    Raises UnsupportedModelError for an architecture, tokenizer or setting that is not served and
    ModelError for a file that is not a whole GGUF.
    """
    # The reader takes a quarter of a second to import and only this function needs it.
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, OSError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    if (architecture := metadata.get("general.architecture")) != "llama":
        raise UnsupportedModelError(
            f"{path.name} is a {architecture!r} GGUF; served as GGUF is llama. "
            "Load the model's safetensors folder or hub id instead"
        )
    divisors = None
    tensors = []
    for tensor in reader.tensors:
        if tensor.name == _ROPE_DIVISORS:
            divisors = np.asarray(tensor.data, dtype=np.float64).reshape(-1)
        else:
            shape = tuple(int(size) for size in reversed(tensor.shape))
            tensors.append(_StoredTensor(_transformers_name(tensor.name), shape, tensor))
    config = _config(metadata, {tensor.name: tensor.shape for tensor in tensors}, divisors)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(config, metadata))
    write_tokenizer(metadata, folder)
    _write_safetensors(folder / "model.safetensors", tensors, config)


def _config(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], divisors: NDArray[np.float64] | None
) -> dict[str, Any]:
    def required(key: str) -> Any:
        if f"llama.{key}" not in metadata:
            raise ModelError(f"the GGUF file lacks llama.{key}")
        return metadata[f"llama.{key}"]

    if metadata.get("llama.expert_count", 0):
        raise UnsupportedModelError("a GGUF file with experts (Mixtral) is not served")
    if "model.embed_tokens.weight" not in shapes:
        raise ModelError("the GGUF file lacks token_embd.weight")
    hidden_size, num_heads = required("embedding_length"), required("attention.head_count")
    head_dim = metadata.get("llama.attention.key_length", hidden_size // num_heads)
    if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError("rotary embedding of a part of each head is not served")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": required("feed_forward_length"),
        "num_hidden_layers": required("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": required("context_length"),
        # Stored as float32: the shortest decimal that reads back as the same float32.
        "rms_norm_eps": float(str(np.float32(required("attention.layer_norm_rms_epsilon")))),
        "rope_parameters": _rope_parameters(metadata, head_dim, divisors),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _rope_parameters(
    metadata: Metadata, head_dim: int, divisors: NDArray[np.float64] | None
) -> dict[str, Any]:
    theta = float(metadata.get("llama.rope.freq_base", 10_000.0))
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        factor = float(metadata["llama.rope.scaling.factor"])
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "none":
        raise UnsupportedModelError(f"rotary embedding scaled by {kind!r} is not served from GGUF")
    if divisors is None:
        return {"rope_type": "default", "rope_theta": theta}
    parameters = _LLAMA3_ROPE | {"rope_theta": theta, "factor": round(float(divisors.max()), 3)}
    if not np.allclose(divisors, _llama3_divisors(parameters, head_dim), rtol=1e-3):
        raise UnsupportedModelError(
            f"{_ROPE_DIVISORS} is not the scaling of a released Llama 3; load the model's "
            "safetensors folder or hub id instead"
        )
    return parameters


def _llama3_divisors(parameters: Mapping[str, Any], head_dim: int) -> NDArray[np.float64]:
    """By what llama3 scaling divides each rotary frequency, float64 [head_dim / 2]."""
    frequencies = parameters["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    divisors: NDArray[np.float64] = 1.0 / (kept + (1.0 - kept) / parameters["factor"])
    return divisors


def _generation_config(config: Mapping[str, Any], metadata: Metadata) -> dict[str, Any]:
    """Every token that ends a turn or a text, as generation_config.json lists them."""
    ends = [config["eos_token_id"]]
    ends += [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    eos_token_ids = list(dict.fromkeys(i for i in ends if i is not None))
    return {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": eos_token_ids,
        "pad_token_id": config["pad_token_id"],
    }


def _transformers_name(name: str) -> str:
    if name in _TENSOR_NAMES:
        return _TENSOR_NAMES[name]
    match name.split("."):
        case ["blk", index, module, kind] if module in _LAYER_MODULE_NAMES:
            return f"model.layers.{index}.{_LAYER_MODULE_NAMES[module]}.{kind}"
    raise UnsupportedModelError(f"the GGUF file has a tensor {name!r} that no Llama has")


def _write_safetensors(path: Path, tensors: list[_StoredTensor], config: Mapping[str, Any]) -> None:
    """The format's 8-byte length, JSON header and raw tensors, written one tensor at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + 4 * int(np.prod(tensor.shape))
        header[tensor.name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for weights in _float32_weights(tensors, config):
            file.write(weights.data)


def _float32_weights(
    tensors: list[_StoredTensor], config: Mapping[str, Any]
) -> Iterator[NDArray[np.float32]]:
    from gguf import dequantize

    for tensor in tensors:
        dense = dequantize(tensor.stored.data, tensor.stored.tensor_type)
        weights = np.asarray(dense, dtype=np.float32).reshape(tensor.shape)
        if ".q_proj." in tensor.name:
            weights = _halves_together(weights, config["num_attention_heads"])
        elif ".k_proj." in tensor.name:
            weights = _halves_together(weights, config["num_key_value_heads"])
        yield np.ascontiguousarray(weights)


def _halves_together(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo GGUF's order of a head's outputs.

    GGUF keeps the two coordinates that rotary embedding turns next to each other; transformers
    keeps all first coordinates of a head before all second ones.
    """
    pairs = weights.reshape(num_heads, -1, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
