"""Whether a model's projections are computed in int8, and what that does to its predictions.

Nothing is calibrated: the kernels round weights and rows as they are. To decide by itself, the
runtime runs a checkpoint over a short text of many kinds in float32 and in int8, once, and keeps in
the cache folder how far the predictions were apart.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sapwood.kernels import AttentionPlan, PrivateSegment
from sapwood.kernels.interface import Kernels
from sapwood.kernels.user_cache import cache_folder
from sapwood.runtime.batch import ForwardBatch
from sapwood.runtime.model_cache import build_folder
from sapwood.runtime.model_config import ModelConfig
from sapwood.runtime.models import Model, ModelClass
from sapwood.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# "auto" takes int8 where the predictions for the sample text move by no more than that: mean
# KL(float32 || int8) in nats a token. SmolLM2-135M's move by a third of it.
MAX_DIVERGENCE = 0.01
_SAMPLE = Path(__file__).with_name("sample.txt")
_VERSION = 3  # of how int8 rounds
_MAX_TOKENS = 256
_NUM_PIECES, _PIECE_BYTES = 64, 4096


class Quantize(StrEnum):
    """The arithmetic of projections."""

    AUTO = "auto"  # int8 on a CPU where the model's predictions stay what they are, else none
    NONE = "none"
    INT8 = "int8"


def int8_divergence(
    model_class: ModelClass,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    kernels: Kernels,
    quantized: Kernels,
    folder: Path,
) -> float:
    """Mean KL(float32 || int8) of the next token over the sample text, in nats a token.

    `weights` are those of the checkpoint in `folder`, float32; `quantized` are the int8 kernels.
    NaN where it could not be measured or kept. The first call for a checkpoint costs two passes
    over 256 tokens and, one after the other, the memory of both models.
    """
    measure = partial(_measure, model_class, config, weights, kernels, quantized, folder)
    try:
        stored = build_folder(cache_folder() / "int8" / _key(folder), measure)
        text = (stored / "divergence.json").read_text(encoding="utf-8")
        divergence = float(json.loads(text))
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s was not tried in int8: %s", folder.name, error)
        return math.nan
    return divergence if divergence >= 0.0 else math.nan


def _measure(
    model_class: ModelClass,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    kernels: Kernels,
    quantized: Kernels,
    folder: Path,
    target: Path,
) -> None:
    """Write divergence.json into `target`."""
    logger.info("trying %s in int8, once", folder.name)
    limit = min(_MAX_TOKENS, config.max_position_embeddings)
    text = _SAMPLE.read_text(encoding="utf-8")
    token_ids = Tokenizer.from_folder(folder).encode(text)[:limit]
    expected, actual = (
        _log_probabilities(model_class(config, weights, own), own, token_ids)
        for own in (kernels, quantized)
    )
    divergence = functional.kl_div(actual, expected, reduction="batchmean", log_target=True).item()
    (target / "divergence.json").write_text(json.dumps(divergence), encoding="utf-8")


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
    """Names a checkpoint by its contents, wherever it lies: its config and tokenizer, its weights'
    sizes and some of their bytes, since to read all of them would take longer than to load them."""
    digest = hashlib.sha256(f"{_VERSION}".encode())
    digest.update(_SAMPLE.read_bytes())
    for name in ("config.json", "tokenizer.json"):
        if (folder / name).exists():
            digest.update((folder / name).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            for offset in np.linspace(0, max(0, size - _PIECE_BYTES), _NUM_PIECES, dtype=int):
                file.seek(int(offset))
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()[:24]
