"""A scheduler that runs without a model.

`PagedExecutor` stands in for the model and the KV cache: in each row of a block it keeps a hash of
the whole prefix up to that token, checks for every row that the plan's segments lead to exactly the
prefix it should attend to, and draws a token that is a function of that prefix. A block that is
shared wrongly, overwritten or copied too late makes it fail at once, in the step where it happens.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np

from sapwood.radix import BlockCopy, PrefixCache
from sapwood.runtime.config import SchedulerOptions
from sapwood.runtime.constraints.interface import GrammarError, Matcher
from sapwood.runtime.core import EngineCore
from sapwood.runtime.hints import NO_HINTS, Hints
from sapwood.runtime.outputs import FinishReason, TokenLogprobs
from sapwood.runtime.policy import load_policy
from sapwood.runtime.request import (
    ChunkResult,
    Request,
    SampledToken,
    Sequence,
    SequenceOutput,
)
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.scheduler import Scheduler
from sapwood.runtime.scoring import PromptScores, TokenScores
from sapwood.runtime.segmenter import Segmenter
from sapwood.runtime.step_plan import Chunk, StepPlan

EOS = 0
VOCAB_SIZE = 1000
NextToken = Callable[[Chunk, int], int]
Row = tuple[int, int]  # of a block


def tokens(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), np.int32)


def token_after(chunk: Chunk, prefix_hash: int) -> int:
    """A token that depends on the whole prefix; never the end token."""
    return 1 + prefix_hash % (VOCAB_SIZE - 1)


def logprob_of(prefix_hash: int) -> float:
    """Of the last token of a prefix: a float32 that depends on all of it."""
    return -(prefix_hash % 1000) / 8


@dataclass(frozen=True)
class LaunchedChunk:
    """What a device is given of a chunk: read at its launch, as all of it may change before it is
    computed. A pending token is not known then."""

    chunk: Chunk
    table: list[int]
    token_ids: list[int]  # from the sequence's beginning, a prompt's next token and drafts included
    matcher: Matcher | None
    copy: BlockCopy | None

    @classmethod
    def of(cls, chunk: Chunk, copies: Iterable[BlockCopy]) -> "LaunchedChunk":
        sequence = chunk.sequence
        table = sequence.held_lease.block_table.tolist()
        num_known = sequence.num_tokens + sequence.num_drafts
        token_ids = sequence.tried_token_ids[: min(num_known, chunk.end + 1)].tolist()
        assert len(token_ids) + chunk.is_pending >= chunk.end, (
            "a token is neither known nor pending"
        )
        copy = next((copy for copy in copies if copy.target in table), None)
        return cls(chunk, table, token_ids, sequence.matcher, copy)

    def after(self, num_tried: int) -> Chunk:
        """As the token after that many drafts sees it: with what constrains it there."""
        sequence, matcher = self.chunk.sequence, self.matcher
        num_known = self.chunk.end - self.chunk.num_drafts
        if matcher is not None and num_tried:
            matcher = matcher.copy()
            with suppress(GrammarError):
                all(map(matcher.advance, self.token_ids[num_known:][:num_tried]))
        seen = SimpleNamespace(
            request=sequence.request,
            request_id=sequence.request_id,
            num_generated=num_known + num_tried - sequence.request.num_prompt_tokens,
            matcher=matcher,
        )
        return replace(self.chunk, sequence=seen)  # type: ignore[arg-type]

    def rows(self, start: int, end: int, block_size: int) -> Iterator[Row]:
        """Where these positions are."""
        for position in range(start, end):
            yield self.table[position // block_size], position % block_size


class PagedStep:
    """A step that was launched, and is computed when the device comes to it."""

    def __init__(self, executor: "PagedExecutor", plan: StepPlan) -> None:
        self.plan = plan
        self.chunks = [LaunchedChunk.of(chunk, plan.copies) for chunk in plan.chunks]
        self.results: list[ChunkResult] | None = None
        self._executor = executor

    @property
    def drawn(self) -> dict[Sequence, int]:
        """The newest token of each sequence."""
        assert self.results is not None, "a token is taken from a step that was not computed"
        pairs = zip(self.plan.chunks, self.results, strict=True)
        return {c.sequence: r.sampled[-1].token_id for c, r in pairs if r.sampled}

    def result(self) -> list[ChunkResult]:
        try:
            while self.results is None:
                self._executor.work()
        finally:
            self._executor.end(self)
        return self.results

    def users(self, block_size: int) -> Iterator[tuple[Row, Sequence, bool]]:
        """Each row that the step reads or writes, for whom, and whether it writes it."""
        for launched in self.chunks:
            chunk, copy = launched.chunk, launched.copy
            for row in launched.rows(0, chunk.start, block_size):
                yield row, chunk.sequence, False
            for row in launched.rows(chunk.start, chunk.end, block_size):
                yield row, chunk.sequence, True
            for offset in range(copy.num_rows if copy else 0):
                yield (copy.source, offset), chunk.sequence, False
                yield (copy.target, offset), chunk.sequence, True


class PagedExecutor:
    """Computes each step when it is launched or, if `is_late`, when it is asked for its result.

    `work` lets a late one compute the next step, whenever that may be. A step is in flight until
    its result is asked for: until then no row that it reads or writes may be written by another
    sequence, though steps are computed in their order.
    """

    def __init__(
        self, block_size: int, next_token: NextToken = token_after, *, is_late: bool = False
    ) -> None:
        self.plans: list[StepPlan] = []
        self.in_flight: deque[PagedStep] = deque()
        self.num_kv_tokens_read = 0
        self._is_late = is_late
        self._block_size = block_size
        self._next_token = next_token
        self._memory: dict[Row, int] = {}  # hash of the prefix that ends there
        self._last_drawn: dict[Sequence, int] = {}  # by the step that was computed last

    def launch(self, plan: StepPlan) -> PagedStep:
        self.plans.append(plan)
        plan.attention.check()
        self.num_kv_tokens_read += plan.attention.num_kv_tokens
        step = PagedStep(self, plan)
        self._check_reuse(step)
        self.in_flight.append(step)
        if not self._is_late:
            self.work()
        return step

    def work(self) -> None:
        """Compute the next step, if there is one that was not."""
        step = next((step for step in self.in_flight if step.results is None), None)
        if step is None:
            return
        plan = step.plan
        for copy in plan.copies:
            for row in range(copy.num_rows):
                self._memory[copy.target, row] = self._memory[copy.source, row]
        for launched in step.chunks:
            chunk = launched.chunk
            if chunk.is_pending:
                launched.token_ids.insert(chunk.start, self._last_drawn[chunk.sequence])
            hashes = self._prefix_hashes(launched)[chunk.start : chunk.end]
            rows = launched.rows(chunk.start, chunk.end, self._block_size)
            self._memory.update(zip(rows, hashes, strict=True))
        self._check_attention(step)
        step.results = [self._result(launched) for launched in step.chunks]
        self._last_drawn = step.drawn

    def end(self, step: PagedStep) -> None:
        assert self.in_flight.popleft() is step, "results are asked for in another order"

    def forget(self, block_ids: Iterable[int]) -> None:
        """Spoil what is in blocks that are free."""
        for block_id in block_ids:
            for row in range(self._block_size):
                self._memory.pop((block_id, row), None)

    def _result(self, launched: LaunchedChunk) -> ChunkResult:
        """Of several tokens drawn from one row each is the one before it plus one."""
        chunk, hashes = launched.chunk, self._prefix_hashes(launched)
        first = chunk.end - chunk.num_drafts
        sampled = [
            SampledToken(self._next_token(launched.after(i), hashes[first + i - 1]))
            for i in range(chunk.num_drafts)
        ]
        last = launched.after(chunk.num_drafts)
        for offset in range(chunk.num_samples):
            token_id = self._next_token(last, hashes[chunk.end - 1]) + offset
            logprobs = None
            if chunk.sequence.request.sampling.needs_logprobs:
                logprob = logprob_of(hash((hashes[chunk.end - 1], token_id)))
                logprobs = TokenLogprobs(token_id=token_id, logprob=logprob)
            sampled.append(SampledToken(token_id, logprobs))
        if not chunk.num_scores:
            return ChunkResult(sampled=tuple(sampled))
        scored = hashes[chunk.first_score :][: chunk.num_scores]
        num_top = chunk.sequence.request.sampling.prompt_logprobs
        top = np.zeros((len(scored), num_top), np.int32)
        scores = TokenScores(
            logprobs=np.array([logprob_of(h) for h in scored], np.float32),
            top_ids=top,
            top_logprobs=top.astype(np.float32),
        )
        return ChunkResult(sampled=tuple(sampled), scores=scores)

    def _prefix_hashes(self, launched: LaunchedChunk) -> list[int]:
        hashes, last = [], hash(launched.chunk.sequence.request.namespace)
        for token in launched.token_ids:
            last = hash((last, token))
            hashes.append(last)
        return hashes

    def _check_reuse(self, step: PagedStep) -> None:
        """No row may be written that a step in flight reads or writes for another sequence."""
        written = {r: who for r, who, is_written in step.users(self._block_size) if is_written}
        for before in self.in_flight:
            for row, sequence, _ in before.users(self._block_size):
                assert written.get(row, sequence) is sequence, "a block is reused too early"

    def _check_attention(self, step: PagedStep) -> None:
        first_row = 0
        for launched in step.chunks:
            chunk, hashes = launched.chunk, self._prefix_hashes(launched)
            for row in range(first_row, first_row + chunk.length):
                seen = self._seen_by(step.plan, row)
                position = chunk.start + row - first_row
                assert seen == dict(enumerate(hashes[: position + 1])), "a row sees other tokens"
            first_row += chunk.length

    def _seen_by(self, plan: StepPlan, row: int) -> dict[int, int | None]:
        """Position -> hash, as the segments give them to a row."""
        seen: dict[int, int | None] = {}
        for shared in plan.attention.shared:
            if row in shared.rows:
                seen.update(self._read(shared.block_ids, shared.start, shared.length))
        for private in plan.attention.private:
            index = row - private.first_row
            if 0 <= index < private.num_rows:
                length = private.length - private.num_rows + index + 1
                seen.update(self._read(private.block_ids, private.start, length))
        return seen

    def _read(self, block_ids: np.ndarray, start: int, length: int) -> dict[int, int | None]:
        size = self._block_size
        return {
            start + i: self._memory.get((int(block_ids[i // size]), i % size))
            for i in range(length)
        }


def answer_key(request_id: str, answer_index: int) -> str:
    return f"{request_id}/{answer_index}" if answer_index else request_id


@dataclass
class Finished:
    step: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    num_cached_tokens: int
    stop_reason: str | int | None


@dataclass
class Harness:
    """An engine core over the paged executor; steps are counted from 1.

    A step takes `step_seconds`; `wait` lets time pass without one. With `overlap` the device is
    late: it computes a step when its result is asked for, or the test lets it `work`.
    """

    block_size: int = 16
    num_blocks: int = 1024
    next_token: NextToken = token_after
    max_model_len: int | None = None
    min_saved_tokens: int = 1
    step_seconds: float = 1.0
    prefix_caching: bool = True
    token_bytes: tuple[bytes, ...] = ()
    overlap: bool = False
    options: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options = SchedulerOptions(**{"max_num_batched_tokens": 10_000, **self.options})
        self.executor = PagedExecutor(self.block_size, self.next_token, is_late=self.overlap)
        self.scheduler = Scheduler(
            self.make_cache(),
            load_policy(options.schedule_policy),
            options,
            segmenter=Segmenter(self.block_size, self.min_saved_tokens),
            max_model_len=self.max_model_len or self.num_blocks * self.block_size,
            token_bytes=self.token_bytes,
        )
        self.core = EngineCore(
            self.scheduler,
            self.executor,
            clock=lambda: self.now,
            make_cache=self.make_cache,
            overlap=self.overlap,
            check_invariants=True,
        )
        self.num_steps = 0
        self.waited_seconds = 0.0
        self.finished: dict[str, Finished] = {}
        self.answers: dict[str, list[int]] = {}
        self.errors: dict[str, str] = {}
        self.prompt_scores: dict[str, PromptScores] = {}
        self._num_added = 0

    def make_cache(self) -> PrefixCache:
        return PrefixCache(self.num_blocks, self.block_size, enabled=self.prefix_caching)

    @property
    def now(self) -> float:
        return self.num_steps * self.step_seconds + self.waited_seconds

    @property
    def cache(self) -> PrefixCache:
        return self.scheduler.cache

    def add(
        self,
        prompt: Iterable[int],
        max_tokens: int = 4,
        *,
        request_id: str | None = None,
        namespace: tuple = (),
        matcher: Matcher | None = None,
        hints: Hints = NO_HINTS,
        **sampling: object,
    ) -> str:
        request_id = request_id or f"r{self._num_added}"
        self._num_added += 1
        params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})
        request = Request(
            request_id=request_id,
            caller_id=request_id,
            prompt_token_ids=tokens(prompt),
            sampling=params,
            max_tokens=max_tokens,
            seed=0,
            eos_token_ids=(EOS,),
            arrival_time=self.now,
            namespace=namespace,
            matcher=matcher,
            hints=hints,
        )
        self.core.add(request)
        self.answers[request_id] = []
        return request_id

    def step(self) -> list[SequenceOutput]:
        self.num_steps += 1
        outputs = self.core.step()
        self.take(outputs)
        return outputs

    def take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            key = answer_key(output.request_id, output.answer_index)
            self.answers.setdefault(key, []).extend(output.token_ids)
            if output.prompt_scores is not None:
                assert output.request_id not in self.prompt_scores, "scores were told twice"
                self.prompt_scores[output.request_id] = output.prompt_scores
            if output.error is not None:
                self.errors[key] = output.error
            if output.finished:
                assert key not in self.finished, "an answer ended twice"
                self.finished[key] = Finished(
                    self.num_steps,
                    self.answers[key],
                    output.finish_reason,
                    output.num_cached_tokens,
                    output.stop_reason,
                )

    def abort(self, request_id: str) -> None:
        self.take(self.core.abort(request_id))

    def preempt(self, num_sequences: int) -> int:
        """Send the newest back to wait, once nothing is in flight."""
        self.take(self.core.settle())
        return self.scheduler.preempt(num_sequences)

    def flush_cache(self) -> None:
        self.take(self.core.flush_cache())

    def wait(self, seconds: float) -> None:
        """Time passes, and the engine looks whether there is anything to do."""
        self.waited_seconds += seconds
        self.take(self.core.step())

    def run(self, limit: int = 100_000) -> None:
        """Step until nothing is left. An error in a step is the test's error."""
        while self.core.has_work:
            self.step()
            assert not self.errors, next(iter(self.errors.values()))
            assert self.num_steps < limit, "the engine does not finish"

    def answer(self, prompt: Iterable[int], max_tokens: int = 4, **sampling: object) -> Finished:
        """Run one request alone."""
        request_id = self.add(prompt, max_tokens, **sampling)
        self.run()
        return self.finished[request_id]

    def assert_nothing_held(self) -> None:
        cache = self.cache
        cache.check()
        assert cache.num_free_blocks + cache.num_tree_blocks == cache.num_blocks
        assert cache.num_evictable_blocks == cache.num_tree_blocks
