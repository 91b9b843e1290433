"""The asyncio engine: streams, cancellation and aborts at every point of a request's life."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from sapwood import (
    AsyncEngine,
    EngineClosedError,
    FinishReason,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from tests.runtime.test_engine import assert_nothing_held

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
PROMPT = list(range(3, 203))


@pytest.fixture(scope="module")
def folder(tiny_model: Path) -> Path:
    return tiny_model


@pytest.fixture
def engine(folder: Path) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(
        str(folder),
        num_kv_blocks=512,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        check_invariants=True,
    )
    yield engine
    engine.close()


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 60))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_generate_answers_in_order(engine: AsyncEngine) -> None:
    async def body() -> None:
        outputs = await engine.generate(["The quick", "A tree"], GREEDY)
        texts = [engine.tokenizer.decode(output.prompt_token_ids) for output in outputs]
        assert texts == ["The quick", "A tree"]
        assert all(len(output.outputs[0].token_ids) == 10 for output in outputs)

    run(body)


def test_many_callers_are_answered_as_if_alone(engine: AsyncEngine) -> None:
    async def body() -> None:
        prompts = [f"word {i}" for i in range(20)]
        together = await asyncio.gather(*(engine.generate(p, GREEDY) for p in prompts))
        for prompt, [output] in zip(prompts, together, strict=True):
            [alone] = await engine.generate(prompt, GREEDY)
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids

    run(body)
    assert_nothing_held(engine)


def test_a_stream_adds_up(engine: AsyncEngine) -> None:
    async def body() -> None:
        [whole] = await engine.generate("The quick", GREEDY)
        pieces = [piece async for piece in engine.stream("The quick", GREEDY)]
        text = "".join(piece.outputs[0].text for piece in pieces)
        assert text == whole.outputs[0].text

    run(body)


def test_an_id_in_use_is_refused_and_free_again_afterwards(engine: AsyncEngine) -> None:
    async def body() -> None:
        stream = engine.stream("The quick", LONG, request_id="mine")
        await anext(stream)
        with pytest.raises(RequestError, match="in use"):
            await engine.generate("A tree", GREEDY, request_ids=["mine"])
        await anext(stream)  # it was not disturbed
        await stream.aclose()
        await engine.generate("A tree", GREEDY, request_ids=["mine"])
        with pytest.raises(RequestError, match="in use"):
            await engine.generate(["a", "b"], GREEDY, request_ids=["same", "same"])

    run(body)
    assert_nothing_held(engine)


def test_an_id_that_was_left_may_be_used_again_at_once(engine: AsyncEngine) -> None:
    async def body() -> None:
        [expected] = await engine.generate("A tree", GREEDY)
        for _ in range(20):
            stream = engine.stream("The quick", LONG, request_id="mine")
            await anext(stream)
            await stream.aclose()
            [output] = await engine.generate("A tree", GREEDY, request_ids=["mine"])
            assert output.request_id == "mine"
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids

    run(body)
    assert_nothing_held(engine)


def test_streams_of_many_are_checked_before_any_runs(engine: AsyncEngine) -> None:
    async def body() -> None:
        steps = engine.stats().num_steps
        with pytest.raises(RequestError):
            await anext(engine.stream_all(["fine", ""], GREEDY))
        assert engine.stats().num_steps == steps
        whole = await engine.generate(["The quick", "A tree"], GREEDY)
        texts = ["", ""]
        async for index, piece in engine.stream_all(["The quick", "A tree"], GREEDY):
            texts[index] += piece.outputs[0].text
        assert texts == [output.outputs[0].text for output in whole]

    run(body)


def test_abort_gives_the_caller_what_there_is(engine: AsyncEngine) -> None:
    async def body() -> None:
        call = asyncio.create_task(engine.generate("The quick", LONG, request_ids=["1"]))
        others = engine.generate(["A tree", "A fox"], GREEDY, request_ids=["10", "11"])
        waiting = asyncio.create_task(others)
        await until(lambda: engine.stats().generated_tokens >= 3)
        assert await engine.abort("1")
        [output] = await call
        assert output.outputs[0].finish_reason is FinishReason.ABORT
        assert 0 < len(output.outputs[0].token_ids) < 1500
        assert [o.outputs[0].finish_reason for o in await waiting] == [FinishReason.LENGTH] * 2
        assert not await engine.abort("1")

    run(body)
    assert_nothing_held(engine)


# -- aborts at every point -------------------------------------------------------------------------


async def cold_answer(engine: AsyncEngine) -> RequestOutput:
    await engine.flush_cache()
    [output] = await engine.generate(PROMPT, GREEDY)
    await engine.flush_cache()
    return output


def num_rows(engine: AsyncEngine) -> int:
    return engine.stats().computed_tokens


Point = Callable[[AsyncEngine, int], bool]
POINTS: dict[str, Point] = {
    "queued": lambda engine, rows: engine.stats().num_waiting + engine.stats().num_running > 0,
    "first chunk": lambda engine, rows: num_rows(engine) >= rows + 1,
    "between chunks": lambda engine, rows: num_rows(engine) >= rows + 128,
    "decode": lambda engine, rows: num_rows(engine) >= rows + 203,
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("point", POINTS)
def test_a_cancelled_call_leaves_nothing_and_the_prefix_answers_as_cold(
    engine: AsyncEngine, point: str, streaming: bool
) -> None:
    async def consume(stream: AsyncIterator[RequestOutput]) -> None:
        async for _ in stream:
            pass

    async def body() -> None:
        cold = await cold_answer(engine)
        rows = num_rows(engine)
        call: Awaitable[object]
        if streaming:
            call = asyncio.create_task(consume(engine.stream(PROMPT, LONG)))
        else:
            call = asyncio.create_task(engine.generate(PROMPT, LONG))
        await until(lambda: POINTS[point](engine, rows))
        call.cancel()  # type: ignore[attr-defined]
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: not engine.stats().num_running + engine.stats().num_waiting)
        assert_nothing_held(engine)
        [again] = await engine.generate(PROMPT, GREEDY)
        assert again.outputs[0].token_ids == cold.outputs[0].token_ids

    run(body)
    assert engine.stats().num_finished_by_reason["abort"] == 1


def test_a_request_that_waits_for_a_seat_can_be_cancelled(engine: AsyncEngine) -> None:
    async def body() -> None:
        running = [asyncio.create_task(engine.generate([3 + i], LONG)) for i in range(4)]
        await until(lambda: engine.stats().num_running == 4)
        waiting = asyncio.create_task(engine.generate(PROMPT, LONG))
        await until(lambda: engine.stats().num_waiting == 1)
        waiting.cancel()
        await until(lambda: engine.stats().num_waiting == 0)
        assert engine.stats().num_running == 4
        for call in running:
            call.cancel()
        await asyncio.gather(*running, waiting, return_exceptions=True)

    run(body)
    assert_nothing_held(engine)


def test_breaking_out_of_a_stream_ends_it(engine: AsyncEngine) -> None:
    async def body() -> None:
        stream = engine.stream("The quick", LONG)
        async for _ in stream:
            break
        await stream.aclose()
        await until(lambda: engine.stats().num_running == 0)

    run(body)
    assert_nothing_held(engine)


def test_closing_tells_everyone_in_flight(engine: AsyncEngine) -> None:
    async def body() -> None:
        calls = [asyncio.create_task(engine.generate([3 + i], LONG)) for i in range(6)]
        await until(lambda: engine.stats().generated_tokens > 6)
        await asyncio.to_thread(engine.close)
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, EngineClosedError) for result in results)
        with pytest.raises(EngineClosedError):
            await engine.flush_cache()

    run(body)


def test_a_loop_that_ended_leaves_no_request_running(engine: AsyncEngine) -> None:
    async def abandon() -> None:
        stream = engine.stream("The quick", LONG, request_id="left")
        await anext(stream)

    asyncio.run(abandon())
    assert_nothing_held(engine)
    run_again = engine.generate("The quick", GREEDY, request_ids=["left"])
    [output] = asyncio.run(run_again)
    assert output.finished
