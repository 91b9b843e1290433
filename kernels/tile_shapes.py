"""The shapes of tiles (tiles.py) and what they cost: what a tuning table says of a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """What one program works on: BLOCK_M packed rows, which are query rows times the heads of a
    KV group, by BLOCK_N keys an iteration; and how it is compiled. From the tuning table."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name in ("rows", "keys", "num_warps", "num_stages"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be positive")

    def num_query_rows(self, group_size: int) -> int:
        """Query rows that one tile takes: at least one, whatever the heads of a KV group."""
        return max(self.rows // group_size, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileCost:
    """Seconds that one program takes on a device that is full, measured.

    `per_tile`: to begin and to end, without any key. `per_key`: for each key and its value.
    """

    per_tile: float
    per_key: float

    def __post_init__(self) -> None:
        if self.per_tile < 0 or self.per_key <= 0:
            raise ValueError(f"a tile costs {self.per_tile} s and a key {self.per_key} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShapes:
    """The shapes to choose from and what they cost. From the tuning table.

    `narrow` is for few rows (decoding, drafts, small groups), `wide` for many (chunks, prompts,
    edges that many sequences share). `per_partial`: seconds that one program takes to write and
    merge the partial result of one query row and KV head. `per_launch`: seconds from the end of one
    launch to the beginning of the next.
    """

    narrow: TileShape
    wide: TileShape
    narrow_cost: TileCost
    wide_cost: TileCost
    per_partial: float
    per_launch: float

    def __post_init__(self) -> None:
        if self.wide.rows < self.narrow.rows:
            raise ValueError(
                f"the wide shape has {self.wide.rows} rows, fewer than the narrow one's "
                f"{self.narrow.rows}"
            )
        if self.per_partial < 0 or self.per_launch < 0:
            raise ValueError(
                f"a partial result costs {self.per_partial} s and a launch {self.per_launch} s"
            )
