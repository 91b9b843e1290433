import time
from argparse import Namespace
from pathlib import Path

import pytest
from common import SteppedEngine, commit, self_times, settings, spread

SHARED = list(range(10, 10 + 3 * 16))


@pytest.fixture
def engine(tiny_model: Path) -> SteppedEngine:
    return SteppedEngine(str(tiny_model), num_kv_blocks=256)


class FakeClock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


class Worker:
    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock

    def outer(self) -> None:
        self.clock.now += 2
        self.inner()
        self.inner()
        self.clock.now += 3

    def inner(self) -> None:
        self.clock.now += 5

    def failing(self) -> None:
        self.clock.now += 7
        raise KeyError("failing")


def test_one_sample_is_its_own_median_and_quartiles() -> None:
    one = spread([3.0])
    assert (one["first_quartile"], one["median"], one["third_quartile"]) == (3.0, 3.0, 3.0)
    assert one["n"] == 1


def test_quartiles_lie_between_the_samples() -> None:
    many = spread([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (many["min"], many["first_quartile"], many["median"]) == (1.0, 2.0, 3.0)
    assert (many["third_quartile"], many["max"], many["mean"]) == (4.0, 5.0, 3.0)


def test_settings_name_no_folder_and_not_the_result() -> None:
    arguments = Namespace(data=Path("/somewhere/data.jsonl"), seed=1, out=Path("/elsewhere/r.json"))
    assert settings(arguments) == {"data": "data.jsonl", "seed": 1}


def test_time_in_an_inner_method_is_counted_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(FakeClock(monkeypatch))
    with self_times([(Worker, "outer"), (Worker, "inner")]) as seconds:
        worker.outer()
        worker.inner()
        assert seconds == {"Worker.outer": 5.0, "Worker.inner": 15.0}


def test_a_method_that_raises_is_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(FakeClock(monkeypatch))
    with self_times([(Worker, "failing")]) as seconds:
        with pytest.raises(KeyError):
            worker.failing()
        assert seconds == {"Worker.failing": 7.0}


def test_timers_are_gone_afterwards() -> None:
    before = Worker.outer
    with self_times([(Worker, "outer")]):
        assert Worker.outer is not before
    assert Worker.outer is before


def test_each_shared_token_is_counted_once_among_the_distinct(engine: SteppedEngine) -> None:
    num_requests, own_len, max_tokens = 4, 5, 4
    for index in range(num_requests):
        engine.submit([*SHARED, *range(100 + index, 100 + index + own_len)], max_tokens)
    decoding = [step for step in engine.run() if step.is_decode and step.num_rows == num_requests]
    assert decoding
    for step in decoding:
        own = step.num_kv_tokens - num_requests * len(SHARED)
        assert step.num_distinct_kv_tokens == len(SHARED) + own


def test_nothing_shared_is_all_distinct(engine: SteppedEngine) -> None:
    for index in range(3):
        engine.submit([200 + index, *SHARED], 3)
    steps = engine.run()
    assert sum(step.num_rows for step in steps) == 3 * (1 + len(SHARED)) + 3 * 2
    assert all(step.num_distinct_kv_tokens == step.num_kv_tokens for step in steps)


def test_what_was_aborted_is_cached_until_cleared(engine: SteppedEngine) -> None:
    engine.submit(SHARED, 50)
    engine.step()
    engine.abort_all()
    assert not engine.core.has_work
    assert engine.core.stats().num_tree_blocks > 0
    engine.clear()
    assert engine.core.stats().num_tree_blocks == 0


def test_results_of_a_machine_without_git_have_no_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() is None
