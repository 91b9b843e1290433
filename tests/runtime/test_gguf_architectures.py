"""A GGUF of every served architecture becomes the checkpoint that it was made from.

Random models of transformers are written as llama.cpp's converter writes them. What comes back has
transformers' own names, the same bits and a config.json from which transformers builds a model that
answers the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sapwood.kernels import load_kernels
from sapwood.runtime.errors import ModelError, UnsupportedModelError
from sapwood.runtime.gguf_convert import convert_gguf
from sapwood.runtime.models import MODELS
from sapwood.runtime.quantize import _log_probabilities
from sapwood.runtime.weights import load_model
from tests.runtime.gguf_files import config_of_folder, random_model, saved_tensors, write_model

LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e6,
    "original_max_position_embeddings": 32,
    "beta_fast": 16.0,
}
PHI_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 32,
    "long_factor": [1.0, 1.05, 1.3, 2.0, 4.5, 8.25],
    "short_factor": [1.0, 1.0, 1.0, 1.1, 1.2, 1.7],
}
GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
# By name: the model's type and what of its config is not as in COMMON_FIELDS.
MODELS_OF: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied-wide-linear": (
        "llama",
        {"tie_word_embeddings": True, "head_dim": 32, "rope_parameters": LINEAR},
    ),
    "mistral": ("mistral", {"sliding_window": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-biased": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "rope_parameters": GEMMA_ROPE,
        },
    ),
    "gemma3-capped": (
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": False,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 8, "original_max_position_embeddings": 128}),
    "phi3-long": (
        "phi3",
        {
            "rope_parameters": PHI_ROPE,
            "original_max_position_embeddings": 32,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
    ),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.0125,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "granite-biased": ("granite", {"attention_bias": True, "mlp_bias": True}),
}
# What transformers adds for itself, and what says nothing of the model's answers.
UNIMPORTANT = (
    "_name_or_path",
    "transformers_version",
    "use_cache",
    "initializer_range",
    "attention_dropout",
    "router_aux_loss_coef",
    "output_router_logits",
    "dtype",
    "max_window_layers",
    "head_dim",
    "pretraining_tp",
    "resid_pdrop",
    "embd_pdrop",
    "router_jitter_noise",
    "architectures",
    "layer_types",
)

# It has no Granite and no Mixtral, leaves biases out and takes the released models' sizes for
# those of Qwen3's heads and experts.
READ_BY_TRANSFORMERS = (
    "llama",
    "llama-tied-wide-linear",
    "mistral",
    "qwen2",
    "qwen2-tied-yarn",
    "gemma3",
    "gemma3-capped",
    "phi3",
    "phi3-long",
)


class Written:
    """A model, the tensors that transformers saves of it, and where its GGUF lies."""

    def __init__(self, folder: Path, model: PreTrainedModel, **options: Any) -> None:
        self.model = model
        self.tensors = saved_tensors(model, folder / "saved")
        self.path = folder / "model.gguf"
        write_model(self.path, model, self.tensors, **options)
        self._folder = folder / "converted"

    def converted(self) -> Path:
        self._folder.mkdir()
        convert_gguf(self.path, self._folder)
        return self._folder


def written(folder: Path, name: str, **options: Any) -> Written:
    model_type, fields = MODELS_OF[name]
    return Written(folder, random_model(model_type, **fields), **options)


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(ids.unsqueeze(0)).logits[0]
    return found


@pytest.mark.parametrize("name", MODELS_OF)
def test_tensors_config_and_answers_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    source = written(tmp_path, name)
    folder = source.converted()
    found = load_file(folder / "model.safetensors")
    assert found.keys() == source.tensors.keys()
    assert all(torch.equal(found[n], tensor) for n, tensor in source.tensors.items())

    expected, config = source.model.config.to_dict(), AutoConfig.from_pretrained(folder).to_dict()
    fields = expected.keys() - set(UNIMPORTANT)
    assert {n: config[n] for n in fields} == {n: expected[n] for n in fields}
    assert config.get("layer_types") == expected.get("layer_types")
    assert config["architectures"] == [type(source.model).__name__]

    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(3, 43)
    assert torch.equal(logits(again, ids), logits(source.model, ids))
    assert again.generation_config.eos_token_id == [2]


@pytest.mark.parametrize("name", MODELS_OF)
def test_sapwood_answers_as_transformers(tmp_path: Path, name: str) -> None:
    if MODELS_OF[name][0] not in MODELS:
        pytest.skip(f"{MODELS_OF[name][0]} has no model of its own here")
    source = written(tmp_path, name)
    kernels = load_kernels("reference")
    loaded = load_model(source.converted(), kernels=kernels)
    ids = np.arange(3, 43, dtype=np.int32)
    found = _log_probabilities(loaded.model, kernels, ids)
    expected = logits(source.model, torch.from_numpy(ids).long()).log_softmax(-1)
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_mistral_file_that_tells_no_window_is_a_llama(tmp_path: Path) -> None:
    model = random_model("mistral", sliding_window=None)
    folder = Written(tmp_path, model).converted()
    assert config_of_folder(folder)["model_type"] == "llama"
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(3, 43)
    assert torch.equal(logits(again, ids), logits(model, ids))


@pytest.mark.slow
@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_own_reader_finds_the_same_tensors(tmp_path: Path, name: str) -> None:
    pytest.importorskip("accelerate")
    source = written(tmp_path, name)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=source.path.name, dtype=torch.float32
    ).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(source.converted(), dtype=torch.float32)
    found = ours.state_dict()
    assert found.keys() == theirs.keys()
    assert all(torch.equal(found[n], tensor) for n, tensor in theirs.items())


def test_the_27b_gemma_scales_its_queries_by_another_size(tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 62, "head_dim": 32, "query_pre_attn_scalar": 16}
    model = random_model("gemma3_text", intermediate_size=8, sliding_window=8, **fields)
    config = config_of_folder(Written(tmp_path, model).converted())
    assert config["query_pre_attn_scalar"] == 64 // 4


def test_a_gemma_without_a_window_has_whole_attention_in_every_layer(tmp_path: Path) -> None:
    model = random_model("gemma3_text", head_dim=16, query_pre_attn_scalar=16, sliding_window=0)
    config = config_of_folder(Written(tmp_path, model).converted())
    assert config["layer_types"] == ["full_attention"] * 2
    assert config["sliding_window"] is None


def test_a_window_comes_as_often_as_the_file_says(tmp_path: Path) -> None:
    extra = {"attention.sliding_window_pattern": 2}
    config = config_of_folder(written(tmp_path, "gemma3", extra=extra).converted())
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 3 + [
        "sliding_attention"
    ]


def test_scales_that_a_granite_file_leaves_out_are_those_of_a_plain_model(tmp_path: Path) -> None:
    scales = {"attention_multiplier": 0.0, "embedding_multiplier": 0.0, "residual_multiplier": 0.0}
    config = config_of_folder(Written(tmp_path, random_model("granite", **scales)).converted())
    assert config["attention_multiplier"] == 16**-0.5
    assert config["embedding_multiplier"] == config["residual_multiplier"] == 1.0


def test_an_attention_factor_that_is_not_the_usual_one_is_kept(tmp_path: Path) -> None:
    source = written(tmp_path, "phi3-long")
    data = source.path.read_bytes()
    usual = np.float32(np.sqrt(1 + np.log(4) / np.log(32))).tobytes()
    assert data.count(usual) == 1
    source.path.write_bytes(data.replace(usual, np.float32(1.5).tobytes()))
    assert config_of_folder(source.converted())["rope_parameters"]["attention_factor"] == 1.5


@pytest.mark.parametrize(
    ("name", "extra", "said"),
    [
        ("llama", {"attention.scale": 0.5}, "attention.scale = 0.5, which is not served for llama"),
        ("llama", {"attention.max_alibi_bias": 8.0}, "attention.max_alibi_bias"),
        ("qwen2", {"attention.sliding_window": 8}, "attention.sliding_window = 8"),
        ("qwen2", {"rope.scaling.type": "longrope"}, "scaled by 'longrope'"),
        ("qwen2-tied-yarn", {"rope.scaling.yarn_attn_factor": 0.5}, "yarn_attn_factor = 0.5"),
        ("qwen3_moe", {"expert_weights_norm": False}, "expert_weights_norm of false"),
        ("qwen3_moe", {"expert_gating_func": 2}, "expert_gating_func = 2"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("phi3", {"rope.scaling.type": "yarn"}, "scaled by 'yarn'"),
        ("granite", {"rope.scaling.finetuned": False}, "Granite without rotary"),
        ("granite", {"expert_count": 4}, "expert_count = 4"),
    ],
)
def test_a_setting_that_would_change_the_answers_is_named(
    tmp_path: Path, name: str, extra: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        written(tmp_path, name, extra=extra).converted()


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("qwen2", "blk.0.attn_output.bias", "no qwen2 has"),
        ("mistral", "blk.0.attn_q.bias", "no mistral has"),
        ("phi3", "blk.0.attn_q.weight", "no phi3 has"),
        ("qwen3_moe", "blk.0.ffn_gate.weight", "no qwen3_moe has"),
        ("gemma3", "v.patch_embd.weight", "no gemma3_text has"),
        ("llama", "blk.x.attn_q.weight", "no llama has"),
        ("llama", "blk.0.attn_q.scale", "no llama has"),
        ("granite", "rope_factors_long.weight", "rope_factors_long.weight, not served"),
        ("llama-tied-wide-linear", "rope_freqs.weight", "rope_freqs.weight, not served"),
        ("phi3", "rope_factors_long.weight", "rope_factors_long.weight, not served"),
    ],
)
def test_a_tensor_that_the_architecture_lacks_is_named(
    tmp_path: Path, name: str, tensor: str, said: str
) -> None:
    extra = {tensor: np.ones(8, dtype=np.float32)}
    with pytest.raises(UnsupportedModelError, match=said):
        written(tmp_path, name, extra_tensors=extra).converted()


def test_an_experts_tensor_of_two_dimensions_is_named(tmp_path: Path) -> None:
    extra = {"blk.9.ffn_up_exps.weight": np.ones((8, 8), dtype=np.float32)}
    with pytest.raises(ModelError, match="three dimensions"):
        written(tmp_path, "mixtral", extra_tensors=extra).converted()


def test_queries_that_are_not_whole_heads_are_named(tmp_path: Path) -> None:
    extra = {"blk.9.attn_q.weight": np.ones((12, 8), dtype=np.float32)}
    with pytest.raises(ModelError, match="12 rows of queries or keys for 4 heads"):
        written(tmp_path, "llama", extra_tensors=extra).converted()


@pytest.mark.parametrize(
    ("name", "extra", "said"),
    [
        ("gemma3", {"block_count": 2**31}, "tensors for 2147483648 layers"),
        ("llama", {"block_count": 0}, "block_count of 0; it must be positive"),
        ("llama", {"attention.head_count": 0}, "attention.head_count of 0"),
        ("llama", {"embedding_length": "many"}, "embedding_length is 'many'"),
        ("llama", {"attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
    ],
)
def test_a_size_that_cannot_be_is_named(
    tmp_path: Path, name: str, extra: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        written(tmp_path, name, extra=extra).converted()


def test_a_head_longer_than_its_divisors_is_refused(tmp_path: Path) -> None:
    extra = {"attention.key_length": 2**31, "attention.value_length": 2**31}
    extra |= {"rope.dimension_count": 2**31}
    divisors = {"rope_freqs.weight": np.ones(8, dtype=np.float32)}
    with pytest.raises(UnsupportedModelError, match="not the scaling of a released Llama 3"):
        written(tmp_path, "llama", extra=extra, extra_tensors=divisors).converted()
