"""config.json of every native model, as transformers has written it over the years."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sapwood.kernels.interface import Activation
from sapwood.runtime.errors import ModelError, UnsupportedModelError
from sapwood.runtime.model_config import ModelConfig, parse_model_config, read_model_config
from sapwood.runtime.models.gemma2 import Gemma2Config
from sapwood.runtime.models.gemma3_text import Gemma3Config
from sapwood.runtime.models.granite import GraniteConfig
from sapwood.runtime.models.llama import LlamaConfig
from sapwood.runtime.models.mistral import MistralConfig
from sapwood.runtime.models.mixtral import MixtralConfig
from sapwood.runtime.models.phi3 import Phi3Config
from sapwood.runtime.models.qwen2 import Qwen2Config
from sapwood.runtime.models.qwen3 import Qwen3Config
from sapwood.runtime.models.qwen3_moe import Qwen3MoeConfig
from sapwood.runtime.models.rope import LinearRope, Llama3Rope, LongRope, Rope, YarnRope
from tests.runtime.tiny_models import CASES, Case, config_of

RAW: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LLAMA3_PARSED = Llama3Rope(
    theta=500_000.0,
    dim=16,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=128,
)


def parse(**changes: Any) -> ModelConfig:
    return parse_model_config(RAW | changes)


def rope_of(**changes: Any) -> Rope:
    config = parse(**changes)
    assert isinstance(config, LlamaConfig | Phi3Config)
    return config.rope


def test_what_is_left_out_takes_the_defaults_of_transformers() -> None:
    config = parse_model_config(RAW)
    assert isinstance(config, LlamaConfig)
    assert config.head_dim == 16
    assert config.num_key_value_heads == 4
    assert config.rope == Rope(theta=10_000.0, dim=16)
    assert config.rms_norm_eps == 1e-6
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()
    assert config.dtype == "float32"


def test_null_means_left_out() -> None:
    nulls = {"head_dim": None, "num_key_value_heads": None, "rope_scaling": None}
    assert parse_model_config(RAW | nulls) == parse_model_config(RAW)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"rope_theta": 5.0}, Rope(theta=5.0, dim=16)),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            Rope(theta=5.0, dim=16),
        ),
        (
            {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            LinearRope(theta=5.0, dim=16, factor=2.0),
        ),
        (
            {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3"} | LLAMA3},
            LLAMA3_PARSED,
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0} | LLAMA3},
            LLAMA3_PARSED,
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 5.0},
            Rope(theta=5.0, dim=16),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            YarnRope(
                theta=10_000.0,
                dim=16,
                attention_factor=0.1 * math.log(4.0) + 1.0,
                factor=4.0,
                beta_fast=32.0,
                beta_slow=1.0,
                original_max_position=512,
                is_truncated=True,
            ),
        ),
    ],
)
def test_rope_is_read_in_both_spellings(written: dict[str, Any], expected: Rope) -> None:
    assert rope_of(**written) == expected


LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize(("original", "factor"), [(128, 2.0), (512, 1.0)])
def test_longrope_is_decided_by_the_longest_context(
    name: str, original: int, factor: float
) -> None:
    written = {"model_type": "phi3", "original_max_position_embeddings": original}
    rope = rope_of(**written, rope_scaling={"type": name} | LONG)
    assert isinstance(rope, LongRope)
    assert rope.factors == (factor,) * 8
    stretched = math.sqrt(1 + math.log(4) / math.log(128))
    assert rope.attention_factor == pytest.approx(stretched if factor == 2.0 else 1.0)


DEFAULTS: dict[str, tuple[type[ModelConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"num_key_value_heads": 4}),
    "mistral": (MistralConfig, {"num_key_value_heads": 8, "layer_windows": (4096,) * 2}),
    "qwen2": (Qwen2Config, {"num_key_value_heads": 32, "layer_windows": ()}),
    "qwen3": (Qwen3Config, {"num_key_value_heads": 32, "head_dim": 128}),
    "gemma2": (
        Gemma2Config,
        {
            "layer_windows": (4096, None),
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": (
        Gemma3Config,
        {
            "head_dim": 256,
            "activation": Activation.GELU_TANH,
            "tie_word_embeddings": True,
            "layer_windows": (4096,) * 2,
            "ropes": (Rope(theta=1e6, dim=256), Rope(theta=1e4, dim=256)),
        },
    ),
    "phi3": (Phi3Config, {"rms_norm_eps": 1e-5, "layer_windows": ()}),
    "granite": (GraniteConfig, {"attention_multiplier": 1.0, "logits_scaling": 1.0}),
    "mixtral": (
        MixtralConfig,
        {"rope": Rope(theta=1e6, dim=2), "num_local_experts": 8, "rms_norm_eps": 1e-5},
    ),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8},
    ),
}


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_each_model_has_its_own_defaults(model_type: str) -> None:
    kind, expected = DEFAULTS[model_type]
    config = parse(model_type=model_type, num_attention_heads=32, max_position_embeddings=8192)
    if model_type == "llama":
        config = parse()
    assert type(config) is kind
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("model_type", ["mistral", "mixtral", "phi3"])
def test_a_window_of_null_is_none(model_type: str) -> None:
    settings = {"model_type": model_type, "num_key_value_heads": 4}
    assert parse(**settings, sliding_window=None).layer_windows == ()
    assert parse(**settings, sliding_window=7).layer_windows == (7, 7)
    assert parse(**settings, sliding_window=512).layer_windows == (), "it holds the whole context"


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_a_window_that_is_not_used_is_none(model_type: str) -> None:
    settings = {"model_type": model_type, "num_key_value_heads": 4, "sliding_window": 7}
    assert parse(**settings, max_window_layers=1).layer_windows == ()
    used = settings | {"use_sliding_window": True}
    assert parse(**used, max_window_layers=1).layer_windows == (None, 7)
    assert parse(**used).layer_windows == (), "there are no layers from the 28th up"
    types = ["sliding_attention", "full_attention"]
    assert parse(**used, layer_types=types).layer_windows == (7, None)
    with pytest.raises(ModelError, match="without a sliding_window"):
        parse(**settings, layer_types=types)


def as_transformers_4_writes(config: dict[str, Any]) -> dict[str, Any]:
    old = dict(config)
    old["torch_dtype"] = old.pop("dtype", "bfloat16")
    parameters = old.pop("rope_parameters")
    if config["model_type"] == "gemma3_text":
        local = parameters["sliding_attention"]
        parameters = parameters["full_attention"]
        old["rope_local_base_freq"] = local["rope_theta"]
    old["rope_theta"] = parameters["rope_theta"]
    if share := parameters.get("partial_rotary_factor"):
        old["partial_rotary_factor"] = share
    scaling = {k: v for k, v in parameters.items() if k not in ("rope_theta", "rope_type")}
    if (kind := parameters["rope_type"]) != "default":
        old["rope_scaling"] = {"type": kind} | scaling
    if config["model_type"] == "qwen3_moe":
        old["num_experts"] = old.pop("num_local_experts")
    if config["model_type"] == "gemma3_text" and config["num_hidden_layers"] > 6:
        del old["layer_types"]
        old["sliding_window_pattern"] = old.pop("_sliding_window_pattern")
    return old


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model_type}-{case.name}")
def test_the_config_of_transformers_4_says_the_same(case: Case, tmp_path: Path) -> None:
    config_of(case).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in written
    old = as_transformers_4_writes(written)
    assert parse_model_config(old) == parse_model_config(written | {"dtype": "bfloat16"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_type": "mamba"},
            "'mamba' is not served; served are llama, gemma2, gemma3_text",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not served"),
        ({"rope_scaling": {"type": "axial", "factor": 2.0}}, "'axial' is not served"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "causal decoders"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 2}, "'linear_attention'"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
        ({"model_type": "granite", "logits_scaling": 0.0}, "logits_scaling is 0.0"),
        (
            {"model_type": "mixtral", "num_experts_per_tok": 9},
            "num_experts_per_tok is 9",
        ),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn is not served"),
    ],
)
def test_what_is_not_served_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        parse(**{"num_key_value_heads": 4} | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "rope factor is 0.0"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "lacks 'short_factor'"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "has 1 factors for 8 frequencies",
        ),
        (
            {"model_type": "phi3", "partial_rotary_factor": 0.1875},
            "rope turns 3 dimensions",
        ),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        parse(**{"num_key_value_heads": 4} | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_parameters": {"full_attention": {}}}, "of its own for 'full_attention'"),
        ({"model_type": "gemma3_text", "rope_parameters": {"factor": 2.0}}, "has 'factor'"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, "ministral"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "turns all of each head"),
    ],
)
def test_what_transformers_passes_over_is_wrong_and_not_only_unserved(
    changes: dict[str, Any], said: str
) -> None:
    """Else its code would be tried, and would serve the model without that setting."""
    with pytest.raises(ModelError, match=said) as refusal:
        parse(**{"num_key_value_heads": 4} | changes)
    assert not isinstance(refusal.value, UnsupportedModelError)


def test_the_dual_chunks_of_qwens_long_models_are_told_not_to_be_applied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parse(model_type="qwen2", num_key_value_heads=4)
    assert not caplog.text
    parse(model_type="qwen2", num_key_value_heads=4, dual_chunk_attention_config={"chunk_size": 8})
    assert "dual_chunk_attention_config is not applied" in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_scaling", "linear"),
        ("rope_scaling", 2),
        ("rope_parameters", ["llama3"]),
        ("eos_token_id", 2.5),
        ("eos_token_id", ["2"]),
        ("eos_token_id", -1),
        ("eos_token_id", True),
        ("bos_token_id", {}),
        ("vocab_size", 10.5),
        ("head_dim", True),
        ("rope_theta", "10000"),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", 10**400),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", -1e-5),
        ("tie_word_embeddings", "false"),
        ("num_hidden_layers", 10**30),
        ("num_hidden_layers", 100_001),
        ("num_attention_heads", 10**30),
        ("hidden_size", 2**31 + 1),
        ("vocab_size", 10**4000),
        ("max_position_embeddings", 10**30),
        ("max_position_embeddings", 2**23 + 1),
        ("max_position_embeddings", 1),
    ],
)
def test_a_value_of_the_wrong_kind_or_size_is_named_with_its_file(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"^config\.json: {field} is .{{1,80}}"):
        parse_model_config(RAW | {field: value})


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_a_number_of_layers_out_of_reach_is_refused_before_anything_is_built(
    model_type: str,
) -> None:
    with pytest.raises(UnsupportedModelError, match="num_hidden_layers is 1"):
        parse(model_type=model_type, num_key_value_heads=4, num_hidden_layers=10**30)


def test_a_value_of_the_wrong_kind_in_a_part_or_the_other_file_is_named_as_well() -> None:
    with pytest.raises(UnsupportedModelError, match=r"config\.json: rope_scaling: factor is '2'"):
        parse_model_config(RAW | {"rope_scaling": {"type": "linear", "factor": "2"}})
    with pytest.raises(UnsupportedModelError, match=r"generation_config\.json: eos_token_id is -1"):
        parse_model_config(RAW, {"eos_token_id": -1})


def test_the_largest_sizes_are_taken() -> None:
    sizes = {"num_hidden_layers": 100_000, "vocab_size": 2**31, "max_position_embeddings": 2**23}
    config = parse_model_config(RAW | sizes)
    assert {name: getattr(config, name) for name in sizes} == sizes


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ModelError, match="lacks 'vocab_size'"):
        parse_model_config({k: v for k, v in RAW.items() if k != "vocab_size"})


def test_end_tokens_of_both_files_count_once_each(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW | {"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert read_model_config(tmp_path).eos_token_ids == (2, 7, 9)


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "is not JSON"), ("[1]", "a JSON object was expected")],
)
def test_a_broken_config_file_is_named(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=said):
        read_model_config(tmp_path)


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_model_config(tmp_path)
