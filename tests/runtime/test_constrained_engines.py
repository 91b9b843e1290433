"""What the faces of an engine do while constraints are compiled: nobody else waits for them."""

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import httpx
import pytest

from sapwood import (
    AsyncEngine,
    Engine,
    EngineClosedError,
    EngineError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.llguidance_backend import LlguidanceBackend, LlguidanceMatcher
from sapwood.runtime.constraints.llguidance_translator import MAX_SHORT_CHARS, ProcessTranslator
from sapwood.runtime.constraints.spec import ConstraintSpec
from sapwood.runtime.engine_base import EngineBase
from sapwood.server.app import create_app
from tests.runtime.constraints.fakes import PATIENCE, FakeBackend, FakeMatcher, fake_compiler, until
from tests.runtime.test_engine import assert_nothing_held
from tests.server.helpers import events

FREE = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "num_kv_blocks": 256,
    "max_num_seqs": 4,
    "check_invariants": True,
    "constraint_deadline_ms": 5000,
}


def held_to(text: str) -> SamplingParams:
    constraint = ConstraintSpec.regex(text)
    return SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, constraint=constraint)


def with_fakes(engine: EngineBase) -> FakeBackend:
    """Puts a compiler over fakes into an engine; the backend that it will ask."""
    engine._compiler.close()
    engine._compiler, backends = fake_compiler()
    backend = backends.get("llguidance")
    assert isinstance(backend, FakeBackend)
    return backend


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(str(tiny_model), **OPTIONS)
    yield engine
    engine.close()


@pytest.fixture
def backend(engine: AsyncEngine) -> FakeBackend:
    return with_fakes(engine)


@pytest.fixture
def sync_engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), **OPTIONS) as engine:
        yield engine


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), PATIENCE))


async def turns(count: int = 20) -> None:
    """Let what is ready on the loop go on."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_five_hundred_constraints_that_wait_stop_nobody_else(
    engine: AsyncEngine, backend: FakeBackend
) -> None:
    async def body() -> None:
        await engine.generate("A tree", held_to("kept"))
        slow = [
            asyncio.create_task(engine.generate("The quick", held_to(f"slow {index}")))
            for index in range(500)
        ]
        while engine.constraint_stats().num_waiting < 498:
            await asyncio.sleep(0.001)
        for sampling in (FREE, held_to("kept")):
            [output] = await engine.generate("A tree", sampling)
            assert len(output.outputs[0].token_ids) == 4
        transport = httpx.ASGITransport(app=create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            request = {"prompt": "A tree", "max_tokens": 4, "temperature": 0}
            answer = await client.post("/v1/completions", json=request)
        assert answer.status_code == 200
        assert not any(task.done() for task in slow)
        assert engine.stats().num_running == engine.stats().num_waiting == 0
        backend.release_all()
        outputs = await asyncio.gather(*slow)
        assert len({output.outputs[0].text for [output] in outputs}) == 1

    run(body)
    assert_nothing_held(engine)


def test_an_id_of_a_request_that_waits_for_its_constraint_is_free(
    engine: AsyncEngine, backend: FakeBackend
) -> None:
    async def body() -> None:
        waiting = asyncio.create_task(
            engine.generate("The quick", held_to("slow"), request_ids=["mine"])
        )
        await asyncio.to_thread(until, lambda: backend.started)
        assert await engine.generate("A tree", FREE, request_ids=["mine"])
        backend.release("slow")
        assert await waiting

    run(body)


def test_a_cancelled_call_leaves_nothing_behind(engine: AsyncEngine, backend: FakeBackend) -> None:
    async def body() -> None:
        def call(text: str) -> asyncio.Task[list[RequestOutput]]:
            return asyncio.create_task(engine.generate("A", held_to(text)))

        calls = [call("slow 0"), call("slow 1")]
        # Both threads are taken before the third comes, which would be compiled at once.
        await asyncio.to_thread(until, lambda: {"slow 0", "slow 1"} <= set(backend.started))
        calls.append(call("never compiled"))
        await asyncio.to_thread(until, lambda: engine.constraint_stats().num_waiting == 1)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert all(call.cancelled() for call in calls)
        assert engine.constraint_stats().num_waiting == 0
        backend.release_all()
        assert await engine.generate("A", held_to("slow 0"))  # it was compiled all the same
        assert backend.started.count("slow 0") == 1
        assert "never compiled" not in backend.started

    run(body)
    assert_nothing_held(engine)


def test_a_stream_waits_for_its_constraint(engine: AsyncEngine, backend: FakeBackend) -> None:
    async def body() -> None:
        stream = engine.stream("A tree", held_to("slow"))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(until, lambda: backend.started)
        await turns()
        assert not first.done()
        backend.release("slow")
        await first
        assert len([piece async for piece in stream]) == 3

    run(body)


@pytest.mark.parametrize(("text", "kind"), [("wrong", RequestError), ("panic", EngineError)])
def test_one_constraint_that_fails_fails_its_call_before_anything_runs(
    engine: AsyncEngine, backend: FakeBackend, text: str, kind: type[Exception]
) -> None:
    async def body() -> None:
        steps = engine.stats().num_steps
        samplings = [FREE, held_to("fine"), held_to(text)]
        with pytest.raises(kind):
            await engine.generate(["a", "b", "c"], samplings)
        with pytest.raises(kind):
            await anext(engine.stream_all(["a", "b", "c"], samplings))
        assert engine.stats().num_steps == steps
        assert len(await engine.generate(["a", "b"], samplings[:2])) == 2

    run(body)


@pytest.mark.parametrize("method", ["fill_mask", "advance", "forced_tokens"])
def test_over_http_a_grammar_that_fails_under_way_ends_its_own_requests_only(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    break_after(monkeypatch, method, num_tokens=5)
    free = {"prompt": "A tree", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    held = {"prompt": "A", "max_tokens": 200, "temperature": 1, "seed": 1, "regex": "[ab]{200}"}

    async def body() -> None:
        transport = httpx.ASGITransport(app=create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

            async def post(**fields: object) -> httpx.Response:
                return await client.post("/v1/completions", json=fields)

            alone = (await post(**free)).json()["choices"]
            beside, streamed, whole, other = await asyncio.gather(
                post(**free, stream=True),
                post(**held, stream=True),
                post(**held),
                post(**{**held, "regex": "[cd]{4}"}),
            )
        assert "".join(piece["choices"][0]["text"] for piece in events(beside)) == alone[0]["text"]
        assert re.fullmatch("[cd]{4}", other.json()["choices"][0]["text"])
        assert whole.status_code == 500
        assert "cannot be followed any further" in whole.json()["error"]["message"]
        assert "choices" not in whole.json()
        *pieces, last = [
            json.loads(line.removeprefix("data: ")) for line in streamed.text.split("\n\n") if line
        ]
        assert re.fullmatch("[ab]{1,8}", "".join(p["choices"][0]["text"] for p in pieces))
        assert not any(piece["choices"][0]["finish_reason"] for piece in pieces)
        assert "cannot be followed any further" in last["error"]["message"]

    run(body)
    assert_nothing_held(engine)


def break_after(monkeypatch: pytest.MonkeyPatch, method: str, *, num_tokens: int) -> None:
    """Makes the default backend's matchers fail in a method once they took in so many tokens."""
    num_taken: WeakKeyDictionary[LlguidanceMatcher, int] = WeakKeyDictionary()
    advance, failing = LlguidanceMatcher.advance, getattr(LlguidanceMatcher, method)

    def counted(matcher: LlguidanceMatcher, token_id: int) -> bool:
        num_taken[matcher] = num_taken.get(matcher, 0) + 1
        return advance(matcher, token_id)

    def broken(matcher: LlguidanceMatcher, *arguments: Any) -> Any:
        if num_taken.get(matcher, 0) >= num_tokens:
            raise GrammarError("it is too complex")
        return (counted if method == "advance" else failing)(matcher, *arguments)

    monkeypatch.setattr(LlguidanceMatcher, "advance", counted)
    monkeypatch.setattr(LlguidanceMatcher, method, broken)


def test_a_large_schema_is_enforced_as_a_small_one_of_the_same_language(
    engine: AsyncEngine,
) -> None:
    """What is translated in a process beside what is translated on a thread."""
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"enum": [i, i + 1]} for i in range(4)},
        "required": [f"p{i}" for i in range(4)],
        "additionalProperties": False,
    }
    large = {**schema, "description": "d" * 8 * MAX_SHORT_CHARS}
    backend = engine._compiler._backends.get("llguidance")
    assert isinstance(backend, LlguidanceBackend)
    assert isinstance(backend._translator, ProcessTranslator)
    backend._translator.wait_until_ready()

    async def body() -> None:
        samplings = [
            SamplingParams(
                temperature=1, seed=3, max_tokens=200, constraint=ConstraintSpec.json_schema(s)
            )
            for s in (schema, large)
        ]
        [small_answer], [large_answer] = [
            output.outputs for output in await engine.generate(["A", "A"], samplings)
        ]
        assert large_answer.token_ids == small_answer.token_ids
        assert json.loads(large_answer.text).keys() == schema["properties"].keys()

    run(body)


def test_closing_an_engine_tells_those_that_wait_for_a_constraint(
    engine: AsyncEngine, backend: FakeBackend
) -> None:
    async def body() -> None:
        calls = [asyncio.create_task(engine.generate("A", held_to("slow"))) for _ in range(3)]
        await asyncio.to_thread(until, lambda: backend.started)
        await asyncio.to_thread(engine.close)
        for told in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(told, EngineClosedError)

    run(body)
    assert backend.closed


def test_each_input_gets_the_matcher_of_its_own_constraint(
    sync_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fakes(sync_engine)
    submitted = []
    submit = sync_engine._core.submit
    monkeypatch.setattr(
        sync_engine._core,
        "submit",
        lambda *requests: (submitted.extend(requests), submit(*requests)),
    )
    sync_engine.generate(["a", "b", "c"], [held_to("x"), FREE, held_to("y")])
    matchers = [request.matcher for request in submitted]
    assert matchers == [FakeMatcher("x"), None, FakeMatcher("y")]


def test_a_caller_of_the_synchronous_engine_waits_and_others_pass(sync_engine: Engine) -> None:
    backend = with_fakes(sync_engine)
    answers = []
    thread = threading.Thread(
        target=lambda: answers.extend(sync_engine.generate("A tree", held_to("slow")))
    )
    thread.start()
    until(lambda: backend.started)
    assert len(list(sync_engine.stream("A tree", held_to("fine")))) == 4
    assert not answers
    backend.release("slow")
    thread.join(PATIENCE)
    assert len(answers[0].outputs[0].token_ids) == 4


def test_the_synchronous_engine_refuses_before_anything_runs(sync_engine: Engine) -> None:
    with_fakes(sync_engine)
    steps = sync_engine.stats().num_steps
    with pytest.raises(RequestError, match="leave it out") as told:
        sync_engine.generate(["a", "b"], [FREE, held_to("wrong")])
    assert told.value.param == "constraint"
    with pytest.raises(RequestError):
        sync_engine.stream("a", held_to("wrong"))
    assert sync_engine.stats().num_steps == steps
