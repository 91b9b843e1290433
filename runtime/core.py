"""The engine's core: `step = commit(run(plan()))`, and nothing else happens here.

It parses nothing, tokenises nothing and raises nothing on request data. Its messages are plain
values, so that it can run on a thread or in a process of its own.
"""

import logging
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Protocol

from sapwood.radix import PrefixCache
from sapwood.runtime.request import ChunkResult, Request, Sequence, SequenceOutput
from sapwood.runtime.scheduler import Scheduler
from sapwood.runtime.step_plan import StepPlan

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """Carries out a plan."""

    def run(self, plan: StepPlan) -> list[ChunkResult]:
        """What the plan's chunks gave, in its order."""
        ...


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

    @property
    def kv_usage(self) -> float:
        """Share of the pool that running requests hold, 0 to 1."""
        return 1 - (self.num_free_blocks + self.num_evictable_blocks) / self.num_blocks


class EngineCore:
    """Owns the scheduler and drives the executor.

    `clock` gives seconds; the scheduler is told the time and reads none. `make_cache` gives an
    empty cache over the same pool, for the case that the one in use can no longer be trusted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Callable[[], float],
        make_cache: Callable[[], PrefixCache],
        check_invariants: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._make_cache = make_cache
        self._check_invariants = check_invariants
        self._num_finished_by_reason: Counter[str] = Counter()
        self._num_quarantines = 0

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.num_running or self.scheduler.num_waiting)

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
        """Drop every cached token that no running request holds; what there is to tell."""
        try:
            self.scheduler.cache.flush()
        except Exception as error:
            logger.exception("a flush failed; the cache is dropped with all who held a part of it")
            return self._counted(self._quarantine(error))
        return []

    def step(self) -> list[SequenceOutput]:
        """One plan, one forward pass, one commit; what there is to tell afterwards.

        An error in a step fails the requests that were running, never the engine.
        """
        plan: StepPlan | None = None
        outputs: list[SequenceOutput] = []
        try:
            plan = self.scheduler.plan(self._clock())
            if plan is None:
                return []
            results = self._executor.run(plan)
            outputs = self.scheduler.commit(plan, results, self._clock())
            if self._check_invariants:
                self.scheduler.check()
        except Exception as error:
            logger.exception("a step failed; its requests are ended and the cache is dropped")
            told = {(o.request_id, o.answer_index) for o in outputs if o.finished}
            outputs += self._quarantine(error, plan, told)
            if plan is None and not outputs:
                # Those that wait would break the next plan too.
                outputs = self._fail(self.scheduler.drop_waiting(), error)
        return self._counted(outputs)

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
        )

    def _quarantine(
        self,
        error: Exception,
        plan: StepPlan | None = None,
        told: Set[tuple[str, int]] = frozenset(),
    ) -> list[SequenceOutput]:
        """Fail whoever held a lease on the tree, drop the tree, and go on with an empty one.

        Also those of the plan that a broken commit took off the running list without a word;
        `told` (request id and answer) have had their last one.
        """
        self._num_quarantines += 1
        lost = self.scheduler.drop_running(self._make_cache())
        if plan is not None:
            known = {sequence.id for sequence in (*lost, *self.scheduler.waiting)}
            lost += [c.sequence for c in plan.chunks if c.sequence.id not in known]
        return self._fail([s for s in lost if (s.request_id, s.answer_index) not in told], error)

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
