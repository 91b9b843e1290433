"""Decides what every step computes, and what its results mean.

    plan    running sequences first, then waiting ones in the policy's order -> StepPlan
    commit  advance, publish, decide every stop, release                     -> SequenceOutput

The next step may be planned before the last one has ended: its tokens then count, though nobody
knows them yet. What that plan cannot be made without, it waits for (`plan` gives None).

Membership is decided before every step (Yu et al. 2022, Orca); prompts are cut into chunks under
one token budget (Agrawal et al. 2024, Sarathi-Serve); waiting requests are ordered by their longest
cached prefix (Zheng et al. 2024, SGLang). Knows no tensors, no text, and reads no clock.
"""

import logging
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from sapwood.radix import BlockCopy, PrefixCache
from sapwood.runtime.admission import LengthEstimator, PeakBudget
from sapwood.runtime.common_prefix import common_length
from sapwood.runtime.config import BatchingMode, SchedulerOptions
from sapwood.runtime.constraints.interface import GrammarError, Matcher
from sapwood.runtime.outputs import FinishReason
from sapwood.runtime.policy import SchedulingPolicy
from sapwood.runtime.programs import Programs
from sapwood.runtime.request import (
    ChunkResult,
    Request,
    SampledToken,
    Sequence,
    SequenceOutput,
    Stop,
    WaitingQueue,
)
from sapwood.runtime.scoring import PromptScores
from sapwood.runtime.segmenter import Segmenter
from sapwood.runtime.step_plan import Chunk, StepPlan
from sapwood.runtime.warm_prefixes import WarmPrefixes

logger = logging.getLogger(__name__)

# How many waiting requests a policy looks at, earliest first: it bounds the cost of a plan however
# long the queue is. Nobody behind them can be overtaken, as nobody behind them is admitted.
LOOKAHEAD = 512


@dataclass(slots=True)
class SchedulerCounters:
    """Running totals. Tokens of a prompt are counted once, at first admission."""

    num_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0  # rows of all steps
    generated_tokens: int = 0
    num_preemptions: int = 0
    num_taken_up: int = 0  # requests that came back to a prefix kept warm for them


class _NeedsCommit(Exception):
    """The plan cannot be made while a step is in flight."""


class Scheduler:
    """Owns every sequence, and each lease on the cache.

    Every plan is carried out, in order, and committed in the same order; until then it is in
    flight. No block gets free while a step in flight may read or write it, as the cache is told of
    both ends of each step.

    `max_model_len` bounds prompt and answer, in tokens; it is at most what the pool holds, so that
    a request that is alone always fits. `token_bytes` gives the bytes that each token id adds to
    the text, for stop strings.
    """

    def __init__(
        self,
        cache: PrefixCache,
        policy: SchedulingPolicy,
        options: SchedulerOptions,
        *,
        segmenter: Segmenter,
        max_model_len: int,
        token_bytes: SequenceOf[bytes] = (),
    ) -> None:
        if max_model_len > cache.num_blocks * cache.block_size:
            raise ValueError(
                f"max_model_len is {max_model_len}, the pool holds "
                f"{cache.num_blocks * cache.block_size} tokens"
            )
        self.counters = SchedulerCounters()
        self._cache = cache
        self._policy = policy
        self._options = options
        self._segmenter = segmenter
        self._max_model_len = max_model_len
        self._token_bytes = token_bytes
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []  # in the order of arrival
        self._unfinished: dict[str, list[Sequence]] = {}  # of each request
        self._in_flight: deque[StepPlan] = deque()  # planned and not yet committed
        self._num_planned = 0
        self._static_group: frozenset[str] = frozenset()
        self._estimator = LengthEstimator()
        self._warm = WarmPrefixes(cache)
        self._programs = Programs()
        self._num_arrived = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[Sequence]:
        return list(self._waiting)

    @property
    def running(self) -> list[Sequence]:
        """In the order of arrival."""
        return list(self._running)

    @property
    def cache(self) -> PrefixCache:
        return self._cache

    def add(self, request: Request) -> None:
        """Queue a request. O(1), and the tokens that its constraint forces at once."""
        sequence = self._begun(Sequence(request, self._num_arrived))
        self._waiting.add(sequence)
        self._unfinished[request.request_id] = [sequence]
        self._num_arrived += 1

    def abort(self, request_id: str, now: float) -> list[SequenceOutput]:
        """End a request wherever it is: an output for each answer that was not finished.

        What it computed stays in the tree; what a step in flight draws for it is dropped. Empty if
        it is not here (any more).
        """
        outputs = []
        for sequence in self._unfinished.pop(request_id, ()):
            if not self._waiting.discard(sequence):
                self._leave(sequence)
            for ended in (sequence, *self._unborn(sequence)):
                outputs.append(self._output(ended, now, stop=Stop(FinishReason.ABORT)))
        return outputs

    def preempt(self, num_sequences: int = 1) -> int:
        """Send the newest running sequences back to wait; how many there were to send.

        Raises ValueError while a step is in flight, which would draw tokens for them.
        """
        if self._in_flight:
            raise ValueError("a step is in flight; commit it before anything is preempted")
        victims = self._running[max(0, len(self._running) - num_sequences) :]
        for victim in reversed(victims):
            self._preempt(victim)
        return len(victims)

    def drop_running(self, cache: PrefixCache) -> list[Sequence]:
        """Forget every running sequence and go on with another, empty cache.

        For quarantine: the old cache is not touched, as it may be what is broken. Returns the
        sequences that held leases on it; those that wait are kept. What is in flight must have
        ended: it is never committed, and its blocks are given out anew.
        """
        self._in_flight.clear()
        dropped, self._running = self._running, []
        for sequence in dropped:
            sequence.lease = None
            self._waiting.discard(sequence)  # a preemption that broke left it in both
            self._forget(sequence)
        for sequence in self._waiting:
            sequence.match_version = -1
        self._cache = cache
        self._warm = WarmPrefixes(cache)
        return dropped

    def drop_waiting(self) -> list[Sequence]:
        """Forget every waiting sequence and return them."""
        dropped = list(self._waiting)
        self._waiting = WaitingQueue()
        for sequence in dropped:
            self._forget(sequence)
        return dropped

    def _forget(self, sequence: Sequence) -> None:
        """Take a sequence that has ended from those of its request."""
        siblings = self._unfinished.get(sequence.request_id, [])
        if sequence in siblings:
            siblings.remove(sequence)
        if not siblings:
            self._unfinished.pop(sequence.request_id, None)

    # -- plan ----------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, from now on in flight, or None when there is nothing to compute.

        While another step is in flight, None also says that it has to be committed first: what is
        next depends on tokens that it draws, or on room that it has yet to give back.
        """
        self._warm.expire(now)
        self._programs.expire(now)
        try:
            chunks = self._chunks(now)
        except _NeedsCommit:
            return None
        if not chunks:
            is_idle = not self._running and not self._waiting
            assert is_idle or self._in_flight, "work is left and nothing can run"
            return None
        plan = StepPlan(
            number=self._num_planned + 1,
            chunks=tuple(chunks),
            copies=tuple(copy for chunk in chunks if (copy := _copy_before(chunk)) is not None),
            attention=self._segmenter.plan(chunks),
        )
        self._launch(plan)
        return plan

    def _chunks(self, now: float) -> list[Chunk]:
        """What the next step computes. Raises _NeedsCommit."""
        if any(c.draws and c.sequence.plans_with_tokens for p in self._in_flight for c in p.chunks):
            raise _NeedsCommit
        chunks: list[Chunk] = []
        num_preemptions = self.counters.num_preemptions
        budget = self._options.step_budget()
        budget = self._plan_running(chunks, budget)
        if self.counters.num_preemptions == num_preemptions:
            self._admit(chunks, budget, now)
        return chunks

    def _launch(self, plan: StepPlan) -> None:
        """Note how far a step will bring its sequences."""
        self._num_planned = plan.number
        self._in_flight.append(plan)
        for chunk in plan.chunks:
            chunk.sequence.held_lease.launched(plan.number)
            chunk.sequence.launch(chunk.num_settling, chunk.draws)

    def _num_to_launch(self, sequence: Sequence) -> int:
        """Tokens of a running sequence that no step computes yet.

        None where all that is left is the end: the token in flight is the last that the answer may
        have. It has no row in the next step, and its seats are free for that.
        """
        num_expected = sequence.num_tokens + sequence.num_pending
        if sequence.num_pending:
            longest = sequence.num_prompt_tokens + sequence.request.max_tokens
            if num_expected >= min(longest, self._max_model_len):
                return 0
        return num_expected - sequence.num_computed - sequence.num_in_flight

    def _plan_running(self, chunks: list[Chunk], budget: int) -> int:
        """One token for each sequence that decodes, then the prompts in progress; the budget left.

        Those with one token to compute go first, so that a long prompt never stalls an answer.
        """
        for sequence in sorted(self._running, key=lambda s: s.num_launched < s.prefill_end):
            if not sequence.is_running:
                continue  # preempted by one before it
            length = min(self._num_to_launch(sequence), budget)
            if length and self._grow(sequence, sequence.num_launched + length):
                chunk = self._with_drafts(_chunk(sequence, length), budget - length)
                chunks.append(chunk)
                budget -= chunk.length
        return budget

    def _with_drafts(self, chunk: Chunk, budget: int) -> Chunk:
        """The chunk, and the drafts after it where they cost nobody else anything."""
        num_drafts = chunk.sequence.num_drafts
        if not num_drafts or num_drafts > budget or chunk.num_samples != 1:
            return chunk
        if not chunk.sequence.held_lease.extend(chunk.end + num_drafts):
            return chunk
        return replace(
            chunk,
            length=chunk.length + num_drafts,
            num_logits=chunk.num_logits + num_drafts,
            num_drafts=num_drafts,
        )

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Get blocks for `num_tokens` tokens, at the cost of the newest; False if that is it.

        Nobody is preempted for room that a step in flight is about to give back, nor while one
        draws for it: raises _NeedsCommit then.
        """
        while not sequence.held_lease.extend(num_tokens):
            if self._in_flight:
                raise _NeedsCommit
            victim = self._running[-1]
            assert len(self._running) > 1, "a sequence alone in the pool does not fit"
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Publish and release, so that the resume is a cache hit."""
        logger.debug("preempt %s", sequence.id)
        self._waiting.add_preempted(sequence)
        self._leave(sequence)
        sequence.num_preemptions += 1
        self.counters.num_preemptions += 1

    def _leave(self, sequence: Sequence, publish: bool = True) -> None:
        """Give the lease back; the tree keeps what was computed, unless it is not to be trusted."""
        lease = sequence.held_lease
        if publish:
            lease.publish(sequence.settled_token_ids, sequence.settled_notes)
        lease.release()
        sequence.lease = None
        sequence.num_computed = 0
        self._running.remove(sequence)

    # -- admission -----------------------------------------------------------------------------

    def _admit(self, chunks: list[Chunk], budget: int, now: float) -> None:
        """Fill the rest of the step with waiting sequences."""
        if not budget or not self._waiting:
            return
        num_seats = self._options.max_num_seqs - self._num_taken_seats()
        if num_seats <= 0:
            return
        peak = self._peak_budget()
        admitted: list[Sequence] = []
        held: set[str] = set()
        for sequence in self._candidates():
            if not budget or sequence.num_seats > num_seats:
                break
            if self._is_held(sequence):
                held.add(sequence.id)
                continue
            if not self._start(sequence, peak, now):
                break
            admitted.append(sequence)
            num_seats -= sequence.num_seats
            length = min(self._num_to_launch(sequence), budget)
            chunk = self._with_drafts(_chunk(sequence, length), budget - length)
            chunks.append(chunk)
            budget -= chunk.length
        self._count_overtaken(admitted, held)

    def _num_taken_seats(self) -> int:
        """Seats of the running sequences that go on."""
        return sum(s.num_seats for s in self._running if self._num_to_launch(s))

    def _candidates(self) -> list[Sequence]:
        """Who may be admitted: preempted, overtaken too often, then in the policy's order."""
        if self._options.mode is BatchingMode.STATIC:
            return self._static_candidates()
        aged: list[Sequence] = []
        others: list[Sequence] = []
        for sequence in self._waiting.first(LOOKAHEAD):
            is_aged = sequence.num_overtaken >= self._options.max_overtakes
            (aged if is_aged else others).append(sequence)
        ordered = self._policy.order(others, self._num_matched, self._programs.ranks(others))
        return [*self._waiting.preempted, *aged, *ordered]

    def _static_candidates(self) -> list[Sequence]:
        """The members of the frozen group that have yet to start; a new group once it is done."""
        waiting = [*self._waiting.preempted, *self._waiting.first(LOOKAHEAD)]
        group = [s for s in waiting if s.request_id in self._static_group]
        if not self._running and not group:
            group = waiting[: self._options.max_num_seqs]
            self._static_group = frozenset(s.request_id for s in group)
        return group

    def _num_matched(self, sequence: Sequence) -> int:
        """Tokens of the longest cached prefix; looked up again only when the tree has changed."""
        if sequence.match_version != self._cache.version:
            match = self._cache.match(sequence.token_ids, sequence.request.namespace)
            sequence.num_matched = match.num_tokens
            sequence.match_version = self._cache.version
        return sequence.num_matched

    def _is_held(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to compute what this one lacks (single flight).

        Waiting must save at least one token. The last token is computed in any case, so it never
        counts. The hold ends when the running one has published their common prefix, which it
        does after every chunk, or has left.
        """
        if not self._cache.enabled:
            return False
        num_matched = self._num_matched(sequence)
        for other in self._running:
            if not other.is_prefilling or other.request.namespace != sequence.request.namespace:
                continue
            num_usable = self._num_usable(sequence, other)
            num_common = common_length(other.token_ids, sequence.token_ids[:num_usable])
            if num_common > max(num_matched, other.num_computed):
                return True
        return False

    def _num_usable(self, sequence: Sequence, other: Sequence) -> int:
        """Leading tokens that need not be computed once `other` has published them."""
        scores = sequence.scores
        if scores is None or not scores.wanted:
            return sequence.num_tokens - 1
        tells_scores = other.scores is not None and bool(other.scores.wanted)
        if scores.may_use_cached and tells_scores:
            return sequence.num_tokens - 1
        return max(0, sequence.first_unscored - 1)

    def _start(self, sequence: Sequence, peak: PeakBudget, now: float) -> bool:
        """Lease blocks for all known tokens and join the running ones; False if it does not fit.

        One that would run alone always may: there is nobody whose memory it could take.
        """
        tokens, namespace = sequence.token_ids, sequence.request.namespace
        num_blocks = -(-len(tokens) // self._cache.block_size)
        max_cached = self._max_cached(sequence)
        match = self._cache.match(tokens, namespace, max_cached=max_cached)
        num_held = num_blocks - match.num_held_blocks
        remaining = self._remaining(sequence)
        if self._running and not peak.fits(num_held, remaining, sequence.num_to_fork):
            return False
        lease = self._cache.acquire(tokens, len(tokens), namespace, max_cached=max_cached)
        if lease is None:
            return False
        peak.add(num_held, remaining, sequence.num_to_fork)
        self._waiting.discard(sequence)
        sequence.lease = lease
        sequence.num_computed = lease.num_cached
        sequence.prefill_end = max(sequence.num_prompt_tokens, sequence.num_tokens - 1)
        if sequence.num_cached_prompt_tokens is None:
            self._count_admission(sequence, lease.num_cached, now)
        insort(self._running, sequence, key=lambda s: s.order)
        return True

    def _max_cached(self, sequence: Sequence) -> int | None:
        """Tokens that may come from the cache where prompt tokens are to be scored; None: all.

        The row before the first one that the cache does not know has to be computed. O(tokens).
        """
        scores = sequence.scores
        if scores is None or not scores.wanted:
            return None
        if scores.may_use_cached:
            namespace = sequence.request.namespace
            scores.take_cached(self._cache.notes(sequence.token_ids, namespace))
        first = sequence.first_unscored
        return None if first == sequence.request.num_prompt_tokens else first - 1

    def _count_admission(self, sequence: Sequence, num_cached: int, now: float) -> None:
        num_prompt_tokens = sequence.request.num_prompt_tokens
        sequence.first_scheduled_time = now
        sequence.num_cached_prompt_tokens = min(num_cached, num_prompt_tokens - 1)
        self.counters.prompt_tokens += num_prompt_tokens
        self.counters.cached_tokens += sequence.num_cached_prompt_tokens
        self.counters.num_taken_up += self._warm.take_up(sequence.request)
        self._programs.note_started(sequence, now)

    def _peak_budget(self) -> PeakBudget:
        """What the running sequences hold and are expected to grow by."""
        cache = self._cache
        num_pinned = cache.num_blocks - cache.num_free_blocks - cache.num_evictable_blocks
        held = [sequence.held_lease.num_exclusive_blocks for sequence in self._running]
        peak = PeakBudget(cache.num_blocks, num_pinned - sum(held), cache.block_size)
        for sequence, num_held in zip(self._running, held, strict=True):
            peak.add(num_held, self._remaining(sequence), sequence.num_to_fork)
        return peak

    def _remaining(self, sequence: Sequence) -> int:
        """Tokens the answer is expected to get from here."""
        request = sequence.request
        room = self._max_model_len - request.num_prompt_tokens
        max_tokens = min(request.max_tokens, room)
        if request.sampling.ignore_eos:
            return max(1, max_tokens - sequence.num_generated)
        guess = request.hints.output_tokens
        return self._estimator.remaining(sequence.num_generated, max_tokens, guess)

    def _count_overtaken(self, admitted: list[Sequence], held: set[str]) -> None:
        """Count, for each that still waits, who was admitted before it though it came later.

        Being held is not being overtaken.
        """
        if not admitted or not self._waiting:
            return
        arrivals = sorted(s.arrival_index for s in admitted)
        for sequence in self._waiting.first(LOOKAHEAD):
            num_later = len(arrivals) - bisect_right(arrivals, sequence.arrival_index)
            if num_later and sequence.id not in held and not self._is_held(sequence):
                sequence.num_overtaken += num_later

    # -- commit --------------------------------------------------------------------------------

    def commit(
        self, plan: StepPlan, results: SequenceOf[ChunkResult], now: float
    ) -> list[SequenceOutput]:
        """Take in the results of the oldest step in flight, one for each of the plan's chunks.

        Prompt chunks are published first, so that the next plan sees them; a sequence that ends
        gives its blocks back here and not a step later, unless the next step is in flight with a
        row of it. That row's result is dropped in its turn, as is that of one aborted meanwhile.
        """
        assert self._in_flight[0] is plan, "steps are committed in the order of their plans"
        self._in_flight.popleft()
        self._cache.ended(plan.number)
        self.counters.num_steps += 1
        self.counters.computed_tokens += plan.num_rows
        pairs = zip(plan.chunks, results, strict=True)
        live = [(chunk, result) for chunk, result in pairs if chunk.sequence.is_running]
        for chunk, result in live:
            self._advance(chunk, result)
        outputs: list[SequenceOutput] = []
        for chunk, result in live:
            sequence = chunk.sequence
            if chunk.num_drafts:
                outputs.append(self._take(sequence, _accepted(chunk, result.sampled), now))
            elif result.sampled:
                first, *others = result.sampled
                # Forked before the first answer can end and give its lease back.
                forks = [self._fork(sequence, index) for index in range(1, 1 + len(others))]
                outputs.append(self._take(sequence, [first], now))
                outputs += [
                    self._take(fork, [token], now)
                    for fork, token in zip(forks, others, strict=True)
                ]
            elif sequence.early_stop is not None and not sequence.num_uncomputed:
                outputs += self._end_early(sequence, sequence.early_stop, now)
        return outputs

    def _advance(self, chunk: Chunk, result: ChunkResult) -> None:
        sequence = chunk.sequence
        lease = sequence.held_lease
        if lease.copy is not None:
            lease.copied()
        was_prefilling = sequence.is_prefilling
        sequence.settle(chunk.num_settling, chunk.draws)
        if result.scores is not None and sequence.scores is not None:
            sequence.scores.take_computed(chunk.first_score, result.scores)
        if was_prefilling:
            lease.publish(sequence.settled_token_ids, sequence.settled_notes)

    def _fork(self, parent: Sequence, answer_index: int) -> Sequence:
        """Begin another answer to a prompt that is computed: its keys and values are shared.

        Where there is no room for the fork's own blocks now, it waits like one that was preempted.
        """
        sequence = self._sibling(parent, answer_index)
        sequence.num_cached_prompt_tokens = parent.num_cached_prompt_tokens
        sequence.first_scheduled_time = parent.first_scheduled_time
        parent.num_to_fork -= 1
        self._unfinished[parent.request_id].append(sequence)
        lease = parent.held_lease.fork(parent.settled_token_ids)
        if lease is None:
            self._waiting.add_preempted(sequence)
        else:
            sequence.lease = lease
            sequence.num_computed = lease.num_cached
            insort(self._running, sequence, key=lambda s: s.order)
        return sequence

    def _sibling(self, sequence: Sequence, answer_index: int) -> Sequence:
        return self._begun(Sequence(sequence.request, sequence.arrival_index, answer_index))

    def _unborn(self, sequence: Sequence) -> list[Sequence]:
        """Answers that were to be forked from it, where nothing is to be computed any more."""
        return [self._sibling(sequence, index) for index in range(1, sequence.num_seats)]

    # -- tokens --------------------------------------------------------------------------------

    def _begun(self, sequence: Sequence) -> Sequence:
        """A new sequence with the tokens that its constraint forces: they join the prompt."""
        if sequence.request.max_tokens == 0:
            sequence.early_stop = Stop(FinishReason.LENGTH)
        elif sequence.matcher is not None:
            done = _stop_if_complete(sequence.matcher)
            sequence.early_stop = done or self._jump_forward(sequence, sequence.matcher)
        return sequence

    def _jump_forward(self, sequence: Sequence, matcher: Matcher) -> Stop | None:
        """Append the tokens that a constraint leaves no choice of; why the answer ends in them.

        They are what the masked sampler would draw, one by one. Log-probabilities need the row
        before each token, so that requests for them go step by step.
        """
        if not self._options.jump_forward or sequence.request.sampling.needs_logprobs:
            return None
        try:
            forced = matcher.forced_tokens()
            stops = (self._append(sequence, token_id) for token_id in forced)
            stop = next((stop for stop in stops if stop is not None), None)
            if stop is None:
                room = sequence.request.max_tokens - sequence.num_generated - 1
                room = min(room, self._max_model_len - sequence.num_tokens - 1)
                sequence.draft(matcher.likely_tokens()[: max(0, room)])
        except Exception as error:
            return _broken(error)
        return stop

    def _append(
        self, sequence: Sequence, token_id: int, logprob: float | None = None
    ) -> Stop | None:
        """Add a token to the answer; why it ends with it."""
        sequence.append(token_id, logprob)
        self.counters.generated_tokens += 1
        stop = self._stop_at_text(sequence, token_id)
        if stop is None and sequence.matcher is not None:
            stop = _advance_matcher(sequence.matcher, token_id)
        return stop or self._stop_at_length(sequence)

    def _take(
        self, sequence: Sequence, tokens: SequenceOf[SampledToken], now: float
    ) -> SequenceOutput:
        """Add what was drawn, all but the last of which were drafts and are computed."""
        for token in tokens:
            if not token.is_sound:
                self._drop(sequence, publish=False)
                return sequence.failure(_fault(sequence, token), now)
            logprob = None if token.logprobs is None else token.logprobs.logprob
            stop = self._append(sequence, token.token_id, logprob)
            if stop is not None:
                break
        sequence.num_computed += min(len(tokens) - 1, sequence.num_uncomputed)
        if stop is None and sequence.matcher is not None:
            stop = self._jump_forward(sequence, sequence.matcher)
        if stop is None:
            return self._output(sequence, now, token)
        if stop.finish_reason is FinishReason.STOP:
            self._estimator.observe(sequence.num_generated)
        return self._end(sequence, stop, now, token)

    def _end(
        self, sequence: Sequence, stop: Stop, now: float, token: SampledToken | None = None
    ) -> SequenceOutput:
        settled = sequence.settled_token_ids
        self._drop(sequence)
        if stop.error is not None:
            return sequence.failure(stop.error, now)
        self._warm.keep(sequence.request, settled, now)
        return self._output(sequence, now, token, stop)

    def _end_early(self, sequence: Sequence, stop: Stop, now: float) -> list[SequenceOutput]:
        """End a request of which no token was to be drawn, all its answers."""
        unborn = self._unborn(sequence)
        first = self._end(sequence, stop, now)
        if stop.error is not None:
            return [first, *(other.failure(stop.error, now) for other in unborn)]
        return [first, *(self._output(other, now, stop=stop) for other in unborn)]

    def _drop(self, sequence: Sequence, publish: bool = True) -> None:
        """Let go of a sequence that has ended, wherever it is."""
        if not self._waiting.discard(sequence):  # where a fork that had no room waits
            self._leave(sequence, publish)
        self._forget(sequence)

    def _stop_at_text(self, sequence: Sequence, token_id: int) -> Stop | None:
        """Whether the newest token ends the answer by what it is, or by the text so far."""
        sampling = sequence.request.sampling
        if sequence.num_generated > sampling.min_tokens and token_id in sequence.end_token_ids:
            is_eos = token_id not in sampling.stop_token_ids
            return Stop(FinishReason.STOP, None if is_eos else token_id, is_by_end_token=True)
        if sequence.stop_matcher is not None:
            match = sequence.stop_matcher.feed(self._bytes_of(sequence, token_id))
            if match is not None:
                return Stop(FinishReason.STOP, match.reason)
        return None

    def _stop_at_length(self, sequence: Sequence) -> Stop | None:
        if sequence.num_generated >= sequence.request.max_tokens:
            return Stop(FinishReason.LENGTH)
        if sequence.num_tokens >= self._max_model_len:
            return Stop(FinishReason.LENGTH)
        return None

    def _bytes_of(self, sequence: Sequence, token_id: int) -> bytes:
        """What a token adds to the text; a model may have more rows than its tokenizer tokens."""
        visible = sequence.request.visible_tokens.get(token_id)
        if visible is not None:
            return visible
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""

    def _output(
        self,
        sequence: Sequence,
        now: float,
        token: SampledToken | None = None,
        stop: Stop | None = None,
    ) -> SequenceOutput:
        """What is new, and from now on is not."""
        logprobs = token.logprobs if token is not None else None
        token_ids = sequence.untold_token_ids
        prompt_scores = self._prompt_scores(sequence)
        sequence.num_told = sequence.num_generated
        if token_ids and sequence.first_token_time is None:
            sequence.first_token_time = now
        return SequenceOutput(
            request_id=sequence.request_id,
            answer_index=sequence.answer_index,
            prompt_scores=prompt_scores,
            token_ids=token_ids,
            logprobs=() if logprobs is None else (logprobs,),
            finish_reason=None if stop is None else stop.finish_reason,
            stop_reason=None if stop is None else stop.stop_reason,
            ended_by_token=stop is not None and stop.is_by_end_token,
            num_cached_tokens=sequence.num_cached_prompt_tokens or 0,
            metrics=sequence.metrics(finished_time=None if stop is None else now),
        )

    def _prompt_scores(self, sequence: Sequence) -> PromptScores | None:
        """What was asked of the prompt, once it is known whole, with the first output."""
        scores = sequence.scores
        is_asked_for = sequence.request.sampling.prompt_logprobs is not None
        if scores is None or not is_asked_for or sequence.answer_index:
            return None
        if sequence.num_told:
            return None  # told before
        if sequence.first_unscored < sequence.request.num_prompt_tokens:
            return None  # aborted before
        return scores.prompt()

    # -- inspection ----------------------------------------------------------------------------

    def check(self) -> None:
        """Assert the invariants of the scheduler and of the cache below it."""
        self._cache.check()
        self._warm.check()
        orders = [sequence.order for sequence in self._running]
        assert orders == sorted(set(orders)), "running sequences are out of order"
        for sequence in self._running:
            assert sequence.lease is not None, "a running sequence holds no lease"
            assert 0 <= sequence.num_computed < sequence.num_tokens <= self._max_model_len
            assert sequence.num_launched <= sequence.num_expected <= self._max_model_len
            assert sequence in self._unfinished[sequence.request_id], "a sequence is not known"
            capacity = sequence.lease.num_blocks * self._cache.block_size
            assert sequence.num_launched <= capacity, "tokens without blocks"
            mine = [c for plan in self._in_flight for c in plan.chunks if c.sequence is sequence]
            assert sequence.num_in_flight == sum(c.num_settling for c in mine), "rows were lost"
            assert sequence.num_pending == sum(c.draws for c in mine), "a draw was lost"
        for sequence in self._waiting:
            assert sequence.lease is None, "a waiting sequence holds a lease"
            assert not sequence.num_in_flight and not sequence.num_pending, "waits and runs"
        assert self._num_taken_seats() <= self._options.max_num_seqs, "more sequences than seats"
        known = [s for sequences in self._unfinished.values() for s in sequences]
        assert len(known) == len(self._running) + len(self._waiting), "a sequence was lost"


def _copy_before(chunk: Chunk) -> BlockCopy | None:
    """What its sequence's first step copies; one in flight has done so."""
    sequence = chunk.sequence
    return None if sequence.num_in_flight else sequence.held_lease.copy


def _chunk(sequence: Sequence, length: int) -> Chunk:
    start = sequence.num_launched
    end = start + length
    samples = end == sequence.num_expected and sequence.early_stop is None
    num_logits = int(samples)
    first = sequence.first_unscored
    if first < sequence.num_prompt_tokens:
        # The row before a token gives its score.
        num_logits = max(num_logits, end - max(start, first - 1))
    num_samples = sequence.num_seats if samples else 0
    is_pending = start >= sequence.num_tokens
    return Chunk(sequence, start, length, num_logits, num_samples, is_pending=is_pending)


def _accepted(chunk: Chunk, sampled: SequenceOf[SampledToken]) -> SequenceOf[SampledToken]:
    """The tokens that count: up to the first that is not the draft in its place."""
    drafts = chunk.token_ids[chunk.length - chunk.num_drafts :].tolist()
    for index, (token, draft) in enumerate(zip(sampled, drafts, strict=False)):
        if not token.is_sound or token.token_id != draft:
            return sampled[: index + 1]
    return sampled


def _advance_matcher(matcher: Matcher, token_id: int) -> Stop | None:
    """Tell a constraint what was drawn; whether the answer is whole, or the constraint broke."""
    try:
        is_allowed = matcher.advance(token_id)
    except Exception as error:
        return _broken(error)
    if is_allowed:
        return _stop_if_complete(matcher)
    return Stop(
        None,
        error=f"the constraint does not allow token {token_id}, which its mask let through; the "
        "answer cannot be trusted and is ended",
    )


def _stop_if_complete(matcher: Matcher) -> Stop | None:
    try:
        return Stop(FinishReason.STOP) if matcher.is_complete else None
    except Exception as error:
        return _broken(error)


def _broken(error: Exception) -> Stop:
    """A constraint that fails under way ends its own answer, which does not go on without it."""
    if not isinstance(error, GrammarError):
        logger.error("a constraint failed", exc_info=error)
    return Stop(None, error=f"the constraint cannot be followed any further: {error}; simplify it")


def _fault(sequence: Sequence, token: SampledToken) -> str:
    """Why there was no token to draw."""
    if token.fault is not None:
        return token.fault
    if sequence.matcher is not None:
        return (
            "no token is left that both the constraint and the other options allow; leave out "
            "banned_token_ids, allowed_token_ids and logit_bias, or loosen the constraint"
        )
    return (
        "the model gave no finite logits for this request; its numbers left the range of "
        "the dtype, or the checkpoint is broken: try float32, or check the weights"
    )
