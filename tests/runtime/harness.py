"""A scheduler that runs without a model.

`PagedExecutor` stands in for the model and the KV cache: in each slot it keeps a hash of the whole
prefix up to that token, checks for every row that the plan's segments lead to exactly the prefix it
should attend to, and draws a token that is a function of that prefix. A block that is shared
wrongly, overwritten or copied too late makes it fail at once, in the step where it happens.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np

from sapwood.radix import PrefixCache
from sapwood.runtime.config import SchedulerOptions
from sapwood.runtime.constraints.interface import GrammarError, Matcher
from sapwood.runtime.core import EngineCore
from sapwood.runtime.hints import NO_HINTS, Hints
from sapwood.runtime.outputs import FinishReason, TokenLogprobs
from sapwood.runtime.policy import load_policy
from sapwood.runtime.request import ChunkResult, Request, SampledToken, SequenceOutput
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.scheduler import Scheduler
from sapwood.runtime.scoring import PromptScores, TokenScores
from sapwood.runtime.segmenter import Segmenter
from sapwood.runtime.step_plan import Chunk, StepPlan

EOS = 0
VOCAB_SIZE = 1000
NextToken = Callable[[Chunk, int], int]


def tokens(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), np.int32)


def token_after(chunk: Chunk, prefix_hash: int) -> int:
    """A token that depends on the whole prefix; never the end token."""
    return 1 + prefix_hash % (VOCAB_SIZE - 1)


def logprob_of(prefix_hash: int) -> float:
    """Of the last token of a prefix: a float32 that depends on all of it."""
    return -(prefix_hash % 1000) / 8


class PagedExecutor:
    def __init__(self, block_size: int, next_token: NextToken = token_after) -> None:
        self.plans: list[StepPlan] = []
        self.num_kv_tokens_read = 0
        self._block_size = block_size
        self._next_token = next_token
        self._memory: dict[int, int] = {}  # slot -> hash of the prefix that ends there

    def run(self, plan: StepPlan) -> list[ChunkResult]:
        self.plans.append(plan)
        plan.attention.check()
        self.num_kv_tokens_read += plan.attention.num_kv_tokens
        for copy in plan.copies:
            for row in range(copy.num_rows):
                source = copy.source * self._block_size + row
                self._memory[copy.target * self._block_size + row] = self._memory[source]
        for chunk in plan.chunks:
            self._write(chunk)
        self._check_attention(plan)
        return [self._result(chunk) for chunk in plan.chunks]

    def _result(self, chunk: Chunk) -> ChunkResult:
        """Of several tokens drawn from one row each is the one before it plus one."""
        hashes = self._prefix_hashes(chunk, chunk.end + 1)
        first = chunk.end - chunk.num_drafts
        sampled = [
            SampledToken(self._next_token(_after(chunk, i), hashes[first + i - 1]))
            for i in range(chunk.num_drafts)
        ]
        last = _after(chunk, chunk.num_drafts)
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

    def _prefix_hashes(self, chunk: Chunk, end: int | None = None) -> list[int]:
        hashes, last = [], hash(chunk.sequence.request.namespace)
        for token in chunk.sequence.tried_token_ids[: end or chunk.end].tolist():
            last = hash((last, token))
            hashes.append(last)
        return hashes

    def _write(self, chunk: Chunk) -> None:
        hashes = self._prefix_hashes(chunk)
        table = chunk.sequence.lease.block_table
        for position in range(chunk.start, chunk.end):
            block = int(table[position // self._block_size])
            self._memory[block * self._block_size + position % self._block_size] = hashes[position]

    def _check_attention(self, plan: StepPlan) -> None:
        first_row = 0
        for chunk in plan.chunks:
            hashes = self._prefix_hashes(chunk)
            for row in range(first_row, first_row + chunk.length):
                seen = self._seen_by(plan, row)
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
        return {
            start + i: self._memory.get(
                int(block_ids[i // self._block_size]) * self._block_size + i % self._block_size
            )
            for i in range(length)
        }


def _after(chunk: Chunk, num_tried: int) -> Chunk:
    """As the token after that many drafts sees it: with what constrains it there."""
    matcher = chunk.sequence.matcher
    if matcher is None or not num_tried:
        return chunk
    matcher = matcher.copy()
    drafts = chunk.token_ids[chunk.length - chunk.num_drafts :].tolist()
    with suppress(GrammarError):
        all(map(matcher.advance, drafts[:num_tried]))
    return replace(chunk, sequence=SimpleNamespace(matcher=matcher))  # type: ignore[arg-type]


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

    A step takes `step_seconds`; `wait` lets time pass without one.
    """

    block_size: int = 16
    num_blocks: int = 1024
    next_token: NextToken = token_after
    max_model_len: int | None = None
    min_saved_tokens: int = 1
    step_seconds: float = 1.0
    prefix_caching: bool = True
    token_bytes: tuple[bytes, ...] = ()
    options: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options = SchedulerOptions(**{"max_num_batched_tokens": 10_000, **self.options})
        self.executor = PagedExecutor(self.block_size, self.next_token)
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
