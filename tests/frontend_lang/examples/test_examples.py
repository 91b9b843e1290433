"""Every example with the real model: in process, over HTTP and in a batch; and what it computes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

import sapwood as sgl
from sapwood.frontend_lang.backends.engine import EngineBackend
from sapwood.runtime import scheduler
from sapwood.runtime.request import SampledToken
from sapwood.runtime.step_plan import Chunk
from tests.frontend_lang.examples.cases import CASES, Case
from tests.frontend_lang.examples.watching import WatchingBackend, num_distinct_tokens

if TYPE_CHECKING:
    from sapwood import Engine

pytestmark = pytest.mark.real_model
every_example = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def assert_ran(case: Case, state: sgl.ProgramState) -> None:
    """All variables are there, each with as many texts as it should have."""
    assert state.error() is None
    for name, num_texts in case.variables.items():
        value = state[name]
        texts = [value] if isinstance(value, str) else value
        assert len(texts) == num_texts, name
        assert all(isinstance(text, str) for text in texts)
    assert state.text()


@pytest.fixture
def rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many drafts of each draw were computed and thrown away: what a constraint leaves a choice
    of is guessed, and a guess may be wrong."""
    found = []
    accepted = scheduler._accepted

    def counted(chunk: Chunk, sampled: Sequence[SampledToken]) -> Sequence[SampledToken]:
        kept = accepted(chunk, sampled)
        found.append(chunk.num_drafts - min(len(kept) - 1, chunk.num_drafts))
        return kept

    monkeypatch.setattr(scheduler, "_accepted", counted)
    return found


@every_example
def test_an_example_computes_each_token_of_its_tree_once(
    case: Case, engine: "Engine", rejected_drafts: list[int]
) -> None:
    """And at most two more for each request: the last known token, and one whose keys no step had
    computed. Drafts that were rejected are no part of the tree."""
    backend = WatchingBackend(EngineBackend(engine))
    engine.flush_cache()
    before = engine.stats().computed_tokens
    state = case.program.run(**case.arguments, **case.options, backend=backend)
    computed = engine.stats().computed_tokens - before - sum(rejected_drafts)
    assert_ran(case, state)
    num_requests = len(backend.sequences)
    assert computed <= num_distinct_tokens(backend.sequences) + 2 * num_requests
    assert computed >= num_distinct_tokens(backend.prompts) - num_requests  # each is counted


@every_example
def test_an_example_runs_over_http(case: Case, endpoint: sgl.RuntimeEndpoint) -> None:
    assert_ran(case, case.program.run(**case.arguments, **case.options, backend=endpoint))


@every_example
def test_an_example_runs_in_a_batch(case: Case, engine: "Engine") -> None:
    states = case.program.run_batch([dict(case.arguments)] * 2, **case.options, backend=engine)
    assert len(states) == 2
    for state in states:
        assert_ran(case, state)
