"""Writes transformers' models as llama.cpp's converter does, for tests.

What is known here is llama.cpp's: gguf-py's map from transformers' names to its own, its writer's
names of settings, and which values its converter changes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

ARCHITECTURES: Mapping[str, gguf.MODEL_ARCH] = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "granite": gguf.MODEL_ARCH.GRANITE,
}
ROTATES_NEIGHBOURS = ("llama", "mistral", "mixtral", "granite")
COMMON_FIELDS: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def random_model(model_type: str, **fields: Any) -> PreTrainedModel:
    """A tiny model whose answers hang on every tensor and whose norms can be added one to."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **(COMMON_FIELDS | fields))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2)
            if "norm" in name:
                # Of few bits, so that adding one and taking it away loses none.
                parameter.mul_(256).round_().div_(256)
                parameter.add_(float(model_type != "gemma3_text"))
    return model


def saved_tensors(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """The model's tensors as transformers saves them."""
    model.save_pretrained(folder)
    return dict(load_file(folder / "model.safetensors"))


def write_model(
    path: Path,
    model: PreTrainedModel,
    tensors: Mapping[str, torch.Tensor],
    *,
    extra: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
) -> None:
    """The model as a GGUF in float32, with a tokenizer of single characters and one merge.

    `extra` are more settings by the names after the architecture's.
    """
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    add_settings(writer, config)
    for name, value in (extra or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_string)(f"{writer.arch}.{name}", value)
    add_tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in merged_experts(tensors):
        weights = changed(name, tensor.numpy(), config)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        writer.add_tensor(theirs, weights)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_settings(writer: gguf.GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None)
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if head_dim is not None and config.model_type != "granite":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    size = head_dim or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    match config.model_type:
        case "llama" | "mistral" | "mixtral" | "granite":
            writer.add_rope_dimension_count(size)
            if getattr(config, "sliding_window", None):  # llama.cpp's converter leaves it out
                writer.add_sliding_window(config.sliding_window)
        case "phi3":
            part = rope.get("partial_rotary_factor", 1.0)
            writer.add_rope_dimension_count(int(part * size))
            writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
            writer.add_sliding_window(config.sliding_window or 0)
        case "gemma3_text":
            writer.add_sliding_window(config.sliding_window)
            if config.final_logit_softcapping:
                writer.add_final_logit_softcapping(config.final_logit_softcapping)
            writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
            rope = rope["full_attention"]
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type == "mixtral":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    add_rope(writer, config, rope)


def add_rope(writer: gguf.GGUFWriter, config: Any, rope: Mapping[str, Any]) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    match rope["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
        case "longrope":
            original = config.original_max_position_embeddings
            ratio = config.max_position_embeddings / original
            factor = math.sqrt(1 + math.log(ratio) / math.log(original))
            writer.add_rope_scaling_attn_factors(factor)
            for name in ("long", "short"):
                factors = np.array(rope[f"{name}_factor"], dtype=np.float32)
                writer.add_tensor(f"rope_factors_{name}.weight", factors)


def merged_experts(
    tensors: Mapping[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Plain tensors as they are, those of a layer's experts in one, by the names of gguf-py."""
    experts: dict[str, list[torch.Tensor]] = {}
    for name in sorted(
        tensors, key=lambda n: [int(p) if p.isdecimal() else 0 for p in n.split(".")]
    ):
        parts = name.split(".")
        if "experts" not in parts:
            yield name, tensors[name]
            continue
        layer, projection = parts[2], parts[-2]
        merged = f"layers.{layer}.feed_forward.experts.{projection}.weight"
        if projection.endswith("proj"):
            merged = f"model.layers.{layer}.mlp.experts.{projection}.weight"
        experts.setdefault(merged, []).append(tensors[name])
    for name, parts_of_it in experts.items():
        yield name, torch.stack(parts_of_it)


def changed(name: str, weights: np.ndarray, config: Any) -> np.ndarray:
    """What llama.cpp's converter does to a tensor's values."""
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
        return weights + np.float32(1)
    if config.model_type in ROTATES_NEIGHBOURS:
        if ".q_proj." in name:
            return neighbours_together(weights, config.num_attention_heads)
        if ".k_proj." in name:
            return neighbours_together(weights, config.num_key_value_heads)
    return weights


def neighbours_together(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a head so that row 2 i is its row i and row 2 i + 1 its row i + half a head."""
    head_len = len(weights) // num_heads
    rows = [
        head * head_len + pair + half * (head_len // 2)
        for head in range(num_heads)
        for pair in range(head_len // 2)
        for half in (0, 1)
    ]
    return np.ascontiguousarray(weights[rows])


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = [f"<{i}>" if i < 3 else chr(0x21 + i) for i in range(vocab_size)]
    tokens[-1] = tokens[3] + tokens[4]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(vocab_size)])
    writer.add_token_merges([f"{tokens[3]} {tokens[4]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def config_of_folder(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found
