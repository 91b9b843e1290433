"""Constraints become matchers once, in time, and nobody who waits is forgotten."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future

import pytest

from sapwood import EngineBusyError, EngineClosedError, EngineError, RequestError
from sapwood.runtime.constraints.compiler import REFUSAL_SECONDS
from sapwood.runtime.constraints.interface import Matcher, Vocabulary
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec
from tests.runtime.constraints.fakes import (
    PATIENCE,
    FakeBackend,
    VirtualClock,
    fake_compiler,
    no_vocabulary,
    until,
)


def spec_of(text: str, backend: str | None = None) -> ConstraintSpec:
    return ConstraintSpec(kind=ConstraintKind.REGEX, text=text, backend=backend)


class Bench:
    """A compiler over fakes, and the fake that compiles."""

    def __init__(self, **options: object) -> None:
        self.clock = VirtualClock()
        self.compiler, self.backends = fake_compiler(self.clock, **options)  # type: ignore[arg-type]

    @property
    def backend(self) -> FakeBackend:
        backend = self.backends.get("llguidance")
        assert isinstance(backend, FakeBackend)
        return backend

    def ask_all(self, *specs: ConstraintSpec | None) -> Future[list[Matcher | None]]:
        return self.compiler.matchers(specs)

    def ask(self, text: str, backend: str | None = None) -> Future[list[Matcher | None]]:
        return self.ask_all(spec_of(text, backend))

    def get(self, text: str, backend: str | None = None) -> object:
        [matcher] = self.ask(text, backend).result(PATIENCE)
        return matcher

    def occupy(self) -> None:
        """Keep both threads busy until these two are released."""
        for text in ("slow 0", "slow 1"):
            self.ask(text)
            until(lambda text=text: text in self.backend.started)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.compiler.close()


def error_of(future: Future[list[Matcher | None]]) -> BaseException:
    error = future.exception(PATIENCE)
    assert error is not None
    return error


# -- once ------------------------------------------------------------------------------------------


def test_five_hundred_equal_constraints_are_compiled_once(bench: Bench) -> None:
    futures = [bench.ask("slow") for _ in range(500)]
    bench.backend.release("slow")
    matchers = [future.result(PATIENCE)[0] for future in futures]
    assert bench.backend.started == ["slow"]
    assert len({id(matcher) for matcher in matchers}) == 500


def test_what_is_kept_is_there_at_once_for_whoever_asks(bench: Bench) -> None:
    first = bench.get("a")
    again = bench.ask("a")
    assert again.done()
    assert again.result()[0] is not first
    assert bench.backend.started == ["a"]
    assert bench.compiler.stats().num_hits == 1


def test_the_default_backend_and_its_name_are_the_same_constraint(bench: Bench) -> None:
    bench.get("a")
    assert bench.ask("a", "llguidance").done()


def test_the_matchers_of_a_call_come_in_its_order_and_none_for_none(bench: Bench) -> None:
    future = bench.ask_all(spec_of("slow"), None, spec_of("a"), spec_of("slow"))
    bench.backend.release("slow")
    texts = [getattr(matcher, "text", None) for matcher in future.result(PATIENCE)]
    assert texts == ["slow", None, "a", "slow"]


def test_the_constraints_of_a_call_are_compiled_side_by_side(bench: Bench) -> None:
    bench.ask_all(spec_of("slow 0"), spec_of("slow 1"))
    until(lambda: len(bench.backend.started) == 2)


def test_a_cache_of_no_bytes_keeps_nothing() -> None:
    bench = Bench(constraint_cache_memory=0)
    bench.get("a")
    bench.get("a")
    assert bench.backend.started == ["a", "a"]
    assert bench.compiler.stats().num_grammars == 0
    bench.compiler.close()


def test_the_texts_of_kept_constraints_count_as_memory_too() -> None:
    bench = Bench(constraint_cache_memory=10_000)
    for index in range(4):
        bench.get(f"{index}" * 3000)  # 3 kB, and 1 kB for the grammar
    assert bench.compiler.stats().num_grammars == 2
    assert bench.compiler.stats().grammar_bytes <= 10_000
    bench.compiler.close()


# -- refusals and failures -------------------------------------------------------------------------


def test_a_constraint_that_cannot_be_enforced_is_a_wrong_request(bench: Bench) -> None:
    error = error_of(bench.ask("wrong"))
    assert isinstance(error, RequestError)
    assert (error.param, error.code) == ("constraint", "invalid_grammar")
    assert str(error) == "a keyword is not enforced; leave it out"


def test_a_refusal_is_remembered_for_a_minute(bench: Bench) -> None:
    first = error_of(bench.ask("wrong"))
    bench.clock.now = REFUSAL_SECONDS - 1
    again = bench.ask("wrong")
    assert again.done()
    assert str(error_of(again)) == str(first)
    assert bench.backend.started == ["wrong"]
    bench.clock.now = REFUSAL_SECONDS
    error_of(bench.ask("wrong"))
    assert bench.backend.started == ["wrong", "wrong"]


def test_each_who_waits_gets_an_error_of_its_own(bench: Bench) -> None:
    futures = [bench.ask("slow and wrong") for _ in range(3)]
    bench.backend.release("slow and wrong")
    assert len({id(error_of(future)) for future in futures}) == 3


@pytest.mark.parametrize("text", ["panic", "no copy"])
def test_a_backend_that_fails_harms_its_own_request_only(
    bench: Bench, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):  # more often than there are threads
        error = error_of(bench.ask(text))
        assert isinstance(error, EngineError)
        assert "Panic" in str(error)
    assert bench.get("a")
    assert caplog.records[-1].exc_info
    assert bench.compiler.stats().num_failures == 5


def test_who_waits_for_a_process_that_is_killed_is_told_in_a_sentence_to_send_it_again(
    bench: Bench,
) -> None:
    error = error_of(bench.ask("killed"))
    assert isinstance(error, EngineError)
    assert "was ended from outside; send it again, or choose another backend" in str(error)
    assert "Error" not in str(error)


def test_a_failure_is_not_remembered(bench: Bench) -> None:
    error_of(bench.ask("panic"))
    error_of(bench.ask("panic"))
    assert bench.backend.started == ["panic", "panic"]


def test_one_wrong_constraint_of_a_call_takes_the_others_out_of_the_line(bench: Bench) -> None:
    bench.occupy()
    error_of(bench.ask_all(spec_of("a"), spec_of("b", "no such backend")))
    assert bench.compiler.stats().num_waiting == 0


# -- backends --------------------------------------------------------------------------------------


def test_an_unknown_backend_is_refused_with_the_names(bench: Bench) -> None:
    error = error_of(bench.ask("a", "lmql"))
    assert isinstance(error, RequestError)
    assert "'lmql'" in str(error) and "broken, llguidance, missing" in str(error)


def test_a_package_that_is_not_installed_is_told_by_name(bench: Bench) -> None:
    error = error_of(bench.ask("a", "missing"))
    assert isinstance(error, RequestError)
    assert "a_package_that_is_not_there" in str(error)


def test_a_backend_that_cannot_be_made_fails_what_needs_it_only(bench: Bench) -> None:
    assert isinstance(error_of(bench.ask("a", "broken")), EngineError)
    assert bench.get("a")


def test_the_default_backend_is_made_before_anybody_asks() -> None:
    asked = threading.Event()

    def make_vocabulary() -> Vocabulary:
        asked.set()
        return no_vocabulary()

    bench = Bench(make_vocabulary=make_vocabulary)
    assert asked.wait(PATIENCE)
    bench.compiler.close()


def test_making_a_backend_does_not_count_for_the_deadline() -> None:
    may_go_on = threading.Event()

    def make_vocabulary() -> Vocabulary:
        assert may_go_on.wait(PATIENCE)
        return no_vocabulary()

    bench = Bench(make_vocabulary=make_vocabulary, constraint_deadline_ms=1)
    future = bench.ask("a")
    bench.clock.now += 1000
    may_go_on.set()
    assert future.result(PATIENCE)
    bench.compiler.close()


# -- time ------------------------------------------------------------------------------------------


@pytest.fixture
def hurried() -> Iterator[Bench]:
    bench = Bench(constraint_deadline_ms=10)
    yield bench
    bench.compiler.close()


def test_a_compile_that_takes_too_long_is_refused_and_kept_once_it_is_done(hurried: Bench) -> None:
    futures = [hurried.ask("slow") for _ in range(2)]
    until(lambda: hurried.backend.started)
    hurried.clock.now += 1
    for future in (*futures, hurried.ask("slow")):  # also who comes while it still runs
        error = error_of(future)
        assert isinstance(error, RequestError)
        assert (error.param, error.code) == ("constraint", "constraint_deadline_exceeded")
        assert "10 ms" in str(error) and "constraint_deadline_ms" in str(error)
    hurried.backend.release("slow")
    until(lambda: hurried.compiler.stats().num_grammars)
    assert hurried.get("slow")
    assert hurried.compiler.stats().num_overruns == 1


def test_who_waits_in_line_is_not_refused_for_the_time_it_waits(hurried: Bench) -> None:
    hurried.occupy()
    waiting = hurried.ask("a")
    hurried.clock.now += 1000
    until(lambda: hurried.compiler.stats().num_overruns == 2)
    assert not waiting.done()
    hurried.backend.release("slow 0")
    assert waiting.result(PATIENCE)


def test_who_waits_for_the_turn_of_another_is_not_refused_for_the_time_it_waits(
    hurried: Bench,
) -> None:
    hurried.ask("slow alone")
    until(lambda: hurried.backend.started)
    waiting = hurried.ask("alone")
    until(lambda: hurried.compiler.stats().num_waiting == 0)
    hurried.clock.now += 1000
    until(lambda: hurried.compiler.stats().num_overruns == 1)
    assert not waiting.done()
    hurried.backend.release("slow alone")
    assert waiting.result(PATIENCE)
    assert hurried.backend.started == ["slow alone", "alone"]


def test_who_waits_for_threads_that_are_held_for_ever_is_told_to_come_back() -> None:
    bench = Bench(wait_seconds=0.01)
    bench.occupy()
    waiting = [bench.ask("a"), bench.ask("a")]
    bench.clock.now += 1
    for future in waiting:
        assert isinstance(error_of(future), EngineBusyError)
    stats = bench.compiler.stats()
    assert (stats.num_waiting, stats.num_turned_away) == (0, 2)
    later = bench.ask("a")
    bench.backend.release_all()
    assert later.result(PATIENCE)
    bench.compiler.close()


def test_small_constraints_come_first_and_every_fourth_is_the_one_that_waited_longest(
    bench: Bench,
) -> None:
    bench.occupy()
    futures = [bench.ask(text) for text in ("c" * 300, "b" * 20, "a")]
    bench.backend.release("slow 0")
    for future in futures:
        future.result(PATIENCE)
    assert [text[0] for text in bench.backend.started[2:]] == ["a", "c", "b"]


def test_where_too_many_wait_one_more_is_told_to_come_back() -> None:
    bench = Bench(max_waiting=2)
    bench.occupy()
    waiting = [bench.ask("a"), bench.ask("b")]
    error = error_of(bench.ask("c"))
    assert isinstance(error, EngineBusyError)
    same = bench.ask("a")  # takes no place
    bench.backend.release_all()
    for future in (*waiting, same, bench.ask("slow 0")):
        assert future.result(PATIENCE)
    assert bench.compiler.stats().num_turned_away == 1
    bench.compiler.close()


def test_a_call_of_many_constraints_is_not_turned_away_by_itself() -> None:
    bench = Bench(max_waiting=2)
    bench.occupy()
    future = bench.ask_all(*[spec_of(f"{index}") for index in range(50)])
    bench.backend.release_all()
    assert len(future.result(PATIENCE)) == 50
    bench.compiler.close()


# -- leaving ---------------------------------------------------------------------------------------


def test_what_nobody_waits_for_leaves_the_line(bench: Bench) -> None:
    bench.occupy()
    first, second = bench.ask("a"), bench.ask("a")
    assert first.cancel()
    assert bench.compiler.stats().num_waiting == 1
    assert second.cancel()
    assert bench.compiler.stats().num_waiting == 0
    bench.backend.release_all()
    assert bench.get("b")
    assert "a" not in bench.backend.started


def test_a_compile_goes_on_when_one_of_those_who_wait_leaves(bench: Bench) -> None:
    first, second = bench.ask("slow"), bench.ask("slow")
    until(lambda: bench.backend.started)
    assert first.cancel()
    bench.backend.release("slow")
    assert second.result(PATIENCE)
    with pytest.raises(CancelledError):
        first.result(0)


def test_a_compile_that_everybody_left_is_kept(bench: Bench) -> None:
    future = bench.ask("slow")
    until(lambda: bench.backend.started)
    assert future.cancel()
    bench.backend.release("slow")
    until(lambda: bench.compiler.stats().num_grammars)
    assert bench.ask("slow").done()


# -- the end ---------------------------------------------------------------------------------------


def test_close_tells_all_who_wait_and_ends_every_thread() -> None:
    before = set(threading.enumerate())
    bench = Bench()
    bench.occupy()
    backend = bench.backend
    waiting = [bench.ask("slow 0"), bench.ask("a")]
    bench.compiler.close()
    for future in waiting:
        assert isinstance(error_of(future), EngineClosedError)
    assert backend.closed
    assert set(threading.enumerate()) <= before
    bench.compiler.close()


def test_nothing_is_compiled_after_the_end(bench: Bench) -> None:
    bench.get("a")
    bench.compiler.close()
    for text in ("a", "b"):
        assert isinstance(error_of(bench.ask(text)), EngineClosedError)
    with pytest.raises(EngineClosedError):
        bench.backends.get("llguidance")


def test_an_engine_may_be_closed_while_a_backend_is_made() -> None:
    may_go_on, asked = threading.Event(), threading.Event()

    def make_vocabulary() -> Vocabulary:
        asked.set()
        assert may_go_on.wait(PATIENCE)
        return no_vocabulary()

    bench = Bench(make_vocabulary=make_vocabulary)
    assert asked.wait(PATIENCE)
    future = bench.ask("a")
    closing = threading.Thread(target=bench.compiler.close)
    closing.start()
    assert isinstance(error_of(future), EngineClosedError)
    may_go_on.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_every_caller_is_told_whatever_many_of_them_do() -> None:
    """Threads that ask for good, wrong, broken and slow constraints, and leave at random."""
    bench = Bench(constraint_cache_memory=20_000, max_waiting=10)
    told: list[str] = []

    def call(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(100):
            kind = chance.choice(["good", "wrong", "panic", "no copy", "good"])
            future = bench.ask(f"{kind} {chance.randrange(8)}")
            if chance.random() < 0.3:
                future.cancel()
            try:
                future.result(PATIENCE)
                told.append("matcher")
            except (RequestError, EngineError, CancelledError) as error:
                told.append(type(error).__name__)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 800
    assert {"matcher", "RequestError", "EngineError", "CancelledError"} <= set(told)
    until(lambda: not bench.compiler._jobs)
    assert bench.compiler.stats().num_waiting == 0
    bench.compiler._grammars.check()
    bench.compiler.close()
