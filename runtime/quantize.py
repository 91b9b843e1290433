"""From a checkpoint's weights to a model whose projections are int8, if it loses next to nothing.

The first load of a checkpoint runs it over a short text in float32, for the magnitudes that
smoothing needs, and then in int8, to see how far its predictions have moved. Both are kept in the
cache folder, so that later loads only rescale and round.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from sapwood.kernels import AttentionPlan, PrivateSegment
from sapwood.kernels.interface import Kernels
from sapwood.kernels.user_cache import cache_folder
from sapwood.runtime.batch import ForwardBatch
from sapwood.runtime.model_cache import build_folder
from sapwood.runtime.model_config import ModelConfig
from sapwood.runtime.models import Model, ModelClass
from sapwood.runtime.smoothing import MagnitudeRecorder, SmoothedWeights, smoothing_scales
from sapwood.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# "auto" takes int8 where the predictions of the calibration text move by no more than that: mean
# KL(float32 || int8) in nats a token. SmolLM2-135M's move by half of it.
MAX_DIVERGENCE = 0.01
_CALIBRATION_TEXT = Path(__file__).with_name("calibration.txt")
_CALIBRATION_VERSION = 2  # of the groups, of smoothing and of rounding
_MAX_CALIBRATION_TOKENS = 1024
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096


class Quantize(StrEnum):
    """The arithmetic of projections."""

    AUTO = "auto"  # int8 on a CPU where the model's predictions stay what they are, else none
    NONE = "none"
    INT8 = "int8"


class QuantizedModel(NamedTuple):
    """A model in int8, and mean KL(float32 || int8) over the calibration text, nats a token."""

    model: Model
    divergence: float


@dataclass(frozen=True, slots=True)
class _Calibration:
    """What smoothing multiplies each projection's inputs by, float32 [in]; see QuantizedModel."""

    scales: Mapping[str, Tensor]
    divergence: float


def quantize_model(
    model_class: ModelClass,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    kernels: Kernels,
    quantized: Kernels,
    folder: Path,
    max_divergence: float | None = None,
) -> QuantizedModel | None:
    """The model of `folder` built on the `quantized` kernels from float32 `weights`.

    None if its predictions move by more than `max_divergence`. The first call for a checkpoint
    costs two passes over about 600 tokens and a second copy of the weights.
    """
    if config.tie_word_embeddings:
        weights = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
        config = replace(config, tie_word_embeddings=False)
    calibrate = partial(_calibrate, model_class, config, weights, kernels, quantized, folder)
    stored = build_folder(cache_folder() / "calibrated" / _key(folder), calibrate)
    calibration = _read(stored / "calibration.safetensors")
    if max_divergence is not None and calibration.divergence > max_divergence:
        return None
    smoothed = SmoothedWeights(weights, model_class.smoothing_groups(config), calibration.scales)
    return QuantizedModel(model_class(config, smoothed, quantized), calibration.divergence)


def _calibrate(
    model_class: ModelClass,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    kernels: Kernels,
    quantized: Kernels,
    folder: Path,
    target: Path,
) -> None:
    """Write calibration.safetensors into `target`."""
    logger.info("calibrating %s for int8, once", folder.name)
    text = _CALIBRATION_TEXT.read_text(encoding="utf-8")
    limit = min(_MAX_CALIBRATION_TOKENS, config.max_position_embeddings)
    token_ids = Tokenizer.from_folder(folder).encode(text)[:limit]
    recorder = MagnitudeRecorder(kernels)
    model = model_class(config, weights, cast(Kernels, recorder))
    expected = _log_probabilities(model, kernels, token_ids)
    magnitudes = {name: recorder.magnitudes(p) for name, p in model.projections.items()}
    del model  # before there is another
    groups = tuple(model_class.smoothing_groups(config))
    scales = smoothing_scales(weights, groups, magnitudes)
    smoothed = SmoothedWeights(weights, groups, scales)
    actual = _log_probabilities(model_class(config, smoothed, quantized), kernels, token_ids)
    divergence = functional.kl_div(actual, expected, reduction="batchmean", log_target=True).item()
    save_file(
        scales,
        target / "calibration.safetensors",
        metadata={"divergence": repr(divergence)},
    )


def _read(path: Path) -> _Calibration:
    with safe_open(path, framework="pt") as file:
        scales = {name: file.get_tensor(name).clone() for name in file.keys()}
        return _Calibration(scales, float(file.metadata()["divergence"]))


def _log_probabilities(model: Model, kernels: Kernels, token_ids: np.ndarray) -> Tensor:
    """Of every next token after each of `token_ids`, float32 [num_tokens, vocab_size]."""
    length = len(token_ids)
    spec = model.kv_spec(num_blocks=1, block_size=length)
    whole = PrivateSegment(
        block_ids=np.zeros(1, np.int32), start=0, length=length, first_row=0, num_rows=length
    )
    plan = AttentionPlan(num_rows=length, block_size=length, shared=(), private=(whole,))
    positions = torch.arange(length)
    batch = ForwardBatch(
        input_ids=torch.from_numpy(token_ids.astype(np.int64)),
        positions=positions,
        slots=positions,
        logits_rows=positions,
        attention=kernels.plan_attention(plan, spec),
    )
    return model.forward(batch, kernels.make_kv_cache(spec)).log_softmax(dim=-1)


def _key(folder: Path) -> str:
    """Names a checkpoint by its contents, wherever it lies: its config, its files' sizes and some
    of their bytes, since to read all of them would take longer than to load them."""
    digest = hashlib.sha256(f"{_CALIBRATION_VERSION}".encode())
    digest.update(_CALIBRATION_TEXT.read_bytes())
    digest.update(f"{torch.cpu._is_vnni_supported()}".encode())  # decides how weights are rounded
    digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            for offset in np.linspace(0, max(0, size - _SAMPLE_BYTES), _NUM_SAMPLES, dtype=int):
                file.seek(int(offset))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:24]
