"""From a folder to a model of transformers that may be served, or the reason why not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from sapwood.kernels.interface import Kernels
from sapwood.runtime.errors import UnsupportedModelError
from sapwood.runtime.universal.gate import admit
from sapwood.runtime.universal.model import UniversalConfig, UniversalModel
from sapwood.runtime.universal.network import build_network, read_config, read_network
from sapwood.runtime.universal.refusal import refused
from sapwood.runtime.universal.verify import verify

logger = logging.getLogger(__name__)


def read_universal_config(folder: Path) -> UniversalConfig:
    """The configuration of a checkpoint whose `model_type` has no native file.

    Raises UnsupportedModelError where it already says why the model is not served, ModelError for
    a config.json that does not parse. Imports transformers.
    """
    source = read_config(folder)
    text = source.get_text_config()
    return UniversalConfig(
        model_type=str(source.model_type),
        vocab_size=_count(source, text, "vocab_size"),
        num_hidden_layers=_count(source, text, "num_hidden_layers"),
        max_position_embeddings=_count(source, text, "max_position_embeddings"),
        dtype=str(source.dtype or "float32").removeprefix("torch."),
        source=source,
    )


def _count(source: Any, text: Any, name: str) -> int:
    value = getattr(text, name, None)
    if not isinstance(value, int) or value < 2 - (name == "num_hidden_layers"):
        raise refused(source.model_type, f"its configuration says {value!r} for {name}")
    return value


def load_universal(
    config: UniversalConfig,
    folder: Path | None,
    *,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    is_verified: bool = False,
) -> UniversalModel:
    """The model with the weights in `folder`, or with random ones where there is none.

    It is tried before it is returned (gate.py), and for longer with `is_verified` (verify.py).
    Raises UnsupportedModelError with the reason where it must not be served, ModelError for a
    checkpoint that does not fit its configuration.
    """
    try:
        if folder is None:
            network = build_network(config.source, dtype, device)
        else:
            network = read_network(folder, config.source, dtype, device)
        model = admit(config, network, kernels)
        if is_verified:
            verify(model, network, kernels)
            logger.info("%s is as transformers' own attention over long prompts", config.model_type)
    except UnsupportedModelError as error:
        raise refused(config.model_type, str(error)) from error.__cause__
    logger.info("%s runs through transformers", config.model_type)
    return model
