"""An engine whose device is late, under random requests, aborts, preemptions, flushes and faults.

After every operation the scheduler and the cache are checked, and that whatever a step in flight
reads or writes is held; blocks that are free are spoiled, so that a step that still needs one
fails. At the end every answer is compared with the one that an engine without overlap gives to the
same request alone.

Everything random comes through `choose(n)`, an integer below n.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sapwood.radix import NamespaceKind, NamespacePart
from sapwood.runtime.config import BatchingMode
from sapwood.runtime.hints import Hints
from sapwood.runtime.outputs import FinishReason
from sapwood.runtime.request import ChunkResult
from sapwood.runtime.step_plan import Chunk, StepPlan
from tests.runtime.automata import Automaton, AutomatonMatcher, allowed_token_after
from tests.runtime.harness import EOS, Finished, Harness, PagedStep, answer_key

Choose = Callable[[int], int]
TENANTS = tuple((NamespacePart(NamespaceKind.TENANT, name),) for name in "xy")
NUM_TOKENS = 4  # that prompts and answers are made of, so that many are alike
TOKEN_BYTES = tuple(bytes([97 + i]) for i in range(NUM_TOKENS + 4))
CHOICES = Automaton({0: {1: 1, 2: 1, 3: 2}, 1: {2: 2}, 2: {3: 3}, 3: {1: 0, 4: 4}}, frozenset({4}))
OPERATIONS = {
    "add": 6,
    "step": 16,
    "work": 6,
    "abort": 2,
    "preempt": 1,
    "flush": 0.5,
    "settle": 0.5,
    "break_launch": 0.1,
    "break_result": 0.1,
}


class DeviceFault(Exception):
    """What a device does to a step that is to fail."""


@dataclass(frozen=True)
class BrokenStep:
    """A step whose result never comes, though it was computed."""

    step: PagedStep

    def result(self) -> list[ChunkResult]:
        self.step.result()
        raise DeviceFault("the device failed")


@dataclass(frozen=True)
class Asked:
    """A request as the harness takes it; equal ones have equal answers."""

    prompt: tuple[int, ...]
    max_tokens: int
    tenant: int
    is_constrained: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    hints: Hints = field(default=Hints(), compare=False)

    def add_to(self, harness: Harness) -> str:
        return harness.add(
            self.prompt,
            self.max_tokens,
            namespace=TENANTS[self.tenant],
            matcher=AutomatonMatcher(CHOICES, num_likely=2) if self.is_constrained else None,
            hints=self.hints,
            **dict(self.options),
        )

    @property
    def num_answers(self) -> int:
        n: int = dict(self.options).get("n", 1)
        return n if self.max_tokens else 1


def drawn_token(chunk: Chunk, prefix_hash: int) -> int:
    """Depends on the whole prefix; the end token now and then."""
    if chunk.sequence.matcher is not None:
        return allowed_token_after(chunk, prefix_hash)
    return EOS if prefix_hash % 11 == 0 else 1 + prefix_hash % NUM_TOKENS


class World:
    """Every method named in OPERATIONS is one; those with nothing to act on do nothing."""

    def __init__(self, choose: Choose) -> None:
        self._block_size = 1 + choose(4)
        num_blocks = -(-(14 + choose(40)) // self._block_size)
        max_num_seqs = 1 + choose(5)
        self._model_len = num_blocks * self._block_size
        self.harness = Harness(
            block_size=self._block_size,
            num_blocks=num_blocks,
            next_token=drawn_token,
            prefix_caching=choose(8) > 0,
            token_bytes=TOKEN_BYTES,
            overlap=True,
            options={
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_seqs + choose(12),
                "mode": BatchingMode.CONTINUOUS if choose(8) else BatchingMode.STATIC,
                "schedule_policy": ("lpm", "fcfs")[choose(2)],
            },
        )
        self._max_answers = max_num_seqs
        self._asked: dict[str, Asked] = {}
        self._aborted: set[str] = set()
        self._expected: dict[Asked, Harness] = {}
        self._num_faults = 0
        self._launch = self.harness.executor.launch

    def operate(self, name: str, choose: Choose) -> None:
        getattr(self, name)(choose)
        self.check()

    # Operations

    def add(self, choose: Choose) -> None:
        """A prompt that often begins like another one and its answer."""
        tenant, prompt = choose(2), ()
        if self._asked and choose(4):
            known = list(self._asked.values())[choose(len(self._asked))]
            tenant = known.tenant
            answer = self._answer_of(known).finished["r0"].token_ids
            prompt = (*known.prompt, *answer)
            prompt = prompt[: choose(len(prompt) + 1)] if choose(2) else prompt
        num_new = choose(2 * self._block_size + 2) or not prompt
        prompt += tuple(1 + choose(NUM_TOKENS) for _ in range(num_new))
        asked = self._drawn_request(prompt[: self._model_len - 1], tenant, choose)
        self._asked[asked.add_to(self.harness)] = asked

    def step(self, choose: Choose) -> None:
        self.harness.step()

    def work(self, choose: Choose) -> None:
        self.harness.executor.work()

    def abort(self, choose: Choose) -> None:
        if unfinished := self._unfinished():
            request_id = unfinished[choose(len(unfinished))]
            self._aborted.add(request_id)
            self.harness.abort(request_id)

    def preempt(self, choose: Choose) -> None:
        self.harness.preempt(1 + choose(3))

    def flush(self, choose: Choose) -> None:
        self.harness.flush_cache()
        cache = self.harness.cache
        held = [lease.held_blocks() for lease in cache._leases]
        kept = set(np.flatnonzero(cache._pool.in_tree)) - set(np.concatenate([[], *held]))
        assert not kept, "something is still cached that no request holds"

    def settle(self, choose: Choose) -> None:
        self.harness.take(self.harness.core.settle())
        assert not self.harness.executor.in_flight

    def break_launch(self, choose: Choose) -> None:
        """The next step that is launched fails at once."""

        def launch(plan: StepPlan) -> PagedStep:
            self._next_launch(self._launch)
            raise DeviceFault("the device takes no step")

        self._next_launch(launch)

    def break_result(self, choose: Choose) -> None:
        """The next step that is launched fails when it is asked for its result."""

        def launch(plan: StepPlan) -> PagedStep:
            self._next_launch(self._launch)
            return BrokenStep(self._launch(plan))  # type: ignore[return-value]

        self._next_launch(launch)

    def _next_launch(self, launch: Callable[[StepPlan], PagedStep]) -> None:
        self._num_faults += launch is not self._launch
        self.harness.executor.launch = launch  # type: ignore[method-assign]

    def end(self) -> None:
        """Let everything run to its end, and compare."""
        self._next_launch(self._launch)
        while self.harness.core.has_work:
            self.harness.step()
            self.check()
            assert self.harness.num_steps < 10_000, "the engine does not finish"
        self.harness.assert_nothing_held()
        for request_id, asked in self._asked.items():
            for index in range(asked.num_answers):
                self._compare(request_id, index, self._answer_of(asked))

    # Comparison

    def check(self) -> None:
        harness = self.harness
        harness.scheduler.check()
        assert len(harness.executor.in_flight) <= 1, "more than one step is in flight"
        pool = harness.cache._pool
        for step in harness.executor.in_flight:
            used = np.array([block for (block, _), *_ in step.users(self._block_size)])
            is_held = pool.refs[used] > pool.in_tree[used]
            assert is_held.all(), "a step in flight uses a block that nobody holds"
        harness.executor.forget(np.flatnonzero(pool.refs == 0).tolist())
        for key, error in harness.errors.items():
            assert self._num_faults and "DeviceFault" in error, f"{key}: {error}"

    def _compare(self, request_id: str, index: int, alone: Harness) -> None:
        key, expected = answer_key(request_id, index), alone.finished[answer_key("r0", index)]
        told = self.harness.answers.get(key, [])
        if request_id in self.harness.errors or key in self.harness.errors:
            assert told == expected.token_ids[: len(told)]
            return
        done = self.harness.finished[key]
        if done.finish_reason is FinishReason.ABORT:
            assert request_id in self._aborted
            assert done.token_ids == expected.token_ids[: len(done.token_ids)]
            return
        assert _what_counts(done) == _what_counts(expected)
        assert 0 <= done.num_cached_tokens < len(self._asked[request_id].prompt)
        if index == 0 and request_id in self.harness.prompt_scores:
            scores = self.harness.prompt_scores[request_id].scores
            right = alone.prompt_scores["r0"].scores
            np.testing.assert_array_equal(scores.logprobs, right.logprobs)

    def _answer_of(self, asked: Asked) -> Harness:
        """What an engine without overlap and with room for all answers to it alone."""
        if asked not in self._expected:
            alone = Harness(
                block_size=16,
                next_token=drawn_token,
                max_model_len=self._model_len,
                token_bytes=TOKEN_BYTES,
            )
            asked.add_to(alone)
            alone.run()
            self._expected[asked] = alone
        return self._expected[asked]

    def _unfinished(self) -> list[str]:
        unfinished = self.harness.scheduler._unfinished
        return [request_id for request_id in self._asked if request_id in unfinished]

    def _drawn_request(self, prompt: tuple[int, ...], tenant: int, choose: Choose) -> Asked:
        """Of every kind that matters to what a plan may know beforehand."""
        options: dict[str, Any] = {}
        max_tokens, is_constrained = 1 + choose(12), False
        match choose(10):
            case 0:
                options["n"] = 1 + choose(self._max_answers)
            case 1:
                is_constrained = True
            case 2:
                options["repetition_penalty"] = 1.5
            case 3:
                options |= {"logprobs": True, "prompt_logprobs": choose(2)}
                max_tokens = choose(3)
            case 4:
                options["stop"] = ("bc", "dd")
            case 5:
                options |= {"stop_token_ids": (3,), "min_tokens": choose(max_tokens)}
            case 6:
                options["ignore_eos"] = True
        hints = Hints(more_follows=choose(6) == 0)
        return Asked(prompt, max_tokens, tenant, is_constrained, tuple(options.items()), hints)


def _what_counts(done: Finished) -> tuple[object, ...]:
    return done.token_ids, done.finish_reason, done.stop_reason


logging.getLogger("sapwood.runtime.core").setLevel(logging.CRITICAL)
