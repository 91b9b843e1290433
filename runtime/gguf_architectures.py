"""What GGUF's architectures are called in transformers' checkpoints: tensors and settings.

Names and values are those of ggml-org/llama.cpp's gguf-py and of its converter from transformers'
checkpoints, whose changes are undone here. One table for each architecture; a setting or a tensor
that its table does not have is refused, since the model would come out differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sapwood.runtime.checkpoint_json import field_of
from sapwood.runtime.errors import ModelError, UnsupportedModelError

_WHERE = "the GGUF file"
_INSTEAD = "load the model's safetensors folder or hub id instead"

Weights = NDArray[np.float32]
Config = Mapping[str, Any]
Change = Callable[[Weights, Config], Weights]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """The settings of a file's architecture, by their names without it, and what tensors it has.

    `shapes` is by GGUF names; `rope` are the factors of rotary frequencies that a file may hold as
    tensors, by the tensor's name.
    """

    settings: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    rope: Mapping[str, list[float]]

    def count(self, name: str, default: int | None = None) -> int:
        """A positive whole number. One for each layer counts as one where all are the same."""
        value = self.settings.get(name)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        found = field_of({name: value}, name, int, default, where=_WHERE)
        if found < 1:
            raise ModelError(f"{_WHERE} has {name} of {found}; it must be positive")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        return field_of(self.settings, name, float, default, where=_WHERE)

    def is_set(self, name: str) -> bool:
        """Whether a number is there and not zero, which is how a file leaves one out."""
        return self.settings.get(name) not in (None, 0, 0.0, False)

    @property
    def head_dim(self) -> int:
        default = self.count("embedding_length") // self.count("attention.head_count")
        return self.count("attention.key_length", default)

    @property
    def rotary_dim(self) -> int:
        return self.count("rope.dimension_count", self.head_dim)


class Place(NamedTuple):
    """Where a GGUF module's tensors go, and how their values change.

    A name with {expert} in it takes the first dimension apart. Only some modules may have a bias.
    """

    module: str
    change: Change | None = None
    may_have_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How a GGUF becomes a checkpoint of `model_type`.

    `model` are the places of modules outside the layers, `layer` those of the modules of
    blk.N, below model.layers.N. `constants` and `config` give the fields of config.json beyond the
    common ones, `rope` its rope_parameters; `settings` are the names that any of them reads, or
    that say nothing of importance.
    """

    model_type: str
    class_name: str
    model: Mapping[str, Place]
    layer: Mapping[str, Place]
    constants: Mapping[str, Any]
    config: Callable[[GgufModel], dict[str, Any]]
    rope: Callable[[GgufModel], dict[str, Any]]
    settings: frozenset[str]


def architecture_of(name: object, settings: Mapping[str, Any]) -> Architecture:
    """The table for a file of architecture `name`.

    A Llama with experts is a Mixtral, one with a sliding window a Mistral: their files differ in
    nothing else. Raises UnsupportedModelError for an architecture that is not served.
    """
    if name == "llama" and settings.get("expert_count"):
        return _MIXTRAL
    if name == "llama" and settings.get("attention.sliding_window"):
        return _MISTRAL
    for known, architecture in _ARCHITECTURES.items():
        if name == known:
            return architecture
    raise UnsupportedModelError(
        f"the file is a {name!r:.40} GGUF; served as GGUF are {', '.join(_ARCHITECTURES)}. "
        "Load the model's safetensors folder or hub id instead"
    )


def config_of(architecture: Architecture, model: GgufModel) -> dict[str, Any]:
    """config.json, without the tokens and the dtype.

    Raises ModelError for settings that are missing or of another kind, UnsupportedModelError for
    those that are not served.
    """
    if unknown := sorted(model.settings.keys() - architecture.settings):
        name = unknown[0]
        raise UnsupportedModelError(
            f"{_WHERE} has {name} = {model.settings[name]!r:.60}, which is not served for "
            f"{architecture.model_type}; {_INSTEAD}"
        )
    if "token_embd.weight" not in model.shapes:
        raise ModelError(f"{_WHERE} lacks token_embd.weight")
    if (num_layers := model.count("block_count")) > len(model.shapes):
        raise ModelError(f"{_WHERE} has {len(model.shapes)} tensors for {num_layers} layers")
    if (value_dim := model.count("attention.value_length", model.head_dim)) != model.head_dim:
        raise UnsupportedModelError(
            f"{_WHERE} has values of {value_dim} and keys of {model.head_dim} dimensions a head, "
            "which is not served"
        )
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": model.shapes["token_embd.weight"][0],
        "hidden_size": model.count("embedding_length"),
        "intermediate_size": model.count("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": model.count("attention.head_count"),
        "num_key_value_heads": model.count(
            "attention.head_count_kv", model.count("attention.head_count")
        ),
        "head_dim": model.head_dim,
        "max_position_embeddings": model.count("context_length"),
        "rms_norm_eps": model.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": architecture.rope(model),
        "tie_word_embeddings": "output.weight" not in model.shapes,
        **architecture.constants,
        **architecture.config(model),
    }


def place_of(architecture: Architecture, name: str) -> Place:
    """Where the tensor `name` goes: the place's module is the full name of the tensor.

    Raises UnsupportedModelError for a tensor that the architecture does not have.
    """
    place, prefix = None, ""
    match name.split("."):
        case [module, kind]:
            place = architecture.model.get(module)
        case ["blk", index, module, kind] if index.isdecimal():
            place, prefix = architecture.layer.get(module), f"model.layers.{index}."
        case _:
            kind = ""
    if (
        place is None
        or kind not in ("weight", "bias")
        or (kind == "bias" and not place.may_have_bias)
    ):
        raise UnsupportedModelError(
            f"{_WHERE} has a tensor {name!r:.80} that no {architecture.model_type} has"
        )
    return place._replace(module=f"{prefix}{place.module}.{kind}")


# Changes of values.


def _halves_together(count_name: str) -> Change:
    """Undo GGUF's order of a head's outputs, which llama.cpp's rotation of neighbours needs.

    GGUF keeps the two coordinates that rotary embedding turns next to each other; transformers
    keeps all first coordinates of a head before all second ones. `count_name` is the field of
    config.json with the number of heads.
    """

    def change(weights: Weights, config: Config) -> Weights:
        num_heads: int = config[count_name]
        if weights.shape[0] % (2 * num_heads):
            raise ModelError(
                f"{_WHERE} has {weights.shape[0]} rows of queries or keys for {num_heads} heads"
            )
        pairs = weights.reshape(num_heads, -1, 2, *weights.shape[1:])
        return pairs.swapaxes(1, 2).reshape(weights.shape)

    return change


def _less_one(weights: Weights, config: Config) -> Weights:
    """Gemma multiplies by 1 + weight, and GGUF holds the sum."""
    return weights - np.float32(1.0)


# Rotary embedding.

ROPE_FREQS, ROPE_LONG, ROPE_SHORT = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
# Llama 3.1 and later: the file holds the divisors of the rotary frequencies instead of the
# settings they come from, of which only the factor differs between the released models.
_LLAMA3_ROPE = MappingProxyType(
    {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
)
_YARN_BETAS = MappingProxyType(
    {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
)


def _rope_parameters(model: GgufModel) -> dict[str, Any]:
    """rope_parameters of a whole head, scaled as the file says."""
    if model.rotary_dim != model.head_dim:
        raise UnsupportedModelError("rotary embedding of a part of each head is not served")
    theta = {"rope_theta": model.number("rope.freq_base", 10_000.0)}
    # A factor without a kind is linear, as llama.cpp reads it.
    implied = "linear" if model.is_set("rope.scaling.factor") else "none"
    kind = model.settings.get("rope.scaling.type", implied)
    if model.rope and (kind != "none" or model.rope.keys() != {ROPE_FREQS}):
        raise UnsupportedModelError(f"{_WHERE} has {' and '.join(model.rope)}, not served for it")
    match kind:
        case "none" if ROPE_FREQS in model.rope:
            return _llama3_parameters(np.array(model.rope[ROPE_FREQS]), theta, model.head_dim)
        case "none":
            return {"rope_type": "default"} | theta
        case "linear":
            return {"rope_type": "linear", "factor": model.number("rope.scaling.factor")} | theta
        case "yarn":
            return _yarn_parameters(model) | theta
    raise UnsupportedModelError(f"rotary embedding scaled by {kind!r:.40} is not served from GGUF")


def _llama3_parameters(
    divisors: NDArray[np.float64], theta: Mapping[str, float], head_dim: int
) -> dict[str, Any]:
    parameters = dict(_LLAMA3_ROPE | theta) | {"factor": round(float(divisors.max()), 3)}
    if len(divisors) != head_dim // 2 or not np.allclose(
        divisors, _llama3_divisors(parameters, head_dim), rtol=1e-3
    ):
        raise UnsupportedModelError(
            f"{ROPE_FREQS} is not the scaling of a released Llama 3; {_INSTEAD}"
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


def _yarn_parameters(model: GgufModel) -> dict[str, Any]:
    """YaRN (Peng et al. 2024), with the attention factor that follows from `factor`."""
    parameters: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": model.number("rope.scaling.factor"),
        "original_max_position_embeddings": model.count("rope.scaling.original_context_length"),
    }
    for name, field in _YARN_BETAS.items():
        if name in model.settings:
            parameters[field] = model.number(name)
    return parameters


def _gemma3_rope(model: GgufModel) -> dict[str, Any]:
    """Two sets of rope_parameters; only whole attention is scaled."""
    return {
        "full_attention": _rope_parameters(model),
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": model.number("rope.freq_base_swa", 10_000.0),
        },
    }


def _phi3_rope(model: GgufModel) -> dict[str, Any]:
    """Phi-3's rotary embedding, of a part of each head and with factors for long texts."""
    if (kind := model.settings.get("rope.scaling.type", "none")) not in ("none", "longrope"):
        raise UnsupportedModelError(f"a Phi-3 with positions scaled by {kind!r:.40} is not served")
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": model.number("rope.freq_base", 10_000.0),
        "partial_rotary_factor": model.rotary_dim / model.head_dim,
    }
    if not model.rope:
        return parameters
    if model.rope.keys() != {ROPE_LONG, ROPE_SHORT}:
        raise UnsupportedModelError(f"{_WHERE} has {' and '.join(model.rope)}, not served for it")
    original = model.count("rope.scaling.original_context_length")
    parameters |= {
        "rope_type": "longrope",
        "long_factor": model.rope[ROPE_LONG],
        "short_factor": model.rope[ROPE_SHORT],
        "original_max_position_embeddings": original,
    }
    ratio = model.count("context_length") / original
    usual = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    factor = model.number("rope.scaling.attn_factor", 1.0)
    if not math.isclose(factor, usual, rel_tol=1e-6):
        parameters["attention_factor"] = factor
    return parameters


# Settings of each architecture beyond the common ones.


def _nothing(model: GgufModel) -> dict[str, Any]:
    return {}


def _has_bias(model: GgufModel, *modules: str) -> bool:
    return any(f"blk.0.{module}.bias" in model.shapes for module in modules)


def _biases(model: GgufModel) -> dict[str, Any]:
    return {
        "attention_bias": _has_bias(model, "attn_q"),
        "mlp_bias": _has_bias(model, "ffn_gate"),
    }


def _attention_bias(model: GgufModel) -> dict[str, Any]:
    return {"attention_bias": _has_bias(model, "attn_q")}


def _mistral_config(model: GgufModel) -> dict[str, Any]:
    return {"sliding_window": model.count("attention.sliding_window")}


def _mixtral_config(model: GgufModel) -> dict[str, Any]:
    return {
        "num_local_experts": model.count("expert_count"),
        "num_experts_per_tok": model.count("expert_used_count"),
    }


def _qwen3_moe_config(model: GgufModel) -> dict[str, Any]:
    # llama.cpp makes the weights of the chosen experts sum up to one, and so do the constants.
    if model.settings.get("expert_weights_norm", True) is not True:
        raise UnsupportedModelError(f"{_WHERE} has expert_weights_norm of false, not served")
    return _attention_bias(model) | {
        "moe_intermediate_size": model.count("expert_feed_forward_length"),
        "num_experts": model.count("expert_count"),
        "num_experts_per_tok": model.count("expert_used_count"),
    }


def _gemma3_config(model: GgufModel) -> dict[str, Any]:
    num_layers, num_heads = model.count("block_count"), model.count("attention.head_count")
    period = model.count("attention.sliding_window_pattern", 6)
    has_window = model.is_set("attention.sliding_window")
    # The file does not say by what queries are scaled: by the size of a head in all models but the
    # one of 27B parameters, which is known by its number of layers.
    is_27b = num_layers == 62
    softcap = "final_logit_softcapping"
    return {
        "query_pre_attn_scalar": (
            model.count("embedding_length") // num_heads if is_27b else model.head_dim
        ),
        "sliding_window": model.count("attention.sliding_window") if has_window else None,
        "layer_types": [
            "sliding_attention" if has_window and (index + 1) % period else "full_attention"
            for index in range(num_layers)
        ],
        "final_logit_softcapping": model.number(softcap) if model.is_set(softcap) else None,
    } | _attention_bias(model)


def _phi3_config(model: GgufModel) -> dict[str, Any]:
    if "attention.sliding_window" not in model.settings:
        raise UnsupportedModelError(
            f"{_WHERE} is from before llama.cpp wrote Phi-3's attention.sliding_window; convert "
            "the model again or load its safetensors folder or hub id"
        )
    window = "attention.sliding_window"
    return {
        "original_max_position_embeddings": model.count("rope.scaling.original_context_length"),
        "sliding_window": model.count(window) if model.is_set(window) else None,
    }


def _granite_config(model: GgufModel) -> dict[str, Any]:
    if model.settings.get("rope.scaling.finetuned", True) is not True:
        raise UnsupportedModelError("a Granite without rotary embedding is not served")
    scales = {
        "attention_multiplier": ("attention.scale", model.head_dim**-0.5),
        "embedding_multiplier": ("embedding_scale", 1.0),
        "residual_multiplier": ("residual_scale", 1.0),
        "logits_scaling": ("logit_scale", None),
    }
    return _biases(model) | {
        field: model.number(name, default) if default is None or model.is_set(name) else default
        for field, (name, default) in scales.items()
    }


# Tables.

_SILU = MappingProxyType({"hidden_act": "silu"})
_NO_WINDOW = MappingProxyType({"hidden_act": "silu", "use_sliding_window": False})

_ROTATED_QUERY = _halves_together("num_attention_heads")
_ROTATED_KEY = _halves_together("num_key_value_heads")

_MODEL = MappingProxyType(
    {
        "token_embd": Place("model.embed_tokens"),
        "output_norm": Place("model.norm"),
        "output": Place("lm_head"),
    }
)
_NORMS = MappingProxyType(
    {"attn_norm": Place("input_layernorm"), "ffn_norm": Place("post_attention_layernorm")}
)
_QUERY_KEY_NORMS = MappingProxyType(
    {"attn_q_norm": Place("self_attn.q_norm"), "attn_k_norm": Place("self_attn.k_norm")}
)


def _attention(query: Change | None, key: Change | None, *, biased: str) -> dict[str, Place]:
    """The projections of attention, those of whose letters are in `biased` maybe with a bias."""
    return {
        "attn_q": Place("self_attn.q_proj", query, "q" in biased),
        "attn_k": Place("self_attn.k_proj", key, "k" in biased),
        "attn_v": Place("self_attn.v_proj", None, "v" in biased),
        "attn_output": Place("self_attn.o_proj", None, "o" in biased),
    }


def _mlp(*, may_have_bias: bool = False) -> dict[str, Place]:
    return {
        "ffn_gate": Place("mlp.gate_proj", None, may_have_bias),
        "ffn_up": Place("mlp.up_proj", None, may_have_bias),
        "ffn_down": Place("mlp.down_proj", None, may_have_bias),
    }


_COMMON = frozenset(
    {
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        *_YARN_BETAS,
    }
)
_EXPERTS = frozenset({"expert_count", "expert_used_count"})
# The layout is Meta's, in which all files have their queries and keys.
_LLAMA_FAMILY = _COMMON | _EXPERTS | {"attention.sliding_window", "tensor_data_layout"}

_LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    model=_MODEL,
    layer=MappingProxyType(
        {
            **_NORMS,
            **_attention(_ROTATED_QUERY, _ROTATED_KEY, biased="qkvo"),
            **_mlp(may_have_bias=True),
        }
    ),
    constants=_SILU,
    config=_biases,
    rope=_rope_parameters,
    settings=_LLAMA_FAMILY,
)
_MISTRAL = Architecture(
    model_type="mistral",
    class_name="MistralForCausalLM",
    model=_MODEL,
    layer=MappingProxyType(
        {**_NORMS, **_attention(_ROTATED_QUERY, _ROTATED_KEY, biased=""), **_mlp()}
    ),
    constants=_SILU,
    config=_mistral_config,
    rope=_rope_parameters,
    settings=_LLAMA_FAMILY,
)
_MIXTRAL = Architecture(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    model=_MODEL,
    layer=MappingProxyType(
        {
            **_NORMS,
            **_attention(_ROTATED_QUERY, _ROTATED_KEY, biased=""),
            "ffn_gate_inp": Place("block_sparse_moe.gate"),
            "ffn_gate_exps": Place("block_sparse_moe.experts.{expert}.w1"),
            "ffn_down_exps": Place("block_sparse_moe.experts.{expert}.w2"),
            "ffn_up_exps": Place("block_sparse_moe.experts.{expert}.w3"),
        }
    ),
    constants=MappingProxyType({"hidden_act": "silu", "sliding_window": None}),
    config=_mixtral_config,
    rope=_rope_parameters,
    settings=_LLAMA_FAMILY - {"attention.sliding_window"},
)
_QWEN2 = Architecture(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    model=_MODEL,
    layer=MappingProxyType({**_NORMS, **_attention(None, None, biased="qkv"), **_mlp()}),
    constants=_NO_WINDOW,
    config=_nothing,
    rope=_rope_parameters,
    settings=_COMMON,
)
_QWEN3 = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    model=_MODEL,
    layer=MappingProxyType(
        {**_NORMS, **_QUERY_KEY_NORMS, **_attention(None, None, biased="qkvo"), **_mlp()}
    ),
    constants=_NO_WINDOW,
    config=_attention_bias,
    rope=_rope_parameters,
    settings=_COMMON,
)
_QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    model=_MODEL,
    layer=MappingProxyType(
        {
            **_NORMS,
            **_QUERY_KEY_NORMS,
            **_attention(None, None, biased="qkvo"),
            "ffn_gate_inp": Place("mlp.gate"),
            "ffn_gate_exps": Place("mlp.experts.{expert}.gate_proj"),
            "ffn_up_exps": Place("mlp.experts.{expert}.up_proj"),
            "ffn_down_exps": Place("mlp.experts.{expert}.down_proj"),
        }
    ),
    constants=MappingProxyType(
        {
            **_NO_WINDOW,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": (),
        }
    ),
    config=_qwen3_moe_config,
    rope=_rope_parameters,
    settings=_COMMON | _EXPERTS | {"expert_feed_forward_length", "expert_weights_norm"},
)
_GEMMA3 = Architecture(
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    model=MappingProxyType({**_MODEL, "output_norm": Place("model.norm", _less_one)}),
    layer=MappingProxyType(
        {
            "attn_norm": Place("input_layernorm", _less_one),
            "post_attention_norm": Place("post_attention_layernorm", _less_one),
            "ffn_norm": Place("pre_feedforward_layernorm", _less_one),
            "post_ffw_norm": Place("post_feedforward_layernorm", _less_one),
            "attn_q_norm": Place("self_attn.q_norm", _less_one),
            "attn_k_norm": Place("self_attn.k_norm", _less_one),
            **_attention(None, None, biased="qkvo"),
            **_mlp(),
        }
    ),
    constants=MappingProxyType(
        {"hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": None}
    ),
    config=_gemma3_config,
    rope=_gemma3_rope,
    settings=_COMMON
    | {
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
        "final_logit_softcapping",
    },
)
_PHI3 = Architecture(
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    model=_MODEL,
    layer=MappingProxyType(
        {
            **_NORMS,
            "attn_qkv": Place("self_attn.qkv_proj"),
            "attn_output": Place("self_attn.o_proj"),
            "ffn_up": Place("mlp.gate_up_proj"),
            "ffn_down": Place("mlp.down_proj"),
        }
    ),
    constants=_SILU,
    config=_phi3_config,
    rope=_phi3_rope,
    settings=_COMMON | {"attention.sliding_window", "rope.scaling.attn_factor"},
)
_GRANITE = Architecture(
    model_type="granite",
    class_name="GraniteForCausalLM",
    model=_MODEL,
    layer=_LLAMA.layer,
    constants=_SILU,
    config=_granite_config,
    rope=_rope_parameters,
    settings=_COMMON | {"attention.scale", "embedding_scale", "residual_scale", "logit_scale"},
)
_ARCHITECTURES = MappingProxyType(
    {
        "llama": _LLAMA,
        "qwen2": _QWEN2,
        "qwen3": _QWEN3,
        "qwen3moe": _QWEN3_MOE,
        "gemma3": _GEMMA3,
        "phi3": _PHI3,
        "granite": _GRANITE,
    }
)
