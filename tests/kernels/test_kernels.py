"""Every kernel backend against the claims of attention_claims.py and operation_claims.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sapwood.kernels import KERNELS, load_kernels
from tests.kernels.backends import device_of, is_interpreted, load
from tests.kernels.cases import all_cases
from tests.kernels.claims import Case, Claim, Subject
from tests.kernels.steps import LAYER, SCALE, Tail, make_step

# Beyond their range exponentials are infinite, on a device without a word. The kernels divide by
# them; the interpreter computes with numpy, which warns.
OVERFLOWS = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


def pairs() -> Iterator[object]:
    """Each backend with each case. The interpreter takes seconds where others take milliseconds, so
    of its cases only the core is fast enough for every run."""
    for backend in sorted(KERNELS):
        for case in all_cases():
            marks = []
            if is_interpreted(backend):
                marks = [OVERFLOWS] if case.is_core else [OVERFLOWS, pytest.mark.slow]
            yield pytest.param(backend, case, id=f"{backend}-{case.name}", marks=marks)


@pytest.mark.parametrize(("backend", "case"), list(pairs()))
def test_claim(backend: str, case: Case) -> None:
    case.run(load(backend), device_of(backend))


@pytest.fixture(params=sorted(KERNELS))
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(load(request.param), device_of(request.param))


def test_a_plan_of_another_backend_is_refused(subject: Subject) -> None:
    step = make_step(subject, [Tail(length=3)])
    kv = step.fill(subject.kernels)
    with pytest.raises(TypeError, match="expected a"):
        subject.kernels.attention(step.query, kv, LAYER, object(), SCALE)


def test_linear_takes_only_what_the_same_backend_packed(subject: Subject) -> None:
    with pytest.raises(TypeError, match="Projection"):
        subject.kernels.linear(torch.zeros(1, 4), torch.zeros(3, 4))


def test_an_unknown_backend_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'cuda'; there are reference, cpu"):
        load_kernels("cuda")


def test_a_new_tensor_is_poisoned_while_a_case_runs() -> None:
    def fresh(subject: Subject) -> None:
        assert torch.empty(3).isnan().all()
        assert torch.zeros(3).new_empty(2, dtype=torch.int32).min() == 2**31 - 1
        assert torch.empty_like(torch.zeros(3)).isnan().all()
        assert torch.zeros(3).sum() == 0

    Case(name="fresh", is_core=True, check=fresh).run(load("reference"), device_of("reference"))


def test_core_cases_have_every_value_and_all_cases_every_combination() -> None:
    cases = list(Claim(print, {"a": (1, 2, 3), "b": (1, 2)}).cases())
    assert len({case.name for case in cases}) == len(cases) == 6
    core = [case.name for case in cases if case.is_core]
    assert sorted(core) == ["print-a=1-b=1", "print-a=2-b=2", "print-a=3-b=1"]


def test_no_two_cases_have_the_same_name() -> None:
    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names)
