"""A request as it was asked, and the state of the sequence that answers it.

Knows no tensors and reads no clock.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from sapwood.radix import Lease, Namespace
from sapwood.runtime.answer_format import AnswerFormat
from sapwood.runtime.constraints.interface import Matcher
from sapwood.runtime.hints import NO_HINTS, Hints
from sapwood.runtime.outputs import FinishReason, RequestMetrics, TokenLogprobs
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.scoring import PromptScores, SequenceScores, TokenScores
from sapwood.runtime.stop import StopMatcher
from sapwood.runtime.turns import ChatPrompt

TokenIds = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A checked request: it fits the context, and its options are within their ranges.

    `max_tokens` and `seed` are settled here, so that nothing below has to decide them.
    `request_id` is the engine's own and never used twice: what is still told of a request that its
    caller has left cannot reach another one. `caller_id` is the name that the caller gave it.
    """

    request_id: str
    caller_id: str
    prompt_token_ids: TokenIds  # int32 [num_prompt_tokens], at least one
    sampling: SamplingParams
    max_tokens: int
    seed: int
    eos_token_ids: tuple[int, ...]
    arrival_time: float  # seconds, the engine's clock
    namespace: Namespace = ()
    chat: ChatPrompt | None = None  # of a conversation: what its next turn will need
    matcher: Matcher | None = None  # at the start of the answer; copied for each
    answer_format: AnswerFormat | None = None  # how the text is read
    hints: Hints = NO_HINTS  # of its program's future; they change no answer
    # Special tokens that are part of the text all the same, with their bytes.
    visible_tokens: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Every token id that ends the answer."""
        eos = () if self.sampling.ignore_eos else self.eos_token_ids
        return frozenset((*eos, *self.sampling.stop_token_ids))


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a sequence ends with its newest token: a reason, or an error."""

    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    error: str | None = None
    is_by_end_token: bool = False


class Sequence:
    """The one mutable state of an answer. Only the scheduler changes it.

    A request of n answers begins as the sequence of the first one, which computes the prompt. The
    others are forked from it when its first token is drawn; until then it takes n seats.

    Steps may be in flight when the next one is planned, so it knows beside what is how far they
    will bring it; without one in flight, `num_in_flight` and `num_pending` are 0.

        tokens     [0 ............ num_tokens) [pending)
        computed   [0 .. num_computed) [in flight .... )

    Invariants: `0 <= num_computed <= num_tokens`; nothing is in flight beyond the pending token; a
    lease is held exactly while running; tokens `[0, num_computed)` have their keys and values in
    the lease's blocks.
    """

    __slots__ = (
        "_buffer",
        "answer_index",
        "arrival_index",
        "early_stop",
        "end_token_ids",
        "first_scheduled_time",
        "first_token_time",
        "lease",
        "match_version",
        "matcher",
        "num_cached_prompt_tokens",
        "num_computed",
        "num_drafts",
        "num_in_flight",
        "num_matched",
        "num_overtaken",
        "num_pending",
        "num_preemptions",
        "prefill_end",
        "num_prompt_tokens",
        "num_to_fork",
        "num_tokens",
        "num_told",
        "request",
        "scores",
        "stop_matcher",
    )

    def __init__(self, request: Request, arrival_index: int, answer_index: int = 0) -> None:
        sampling = request.sampling
        self.request = request
        self.arrival_index = arrival_index
        self.answer_index = answer_index
        self.num_to_fork = sampling.num_computed_answers - 1 if answer_index == 0 else 0
        self.num_prompt_tokens = self.num_tokens = request.num_prompt_tokens
        self.num_told = 0  # generated tokens that an output had
        self.num_computed = 0
        self.num_in_flight = 0  # tokens behind `num_computed` that steps in flight compute
        self.num_pending = 0  # tokens behind `num_tokens` that steps in flight draw
        self.num_drafts = 0  # tokens behind `num_tokens` that are to be tried
        self.prefill_end = self.num_tokens  # of the prompt, or of what a preemption lost
        self.early_stop: Stop | None = None  # why it ends without a token being drawn
        self.matcher = None if request.matcher is None else request.matcher.copy()
        self.lease: Lease | None = None
        self.num_cached_prompt_tokens: int | None = None  # counted once, at first admission
        self.num_matched = 0  # of the cache's version `match_version`
        self.match_version = -1
        self.num_overtaken = 0
        self.num_preemptions = 0
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.end_token_ids = request.end_token_ids
        self.stop_matcher = StopMatcher.of(sampling)
        self._buffer = request.prompt_token_ids
        self.scores: SequenceScores | None = None
        if sampling.needs_logprobs or sampling.prompt_logprobs is not None:
            # Only the first answer tells the prompt's.
            positions = _scored_positions(request) if answer_index == 0 else range(0)
            num_top = sampling.prompt_logprobs or 0
            self.scores = SequenceScores(request.num_prompt_tokens, positions, num_top)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def id(self) -> str:
        """Unique among the sequences of all requests."""
        return f"{self.request_id}/{self.answer_index}"

    @property
    def order(self) -> tuple[int, int]:
        """Sorts by arrival."""
        return self.arrival_index, self.answer_index

    @property
    def num_seats(self) -> int:
        """Running sequences that this one is, or is about to become."""
        return 1 + self.num_to_fork

    @property
    def settled_notes(self) -> NDArray[np.float32] | None:
        """Log-probabilities of the settled tokens, NaN where not known; None where none is."""
        return None if self.scores is None else self.scores.notes(self.num_computed)

    @property
    def first_unscored(self) -> int:
        """The first prompt position to score, the end of the prompt where there is none."""
        return self.num_prompt_tokens if self.scores is None else self.scores.first_missing

    @property
    def token_ids(self) -> TokenIds:
        """Prompt and answer so far, int32 [num_tokens]; a view."""
        return self._buffer[: self.num_tokens]

    @property
    def tried_token_ids(self) -> TokenIds:
        """Prompt, answer so far and then drafts, or pending tokens without a value yet; a view."""
        return self._buffer[: self.num_tokens + max(self.num_drafts, self.num_pending)]

    @property
    def settled_token_ids(self) -> TokenIds:
        """The tokens whose keys and values exist, int32 [num_computed]; a view."""
        return self._buffer[: self.num_computed]

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def num_launched(self) -> int:
        """Tokens that are computed, or that a step in flight computes."""
        return self.num_computed + self.num_in_flight

    @property
    def num_expected(self) -> int:
        """Tokens there are once the steps in flight have ended, if the answer goes on."""
        return self.num_tokens + self.num_pending

    @property
    def is_prefilling(self) -> bool:
        """Whether a part of its prompt, or of what it lost to a preemption, is not computed.

        Forced tokens that come with a drawn one are no prefill, however many they are.
        """
        return self.num_computed < self.prefill_end

    @property
    def plans_with_tokens(self) -> bool:
        """Whether a step cannot be planned for it before the last token drawn is known.

        The token itself may stay on the device, but not what follows from it on the host: masks,
        forced tokens and drafts of a constraint, counts of penalties, the answers forked with it.
        """
        has_penalties = self.request.sampling.has_penalties
        return self.matcher is not None or has_penalties or self.num_to_fork > 0

    @property
    def is_running(self) -> bool:
        return self.lease is not None

    @property
    def held_lease(self) -> Lease:
        """The lease of a running sequence."""
        assert self.lease is not None, "a waiting sequence holds no lease"
        return self.lease

    @property
    def untold_token_ids(self) -> tuple[int, ...]:
        """Generated tokens that no output had yet."""
        first = self.num_prompt_tokens + self.num_told
        return tuple(self._buffer[first : self.num_tokens].tolist())

    def launch(self, num_tokens: int, draws: bool) -> None:
        """A step is in flight that computes `num_tokens` more, and draws one if `draws`."""
        self.num_in_flight += num_tokens
        if draws:
            self.num_pending += 1
            self._make_room(self.num_pending)

    def settle(self, num_tokens: int, draws: bool) -> None:
        """That step has ended; what it drew is appended next."""
        self.num_computed += num_tokens
        self.num_in_flight -= num_tokens
        self.num_pending -= draws

    def append(self, token_id: int, logprob: float | None = None) -> None:
        """Add a generated token. Amortised O(1): the buffer doubles."""
        if self.scores is not None:
            self.scores.append(self.num_tokens, logprob)
        self._make_room(1)
        self._buffer[self.num_tokens] = token_id
        self.num_tokens += 1
        self.num_drafts = 0

    def draft(self, token_ids: SequenceOf[int]) -> None:
        """Tokens to try next; they are gone with the next token that is appended."""
        self.num_drafts = len(token_ids)
        if token_ids:
            self._make_room(len(token_ids))
            self._buffer[self.num_tokens : self.num_tokens + len(token_ids)] = token_ids

    def _make_room(self, num_tokens: int) -> None:
        if self.num_tokens + num_tokens > len(self._buffer):
            room = max(64, self.num_tokens)
            self._buffer = np.concatenate([self._buffer, np.empty(room, np.int32)])

    def failure(self, error: str, now: float) -> "SequenceOutput":
        """What there is to tell when it cannot go on."""
        return SequenceOutput(
            request_id=self.request_id,
            answer_index=self.answer_index,
            error=error,
            num_cached_tokens=self.num_cached_prompt_tokens or 0,
            metrics=self.metrics(finished_time=now),
        )

    def metrics(self, finished_time: float | None = None) -> RequestMetrics:
        return RequestMetrics(
            arrival_time=self.request.arrival_time,
            first_scheduled_time=self.first_scheduled_time,
            first_token_time=self.first_token_time,
            finished_time=finished_time,
            num_preemptions=self.num_preemptions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """What one step has to tell about one sequence. `error` is set when it failed.

    `prompt_scores` come once, with the first answer's first output.
    """

    request_id: str
    answer_index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    ended_by_token: bool = False
    error: str | None = None
    prompt_scores: PromptScores | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class WaitingQueue:
    """Sequences that wait, in arrival order, behind those that were preempted.

    O(1) to add and to remove by id.
    """

    __slots__ = ("_by_id", "_preempted")

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._preempted: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_id) + len(self._preempted)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted.values()
        yield from self._by_id.values()

    @property
    def preempted(self) -> list[Sequence]:
        """Those to resume before any other, earliest arrival first."""
        return sorted(self._preempted.values(), key=lambda seq: seq.order)

    def first(self, num_sequences: int) -> list[Sequence]:
        """Of those that never ran the first to arrive, in their order."""
        return list(islice(self._by_id.values(), num_sequences))

    def add(self, sequence: Sequence) -> None:
        self._by_id[sequence.id] = sequence

    def add_preempted(self, sequence: Sequence) -> None:
        self._preempted[sequence.id] = sequence

    def discard(self, sequence: Sequence) -> bool:
        """Take a sequence out; whether it waited here."""
        was_preempted = self._preempted.pop(sequence.id, None) is not None
        return self._by_id.pop(sequence.id, None) is not None or was_preempted


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token drawn for one chunk, with log-probabilities if they were asked for.

    `is_sound` is False where the model gave no finite logits, and then there is no token. `fault`
    is why, where it was not the model.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    is_sound: bool = True
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkResult:
    """What a chunk's logits gave: as many tokens as it draws, and the scores of those it scores."""

    sampled: tuple[SampledToken, ...] = ()
    scores: TokenScores | None = None


def _scored_positions(request: Request) -> range:
    """Prompt positions whose log-probability is asked for; the first token has none."""
    if request.sampling.prompt_logprobs is None:
        return range(0)
    start = max(1, request.sampling.prompt_logprobs_start)
    return range(start, max(start, request.num_prompt_tokens))
