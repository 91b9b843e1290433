"""Tokens that a constraint forces are appended, not drawn; answers are the same to the token."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
from torch import Tensor

from sapwood import ConstraintSpec, Engine, SamplingParams
from sapwood.runtime.constraints.interface import Matcher
from sapwood.runtime.constraints.spec import Whitespace
from sapwood.runtime.scheduler import Scheduler
from sapwood.runtime.step_plan import StepPlan
from sapwood.runtime.token_masks import TokenMasks
from tests.extraction import CHOICES, REGEXES
from tests.functions import Function, load_functions

# Prompts and runs are cut into chunks.
OPTIONS = {
    "max_num_batched_tokens": 24,
    "max_num_seqs": 16,
    "block_size": 8,
    "constraint_deadline_ms": 5000,
}


@contextmanager
def counting_masks() -> Iterator[list[int]]:
    """The number of constrained rows of each step."""
    counts: list[int] = []
    apply = TokenMasks.apply

    def count_and_apply(
        masks: TokenMasks, logits: Tensor, matchers: Mapping[int, Matcher]
    ) -> dict[int, str]:
        counts.append(len(matchers))
        return apply(masks, logits, matchers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenMasks, "apply", count_and_apply)
        yield counts


@contextmanager
def preempting() -> Iterator[None]:
    """Before every third plan some running sequences are sent back to wait."""
    plan, draw = Scheduler.plan, random.Random(3)

    def preempt_and_plan(scheduler: Scheduler, now: float) -> StepPlan | None:
        if draw.random() < 0.3:
            scheduler.preempt(draw.randint(1, 8))
        return plan(scheduler, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "plan", preempt_and_plan)
        yield


Asked = tuple[str, SamplingParams]


def drawn_constraint(draw: random.Random, function: Function) -> ConstraintSpec | None:
    match draw.randrange(5):
        case 0 | 1:
            return None
        case 2:
            return ConstraintSpec.regex(draw.choice(REGEXES))
        case 3:
            return ConstraintSpec.choice(list(draw.choice(CHOICES)))
    schema = draw.choice((function.parameters, function.closed_parameters))
    return ConstraintSpec.json_schema(schema, whitespace=draw.choice(list(Whitespace)))


def drawn_requests(num_requests: int) -> list[Asked]:
    draw = random.Random(7)
    functions = load_functions()
    asked = []
    for index in range(num_requests):
        function = draw.choice(functions)
        constraint = drawn_constraint(draw, function)
        sampling = SamplingParams(
            max_tokens=draw.randint(1, 48),
            temperature=draw.choice((0.0, 1.0)),
            seed=index,
            constraint=constraint,
            n=draw.choice((1, 1, 1, 3)),
            stop=draw.choice(((), (), (":",), ('"',))),
        )
        asked.append((function.question[:60], sampling))
    return asked


def answers(asked: Sequence[Asked], *, jump_forward: bool) -> tuple[list[object], int, int]:
    """What was answered; preemptions; masks that were needed."""
    with (
        preempting(),
        counting_masks() as num_masks,
        Engine("smollm2", jump_forward=jump_forward, check_invariants=True, **OPTIONS) as engine,
    ):
        outputs = engine.generate([a[0] for a in asked], [a[1] for a in asked])
        found = [
            (answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason)
            for output in outputs
            for answer in output.outputs
        ]
        return found, engine.stats().num_preemptions, sum(num_masks)


def check(num_requests: int) -> None:
    asked = drawn_requests(num_requests)
    jumping, preemptions, num_masks = answers(asked, jump_forward=True)
    stepping, _, num_more_masks = answers(asked, jump_forward=False)
    assert preemptions > 0
    assert num_masks < 0.95 * num_more_masks
    assert jumping == stepping


def test_answers_are_the_same_with_and_without_jumping_forward() -> None:
    check(24)


@pytest.mark.slow
def test_a_thousand_answers_are_the_same_with_and_without_jumping_forward() -> None:
    check(1000)
