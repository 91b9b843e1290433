"""How long the pieces are that a step's key ranges are cut into, so that a device is filled evenly.

Few programs with long ranges leave most of a device idle, and so does the last wave of a few equal
programs more than it runs at once. Ranges are therefore cut into pieces (split-KV: FlashDecoding,
Dao et al. 2023), whose results are merged. FlashInfer (Ye et al. 2025) searches for the shortest
piece with which all of them run at once; here more waves are allowed too, and among a few lengths
the one is taken that ends first, by an upper bound of what list scheduling (Graham 1969) takes:

    wave_seconds = sum over j of time(j * num_programs)     pieces in falling order of their times

which lies between the device's mean load and that plus the longest piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sapwood.kernels.ragged import Int64Array
from sapwood.kernels.tile_shapes import TileCost

FloatArray = NDArray[np.float64]

# Lengths that are tried, in the mean load of a program: somewhat more, since whole pieces seldom
# fit exactly, and fractions, which make waves of small pieces.
_SHARES = (2.0, 1.5, 1.25, 1.12, 1.0, 0.8, 0.65, 0.5, 0.4, 0.33, 0.25)
# Nothing is cut where that could save at most this part of the time.
_SMALL_SHARE = 0.06


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """What the row tiles of one shape read, int64 [num_row_tiles] each.

    Row tile `i` has `num_rows[i]` rows and reads the keys `[begins[i], ends[i])` of its range,
    which is `[firsts[i], lasts[i])`. Pieces are counted from the range's first key, so that its
    tiles are cut at the same keys. `has_partials`: some of the rows have other ranges too.
    """

    firsts: Int64Array
    lasts: Int64Array
    begins: Int64Array
    ends: Int64Array
    num_rows: Int64Array
    has_partials: NDArray[np.bool_]

    def where(self, mask: NDArray[np.bool_]) -> Spans:
        return Spans(
            firsts=self.firsts[mask],
            lasts=self.lasts[mask],
            begins=self.begins[mask],
            ends=self.ends[mask],
            num_rows=self.num_rows[mask],
            has_partials=self.has_partials[mask],
        )


def piece_lengths(
    spans: Spans,
    *,
    cost: TileCost,
    per_partial: float,
    per_launch: float,
    num_programs: float,
    key_step: int,
) -> Int64Array:
    """Keys of a piece for each row tile: its whole range, or the same for all of it that are cut.

    `num_programs`: those that the device runs at once for one KV head. Pieces are multiples of
    `key_step`. O(row tiles x log) for each of some ten lengths, in numpy.
    """
    whole = spans.lasts - spans.firsts
    keys = spans.ends - spans.begins
    seconds = cost.per_tile + keys.astype(np.float64) * cost.per_key
    uncut = _wave_seconds(seconds, np.ones_like(keys), num_programs)
    if uncut <= (1 + _SMALL_SHARE) * seconds.sum() / num_programs:
        return whole
    mean_load = keys.sum() / num_programs
    longest = np.maximum(np.ceil(mean_load * np.array(_SHARES)), key_step)[:, None]
    num_cuts = np.where(keys <= longest, 1, np.ceil(whole / longest)).astype(np.int64)
    pieces = np.ceil(whole / num_cuts / key_step).astype(np.int64) * key_step
    tried = np.concatenate([whole[None], np.where(num_cuts == 1, whole, pieces)])
    num_pieces = count_pieces(spans, tried)
    seconds = cost.per_tile + keys / num_pieces * cost.per_key
    is_split = num_pieces > 1
    num_partials = (num_pieces * spans.num_rows * (is_split | spans.has_partials)).sum(axis=1)
    adds_merge = is_split.any(axis=1) & (not spans.has_partials.any())
    estimates = (
        _wave_seconds(seconds, num_pieces, num_programs)
        + num_partials * (per_partial / num_programs)
        + adds_merge * per_launch
    )
    best: Int64Array = tried[int(np.argmin(estimates))]
    return best


def count_pieces(spans: Spans, pieces: Int64Array) -> Int64Array:
    """Pieces of each row tile, if those of its range are `pieces` long; broadcasts over lengths."""
    last = (spans.ends - 1 - spans.firsts) // pieces
    num_pieces: Int64Array = last - (spans.begins - spans.firsts) // pieces + 1
    return num_pieces


def _wave_seconds(seconds: FloatArray, counts: Int64Array, num_programs: float) -> FloatArray:
    """The bound of this module's drawing for `counts` pieces of `seconds` each, along the last
    axis. Wave `j` begins with the piece at `floor(j * num_programs)`."""
    order = np.argsort(-seconds, axis=-1)
    seconds = np.take_along_axis(seconds, order, axis=-1)
    num_before = np.cumsum(np.take_along_axis(counts, order, axis=-1), axis=-1)
    num_waves = np.ceil(num_before / num_programs)
    begun = np.diff(num_waves, axis=-1, prepend=0)
    total: FloatArray = (begun * seconds).sum(axis=-1)
    return total
