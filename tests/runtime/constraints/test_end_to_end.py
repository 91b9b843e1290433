"""Constrained answers of a real model at temperature 1: each satisfies its constraint, or was cut
off by its length and says so."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jsonschema
import pytest

from sapwood import ConstraintSpec, Engine, SamplingParams
from sapwood.runtime.constraints.spec import Whitespace
from sapwood.runtime.outputs import FinishReason
from tests.extraction import CHOICES, REGEXES
from tests.functions import load_functions

MAX_TOKENS = 160


@dataclass(frozen=True)
class Case:
    name: str
    prompt: str
    spec: ConstraintSpec
    check: Callable[[str], object]  # raises for an answer that breaks the constraint


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    # On a busy machine a constraint may take longer to compile than a server would let it.
    with Engine("smollm2", max_num_seqs=32, constraint_deadline_ms=5000) as engine:
        yield engine


def json_check(schema: dict[str, object]) -> Callable[[str], object]:
    validator = jsonschema.Draft202012Validator(schema)
    return lambda text: validator.validate(json.loads(text))


def match_check(pattern: str) -> Callable[[str], object]:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), f"{text!r} does not match {pattern}"

    return check


def choice_check(choices: tuple[str, ...]) -> Callable[[str], object]:
    def check(text: str) -> None:
        assert text in choices

    return check


def cases() -> list[Case]:
    """240 schemas of functions, every second one closed, in all whitespace modes; 60 others."""
    found = []
    functions = [function for i, function in enumerate(load_functions()) if i % 5]
    for i, function in enumerate(functions):
        schema = function.closed_parameters if i % 2 else function.parameters
        prompt = f"{function.question}\nThe arguments of {function.name} as JSON: "
        spec = ConstraintSpec.json_schema(schema, whitespace=list(Whitespace)[i % 3])
        found.append(Case(function.name, prompt, spec, json_check(schema)))
    for pattern in REGEXES:
        spec = ConstraintSpec.regex(pattern)
        found.append(Case(pattern, f"An example of {pattern}: ", spec, match_check(pattern)))
    for choices in CHOICES:
        spec = ConstraintSpec.choice(list(choices))
        prompt = f"One of {', '.join(choices)}: "
        found.append(Case(str(choices), prompt, spec, choice_check(choices)))
    return found


def check_answers(engine: Engine, chosen: list[Case], seed: int) -> int:
    """How many answers ended by themselves; each was checked."""
    sampling = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=seed, constraint=case.spec)
        for case in chosen
    ]
    num_whole = 0
    for case, output in zip(
        chosen, engine.generate([c.prompt for c in chosen], sampling), strict=True
    ):
        [answer] = output.outputs
        if answer.finish_reason is FinishReason.LENGTH:
            assert len(answer.token_ids) == MAX_TOKENS, case.name
            continue
        assert answer.finish_reason is FinishReason.STOP
        case.check(answer.text)
        num_whole += 1
    return num_whole


def test_answers_satisfy_their_constraints(engine: Engine) -> None:
    chosen = cases()[::12]
    assert check_answers(engine, chosen, seed=1) >= 0.5 * len(chosen)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_three_hundred_constraints_are_satisfied(engine: Engine, seed: int) -> None:
    chosen = cases()
    assert len(chosen) == 300
    num_whole = check_answers(engine, chosen, seed)
    assert num_whole >= 0.6 * len(chosen)
