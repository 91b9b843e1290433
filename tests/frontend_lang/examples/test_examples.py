"""Every example with the real model: in process, over HTTP and in a batch; and what it computes."""

from typing import TYPE_CHECKING

import pytest

import sapwood as sgl
from sapwood.frontend_lang.backends.engine import EngineBackend
from tests.frontend_lang.examples.cases import CASES, Case
from tests.frontend_lang.examples.watching import WatchingBackend

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


@every_example
def test_an_example_computes_each_token_of_its_tree_once(case: Case, engine: "Engine") -> None:
    """And at most two more for each request: the last known token, and one whose keys no step had
    computed."""
    backend = WatchingBackend(EngineBackend(engine))
    engine.flush_cache()
    before = engine.stats().computed_tokens
    state = case.program.run(**case.arguments, **case.options, backend=backend)
    computed = engine.stats().computed_tokens - before
    assert_ran(case, state)
    assert computed <= backend.num_distinct_tokens + 2 * len(backend.sequences)
    assert computed >= backend.num_distinct_tokens - len(backend.sequences)  # each is counted


@every_example
def test_an_example_runs_over_http(case: Case, server_url: str) -> None:
    backend = sgl.RuntimeEndpoint(server_url)
    assert_ran(case, case.program.run(**case.arguments, **case.options, backend=backend))


@every_example
def test_an_example_runs_in_a_batch(case: Case, engine: "Engine") -> None:
    states = case.program.run_batch(
        [dict(case.arguments)] * 2, **case.options, backend=engine, progress_bar=False
    )
    assert len(states) == 2
    for state in states:
        assert_ran(case, state)
