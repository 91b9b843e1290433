"""The named tensors of a checkpoint folder, read one at a time.

Weights come from safetensors only: nothing here unpickles or runs code from a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sapwood.runtime.errors import ModelError, ModelNotFoundError, UnsupportedModelError

FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors names them; float8 needs scales
_MAX_NAMES_IN_ERROR = 5


class TensorHeader(NamedTuple):
    """What is known of a tensor before it is read: dtype as safetensors names it, and shape."""

    dtype: str
    shape: tuple[int, ...]


class TensorSource(Protocol):
    """Tensors by name."""

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Name, dtype and shape of every tensor there is."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor of a name in `headers`."""
        ...


class SafetensorsFolder:
    """The tensors in a folder's safetensors files, mapped from disk.

    Raises ModelNotFoundError where there are no such files, UnsupportedModelError where there are
    only pickled ones and ModelError for files that are missing or damaged.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._file_by_name: dict[str, Any] = {}
        headers: dict[str, TensorHeader] = {}
        for path in _safetensors_files(folder):
            file = _open_safetensors(path, device)
            for name in file.keys():
                stored = file.get_slice(name)
                headers[name] = TensorHeader(stored.get_dtype(), tuple(stored.get_shape()))
                self._file_by_name[name] = file
        self._headers = MappingProxyType(headers)

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        return self._headers

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file_by_name[name].get_tensor(name)
        return tensor


def some_of(names: Sequence[str]) -> str:
    """The first few of `names` and how many more there are."""
    more = len(names) - _MAX_NAMES_IN_ERROR
    listed = ", ".join(names[:_MAX_NAMES_IN_ERROR])
    return f"{listed} and {more} more" if more > 0 else listed


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            file_by_tensor = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(file_by_tensor.values()))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ModelError(f"{index} does not map tensors to files: {error!r:.200}") from error
        if others := [name for name in names if not isinstance(name, str)]:
            raise ModelError(f"{index} does not map tensors to files: {others[0]!r:.80}")
        if outside := [name for name in names if Path(name).name != name]:
            raise ModelError(f"{index} names a file outside its folder: {outside[0]!r:.80}")
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ModelError(
                f"{folder} lacks {some_of(missing)} of its {len(names)} weight files; "
                "fetch the checkpoint again"
            )
        return [folder / name for name in names]
    if (single := folder / "model.safetensors").exists():
        return [single]
    pickled = [path.name for s in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(s)]
    if pickled:
        raise UnsupportedModelError(
            f"{folder} has only pickled weights ({some_of(pickled)}), which can run code when they "
            "are loaded; convert them with transformers: from_pretrained, then save_pretrained"
        )
    raise ModelNotFoundError(f"{folder} has no model.safetensors and no index of such files")


def _open_safetensors(path: Path, device: torch.device) -> Any:
    try:
        return safe_open(path, framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a whole safetensors file: {error}") from error
