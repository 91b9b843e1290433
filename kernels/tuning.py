"""Tuning tables: shapes of kernels that were measured on a GPU, one small JSON file for each.

`tuning/<name>.json` is for the GPUs of that name; `tuning/default.json` is what all others get, and
was reasoned, not measured. `sapwood tune` writes such a file, into the user's cache. Nothing is
measured while requests run.
"""

from __future__ import annotations

import json
import re
import typing
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, cast

from sapwood.kernels.tile_shapes import TileShapes
from sapwood.kernels.user_cache import cache_folder

TABLES = Path(__file__).with_name("tuning")
DEFAULT = "default"
MIN_SIDE = 16  # of a tile: what a matrix instruction takes
KvBytes = Literal[1, 2, 4]


class TuningError(ValueError):
    """A tuning file that is not one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTuning:
    """The tiles of attention with heads of up to `max_head_dim`, at most `max_group_size` query
    heads for each of keys, and keys and values of `kv_bytes` a number."""

    max_head_dim: int
    max_group_size: int
    kv_bytes: KvBytes
    shapes: TileShapes

    def __post_init__(self) -> None:
        for kind, shape in (("narrow", self.shapes.narrow), ("wide", self.shapes.wide)):
            for name, value in (("rows", shape.rows), ("keys", shape.keys)):
                if value < MIN_SIDE or value & (value - 1):
                    raise ValueError(
                        f"{name} of {kind} tiles is {value}, it must be a power of two of at least "
                        f"{MIN_SIDE}"
                    )
            if shape.num_warps not in (1, 2, 4, 8):
                raise ValueError(f"{kind} tiles have {shape.num_warps} warps, not 1, 2, 4 or 8")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTable:
    """What was measured on one kind of GPU.

    `gpu` is its name as its driver says it, or `default`; `measured_with` names what measured it
    and in which version, empty where nothing did. Of `attention` the first entry that fits counts.
    """

    gpu: str
    measured_with: str
    attention: tuple[AttentionTuning, ...]

    def tile_shapes(self, *, head_dim: int, group_size: int, kv_bytes: int) -> TileShapes:
        """The tiles for one kind of attention. Raises ValueError where none are there."""
        for entry in self.attention:
            if (
                head_dim <= entry.max_head_dim
                and group_size <= entry.max_group_size
                and kv_bytes == entry.kv_bytes
            ):
                return entry.shapes
        raise ValueError(
            f"the tuning table of {self.gpu} has no tiles for heads of {head_dim}, groups of "
            f"{group_size} and {kv_bytes} bytes a number"
        )

    def dump(self) -> str:
        """The table as the text of its file."""
        return json.dumps(asdict(self), indent=1) + "\n"


def load_table(gpu: str | None, folder: Path = TABLES) -> TuningTable:
    """The table of the GPU that its driver calls `gpu`, or the default one. Reads one file.

    One that was measured here (`own_table_path`) comes before those of `folder`. Raises TuningError
    for a file that is not a table.
    """
    if gpu is not None and (own := own_table_path(gpu)).is_file():
        return _table_in(own)
    return shipped_table(gpu, folder)


def shipped_table(gpu: str | None, folder: Path = TABLES) -> TuningTable:
    """The same without what was measured here: what `folder` has for the GPU, or for all."""
    if gpu is not None and (measured := folder / f"{file_stem(gpu)}.json").is_file():
        return _table_in(measured)
    return _table_in(folder / f"{DEFAULT}.json")


def _table_in(path: Path) -> TuningTable:
    return parse_table(path.read_text(encoding="utf-8", errors="replace"), where=str(path))


def own_table_path(gpu: str) -> Path:
    """Where `sapwood tune` keeps what it measured on this machine."""
    return cache_folder() / "tuning" / f"{file_stem(gpu)}.json"


def file_stem(gpu: str) -> str:
    """`NVIDIA H200` as the name of a file: `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def parse_table(text: str, where: str) -> TuningTable:
    """Read a table, strictly: a field that is unknown, missing or of another type is refused."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise TuningError(f"{where} is not JSON: {error}") from error
    return cast(TuningTable, _read(TuningTable, document, where))


def _read(kind: Any, value: Any, where: str) -> Any:
    """`value` of a JSON document as a `kind`: a dataclass, a tuple of one type, a plain value."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_read(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is Literal and value in arguments and not isinstance(value, bool):
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if type(value) is kind:
        return value
    expected = kind.__name__ if origin is None else str(kind)
    raise TuningError(f"{where} is {value!r}, it must be {expected}")


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise TuningError(f"{where} is {value!r}, it must be an object")
    names = {field.name for field in fields(kind)}
    if unknown := sorted(value.keys() - names):
        raise TuningError(f"{where} has {', '.join(unknown)}; known are {', '.join(sorted(names))}")
    if missing := sorted(names - value.keys()):
        raise TuningError(f"{where} lacks {', '.join(missing)}")
    hints = typing.get_type_hints(kind)
    values = {name: _read(hints[name], value[name], f"{where}.{name}") for name in names}
    try:
        return kind(**values)
    except ValueError as error:
        raise TuningError(f"{where}: {error}") from error
