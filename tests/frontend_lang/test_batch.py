"""Many runs of one program: order, errors, threads, and what is shared."""

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import sapwood as sgl
from sapwood.frontend_lang.backends.interface import Call, Prompt
from sapwood.frontend_lang.batch import _Batch
from sapwood.frontend_lang.process import PROCESS
from sapwood.frontend_lang.state import ProgramState
from tests.frontend_lang.fakes import FakeBackend, ScriptedError
from tests.frontend_lang.interrupts import interrupt_when
from tests.frontend_lang.loops import num_tasks_left, own_loop

EXAMPLES = "Q: one and one?\nA: two\nQ: two and two?\nA: four\n"


@sgl.function
def answer(s: ProgramState, question: str) -> None:
    s += EXAMPLES + "Q: " + question + "\nA:"
    s += sgl.gen("answer", max_tokens=8)


@sgl.function
def talk(s: ProgramState, question: str) -> None:
    """Reads what it has asked, and so holds its thread."""
    s += EXAMPLES + question + sgl.gen("first")
    s += f"[{s['first']}]" + sgl.gen("second")
    assert s["second"]


@sgl.function
async def talk_async(s: ProgramState, question: str) -> None:
    s += EXAMPLES + question + sgl.gen("first")
    s += f"[{await s.aget('first')}]" + sgl.gen("second")


def questions(number: int) -> list[dict[str, Any]]:
    return [{"question": f"number {index:03}?"} for index in range(number)]


def shuffled(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return random.Random(3).sample(items, len(items))


def echo(prompt: Prompt, call: Call) -> str:
    """What was asked last."""
    return prompt.text.rsplit("number ")[-1][:3]


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    """A batch that waits for ever ends the test, not the suite's time."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("program", [answer, talk, talk_async])
@pytest.mark.parametrize("num_threads", ["auto", 1, 3])
def test_states_come_in_the_order_of_their_arguments(program: Any, num_threads: Any) -> None:
    items = shuffled(questions(20))
    states = program.run_batch(items, backend=FakeBackend(echo), num_threads=num_threads)
    assert [EXAMPLES in state.text() for state in states] == [True] * 20
    asked = [state.text().removeprefix(EXAMPLES) for state in states]
    for item, text in zip(items, asked, strict=True):
        assert item["question"] in text


def test_an_empty_batch_is_empty() -> None:
    assert answer.run_batch([], backend=FakeBackend()) == []


@pytest.mark.parametrize("program", [answer, talk, talk_async])
def test_the_common_prefix_is_computed_once_and_the_rest_begins_depth_first(program: Any) -> None:
    backend = FakeBackend()
    program.run_batch(shuffled(questions(40)), backend=backend)
    common, *prompts = backend.prompts
    first = [text for text in prompts if "[" not in text]
    assert EXAMPLES in common and all(text.startswith(common) for text in prompts)
    assert len(first) == 40 and first == sorted(first)


def test_no_program_is_run_twice() -> None:
    runs: list[str] = []

    @sgl.function
    def counted(s: ProgramState, question: str) -> None:
        runs.append(question)
        s += EXAMPLES + question + sgl.gen("x")

    counted.run_batch(questions(30), backend=FakeBackend())
    assert sorted(runs) == [item["question"] for item in questions(30)]


def test_with_generator_style_a_state_comes_before_later_ones_are_done() -> None:
    backend = FakeBackend(delay=0.005)
    states = answer.run_batch(questions(6), backend=backend, num_threads=1, generator_style=True)
    assert len(backend.asked) == 0  # nothing begins before somebody wants it
    next(iter(states))
    assert len(backend.asked) < 7
    assert len(list(states)) == 5


def test_closing_the_generator_aborts_the_rest() -> None:
    backend = FakeBackend(delay=0.01)
    states = answer.run_batch(questions(50), backend=backend, num_threads=2, generator_style=True)
    next(iter(states))
    states.close()  # type: ignore[union-attr]
    settle(backend)
    assert len(backend.asked) < 20


def settle(backend: FakeBackend) -> None:
    """Soon nothing is under way: no request, and nothing else on the loop."""
    deadline = time.monotonic() + 5
    while backend.num_active + num_tasks() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert backend.num_active == 0
    assert num_tasks() == 0


def num_tasks() -> int:
    async def others() -> int:
        return len(asyncio.all_tasks()) - 1

    return PROCESS.background.run(others())


@pytest.mark.parametrize("program", [answer, talk, talk_async])
def test_the_first_error_is_raised_with_its_line_and_the_rest_is_aborted(program: Any) -> None:
    def fail_one(prompt: Prompt, call: Call) -> str:
        if "number 007" in prompt.text:
            raise ScriptedError("no answer to 7")
        return "ok"

    backend = FakeBackend(fail_one, delay=0.01)
    with pytest.raises(sgl.ProgramError, match=r"test_batch.py:\d+ in .*no answer to 7") as caught:
        program.run_batch(questions(60), backend=backend, num_threads=4)
    assert isinstance(caught.value.__cause__, ScriptedError)
    settle(backend)
    assert len(backend.asked) < 60


@pytest.mark.parametrize("program", [answer, talk, talk_async])
def test_errors_that_are_returned_are_those_of_their_states_only(program: Any) -> None:
    def fail_some(prompt: Prompt, call: Call) -> str:
        if "number 003" in prompt.text or "number 011" in prompt.text:
            raise ScriptedError("not that one")
        return "ok"

    states = program.run_batch(questions(15), backend=FakeBackend(fail_some), on_error="return")
    failed = [index for index, state in enumerate(states) if state.error() is not None]
    assert failed == [3, 11]
    with pytest.raises(sgl.ProgramError, match="not that one"):
        states[3].text()


def test_an_error_of_the_program_itself_is_its_own() -> None:
    @sgl.function
    def picky(s: ProgramState, question: str) -> None:
        s += question + sgl.gen("x")
        if "002" in question:
            raise ValueError("I do not like 2")

    with pytest.raises(ValueError, match="I do not like 2"):
        picky.run_batch(questions(5), backend=FakeBackend())
    states = picky.run_batch(questions(5), backend=FakeBackend(), on_error="return")
    assert [str(state.error() or "").endswith("I do not like 2") for state in states] == [
        index == 2 for index in range(5)
    ]


def test_a_program_that_raises_stop_iteration_ends_too() -> None:
    @sgl.function
    def exhausted(s: ProgramState, question: str) -> None:
        next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        exhausted.run_batch(questions(2), backend=FakeBackend())


def test_arguments_that_do_not_fit_are_told_with_their_item_before_anything_runs() -> None:
    backend = FakeBackend()
    with pytest.raises(TypeError, match="item 1 of the batch.*'question'"):
        answer.run_batch([{"question": "q"}, {}], backend=backend)
    with pytest.raises(TypeError, match="item 0 of the batch is a str"):
        answer.run_batch(["q"], backend=backend)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="num_threads"):
        answer.run_batch(questions(1), backend=backend, num_threads=0)
    with pytest.raises(TypeError, match="on_error"):
        answer.run_batch(questions(1), backend=backend, on_error="ignore")  # type: ignore[call-overload]
    assert backend.asked == []


def test_options_of_the_batch_reach_every_answer_and_items_may_have_their_own() -> None:
    backend = FakeBackend(echo)
    items = [{"question": "number 000?"}, {"question": "number 001?", "temperature": 0.5}]
    answer.run_batch(items, backend=backend, temperature=0.25)
    temperatures = [
        asked.call.options.get("temperature") for asked in backend.asked[-2:] if asked.call
    ]
    assert temperatures == [0.25, 0.5]


def test_plain_programs_have_a_bounded_number_of_threads_and_async_ones_none() -> None:
    before = threading.active_count()
    most = 0

    def watch(prompt: Prompt, call: Call) -> str:
        nonlocal most
        most = max(most, threading.active_count() - before)
        return "ok"

    talk_async.run_batch(questions(50), backend=FakeBackend(watch))
    assert most <= 1  # the loop's
    most = 0
    talk.run_batch(questions(50), backend=FakeBackend(watch), num_threads=5)
    assert most <= 6


def test_a_batch_that_ends_begins_no_more_programs_and_leaves_no_tasks() -> None:
    backend = FakeBackend(echo, failing=[3])
    with own_loop() as background:
        with pytest.raises(sgl.ProgramError):
            talk.run_batch(questions(50), backend=backend, num_threads=2)
        assert num_tasks_left(background) == 0
        assert len(backend.asked) < 50  # of 100, had all programs been begun


def test_no_more_than_num_threads_programs_work_at_the_backend() -> None:
    most = 0

    def watch(prompt: Prompt, call: Call) -> str:
        nonlocal most
        most = max(most, backend.num_active)
        return "ok"

    backend = FakeBackend(watch, delay=0.002)
    answer.run_batch(questions(30), backend=backend, num_threads=3)
    assert most <= 3


@pytest.mark.parametrize("program", [answer, talk, talk_async])
def test_a_program_out_of_time_is_aborted_and_the_others_are_not(program: Any) -> None:
    class Stuck(FakeBackend):
        async def generate(self, prompt: Prompt, call: Call) -> Any:
            if "number 001" in prompt.text:
                await asyncio.sleep(60)
            return await super().generate(prompt, call)

    states = program.run_batch(questions(4), backend=Stuck(), timeout=0.2, on_error="return")
    errors = [state.error() for state in states]
    assert [error is not None for error in errors] == [False, True, False, False]
    assert "0.2 seconds" in str(errors[1])


def test_the_time_of_a_program_does_not_count_while_it_waits_for_its_turn() -> None:
    backend = FakeBackend(delay=0.05)
    states = answer.run_batch(questions(8), backend=backend, num_threads=1, timeout=0.25)
    assert [state["answer"] for state in states] == ["ok"] * 8


def test_a_function_that_never_looks_up_is_left_behind_when_its_time_is_over() -> None:
    released = threading.Event()

    @sgl.function
    def sleepy(s: ProgramState) -> None:
        released.wait(20)

    with pytest.raises(sgl.ProgramTimeoutError):
        sleepy.run_batch([{}], backend=FakeBackend(), timeout=0.05)
    released.set()


def test_a_batch_inside_an_async_program_is_refused_instead_of_waiting_for_itself() -> None:
    @sgl.function
    async def nested(s: ProgramState) -> None:
        answer.run_batch(questions(2), backend=FakeBackend())

    with pytest.raises(sgl.ProgramUsageError, match="run_batch waits"):
        nested.run_batch([{}], backend=FakeBackend())


def test_a_batch_runs_where_an_event_loop_runs_already() -> None:
    async def notebook() -> int:
        return len(answer.run_batch(questions(3), backend=FakeBackend()))

    assert asyncio.run(notebook()) == 3


def test_progress_is_told_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    answer.run_batch(questions(4), backend=FakeBackend(), progress_bar=True)
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.startswith("4/4 programs, ")


@sgl.function
def few_shot(s: ProgramState, examples: str, question: str) -> None:
    s += "Solve:\n" + examples + "Q: " + question + "\nA:"
    s += sgl.gen("answer", max_tokens=2, temperature=0)


@sgl.function
def few_shot_read(s: ProgramState, examples: str, question: str) -> None:
    """Reads its answer, and asks on."""
    s += "Solve:\n" + examples + "Q: " + question + "\nA:"
    s += sgl.gen("answer", max_tokens=2, temperature=0)
    s += f" is {len(s['answer'])} long." + sgl.gen("more", max_tokens=2, temperature=0)


def few_shot_items(num_items: int, num_groups: int) -> list[dict[str, str]]:
    """Shuffled; each group has examples of its own."""
    generator = random.Random(11)

    def words(count: int) -> str:
        return " ".join(str(generator.randrange(1000)) for _ in range(count))

    examples = [f"{words(40)}\n" for _ in range(num_groups)]
    items = [
        {"examples": examples[index % num_groups], "question": words(6)}
        for index in range(num_items)
    ]
    generator.shuffle(items)
    return items


def num_distinct(sequences: list[tuple[int, ...]]) -> int:
    """Tokens of the tree that the sequences make."""
    ordered = sorted(sequences)
    shared = [
        next((at for at, pair in enumerate(zip(*two, strict=False)) if pair[0] != pair[1]), 0)
        for two in pairwise(ordered)
    ]
    return sum(map(len, ordered)) - sum(shared)


def share_of_best_hit_rate(program: Any, tiny_model: Path, **options: Any) -> float:
    """In an engine whose cache is twice the longest request."""
    items = few_shot_items(num_items=200, num_groups=10)
    with sgl.Engine(str(tiny_model), num_kv_blocks=64) as engine:
        tokens = [
            engine.tokenizer.encode(f"Solve:\n{item['examples']}Q: {item['question']}\nA:")
            for item in items
        ]
    prompts = [tuple(ids.tolist()) for ids in tokens]
    num_blocks = 2 * -(-(max(map(len, prompts)) + 32) // 16)
    with sgl.Engine(str(tiny_model), num_kv_blocks=num_blocks) as engine:
        states = program.run_batch(items, backend=engine, **options)
        told = [state.get_meta_info("answer") for state in states]
    assert [meta["prompt_tokens"] for meta in told] == list(map(len, prompts))
    total = sum(map(len, prompts))
    best = 1 - num_distinct(prompts) / total
    return sum(meta["cached_tokens"] for meta in told) / total / best


@pytest.mark.parametrize("num_threads", ["auto", 8])
def test_shuffled_programs_share_as_if_sorted_in_a_cache_of_twice_the_longest(
    tiny_model: Path, num_threads: Any
) -> None:
    assert share_of_best_hit_rate(few_shot, tiny_model, num_threads=num_threads) >= 0.96


def test_shuffled_programs_that_read_what_they_ask_share_nearly_as_much(tiny_model: Path) -> None:
    assert share_of_best_hit_rate(few_shot_read, tiny_model) >= 0.7


def test_ctrl_c_ends_a_batch_and_aborts_its_requests() -> None:
    backend = FakeBackend(delay=60)
    interrupt_when(lambda: backend.num_active > 0, inside=_Batch.results)
    with pytest.raises(KeyboardInterrupt):
        answer.run_batch(questions(10), backend=backend)
    settle(backend)
    assert backend.num_cancelled == len(backend.asked) > 0


def test_a_batch_cannot_be_streamed() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.gen("x")
        s.text()

    with pytest.raises(TypeError, match="leave stream out"):
        program.run_batch([{}], backend=FakeBackend(), stream=True)
