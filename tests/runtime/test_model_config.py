"""config.json of the Llama family, as transformers has written it over the years."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sapwood.runtime.errors import ModelError, UnsupportedModelError
from sapwood.runtime.model_config import (
    RopeConfig,
    RopeKind,
    parse_model_config,
    read_model_config,
)

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
LLAMA3_PARSED = RopeConfig(
    theta=500_000.0,
    kind=RopeKind.LLAMA3,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=128,
)


def test_what_is_left_out_takes_the_defaults_of_transformers() -> None:
    config = parse_model_config(RAW)
    assert config.head_dim == 16
    assert config.num_key_value_heads == 4
    assert config.rope == RopeConfig(theta=10_000.0)
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
        ({"rope_theta": 5.0}, RopeConfig(theta=5.0)),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            RopeConfig(theta=5.0),
        ),
        (
            {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeConfig(theta=5.0, kind=RopeKind.LINEAR, factor=2.0),
        ),
        (
            {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3"} | LLAMA3},
            LLAMA3_PARSED,
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0} | LLAMA3},
            LLAMA3_PARSED,
        ),
    ],
)
def test_rope_is_read_in_both_spellings(written: dict[str, Any], expected: RopeConfig) -> None:
    assert parse_model_config(RAW | written).rope == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba"}, "'mamba' is not served; served are llama"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not served"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn' is not served"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "part of each head"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn is not served"),
    ],
)
def test_what_is_not_served_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        parse_model_config(RAW | changes)


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
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        parse_model_config(RAW | changes)


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
        ("max_position_embeddings", 1),
    ],
)
def test_a_value_of_the_wrong_kind_or_size_is_named_with_its_file(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"^config\.json: {field} is .{{1,80}}"):
        parse_model_config(RAW | {field: value})


def test_a_value_of_the_wrong_kind_in_a_part_or_the_other_file_is_named_as_well() -> None:
    with pytest.raises(UnsupportedModelError, match=r"config\.json: rope_scaling: factor is '2'"):
        parse_model_config(RAW | {"rope_scaling": {"type": "linear", "factor": "2"}})
    with pytest.raises(UnsupportedModelError, match=r"generation_config\.json: eos_token_id is -1"):
        parse_model_config(RAW, {"eos_token_id": -1})


def test_the_largest_sizes_are_taken() -> None:
    sizes = {"num_hidden_layers": 100_000, "vocab_size": 2**31, "max_position_embeddings": 2**31}
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
