"""The measured numbers that attention is planned with: shapes of tiles, and what they cost.

Values only; tiles.py plans with them, and the tuning table of a GPU holds them (tuning.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """What one program of an attention kernel works on.

    `rows` (BLOCK_M) are query rows times heads of a KV group, packed: a tile has at most
    `rows // group_size` query rows, and at least one. `keys` (BLOCK_N) are read in each iteration.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name in ("rows", "keys"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} is {value}, it must be a power of two of at least 16")
        if self.num_warps not in (1, 2, 4, 8):
            raise ValueError(f"num_warps is {self.num_warps}, it must be 1, 2, 4 or 8")
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages is {self.num_stages}, it must be from 1 to 8")


@dataclass(frozen=True, slots=True, kw_only=True)
class TileCosts:
    """Seconds that a tile takes on one multiprocessor, of one KV head.

    A tile costs `tile_seconds`, and `key_seconds` for each of its keys; each row of a partial
    result costs `partial_seconds`, its merging included.
    """

    tile_seconds: float
    key_seconds: float
    partial_seconds: float

    def __post_init__(self) -> None:
        for name in ("tile_seconds", "key_seconds", "partial_seconds"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be from 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShapes:
    """The shapes of one kind of model on one GPU, each with its costs.

    `narrow` is for few rows, as in decoding, where the keys' bytes take the time; `wide` for many,
    as in prefill and on an edge that many rows share, where products do.
    """

    narrow: TileShape
    wide: TileShape
    narrow_costs: TileCosts
    wide_costs: TileCosts

    def __post_init__(self) -> None:
        if self.narrow.rows > self.wide.rows:
            raise ValueError(
                f"narrow tiles have {self.narrow.rows} rows, wide ones {self.wide.rows}; "
                "the narrow ones must have fewer"
            )
