"""The engine's core: `step = commit(launch(plan()).result())`, and nothing else happens here.

With overlap a step's result is asked for only when the next one was launched, so that the device
has something to do while the host commits and plans. Without, it is asked for at once: the same
loop, with no step in between.

It parses nothing, tokenises nothing and raises nothing on request data. Its messages are plain
values, so that it can run on a thread or in a process of its own.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Protocol

from sapwood.radix import PrefixCache
from sapwood.runtime.request import ChunkResult, Request, Sequence, SequenceOutput
from sapwood.runtime.scheduler import Scheduler
from sapwood.runtime.step_plan import StepPlan
from sapwood.runtime.step_times import StepTimes

logger = logging.getLogger(__name__)


class StepInFlight(Protocol):
    """A step that was launched."""

    def result(self) -> list[ChunkResult]:
        """What the plan's chunks gave, in its order; waits until that is there. Called once."""
        ...


class Executor(Protocol):
    """Carries out plans, in the order in which they are launched."""

    def launch(self, plan: StepPlan) -> StepInFlight:
        """Begin a step, and read of its sequences what may change before it has ended.

        The step before may still be in flight: pending tokens are those that it draws.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: StepPlan
    step: StepInFlight
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A consistent look at the engine between two steps. Counts are totals since the start."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_evictable_blocks: int
    num_tree_blocks: int
    num_warm_blocks: int  # of these, kept for requests yet to come
    num_steps: int
    prompt_tokens: int  # of admitted requests
    cached_tokens: int  # of these, not computed
    computed_tokens: int  # rows of all forward passes
    generated_tokens: int
    num_preemptions: int
    num_taken_up: int  # requests that came back to a prefix kept warm for them
    num_finished_by_reason: dict[str, int]
    num_quarantines: int
    fixed_rows_per_step: float | None  # rows that take as long as what every step costs

    @property
    def kv_usage(self) -> float:
        """Share of the pool that running requests hold, 0 to 1."""
        return 1 - (self.num_free_blocks + self.num_evictable_blocks) / self.num_blocks


class EngineCore:
    """Owns the scheduler and drives the executor.

    `clock` gives seconds; the scheduler is told the time and reads none. `make_cache` gives an
    empty cache over the same pool, for the case that the one in use can no longer be trusted.
    With `overlap` one step is in flight while the one before it is committed and the next planned.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Callable[[], float],
        make_cache: Callable[[], PrefixCache],
        overlap: bool = False,
        check_invariants: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._make_cache = make_cache
        self._num_ahead = int(overlap)  # steps left in flight when the core does something else
        self._in_flight: deque[_Launched] = deque()
        self._step_times = StepTimes()
        self._last_result = -math.inf  # when the step before had ended
        self._check_invariants = check_invariants
        self._num_finished_by_reason: Counter[str] = Counter()
        self._num_quarantines = 0

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight or self.scheduler.num_running or self.scheduler.num_waiting)

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def abort(self, request_id: str) -> list[SequenceOutput]:
        """End a request at once; what there is to tell about it."""
        try:
            outputs = self.scheduler.abort(request_id, self._clock())
        except Exception as error:
            logger.exception("an abort failed; the cache is dropped with all who held a part of it")
            outputs = self._quarantine(error)
        return self._counted(outputs)

    def flush_cache(self) -> list[SequenceOutput]:
        """Drop every cached token that no running request holds; what there is to tell.

        Waits for what is in flight, which holds tokens of requests that have ended.
        """
        outputs = self.settle()
        try:
            self.scheduler.cache.flush()
        except Exception as error:
            logger.exception("a flush failed; the cache is dropped with all who held a part of it")
            outputs += self._counted(self._quarantine(error))
        return outputs

    def settle(self) -> list[SequenceOutput]:
        """Wait for the steps in flight and commit them; what there is to tell."""
        outputs: list[SequenceOutput] = []
        while self._in_flight:
            outputs += self._counted(self._commit())
        return outputs

    def step(self) -> list[SequenceOutput]:
        """Plan and launch a step, commit the oldest one in flight; what there is to tell then.

        With overlap that is the step before, or none if there was none. A step that cannot be
        planned before the one in flight is committed is launched by the next call. An error in a
        step fails the requests that were running, never the engine.
        """
        try:
            is_launched = self._launch()
        except Exception as error:
            logger.exception("a step failed; its requests are ended and the cache is dropped")
            outputs = self._quarantine(error)
            # If none was running, those that wait would break the next plan too.
            outputs = outputs or self._fail(self.scheduler.drop_waiting(), error)
            return self._counted(outputs)
        if self._in_flight and (not is_launched or len(self._in_flight) > self._num_ahead):
            return self._counted(self._commit())
        return []

    def _launch(self) -> bool:
        """Begin the next step; False if there is none (yet)."""
        plan = self.scheduler.plan(self._clock())
        if plan is not None:
            time = self._clock()
            self._in_flight.append(_Launched(plan, self._executor.launch(plan), time))
        return plan is not None

    def _commit(self) -> list[SequenceOutput]:
        """Wait for the oldest step in flight and take in its results; what there is to tell."""
        launched = self._in_flight.popleft()
        members = [c.sequence for c in launched.plan.chunks if c.sequence.is_running]
        outputs: list[SequenceOutput] = []
        try:
            results = launched.step.result()
            self._note_time(launched)
            outputs = self.scheduler.commit(launched.plan, results, self._clock())
            if self._check_invariants:
                self.scheduler.check()
        except Exception as error:
            logger.exception("a step failed; its requests are ended and the cache is dropped")
            told = {(o.request_id, o.answer_index) for o in outputs if o.finished}
            outputs += self._quarantine(error, members, told)
        return outputs

    def _note_time(self, ended: _Launched) -> None:
        """A step has begun with its launch, or when the one before it had ended."""
        now = self._clock()
        self._step_times.observe(ended.plan.num_rows, now - max(ended.time, self._last_result))
        self._last_result = now

    def stats(self) -> EngineStats:
        cache, counters = self.scheduler.cache, self.scheduler.counters
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_blocks=cache.num_blocks,
            num_free_blocks=cache.num_free_blocks,
            num_evictable_blocks=cache.num_evictable_blocks,
            num_tree_blocks=cache.num_tree_blocks,
            num_warm_blocks=cache.num_warm_blocks,
            num_steps=counters.num_steps,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            computed_tokens=counters.computed_tokens,
            generated_tokens=counters.generated_tokens,
            num_preemptions=counters.num_preemptions,
            num_taken_up=counters.num_taken_up,
            num_finished_by_reason=dict(self._num_finished_by_reason),
            num_quarantines=self._num_quarantines,
            fixed_rows_per_step=self._step_times.fixed_rows,
        )

    def _quarantine(
        self,
        error: Exception,
        members: Iterable[Sequence] = (),
        told: Set[tuple[str, int]] = frozenset(),
    ) -> list[SequenceOutput]:
        """Fail whoever held a lease on the tree, drop the tree, and go on with an empty one.

        Also those of the step's `members` that a broken commit took off the running list without a
        word; `told` (request id and answer) have had their last one.
        """
        self._num_quarantines += 1
        self._await_the_rest()
        lost = self.scheduler.drop_running(self._make_cache())
        known = {sequence.id for sequence in (*lost, *self.scheduler.waiting)}
        lost += [sequence for sequence in members if sequence.id not in known]
        return self._fail([s for s in lost if (s.request_id, s.answer_index) not in told], error)

    def _await_the_rest(self) -> None:
        """Wait for what is in flight and drop its results: its blocks are about to be reused."""
        while self._in_flight:
            try:
                self._in_flight.popleft().step.result()
            except Exception:
                logger.warning("a step after the failed one failed too", exc_info=True)

    def _fail(self, sequences: list[Sequence], error: Exception) -> list[SequenceOutput]:
        reason = (
            f"the engine failed while it worked on this request: {error!r}; it can be sent again"
        )
        now = self._clock()
        return [sequence.failure(reason, now) for sequence in sequences]

    def _counted(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        for output in outputs:
            if output.error is not None:
                self._num_finished_by_reason["error"] += 1
            elif output.finish_reason is not None:
                self._num_finished_by_reason[output.finish_reason.value] += 1
        return outputs
