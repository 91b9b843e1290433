"""Logits to tokens.

`SamplingParams` tells what is done, and in what order. Every row is computed from its own logits,
parameters, seed, position and tokens; what else is in the batch does not matter, to the last bit.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sapwood.runtime.constraints.interface import GrammarError, Matcher
from sapwood.runtime.noise import answer_seed, uniform
from sapwood.runtime.outputs import Logprob, TokenLogprobs
from sapwood.runtime.request import SampledToken, Sequence, TokenIds
from sapwood.runtime.sampling_params import SamplingParams, TokenEdits
from sapwood.runtime.scoring import TokenScores
from sapwood.runtime.step_plan import Chunk
from sapwood.runtime.token_masks import TokenMasks

# How many logits are worked on at once: 32 MiB in float64, whatever the batch and the vocabulary.
_SLICE_SIZE = 2**22


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingRow:
    """One token to draw, from row `logits_index` of the logits. Several may draw from one row.

    `token_ids` are the prompt and the answer so far, int32 [position]: a view, read at once, and
    only for penalties, where none of them is pending.
    `held_off_token_ids` may not be drawn: those that would end the answer too early. `matcher`,
    where the answer is constrained, says what else may not.
    """

    params: SamplingParams
    seed: int
    logits_index: int
    token_ids: TokenIds
    num_prompt_tokens: int
    held_off_token_ids: tuple[int, ...] = ()
    matcher: Matcher | None = None

    @classmethod
    def of(
        cls, chunk: Chunk, logits_index: int, num_forks: int = 0, num_tried: int = 0
    ) -> "SamplingRow":
        """For the token after a chunk, or of the `num_forks`-th sequence that is forked there.

        With `num_tried`, for the one after that many of its drafts.
        """
        sequence = chunk.sequence
        params = sequence.request.sampling
        num_known = chunk.end - chunk.num_drafts + num_tried
        num_generated = num_known - sequence.request.num_prompt_tokens
        hold_off_end = num_generated < params.min_tokens
        held_off = sequence.end_token_ids if hold_off_end else frozenset[int]()
        if sequence.matcher is not None and params.ignore_eos:
            held_off |= frozenset(sequence.request.eos_token_ids)  # its mask may have them
        return cls(
            params=params,
            seed=answer_seed(sequence.request.seed, sequence.answer_index + num_forks),
            logits_index=logits_index,
            token_ids=sequence.tried_token_ids[:num_known],
            num_prompt_tokens=sequence.request.num_prompt_tokens,
            held_off_token_ids=tuple(held_off),
            matcher=_matcher_after(sequence, num_tried),
        )

    @property
    def position(self) -> int:
        """Of the token to draw."""
        return len(self.token_ids)


def _matcher_after(sequence: Sequence, num_tried: int) -> Matcher | None:
    """What constrains the token after that many drafts.

    Where it does not take a draft, that one is not drawn, and what comes after does not count.
    """
    if sequence.matcher is None or not num_tried:
        return sequence.matcher
    matcher = sequence.matcher.copy()
    drafts = sequence.tried_token_ids[sequence.num_tokens :][:num_tried].tolist()
    with suppress(GrammarError):
        all(map(matcher.advance, drafts))
    return matcher


def sample(
    logits: Tensor, rows: SequenceOf[SamplingRow], masks: TokenMasks | None = None
) -> list[SampledToken]:
    """Draw one token for each of `rows` from `logits` float32 [*, vocab_size]; may overwrite them.

    `masks` are needed where a row has a matcher. A row whose matcher fails is told as not sound,
    with the reason. A row without a finite maximum (a broken checkpoint, float16 beyond its range,
    no token left that may be drawn) is told as not sound and disturbs no other.

    O(num_rows * vocab_size), a sort of each row that has top_k or top_p, and a sort of the tokens
    so far of each that has penalties.
    """
    if not rows:
        return []
    model_logprobs = _ModelLogprobs.of(logits, rows)
    logits = _row_for_each(logits, rows)
    errors = _apply_masks(logits, rows, masks)
    edit_logits(logits, rows)
    token_ids = _argmax(logits)
    # NaN and infinities show in the maximum, and NaN counts as the highest of all.
    is_sound: list[bool] = logits.gather(1, token_ids[:, None])[:, 0].isfinite().tolist()
    for index in errors:
        is_sound[index] = False
    drawn = [i for i, row in enumerate(rows) if is_sound[i] and not row.params.is_greedy]
    for part in _slices(len(drawn), logits.shape[1]):
        indices = drawn[part]
        chosen = [rows[i] for i in indices]
        token_ids[indices] = _draw(_weights(logits[indices], chosen), chosen)
    tokens: list[int] = token_ids.tolist()
    logprobs = model_logprobs.told(rows, tokens)
    faults = [errors.get(index) for index in range(len(rows))]
    return [SampledToken(*parts) for parts in zip(tokens, logprobs, is_sound, faults, strict=True)]


def _apply_masks(
    logits: Tensor, rows: SequenceOf[SamplingRow], masks: TokenMasks | None
) -> dict[int, str]:
    """Take out what constraints do not allow; what went wrong, by row."""
    matchers = {i: row.matcher for i, row in enumerate(rows) if row.matcher is not None}
    if not matchers:
        return {}
    assert masks is not None, "a row is constrained and there is no room for masks"
    return masks.apply(logits, matchers)


def prompt_logprobs(logits: Tensor, next_token_ids: TokenIds, num_top: int) -> TokenScores:
    """What each row of `logits` float32 [num_rows, vocab_size] gives the token that does follow.

    The same numbers, bit for bit, as `sample` tells of a token that it draws from such a row. The
    logits are left as they are; beside them 16 MiB are in use at a time.
    """
    vocab_size = logits.shape[1]
    following = torch.from_numpy(next_token_ids.astype(np.int64)).to(logits.device)
    num_top = min(num_top, vocab_size)
    found = TokenScores(
        logprobs=np.empty(len(logits), np.float32),
        top_ids=np.empty((len(logits), num_top), np.int32),
        top_logprobs=np.empty((len(logits), num_top), np.float32),
    )
    for part in _slices(len(logits), vocab_size):
        of_all = _log_softmax(logits[part])
        found.logprobs[part] = of_all.gather(1, following[part, None])[:, 0].cpu().numpy()
        top = _top(of_all, num_top)
        found.top_ids[part] = top.token_ids.cpu().numpy()
        found.top_logprobs[part] = top.logprobs.cpu().numpy()
    return found


def _slices(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """All rows, a few at a time."""
    num_at_once = max(1, _SLICE_SIZE // vocab_size)
    for start in range(0, num_rows, num_at_once):
        yield slice(start, min(start + num_at_once, num_rows))


def _row_for_each(logits: Tensor, rows: SequenceOf[SamplingRow]) -> Tensor:
    """Logits [num_rows, vocab_size] in the order of `rows`, each with a row of its own."""
    indices = [row.logits_index for row in rows]
    if indices == list(range(len(logits))):
        return logits
    return logits[indices]


# -- the logits of single tokens ---------------------------------------------------------------


def edit_logits(logits: Tensor, rows: SequenceOf[SamplingRow]) -> None:
    """Take tokens out, add biases, then penalise; in place, one row of `logits` for each of `rows`.

    Everything that comes before temperature. Sums are taken in float64 and rounded once.
    """
    for index, row in enumerate(rows):
        edits = row.params.token_edits
        if edits is not None:
            _take_out(logits[index], edits)
        if row.held_off_token_ids:
            held_off = _ids_within(np.array(sorted(row.held_off_token_ids), np.int64), logits)
            logits[index, held_off] = -torch.inf
        if edits is not None and len(edits.biased):
            _add_biases(logits[index], edits)
    _penalise(logits, rows)


def _take_out(logits: Tensor, edits: TokenEdits) -> None:
    """`logits` [vocab_size] of one row; banned tokens and those not allowed get -inf."""
    if edits.allowed is not None:
        allowed = _ids_within(edits.allowed, logits)
        kept = logits[allowed]
        logits.fill_(-torch.inf)
        logits[allowed] = kept
    elif len(edits.banned):
        logits[_ids_within(edits.banned, logits)] = -torch.inf


def _add_biases(logits: Tensor, edits: TokenEdits) -> None:
    biased = _ids_within(edits.biased, logits)
    biases = torch.from_numpy(edits.biases[: len(biased)]).to(logits.device)
    logits[biased] = (logits[biased].double() + biases).float()


def _ids_within(token_ids: NDArray[np.int64], logits: Tensor) -> Tensor:
    """Those of sorted ids that the logits have a place for, as an index."""
    num_within = int(np.searchsorted(token_ids, logits.shape[-1]))
    return torch.from_numpy(token_ids[:num_within]).to(logits.device)


@dataclass(frozen=True, slots=True, eq=False)
class _SeenTokens:
    """The distinct tokens that one row's penalties look at, and how often the answer has each."""

    token_ids: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, row: SamplingRow, vocab_size: int) -> "_SeenTokens":
        generated = row.token_ids[row.num_prompt_tokens :]
        token_ids, counts = np.unique(generated, return_counts=True)
        if row.params.repetition_penalty != 1.0:
            in_answer, in_answer_counts = token_ids, counts
            token_ids = np.unique(row.token_ids)
            counts = np.zeros(len(token_ids), np.int64)
            counts[np.searchsorted(token_ids, in_answer)] = in_answer_counts
        num_within = int(np.searchsorted(token_ids, vocab_size))
        return cls(token_ids[:num_within].astype(np.int64), counts[:num_within])


def _penalise(logits: Tensor, rows: SequenceOf[SamplingRow]) -> None:
    """Repetition, then frequency and presence penalties, in place; touches the tokens seen only."""
    indices = [index for index, row in enumerate(rows) if row.params.has_penalties]
    if not indices:
        return
    seen = [_SeenTokens.of(rows[index], logits.shape[1]) for index in indices]
    params = [rows[index].params for index in indices]
    num_seen = [len(tokens.token_ids) for tokens in seen]
    penalties = [
        tokens.counts * p.frequency_penalty + (tokens.counts > 0) * p.presence_penalty
        for tokens, p in zip(seen, params, strict=True)
    ]
    place = (
        _indices(np.repeat(indices, num_seen), logits),
        _indices(np.concatenate([tokens.token_ids for tokens in seen]), logits),
    )
    repetition = np.repeat([float(p.repetition_penalty) for p in params], num_seen)
    logits[place] = _penalised(
        logits[place],
        repetition=torch.from_numpy(repetition).to(logits.device),
        subtracted=torch.from_numpy(np.concatenate(penalties)).to(logits.device),
    )


def _penalised(logits: Tensor, *, repetition: Tensor, subtracted: Tensor) -> Tensor:
    """float32 [num_tokens]. What was finite stays finite, however small a penalty divides it."""
    exact = logits.double()
    exact = torch.where(exact > 0, exact / repetition, exact * repetition) - subtracted
    largest = torch.finfo(torch.float32).max
    return torch.where(logits.isfinite(), exact.clamp(-largest, largest).float(), logits)


def _indices(values: NDArray[np.int64], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)


# -- the draw ----------------------------------------------------------------------------------


def _argmax(logits: Tensor) -> Tensor:
    """The first of the highest in each row; int64 [num_rows]."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(axis=-1))  # torch's takes six times as long


def _weights(logits: Tensor, rows: SequenceOf[SamplingRow]) -> Tensor:
    """Unnormalised probabilities after temperature, top_k, top_p and min_p, in that order.

    int64 [num_rows, vocab_size]: whole numbers, so that sums over a row are exact in whatever
    order a device takes them; it varies with the batch. A token is kept if it has at least
    2**-43 (with half a million tokens) of the best one's probability. Of equally likely tokens at
    an edge the lower ids stay.
    """
    vocab_size = logits.shape[1]
    temperature = _column([row.params.temperature for row in rows], logits)
    # In two steps, so that a tiny temperature gives infinities below the best and not NaN.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).double() / temperature
    relative = scaled.exp_()  # to the best token's probability
    best_weight = 2.0 ** (62 - vocab_size.bit_length())  # a row's sum stays below 2**62
    weights = (relative * best_weight).round_().long()
    ranked = [i for i, row in enumerate(rows) if row.params.top_k > 0 or row.params.top_p < 1.0]
    if ranked:
        chosen = [rows[i] for i in ranked]
        weights[ranked] = _best_of(weights[ranked], logits[ranked], chosen)
    if any(row.params.min_p > 0.0 for row in rows):
        weights[relative < _column([row.params.min_p for row in rows], logits)] = 0
    return weights


def _best_of(weights: Tensor, logits: Tensor, rows: SequenceOf[SamplingRow]) -> Tensor:
    """`weights` with zeros where top_k, then top_p, leaves a token out."""
    vocab_size = logits.shape[1]
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    ordered = weights.gather(1, ids)
    limits = [row.params.top_k if row.params.top_k > 0 else vocab_size for row in rows]
    top_k = _column(limits, logits)
    ordered[torch.arange(vocab_size, device=logits.device) >= top_k] = 0
    cumulative = ordered.cumsum(dim=-1)
    before, total = cumulative - ordered, cumulative[:, -1:]
    top_p = _column([row.params.top_p for row in rows], logits)
    ordered[(before.double() >= top_p * total.double()) & (top_p < 1.0)] = 0
    return torch.zeros_like(weights).scatter_(1, ids, ordered)


def _draw(weights: Tensor, rows: SequenceOf[SamplingRow]) -> Tensor:
    """The token at which the cumulative sum, in token-id order, passes a uniform number."""
    seeds = np.array([row.seed for row in rows], np.int64)
    positions = np.array([row.position for row in rows], np.int64)
    noise = torch.from_numpy(uniform(seeds, positions)).to(weights.device)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Rounding must not carry the product up to the total, where no token is left.
    target = torch.minimum((noise[:, None] * total.double()).long(), total - 1)
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _column(values: SequenceOf[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


# -- log-probabilities -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Top:
    """The most likely tokens of each row, the most likely first, equally likely ones by id."""

    token_ids: Tensor  # int64 [num_rows, num_top]
    logprobs: Tensor  # float32 [num_rows, num_top]


@dataclass(frozen=True, slots=True, eq=False)
class _ModelLogprobs:
    """The model's own log-probabilities, taken before anything was masked.

    `slots` finds the row of `of_all` for those rows of the logits that were asked for.
    """

    slots: dict[int, int]
    of_all: Tensor  # [num_slots, vocab_size]
    top: list[list[Logprob]]

    @classmethod
    def of(cls, logits: Tensor, rows: SequenceOf[SamplingRow]) -> "_ModelLogprobs":
        asking = [row for row in rows if row.params.needs_logprobs]
        if not asking:
            return cls({}, logits[:0], [])
        slots = {index: i for i, index in enumerate(sorted({row.logits_index for row in asking}))}
        of_all = _log_softmax(logits[list(slots)])
        best = _top(of_all, max(row.params.top_logprobs for row in asking))
        pairs = zip(best.token_ids.tolist(), best.logprobs.tolist(), strict=True)
        return cls(slots, of_all, [[*map(Logprob, ids, values)] for ids, values in pairs])

    def told(
        self, rows: SequenceOf[SamplingRow], tokens: SequenceOf[int]
    ) -> list[TokenLogprobs | None]:
        """For each row that asks, the log-probability of its token and the most likely ones."""
        found: list[TokenLogprobs | None] = [None] * len(rows)
        asking = [i for i, row in enumerate(rows) if row.params.needs_logprobs]
        if not asking:
            return found
        slots = [self.slots[rows[i].logits_index] for i in asking]
        values = self.of_all[slots, [tokens[i] for i in asking]].tolist()
        for i, slot, value in zip(asking, slots, values, strict=True):
            top = tuple(self.top[slot][: rows[i].params.top_logprobs])
            found[i] = TokenLogprobs(token_id=tokens[i], logprob=value, top=top)
        return found


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), dim=-1)


def _top(logprobs: Tensor, num_top: int) -> _Top:
    """Of `logprobs` [num_rows, vocab_size]; fewer where the vocabulary is smaller."""
    best = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    token_ids, order = best.indices.sort(dim=-1)
    values, order = best.values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return _Top(token_ids.gather(1, order), values)
