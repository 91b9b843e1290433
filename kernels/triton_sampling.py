"""A token for each row of logits in Triton, without a sort of the vocabulary.

What is drawn is defined in drawing.py. With `m` the highest logit of a row and V tokens, token `i`
has a whole-number weight

    w_i = round(exp((l_i - m) / temperature) * best)        best = 2 ** (62 - bit_length(V))

and tokens stand in the order of their logits, highest first, equal ones by id. top_k keeps the
first k of them, top_p those before which less than `top_p * total` lies, so what both keep is a
prefix. It is told by its *edge*, the lowest logit that is kept, and by how many tokens with just
that logit are: the first ones by id. The edge is searched for between the bit patterns of floats,
which have the order of the floats once those of negative ones are turned round (Herf 2001). A pass
over the candidates sums up what lies from each of four pivots on and leaves a fifth of the
interval, so at most fourteen passes are made. Sums of whole numbers are exact in any order, so
that any number of programs may take them.

The rows' logits are read twice, three times where a row has top_k or top_p:

    _find_best      the highest logit and its token, in each span of a row
    _weigh          the sum of weights of each span, and how many tokens lie in each *bin*, a range
                    of distances below the best
    _gather         the tokens in the first bins, as many bins as surely reach beyond the edge
    _pick           a program for each row: the token, in the span where the sum passes it
    _pick_ranked    the same for rows with top_k or top_p: the edge, among what was gathered, then
                    the token

A row where too many tokens are gathered (of a distribution that is nearly flat, or with a top_k of
thousands) has its edge searched for among all of its tokens, which takes a program that many passes
over its row. Bins are a proposal only: where they turn out to fall short, that is done too.

Exponentials are float64 and differ from torch's on a CPU by a unit in the last place, where the
mathematical libraries do. A weight is then one more or less, of up to `best`, and the token is
another one only if the random number, or top_p's share, falls within so little of the border
between two tokens. Everything else is equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood.kernels.drawing import best_bits
from sapwood.kernels.interface import DrawnTokens, DrawParams
from sapwood.kernels.kernel_form import KernelForm
from sapwood.kernels.specialization import Specialization

_NO_EDGE = tl.constexpr(-(2**31))  # below the order of every float: all tokens are kept
_NOT_A_NUMBER = tl.constexpr(2**31 - 1)  # above the order of every float
_WHOLE_FROM = tl.constexpr(2.0**52)  # float64 numbers have no fraction from here on
_NUM_STAGES = tl.constexpr(3)  # of loops over memory: loads of two later turns are under way
_NUM_PIVOTS = tl.constexpr(4)  # in a pass of the search for an edge
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _order(x: tl.tensor) -> tl.tensor:
    """int32 with the order of float32 `x`, of -0.0 that of 0.0; NaN above all."""
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(x == 0.0, 0, order)
    return tl.where(x != x, _NOT_A_NUMBER, order)


@triton.jit
def _value(order: tl.tensor) -> tl.tensor:
    """The float32 of which `order` is the order."""
    bits = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _distance(x: tl.tensor, best: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """float64 in nats below the best; infinite for tokens that were taken out."""
    # In two steps, so that a tiny temperature gives infinities and not NaN.
    return (best - x).to(tl.float64) / temperature


@triton.jit
def _weight(distance: tl.tensor, min_p: tl.tensor, BEST_BITS: tl.constexpr) -> tl.tensor:
    """int64: a share of 2 ** BEST_BITS, rounded half to even; 0 below `min_p` of the best."""
    relative = tl.exp(-distance)
    scaled = relative * (1 << BEST_BITS)
    rounded = tl.where(scaled < _WHOLE_FROM, (scaled + _WHOLE_FROM) - _WHOLE_FROM, scaled)
    return tl.where(relative < min_p, 0, rounded.to(tl.int64))


@triton.jit
def _bin(distance: tl.tensor, BEST_BITS: tl.constexpr, NUM_BINS: tl.constexpr) -> tl.tensor:
    """int32 [0, NUM_BINS): of equal widths, the last for what has no weight for certain."""
    per_nat: tl.constexpr = (NUM_BINS - 1) / ((BEST_BITS + 2) * _LN_2)
    return tl.minimum(distance * per_nat, NUM_BINS - 1.0).to(tl.int32)


@triton.jit
def _mass_up_to_bins(
    num_in_bin: tl.tensor, mass: tl.tensor, BEST_BITS: tl.constexpr, NUM_BINS: tl.constexpr
) -> tl.tensor:
    """float64 [NUM_BINS], which the tokens up to each bin have at least, of a row's whole mass.

    What its tokens would have at their bins' far ends, or the whole without what the others would
    have at the near ends of theirs. Sums and weights are rounded, so it is not quite certain.
    """
    per_nat: tl.constexpr = (NUM_BINS - 1) / ((BEST_BITS + 2) * _LN_2)
    bins = tl.arange(0, NUM_BINS)
    near_end = bins.to(tl.float64) / per_nat
    num = tl.where(bins < NUM_BINS - 1, num_in_bin, 0).to(tl.float64)
    at_near_end = num * tl.exp(-near_end) * (1 << BEST_BITS)
    at_far_end = num * tl.exp(-(near_end + 1.0 / per_nat)) * (1 << BEST_BITS)
    beyond = tl.sum(at_near_end) - tl.cumsum(at_near_end, axis=0)
    return tl.maximum(tl.cumsum(at_far_end, axis=0), mass - beyond)


@triton.jit
def _best_of(
    best_ptr: tl.tensor, row: tl.tensor, num_spans: tl.tensor, MAX_SPANS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The highest logit of a row, and the first token that has it."""
    spans = tl.arange(0, MAX_SPANS)
    lowest = tl.full([MAX_SPANS], -(2**63), tl.int64)
    packed = tl.max(tl.load(best_ptr + row * num_spans + spans, spans < num_spans, other=lowest))
    return _value((packed >> 32).to(tl.int32)), 0x7FFFFFFF - (packed & 0x7FFFFFFF)


@triton.jit
def _is_sound(best: tl.tensor) -> tl.tensor:
    return tl.abs(best) < float("inf")  # NaN is not


@triton.jit(do_not_specialize=["num_spans"])
def _find_best(
    logits_ptr: tl.tensor,
    stride: tl.tensor,
    best_ptr: tl.tensor,
    vocab_size: tl.tensor,
    span: tl.tensor,
    num_spans: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """For each row and span an int64: the order of the highest logit, then 2 ** 31 - 1 - token."""
    row, span_id = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = span_id * span
    end = tl.minimum(first + span, vocab_size)
    offsets = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], -(2**63), tl.int64)
    for start in tl.range(first, end, BLOCK, num_stages=_NUM_STAGES):
        ids = start + offsets
        x = tl.load(logits_ptr + row * stride + ids, ids < vocab_size, other=-float("inf"))
        packed = (_order(x).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
        highest = tl.maximum(highest, packed)
    tl.store(best_ptr + row * num_spans + span_id, tl.max(highest))


@triton.jit(do_not_specialize=["num_rows", "num_spans"])
def _weigh(
    logits_ptr: tl.tensor,
    stride: tl.tensor,
    params_ptr: tl.tensor,
    best_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    span: tl.tensor,
    num_spans: tl.tensor,
    BEST_BITS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    MAX_SPANS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The mass of each span, and of rows with top_k or top_p how many tokens each bin has."""
    row, span_id = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(params_ptr + row)
    best, _ = _best_of(best_ptr, row, num_spans, MAX_SPANS)
    if (temperature > 0.0) & _is_sound(best):
        is_ranked = _is_ranked(params_ptr, row, num_rows, vocab_size)
        # top_p alone wants the sum of all weights, before min_p; after top_k that of fewer.
        is_weighed = tl.load(params_ptr + num_rows + row) >= vocab_size
        min_p = tl.where(is_ranked, 0.0, tl.load(params_ptr + 3 * num_rows + row))
        first = span_id * span
        end = tl.minimum(first + span, vocab_size)
        offsets = tl.arange(0, BLOCK)
        masses = tl.zeros([BLOCK], tl.int64)
        counts = tl.zeros([NUM_BINS], tl.int32)
        for start in tl.range(first, end, BLOCK, num_stages=_NUM_STAGES):
            ids = start + offsets
            x = tl.load(logits_ptr + row * stride + ids, ids < vocab_size, other=-float("inf"))
            distance = _distance(x, best, temperature)
            if is_weighed:
                masses += _weight(distance, min_p, BEST_BITS)
            if is_ranked:
                counts += tl.histogram(_bin(distance, BEST_BITS, NUM_BINS), NUM_BINS)
        cell = row * num_spans + span_id
        tl.store(masses_ptr + cell, tl.sum(masses))
        if is_ranked:
            tl.store(counts_ptr + cell * NUM_BINS + tl.arange(0, NUM_BINS), counts)


@triton.jit
def _is_ranked(
    params_ptr: tl.tensor, row: tl.tensor, num_rows: tl.tensor, vocab_size: tl.tensor
) -> tl.tensor:
    top_k = tl.load(params_ptr + num_rows + row)
    top_p = tl.load(params_ptr + 2 * num_rows + row)
    return (top_k < vocab_size) | (top_p < 1.0)


@triton.jit(do_not_specialize=["num_rows", "num_spans"])
def _gather(
    logits_ptr: tl.tensor,
    stride: tl.tensor,
    params_ptr: tl.tensor,
    best_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    values_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    num_gathered_ptr: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    span: tl.tensor,
    num_spans: tl.tensor,
    CAPACITY: tl.constexpr,
    BEST_BITS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    MAX_SPANS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The logits and ids, in their order, of the tokens in a row's first bins.

    As many bins as have top_k tokens, or else top_p of the row's mass. How many tokens they are, or
    -1 where more than CAPACITY are, is told in `num_gathered` [num_rows].
    """
    row, span_id = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(params_ptr + row)
    best, _ = _best_of(best_ptr, row, num_spans, MAX_SPANS)
    is_ranked = _is_ranked(params_ptr, row, num_rows, vocab_size)
    if (temperature > 0.0) & _is_sound(best) & is_ranked:
        spans = tl.arange(0, MAX_SPANS)
        bins = tl.arange(0, NUM_BINS)
        cells = (row * num_spans + spans[:, None]) * NUM_BINS + bins[None, :]
        counts = tl.load(counts_ptr + cells, (spans < num_spans)[:, None], other=0)
        num_in_bin = tl.sum(counts, axis=0)

        top_k = tl.load(params_ptr + num_rows + row)
        if top_k < vocab_size:
            num_short = tl.sum((tl.cumsum(num_in_bin, axis=0) < top_k).to(tl.int32))
        else:
            top_p = tl.load(params_ptr + 2 * num_rows + row)
            masses = tl.load(masses_ptr + row * num_spans + spans, spans < num_spans, other=0)
            mass = tl.sum(masses).to(tl.float64)
            at_least = _mass_up_to_bins(num_in_bin, mass, BEST_BITS, NUM_BINS)
            num_short = tl.sum((at_least < top_p * mass).to(tl.int32))
        last_bin = tl.minimum(num_short, NUM_BINS - 2)

        is_gathered = (bins <= last_bin)[None, :]
        num_gathered = tl.sum(tl.sum(tl.where(is_gathered, counts, 0), axis=1))
        fits = num_gathered <= CAPACITY
        if span_id == 0:
            tl.store(num_gathered_ptr + row, tl.where(fits, num_gathered, -1))
        if fits:
            is_before = is_gathered & (spans < span_id)[:, None]
            place = row * CAPACITY + tl.sum(tl.sum(tl.where(is_before, counts, 0), axis=1))
            first = span_id * span
            end = tl.minimum(first + span, vocab_size)
            offsets = tl.arange(0, BLOCK)
            for start in tl.range(first, end, BLOCK, num_stages=_NUM_STAGES):
                ids = start + offsets
                x = tl.load(logits_ptr + row * stride + ids, ids < vocab_size, other=-float("inf"))
                distance = _distance(x, best, temperature)
                # The last bin is never gathered, and what is past the end lies there.
                is_taken = _bin(distance, BEST_BITS, NUM_BINS) <= last_bin
                taken = is_taken.to(tl.int32)
                num_taken = tl.sum(taken)
                if num_taken > 0:
                    places = place + tl.cumsum(taken, axis=0) - 1
                    tl.store(values_ptr + places, x, is_taken)
                    tl.store(ids_ptr + places, ids, is_taken)
                    place += num_taken


@triton.jit
def _lowest(source_ptr: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The order of the lowest of `n` logits."""
    offsets = tl.arange(0, BLOCK)
    lowest = tl.full([BLOCK], _NOT_A_NUMBER, tl.int32)
    for start in range(0, n, BLOCK):
        is_in = start + offsets < n
        x = tl.load(source_ptr + start + offsets, is_in, other=0.0)
        lowest = tl.minimum(lowest, tl.where(is_in, _order(x), _NOT_A_NUMBER))
    return tl.min(lowest)


@triton.jit
def _num_from(
    source_ptr: tl.tensor, n: tl.tensor, order: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """How many of `n` logits have at least this order."""
    offsets = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n, BLOCK):
        is_in = start + offsets < n
        x = tl.load(source_ptr + start + offsets, is_in, other=0.0)
        found += (is_in & (_order(x) >= order)).to(tl.int32)
    return tl.sum(found)


@triton.jit
def _mass_from(
    source_ptr: tl.tensor,
    n: tl.tensor,
    order: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    BEST_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The weights of those of `n` logits that have at least this order."""
    offsets = tl.arange(0, BLOCK)
    masses = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, n, BLOCK, num_stages=_NUM_STAGES):
        x = tl.load(source_ptr + start + offsets, start + offsets < n, other=-float("inf"))
        weight = _weight(_distance(x, best, temperature), min_p, BEST_BITS)
        masses += tl.where(_order(x) >= order, weight, 0)
    return tl.sum(masses)


@triton.jit
def _kept_weights(
    x: tl.tensor,
    is_in: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    edge: tl.tensor,
    num_ties: tl.tensor,
    ties_before: tl.tensor,
    BEST_BITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Weights of some tokens, before which there are so many at the edge: 0 of those left out."""
    order = _order(x)
    is_tie = (is_in & (order == edge)).to(tl.int32)
    is_kept = is_in & (order > edge)
    if ties_before < num_ties:
        rank = ties_before + tl.cumsum(is_tie, axis=0)
        is_kept = is_kept | ((is_tie > 0) & (rank <= num_ties))
    weight = _weight(_distance(x, best, temperature), min_p, BEST_BITS)
    return tl.where(is_kept, weight, 0), tl.sum(is_tie)


@triton.jit
def _passes(
    source_ptr: tl.tensor,
    n: tl.tensor,
    target: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    edge: tl.tensor,
    num_ties: tl.tensor,
    BEST_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Where in `n` logits the cumulative weight of what is kept first exceeds `target`."""
    offsets = tl.arange(0, BLOCK)
    mass_before = tl.full([], 0, tl.int64)
    ties_before = tl.full([], 0, tl.int32)
    start_there = tl.full([], 0, tl.int32)
    mass_there = mass_before
    ties_there = ties_before
    for start in tl.range(0, n, BLOCK, num_stages=_NUM_STAGES):
        is_in = start + offsets < n
        x = tl.load(source_ptr + start + offsets, is_in, other=-float("inf"))
        weights, ties = _kept_weights(
            x, is_in, best, temperature, min_p, edge, num_ties, ties_before, BEST_BITS
        )
        mass = tl.sum(weights)
        is_there = (mass_before <= target) & (mass_before + mass > target)
        start_there = tl.where(is_there, start, start_there)
        mass_there = tl.where(is_there, mass_before, mass_there)
        ties_there = tl.where(is_there, ties_before, ties_there)
        mass_before += mass
        ties_before += ties
    is_in = start_there + offsets < n
    x = tl.load(source_ptr + start_there + offsets, is_in, other=-float("inf"))
    weights, _ = _kept_weights(
        x, is_in, best, temperature, min_p, edge, num_ties, ties_there, BEST_BITS
    )
    cumulative = mass_there + tl.cumsum(weights, axis=0)
    return start_there + tl.sum((cumulative <= target).to(tl.int32))


@triton.jit
def _target(noise: tl.tensor, mass: tl.tensor) -> tl.tensor:
    """The cumulative weight that the token passes: below `mass`, also where its product rounds."""
    return tl.minimum((noise * mass.to(tl.float64)).to(tl.int64), mass - 1)


@triton.jit(do_not_specialize=["num_rows", "num_spans"])
def _pick(
    logits_ptr: tl.tensor,
    stride: tl.tensor,
    params_ptr: tl.tensor,
    best_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    is_sound_ptr: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    span: tl.tensor,
    num_spans: tl.tensor,
    BEST_BITS: tl.constexpr,
    MAX_SPANS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The token of each row without top_k and top_p, the best or one that is drawn.

    Of all rows whether they are sound, and the best token of those that are not.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(params_ptr + row)
    best, token = _best_of(best_ptr, row, num_spans, MAX_SPANS)
    is_drawn = _is_sound(best) & (temperature > 0.0)
    tl.store(is_sound_ptr + row, _is_sound(best).to(tl.int8))
    if is_drawn & _is_ranked(params_ptr, row, num_rows, vocab_size):
        return
    if is_drawn:
        spans = tl.arange(0, MAX_SPANS)
        masses = tl.load(masses_ptr + row * num_spans + spans, spans < num_spans, other=0)
        target = _target(tl.load(params_ptr + 4 * num_rows + row), tl.sum(masses))
        cumulative = tl.cumsum(masses, axis=0)
        span_id = tl.sum(((cumulative <= target) & (spans < num_spans)).to(tl.int32))
        first = span_id * span
        position = _passes(
            logits_ptr + row * stride + first,
            tl.minimum(span, vocab_size - first),
            target - tl.sum(tl.where(spans < span_id, masses, 0)),
            best,
            temperature,
            tl.load(params_ptr + 3 * num_rows + row),
            _NO_EDGE,
            0,
            BEST_BITS,
            BLOCK,
        )
        token = (first + position).to(tl.int64)
    tl.store(token_ids_ptr + row, token)


@triton.jit
def _edge(
    source_ptr: tl.tensor,
    n: tl.tensor,
    wanted: tl.tensor,
    low: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    BY_MASS: tl.constexpr,
    BEST_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The highest order from which on up the tokens have the `wanted` mass, or are that many.

    They do from `low` on, which is not asked. Each pass cuts what is left in NUM_PIVOTS + 1 parts.
    """
    offsets = tl.arange(0, BLOCK)
    high = _order(best).to(tl.int64)
    low = low.to(tl.int64)
    while low < high:
        step = (high - low) // (_NUM_PIVOTS + 1) + 1
        pivots = low + (tl.arange(0, _NUM_PIVOTS) + 1) * step
        # One that is above all floats is above `high` as well, and nothing is there.
        pivots = tl.minimum(pivots, _NOT_A_NUMBER).to(tl.int32)
        found = tl.zeros([BLOCK, _NUM_PIVOTS], tl.int64)
        for start in tl.range(0, n, BLOCK, num_stages=_NUM_STAGES):
            x = tl.load(source_ptr + start + offsets, start + offsets < n, other=-float("inf"))
            if BY_MASS:
                amount = _weight(_distance(x, best, temperature), 0.0, BEST_BITS)
            else:
                amount = tl.full([BLOCK], 1, tl.int64)
            is_from = _order(x)[:, None] >= pivots[None, :]
            found += tl.where(is_from, amount[:, None], 0)
        is_reached = tl.sum(found, axis=0).to(tl.float64) >= wanted
        low += tl.sum(is_reached.to(tl.int32)) * step
        high = tl.minimum(high, low + step - 1)
    return low.to(tl.int32)


@triton.jit
def _ties_to_reach(
    wanted: tl.tensor, above: tl.tensor, weight: tl.tensor, n: tl.tensor
) -> tl.tensor:
    """How many of at most `n` tokens of one weight it takes, with the mass above, at least one."""
    low = tl.full([], 1, tl.int32)
    high = tl.maximum(n, 1)
    while low < high:
        middle = (low + high) // 2
        if (above + middle.to(tl.int64) * weight).to(tl.float64) >= wanted:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _mass_kept(
    source_ptr: tl.tensor,
    n: tl.tensor,
    edge: tl.tensor,
    num_ties: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    BEST_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The weights above the edge, and of so many tokens at it."""
    above = _mass_from(source_ptr, n, edge + 1, best, temperature, min_p, BEST_BITS, BLOCK)
    at_edge = _weight(_distance(_value(edge), best, temperature), min_p, BEST_BITS)
    return above + tl.where(num_ties > 0, num_ties.to(tl.int64) * at_edge, 0)


@triton.jit(do_not_specialize=["num_rows", "num_spans"])
def _pick_ranked(
    logits_ptr: tl.tensor,
    stride: tl.tensor,
    params_ptr: tl.tensor,
    best_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    values_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    num_gathered_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    num_spans: tl.tensor,
    CAPACITY: tl.constexpr,
    BEST_BITS: tl.constexpr,
    MAX_SPANS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The token of each row that is drawn of those that top_k, then top_p, then min_p leave."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(params_ptr + row)
    best, _ = _best_of(best_ptr, row, num_spans, MAX_SPANS)
    is_drawn = _is_sound(best) & (temperature > 0.0)
    if is_drawn & _is_ranked(params_ptr, row, num_rows, vocab_size):
        top_k = tl.load(params_ptr + num_rows + row)
        top_p = tl.load(params_ptr + 2 * num_rows + row)
        has_top_k = top_k < vocab_size
        spans = tl.arange(0, MAX_SPANS)
        mass = tl.sum(tl.load(masses_ptr + row * num_spans + spans, spans < num_spans, other=0))

        source_ptr = values_ptr + row * CAPACITY
        n = tl.load(num_gathered_ptr + row)
        is_gathered = n >= 0
        if is_gathered & (top_k >= vocab_size):
            found = _mass_from(source_ptr, n, _NO_EDGE, best, temperature, 0.0, BEST_BITS, BLOCK)
            is_gathered = found.to(tl.float64) >= top_p * mass.to(tl.float64)
        if not is_gathered:
            source_ptr = logits_ptr + row * stride
            n = vocab_size

        # What is kept: the tokens above the edge, and the first `num_ties` of those at it.
        edge = _lowest(source_ptr, n, BLOCK) - 1
        num_ties = tl.full([], 0, tl.int32)
        if has_top_k & (top_k < n):
            edge = _edge(source_ptr, n, top_k, edge, best, temperature, False, BEST_BITS, BLOCK)
            num_ties = top_k.to(tl.int32) - _num_from(source_ptr, n, edge + 1, BLOCK)
        if top_p < 1.0:
            if has_top_k:
                mass = _mass_kept(
                    source_ptr, n, edge, num_ties, best, temperature, 0.0, BEST_BITS, BLOCK
                )
            wanted = top_p * mass.to(tl.float64)
            edge = _edge(source_ptr, n, wanted, edge, best, temperature, True, BEST_BITS, BLOCK)
            above = _mass_from(source_ptr, n, edge + 1, best, temperature, 0.0, BEST_BITS, BLOCK)
            at_edge = _weight(_distance(_value(edge), best, temperature), 0.0, BEST_BITS)
            num_ties = _ties_to_reach(wanted, above, at_edge, n)

        min_p = tl.load(params_ptr + 3 * num_rows + row)
        kept = _mass_kept(source_ptr, n, edge, num_ties, best, temperature, min_p, BEST_BITS, BLOCK)
        position = _passes(
            source_ptr,
            n,
            _target(tl.load(params_ptr + 4 * num_rows + row), kept),
            best,
            temperature,
            min_p,
            edge,
            num_ties,
            BEST_BITS,
            BLOCK,
        )
        token = position.to(tl.int64)
        if is_gathered:
            token = tl.load(ids_ptr + row * CAPACITY + position).to(tl.int64)
        tl.store(token_ids_ptr + row, token)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingShape:
    """How the work is cut. Reasoned for an H200, not measured.

    A row is cut into as many spans, at most `max_spans`, as it takes for `num_programs` programs:
    four or five for each that the device runs at a time, so that the last ones leave little of it
    idle. `capacity` tokens of a row can be gathered, in 64 KiB. Bins are a quarter of a nat wide
    with 128 of them: then up to about a quarter more mass is gathered than is kept.
    """

    block: int = 1024  # tokens that a program works on at a time
    num_warps: int = 4
    pick_block: int = 512
    num_pick_warps: int = 4
    num_search_warps: int = 8  # of those that search for an edge: more registers would be spilled
    max_spans: int = 32
    num_bins: int = 128
    capacity: int = 8192
    num_programs: int = 4096
    max_rows: int = 1024  # at once: bounds the memory for what is gathered

    def num_spans(self, num_rows: int, vocab_size: int) -> int:
        """At most; whole blocks in each may need fewer."""
        num_wanted: int = triton.cdiv(self.num_programs, num_rows)
        num_blocks: int = triton.cdiv(vocab_size, self.block)
        return min(self.max_spans, num_blocks, num_wanted)


class _Forms(NamedTuple):
    """The forms of the kernels for one vocabulary."""

    find_best: KernelForm
    weigh: KernelForm
    gather: KernelForm
    pick: KernelForm
    pick_ranked: KernelForm

    @classmethod
    def of(cls, vocab_size: int, shape: SamplingShape) -> _Forms:
        block = {"BLOCK": shape.block}
        capacity = {"CAPACITY": shape.capacity}
        row = {"BEST_BITS": best_bits(vocab_size), "MAX_SPANS": shape.max_spans}
        binned = {**row, "NUM_BINS": shape.num_bins}
        pick_block = {"BLOCK": shape.pick_block}
        return cls(
            find_best=KernelForm(block, shape.num_warps),
            weigh=KernelForm({**binned, **block}, shape.num_warps),
            gather=KernelForm({**binned, **capacity, **block}, shape.num_warps),
            pick=KernelForm({**row, **pick_block}, shape.num_pick_warps),
            pick_ranked=KernelForm({**row, **capacity, **pick_block}, shape.num_search_warps),
        )


def draw_tokens(
    logits: Tensor, params: DrawParams, shape: SamplingShape | None = None
) -> DrawnTokens:
    """`Kernels.draw_tokens`, in two launches for greedy rows up to five."""
    shape = shape or SamplingShape()
    num_rows = len(logits)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    is_sound = torch.empty(num_rows, dtype=torch.uint8, device=logits.device)
    for start in range(0, num_rows, shape.max_rows):
        rows = slice(start, min(start + shape.max_rows, num_rows))
        _launch(logits[rows], params.part(rows), token_ids[rows], is_sound[rows], shape)
    return DrawnTokens(token_ids, is_sound.view(torch.bool))


def _launch(
    logits: Tensor, params: DrawParams, token_ids: Tensor, is_sound: Tensor, shape: SamplingShape
) -> None:
    """Draw from a bounded number of rows into `token_ids` and `is_sound`."""
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, shape.block)
    span = triton.cdiv(num_blocks, shape.num_spans(num_rows, vocab_size)) * shape.block
    num_spans = triton.cdiv(vocab_size, span)
    num_cells = num_rows * num_spans
    # Kernels that do not run need no memory between them, and those that do not read it no address.
    num_drawn_cells = num_cells if len(params.drawn_rows) else 0
    num_ranked_cells = num_cells if len(params.ranked_rows(vocab_size)) else 0
    num_gatherable = num_rows * shape.capacity if num_ranked_cells else 0

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=logits.device)

    best = empty(num_cells, torch.int64)
    masses = empty(num_drawn_cells, torch.int64)
    counts = empty(num_ranked_cells * shape.num_bins, torch.int32)
    values = empty(num_gatherable, torch.float32)
    ids = empty(num_gatherable, torch.int32)
    num_gathered = empty(num_rows, torch.int32)

    forms = _Forms.of(vocab_size, shape)
    source = (logits, logits.stride(0))
    cells = (num_rows, num_spans)
    sizes = (vocab_size, span, num_spans)
    _find_best[cells](
        *source, best, *sizes, **forms.find_best.constants, num_warps=forms.find_best.num_warps
    )
    if num_drawn_cells:
        _weigh[cells](
            *source,
            *(params.on_device, best, masses, counts),
            *(num_rows, *sizes),
            **forms.weigh.constants,
            num_warps=forms.weigh.num_warps,
        )
    if num_ranked_cells:
        _gather[cells](
            *source,
            *(params.on_device, best, masses, counts, values, ids, num_gathered),
            *(num_rows, *sizes),
            **forms.gather.constants,
            num_warps=forms.gather.num_warps,
        )
    _pick[(num_rows,)](
        *source,
        *(params.on_device, best, masses, token_ids, is_sound),
        *(num_rows, *sizes),
        **forms.pick.constants,
        num_warps=forms.pick.num_warps,
    )
    if num_ranked_cells:
        _pick_ranked[(num_rows,)](
            *source,
            *(params.on_device, best, masses, values, ids, num_gathered, token_ids),
            *(num_rows, vocab_size, num_spans),
            **forms.pick_ranked.constants,
            num_warps=forms.pick_ranked.num_warps,
        )


# SmolLM2 and Mistral; Llama 3; Qwen 3 and the first Gemmas; Gemma 3.
_VOCAB_SIZES = (49_152, 128_256, 151_936, 262_144)

_SIGNATURE = MappingProxyType(
    {
        "logits_ptr": "*fp32",
        "stride": "i32:16",
        "params_ptr": "*fp64",
        "best_ptr": "*i64",
        "masses_ptr": "*i64",
        "counts_ptr": "*i32",
        "values_ptr": "*fp32",
        "ids_ptr": "*i32",
        "num_gathered_ptr": "*i32",
        "token_ids_ptr": "*i64",
        "is_sound_ptr": "*u8",
        "num_rows": "i32",
        "vocab_size": "i32:16",
        "span": "i32:16",
        "num_spans": "i32",
    }
)


_KERNELS = (_find_best, _weigh, _gather, _pick, _pick_ranked)


def specializations() -> Iterator[Specialization]:
    """The forms for the vocabularies of common models."""
    for vocab_size in _VOCAB_SIZES:
        forms = _Forms.of(vocab_size, SamplingShape())
        for function, form in zip(_KERNELS, forms, strict=True):
            signature = {
                name: text for name, text in _SIGNATURE.items() if name in function.arg_names
            }
            name = f"{function.__name__.strip('_').replace('_', '-')}-{vocab_size}"
            yield form.specialization(name, function, signature)
