"""Loading: every source and dtype, and an error that says what to do where it cannot work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sapwood.kernels import load_kernels
from sapwood.runtime.errors import (
    ConfigError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from sapwood.runtime.model_config import ModelConfig, read_model_config
from sapwood.runtime.models import load_model_class
from sapwood.runtime.weights import LoadedModel, choose_dtype, find_model, load_model

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}


class RecordingModel:
    """Stands in for a model's class: keeps the weights it was given."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], kernels: Any) -> None:
        self.config, self.weights, self.kernels = config, weights, kernels

    weight_shapes = staticmethod(load_model_class("llama").weight_shapes)
    unused_weights = staticmethod(load_model_class("llama").unused_weights)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LoadedModel]:
    monkeypatch.setattr("sapwood.runtime.weights.load_model_class", lambda _: RecordingModel)

    def load(source: Any, **options: Any) -> LoadedModel:
        return load_model(source, kernels=load_kernels("reference"), **options)

    return load


def weights_of(loaded: LoadedModel) -> dict[str, Tensor]:
    assert isinstance(loaded.model, RecordingModel)
    return loaded.model.weights


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with config.json and model.safetensors in bfloat16."""
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = RecordingModel.weight_shapes(read_model_config(folder))
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = dict(load_file(folder / "model.safetensors"))
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_folder_gives_its_tensors_config_path_and_name(
    checkpoint: Path, load: Callable[..., LoadedModel]
) -> None:
    loaded = load(checkpoint, dtype="bfloat16")
    stored = load_file(checkpoint / "model.safetensors")
    assert weights_of(loaded).keys() == stored.keys()
    assert all(torch.equal(weights_of(loaded)[name], stored[name]) for name in stored)
    assert loaded.path == checkpoint
    assert loaded.name == "tiny-llama"
    assert loaded.config.vocab_size == 50


def test_sharded_weights_are_the_same_as_single_ones(
    checkpoint: Path, load: Callable[..., LoadedModel]
) -> None:
    single = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(single)
    shards = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, held in shards.items():
        save_file({name: single[name].clone() for name in held}, checkpoint / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    weights = weights_of(load(checkpoint, dtype="bfloat16"))
    assert all(torch.equal(weights[name], single[name]) for name in names)
    (checkpoint / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks b\.safetensors of its 2 weight files"):
        load(checkpoint)


def test_an_index_that_points_outside_its_folder_is_refused(
    checkpoint: Path, load: Callable[..., LoadedModel]
) -> None:
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../x.safetensors"}}))
    with pytest.raises(ModelError, match="outside its folder"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", torch.float32),
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
    ],
)
def test_every_tensor_has_the_dtype_asked_for(
    checkpoint: Path, load: Callable[..., LoadedModel], dtype: str, expected: torch.dtype
) -> None:
    weights = weights_of(load(checkpoint, dtype=dtype))
    assert {tensor.dtype for tensor in weights.values()} == {expected}


def test_auto_keeps_the_checkpoints_dtype_off_the_cpu(checkpoint: Path) -> None:
    config = read_model_config(checkpoint)
    assert choose_dtype("auto", config, torch.device("cuda")) == torch.bfloat16
    assert choose_dtype("auto", config, torch.device("cpu")) == torch.float32


@pytest.mark.parametrize(
    "options", [{"dtype": "float64"}, {"dtype": "int8"}, {"load_format": "pickle"}]
)
def test_an_unknown_option_is_refused(
    checkpoint: Path, load: Callable[..., LoadedModel], options: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(options.values()))):
        load(checkpoint, **options)


def test_missing_unexpected_and_misshapen_tensors_are_all_named(
    checkpoint: Path, load: Callable[..., LoadedModel]
) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(24, 16)
        tensors["model.norm.weight"] = torch.zeros(17)

    rewrite(checkpoint, spoil)
    with pytest.raises(ModelError) as raised:
        load(checkpoint)
    assert "lacks model.layers.1.mlp.up_proj.weight" in str(raised.value)
    assert "has model.layers.2.mlp.up_proj.weight, which" in str(raised.value)
    assert "model.norm.weight of shape [17] where its config.json says [16]" in str(raised.value)


@pytest.mark.parametrize(
    ("dtype", "said"), [(torch.int8, "I8"), (torch.bool, "BOOL"), (torch.float8_e4m3fn, "F8_E4M3")]
)
def test_a_tensor_of_another_dtype_is_named_with_it(
    checkpoint: Path, load: Callable[..., LoadedModel], dtype: torch.dtype, said: str
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(checkpoint, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(UnsupportedModelError, match=f"{name} as {said}; served are"):
        load(checkpoint)


def test_old_rotary_buffers_and_the_copy_of_a_tied_head_are_passed_over(
    checkpoint: Path, load: Callable[..., LoadedModel]
) -> None:
    (checkpoint / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[name] = torch.zeros(4)

    rewrite(checkpoint, add)
    weights = weights_of(load(checkpoint))
    assert "lm_head.weight" not in weights
    assert name not in weights


def test_a_head_that_differs_is_taken_though_the_config_ties_it(
    checkpoint: Path, load: Callable[..., LoadedModel], caplog: pytest.LogCaptureFixture
) -> None:
    (checkpoint / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    loaded = load(checkpoint, dtype="bfloat16")
    stored = load_file(checkpoint / "model.safetensors")
    assert torch.equal(weights_of(loaded)["lm_head.weight"], stored["lm_head.weight"])
    assert isinstance(loaded.config, ModelConfig) and not loaded.config.tie_word_embeddings
    assert "has a head of its own" in caplog.text


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ("{}", "KeyError"),
        ('{"weight_map": {"a": null}}', "None"),
        ('{"weight_map": {"a": 1}}', "1"),
        ("[" * 100_000, "RecursionError"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "outside its folder"),
        ('{"weight_map": {"a": ".."}}', "lacks .. of its 1 weight files"),
    ],
)
def test_an_index_that_names_no_files_is_told(
    checkpoint: Path, load: Callable[..., LoadedModel], files: str, said: str
) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(files)
    with pytest.raises(ModelError, match=re.escape(said)):
        load(checkpoint)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_and_never_opened(
    checkpoint: Path, load: Callable[..., LoadedModel], name: str
) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / name)
    with pytest.raises(UnsupportedModelError, match=f"pickled weights .{name}.*save_pretrained"):
        load(checkpoint)


def test_a_damaged_weight_file_is_named(checkpoint: Path, load: Callable[..., LoadedModel]) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        load(checkpoint)


def test_a_folder_without_weights_is_named(
    checkpoint: Path, load: Callable[..., LoadedModel]
) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"has no model\.safetensors"):
        load(checkpoint)


def test_dummy_weights_are_the_same_every_time_and_need_no_checkpoint(
    checkpoint: Path, load: Callable[..., LoadedModel]
) -> None:
    (checkpoint / "model.safetensors").unlink()
    config = read_model_config(checkpoint)
    from_folder = load(checkpoint, load_format="dummy")
    from_config = load(config, load_format="dummy")
    assert from_folder.path == checkpoint
    assert from_config.path is None
    first, second = weights_of(from_folder), weights_of(from_config)
    assert first.keys() == RecordingModel.weight_shapes(config).keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["lm_head.weight"].std() > 0
    assert (first["model.norm.weight"] == 1).all()


def test_a_config_alone_has_no_weights(checkpoint: Path, load: Callable[..., LoadedModel]) -> None:
    with pytest.raises(ConfigError, match='load_format="dummy"'):
        load(read_model_config(checkpoint))


@pytest.mark.parametrize("source", ["./no/such/folder", "a/b/c", "model.gguf", Path("nowhere")])
def test_what_can_only_be_a_path_is_not_looked_up_on_the_hub(source: str | Path) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist; give a folder"):
        find_model(source)


def test_a_file_that_is_no_gguf_is_refused(checkpoint: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"is not a \.gguf file"):
        find_model(checkpoint / "config.json")


def test_other_names_are_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sapwood.runtime.weights.pull", lambda name: Path("/hub") / name)
    assert find_model("owner/name-1.5B") == Path("/hub/owner/name-1.5B")
