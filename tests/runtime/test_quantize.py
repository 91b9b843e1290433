"""Loading in int8: tried once a checkpoint, taken by itself only where it is as good."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sapwood import ConfigError, Engine, SamplingParams
from sapwood.kernels import load_kernels
from sapwood.kernels.interface import Kernels
from sapwood.kernels.projections import Int8Projection
from sapwood.kernels.user_cache import cache_folder
from sapwood.runtime import quantize
from sapwood.runtime.quantize import Quantize
from sapwood.runtime.weights import LoadedModel, load_model

pytestmark = pytest.mark.skipif(
    load_kernels("cpu").quantized() is None, reason="int8 takes a C compiler"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    native = cache_folder() / "native"
    native.mkdir(parents=True, exist_ok=True)
    (tmp_path / "native").symlink_to(native)  # or it would be compiled for every test
    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path))
    return tmp_path


def load(folder: Path, **options: str) -> LoadedModel:
    return load_model(folder, kernels=load_kernels("cpu"), **options)


class CountingKernels:
    """The cpu kernels, and what their int8 ones packed."""

    def __init__(self) -> None:
        self.packed: list[object] = []
        self._kernels: Kernels = load_kernels("cpu")

    def quantized(self) -> "CountingKernels":
        found = self._kernels.quantized()
        assert found is not None
        self._kernels = found
        return self

    def pack_linear(self, *arguments: object, **options: object) -> object:
        self.packed.append(self._kernels.pack_linear(*arguments, **options))  # type: ignore[arg-type]
        return self.packed[-1]

    def __getattr__(self, name: str) -> object:
        return getattr(self._kernels, name)


@pytest.mark.parametrize(("mode", "is_int8"), [("int8", True), ("none", False)])
def test_every_projection_is_int8(tiny_model: Path, mode: str, is_int8: bool) -> None:
    kernels = CountingKernels()
    loaded = load_model(tiny_model, kernels=kernels, quantize=mode)  # type: ignore[arg-type]
    assert loaded.quantize is Quantize(mode)
    assert len(kernels.packed) == 4 * loaded.config.num_hidden_layers + 1
    assert all(isinstance(p, Int8Projection) == is_int8 for p in kernels.packed)


def test_a_checkpoint_is_tried_once(
    tiny_model: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(tiny_model, quantize="int8")
    assert not (own_cache / "int8").exists(), "int8 that is asked for is not doubted"
    load(tiny_model, quantize="auto")
    (stored,) = (own_cache / "int8").glob("*/divergence.json")
    assert 0 < float(stored.read_text()) < 1

    def again(*_: object) -> None:
        raise AssertionError("tried twice")

    monkeypatch.setattr(quantize, "_measure", again)
    load(tiny_model, quantize="auto")


def test_changed_weights_are_tried_anew(tiny_model: Path, own_cache: Path) -> None:
    changed = own_cache / "changed"
    changed.mkdir()
    for path in tiny_model.iterdir():
        (changed / path.name).write_bytes(path.read_bytes())
    load(tiny_model, quantize="auto")
    load(changed, quantize="auto")
    assert len(list((own_cache / "int8").glob("*/"))) == 1, "the place does not matter"
    weights = load_file(changed / "model.safetensors")
    save_file({n: t * 1.5 for n, t in weights.items()}, changed / "model.safetensors")
    load(changed, quantize="auto")
    assert len(list((own_cache / "int8").glob("*/"))) == 2


@pytest.mark.parametrize(("bound", "expected"), [(1e9, Quantize.INT8), (0.0, Quantize.NONE)])
def test_auto_takes_int8_where_predictions_stay_what_they_are(
    tiny_model: Path,
    bound: float,
    expected: Quantize,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("sapwood.runtime.weights.MAX_DIVERGENCE", bound)
    with caplog.at_level(logging.WARNING):
        assert load(tiny_model, quantize="auto").quantize is expected
    assert ("quantize=int8 insists" in caplog.text) == (expected is Quantize.NONE)


def test_int8_that_cannot_be_had_is_refused_and_auto_does_without(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="must be float32 on a CPU"):
        load(tiny_model, quantize="int8", dtype="bfloat16")
    assert load(tiny_model, quantize="auto", dtype="bfloat16").quantize is Quantize.NONE
    with pytest.raises(ConfigError, match="'reference' have no int8"):
        load_model(tiny_model, kernels=load_kernels("reference"), quantize="int8")
    with pytest.raises(ConfigError, match="auto, none, int8"):
        load(tiny_model, quantize="int4")


@pytest.mark.parametrize("stored", ["", "NaN", "-1", "null", "[1]", '"abc"'])
def test_what_was_not_measured_well_is_no_reason_for_int8(
    tiny_model: Path, own_cache: Path, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sapwood.runtime.weights.MAX_DIVERGENCE", 1e9)
    assert load(tiny_model, quantize="auto").quantize is Quantize.INT8
    (path,) = (own_cache / "int8").glob("*/divergence.json")
    path.write_text(stored)
    assert load(tiny_model, quantize="auto").quantize is Quantize.NONE


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(
    tiny_model: Path, own_cache: Path
) -> None:
    (own_cache / "int8").write_text("a file, not a folder")
    assert load(tiny_model, quantize="auto").quantize is Quantize.NONE


@pytest.mark.parametrize("mode", ["int8", "auto"])
def test_dummy_weights_are_not_tried(tiny_model: Path, own_cache: Path, mode: str) -> None:
    loaded = load(tiny_model, quantize=mode, load_format="dummy")
    assert loaded.quantize is Quantize.INT8
    assert not (own_cache / "int8").exists()


def test_a_tied_head_is_quantised_and_the_embedding_is_not(
    tiny_model: Path, own_cache: Path
) -> None:
    tied = own_cache / "tied"
    tied.mkdir()
    for path in tiny_model.iterdir():
        (tied / path.name).write_bytes(path.read_bytes())
    config = json.loads((tied / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tied / "config.json").write_text(json.dumps(config))
    weights = load_file(tied / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tied / "model.safetensors")
    kernels = CountingKernels()
    model = load_model(tied, kernels=kernels, quantize="int8").model  # type: ignore[arg-type]
    head = kernels.packed[-1]
    assert isinstance(head, Int8Projection) and head.num_planes == 2
    embedding = model._embedding  # type: ignore[attr-defined]
    assert torch.equal(embedding, weights["model.embed_tokens.weight"])


def test_the_engine_says_what_it_computes_in(tiny_model: Path) -> None:
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    for mode in ("none", "int8"):
        with Engine(str(tiny_model), quantize=mode, num_kv_blocks=64) as engine:
            assert engine.info.quantize == mode
            assert len(engine.generate(["Some text"], sampling)[0].outputs[0].token_ids) == 4
    with pytest.raises(ConfigError, match="quantize is 'int4'"):
        Engine(str(tiny_model), quantize="int4")
