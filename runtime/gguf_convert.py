"""A .gguf file as an ordinary model folder: config.json, model.safetensors, tokenizer.json.

The weights are dequantised to float32 once, with numpy, one tensor in memory at a time. What an
architecture's tensors and settings are called is told in gguf_architectures.py; whatever would come
out differently is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sapwood.runtime.errors import ModelError
from sapwood.runtime.gguf_architectures import (
    ROPE_FREQS,
    ROPE_LONG,
    ROPE_SHORT,
    Architecture,
    Change,
    GgufModel,
    architecture_of,
    config_of,
    place_of,
)
from sapwood.runtime.gguf_file import GgufFile, GgufTensor, read_gguf
from sapwood.runtime.gguf_tokenizer import write_tokenizer

CONVERTER_VERSION = 1
"""Part of the key of a converted folder: raise it when the conversion's output changes."""

_ROPE_TENSORS = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)
_TOKENS = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))


class _Output(NamedTuple):
    """A tensor under its transformers name, still quantised."""

    name: str
    stored: GgufTensor
    change: Change | None


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the model in `path` to the empty `folder`.

    Raises UnsupportedModelError for an architecture, tokenizer or setting that is not served and
    ModelError for a file that is not a whole GGUF.
    """
    file = read_gguf(path)
    name = file.metadata.get("general.architecture")
    model = _model(file, str(name))
    architecture = architecture_of(name, model.settings)
    outputs = [
        output
        for tensor in file.tensors
        if tensor.name not in _ROPE_TENSORS
        for output in _outputs(architecture, tensor)
    ]
    tokens = {
        f"{role}_token_id": file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        for role, key in _TOKENS
    }
    config = config_of(architecture, model) | tokens | {"dtype": "float32"}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(tokens, file.metadata))
    write_tokenizer(file.metadata, folder)
    _write_safetensors(folder / "model.safetensors", outputs, config)


def _model(file: GgufFile, architecture: str) -> GgufModel:
    prefix = f"{architecture}."
    return GgufModel(
        settings={
            name.removeprefix(prefix): value
            for name, value in file.metadata.items()
            if name.startswith(prefix)
        },
        shapes={tensor.name: tensor.shape for tensor in file.tensors},
        rope={
            tensor.name: [float(str(factor)) for factor in tensor.floats().reshape(-1)]
            for tensor in file.tensors
            if tensor.name in _ROPE_TENSORS
        },
    )


def _outputs(architecture: Architecture, tensor: GgufTensor) -> Iterator[_Output]:
    """What becomes of a stored tensor: itself, or one for each expert."""
    place = place_of(architecture, tensor.name)
    if "{expert}" not in place.module:
        yield _Output(place.module, tensor, place.change)
        return
    if len(tensor.shape) != 3:
        raise ModelError(
            f"the GGUF file has {tensor.name} of shape {list(tensor.shape)}; experts' tensors have "
            "three dimensions"
        )
    for expert in range(tensor.shape[0]):
        yield _Output(place.module.format(expert=expert), tensor.part(expert), place.change)


def _generation_config(tokens: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Every token that ends a turn or a text, as generation_config.json lists them."""
    ends = [tokens["eos_token_id"]]
    ends += [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    eos_token_ids = list(dict.fromkeys(i for i in ends if i is not None))
    return {**tokens, "eos_token_id": eos_token_ids}


def _write_safetensors(path: Path, outputs: list[_Output], config: Mapping[str, Any]) -> None:
    """The format's 8-byte length, JSON header and raw tensors, written one tensor at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for output in outputs:
        start, end = end, end + 4 * math.prod(output.stored.shape)
        header[output.name] = {
            "dtype": "F32",
            "shape": list(output.stored.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for output in outputs:
            file.write(_weights(output, config).data)


def _weights(output: _Output, config: Mapping[str, Any]) -> NDArray[np.float32]:
    """Float32, of the stored shape and in one piece."""
    weights = output.stored.floats()
    if output.change is not None:
        weights = output.change(weights, config)
    return np.ascontiguousarray(weights)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
