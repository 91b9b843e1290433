"""Programs over HTTP to our own server: the tokens are those of an engine in process."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import sapwood
from sapwood import AsyncEngine, EngineError, RequestError
from sapwood.frontend_lang.backends.engine import EngineBackend
from sapwood.frontend_lang.backends.http import GROUP_CONNECTIONS
from sapwood.frontend_lang.backends.interface import (
    Answer,
    Call,
    Piece,
    Prompt,
    RoleText,
)
from sapwood.frontend_lang.backends.runtime_endpoint import RuntimeEndpoint
from sapwood.frontend_lang.options import Options
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec, Whitespace
from sapwood.runtime.errors import ContextLengthError
from sapwood.runtime.hints import NO_HINTS, Hints
from sapwood.server.app import create_app
from tests.frontend_lang.serving import listening
from tests.server.fakes import ANSWER, FakeEngine

pytestmark = pytest.mark.anyio
TEXT = "The quick brown fox"
GREEDY = Options(temperature=0, max_tokens=12)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(str(tiny_model), num_kv_blocks=128, max_num_seqs=16, check_invariants=True)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def url(engine: AsyncEngine) -> Iterator[str]:
    with listening(create_app(engine)) as url:
        yield url


@pytest.fixture
async def endpoint(url: str) -> AsyncIterator[RuntimeEndpoint]:
    endpoint = RuntimeEndpoint(url)
    yield endpoint
    await endpoint.aclose()


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., RuntimeEndpoint]]:
    """Endpoints of applications over fake engines."""
    opened: list[tuple[Any, RuntimeEndpoint]] = []

    def make(engine: FakeEngine, **options: Any) -> RuntimeEndpoint:
        context = listening(create_app(engine))
        endpoint = RuntimeEndpoint(context.__enter__(), **options)
        opened.append((context, endpoint))
        return endpoint

    yield make
    for context, endpoint in opened:
        await endpoint.aclose()
        await asyncio.to_thread(context.__exit__, None, None, None)


async def prompt_of(endpoint: RuntimeEndpoint, text: str) -> Prompt:
    assert endpoint.encoder is not None
    ids = await endpoint.encoder.encode([Piece(text)], at_start=True)
    return Prompt(text=text, token_ids=ids)


async def streamed(endpoint: RuntimeEndpoint, prompt: Prompt, call: Call) -> list[Answer]:
    return [piece async for piece in endpoint.stream(prompt, call)]


async def test_answers_are_those_of_the_engine_in_process(endpoint, engine) -> None:
    near = EngineBackend(engine)
    prompt = await prompt_of(endpoint, TEXT)
    assert prompt.token_ids == await near.encoder.encode([Piece(TEXT)], at_start=True)
    for options in (
        GREEDY,
        GREEDY | {"stop": ["e"]},
        GREEDY | {"ignore_eos": True, "logit_bias": {5: 1.5}, "repetition_penalty": 1.2},
        Options(temperature=1.0, seed=3, n=3, max_tokens=5, top_k=20),
    ):
        call = Call(options=options)
        far_answers = await endpoint.generate(prompt, call)
        near_answers = await near.generate(prompt, call)
        for far_one, near_one in zip(far_answers, near_answers, strict=True):
            assert far_one.text == near_one.text
            assert far_one.token_ids == near_one.token_ids
            assert far_one.finish_reason == near_one.finish_reason
            same = ("finish_reason", "prompt_tokens", "completion_tokens")
            assert [far_one.meta[k] for k in same] == [near_one.meta[k] for k in same]


async def test_a_prompt_and_its_answer_are_found_again(endpoint, engine) -> None:
    await endpoint.flush_cache()
    prompt = await prompt_of(endpoint, "Nothing that was said before, 12345")
    [answer] = await endpoint.generate(prompt, Call(options=GREEDY | {"ignore_eos": True}))
    further = (*prompt.token_ids, *answer.token_ids)
    call = Call(options=GREEDY | {"max_tokens": 1})
    [again] = await endpoint.generate(Prompt(text="", token_ids=further), call)
    # The last token that was drawn had not been computed, and one always is.
    assert again.meta["cached_tokens"] >= len(further) - 2


async def test_a_stream_says_what_the_whole_answer_says(endpoint) -> None:
    prompt = await prompt_of(endpoint, TEXT)
    for options in (GREEDY, GREEDY | {"stop": "e"}, GREEDY | {"return_logprob": True}):
        call = Call(options=options)
        [whole] = await endpoint.generate(prompt, call)
        pieces = await streamed(endpoint, prompt, call)
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [piece.token_ids for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].token_ids == whole.token_ids
        assert pieces[-1].finish_reason == whole.finish_reason
        if options.get("return_logprob"):
            key = "output_token_logprobs"
            assert len(pieces[-1].meta[key]) == len(whole.meta[key]) > 0


async def test_scores_are_those_of_the_engine_in_process(endpoint, engine) -> None:
    near = EngineBackend(engine)
    prompt = await prompt_of(endpoint, TEXT)
    further = [await endpoint.encoder.encode([Piece(t)], at_start=False) for t in (" jumps", "!")]
    for before in (prompt, Prompt(text="", token_ids=())):
        for given in (further, [*further, further[0]], [" jumps", "!"]):
            far_scores = await endpoint.score(before, given, NO_HINTS)
            near_scores = await near.score(before, given, NO_HINTS)
            for far_one, near_one in zip(far_scores, near_scores, strict=True):
                assert far_one.token_ids == near_one.token_ids
                assert far_one.logprobs == pytest.approx(near_one.logprobs, abs=1e-4)


async def test_constants_and_roles_are_asked_for_once(serve, fake, monkeypatch) -> None:
    endpoint = serve(fake)
    asked: list[str] = []
    post = endpoint._http.post

    async def counted(path: str, body: Any) -> Any:
        asked.append(path)
        return await post(path, body)

    monkeypatch.setattr(endpoint._http, "post", counted)
    pieces = [Piece("user:", is_control=True), Piece("hi<end>"), Piece("<end>", is_control=True)]
    many = [endpoint.encoder.encode(pieces, at_start=True) for _ in range(20)]
    assert {ids[-1] for ids in await asyncio.gather(*many)} == {256}
    assert len(set(await asyncio.gather(*(endpoint.encoder.role_text(("user",)),) * 1))) == 1
    for _ in range(3):
        assert await endpoint.encoder.role_text(("user",)) == RoleText("user:", "<end>")
    assert asked == ["/tokenize", "/role_text"]
    await endpoint.encoder.encode(pieces, at_start=False)
    assert len(asked) == 3


async def test_constants_wanted_together_are_asked_for_together(serve, fake, monkeypatch) -> None:
    endpoint = serve(fake)
    asked: list[int] = []
    post = endpoint._http.post

    async def counted(path: str, body: Any) -> Any:
        asked.append(len(body["batch"]))
        return await post(path, body)

    monkeypatch.setattr(endpoint._http, "post", counted)
    encode = endpoint.encoder.encode
    texts = [f"choice {i}" for i in range(300)]
    told = await asyncio.gather(*(encode([Piece(text)], at_start=False) for text in texts))
    assert told == [tuple(text.encode()) for text in texts]
    assert asked == [256, 44]
    long = ["x" * 200_000, "y" * 200_000]
    told = await asyncio.gather(*(encode([Piece(text)], at_start=False) for text in long))
    assert [len(ids) for ids in told] == [200_000] * 2
    assert asked == [256, 44, 1, 1]


async def test_one_wrong_constant_is_no_fault_of_the_others(endpoint) -> None:
    texts = ["before", "\ud800", "after"]
    encode = endpoint.encoder.encode
    told = await asyncio.gather(
        *(encode([Piece(text)], at_start=False) for text in texts), return_exceptions=True
    )
    assert isinstance(told[1], RequestError)
    assert [len(told[0]) > 0, len(told[2]) > 0] == [True, True]


async def test_constants_that_nobody_waits_for_any_more_hinder_no_others(serve, fake) -> None:
    endpoint = serve(fake)
    encode = endpoint.encoder.encode
    tasks = [asyncio.ensure_future(encode([Piece(t)], at_start=False)) for t in ("a", "b", "c")]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert await tasks[2] == (99,)
    assert await tasks[1] == (98,)
    assert await encode([Piece("a")], at_start=False) == (97,)


async def test_roles_may_be_written_otherwise_than_the_server_does(serve, fake) -> None:
    encoder = serve(fake, chat_template="chatml").encoder
    around = await encoder.role_text(("system", "user"))
    assert around == RoleText("<|im_start|>user\n", "<|im_end|>\n")
    with pytest.raises(ValueError, match="one of chatml, llama-3"):
        RuntimeEndpoint("http://127.0.0.1:9", chat_template="alpaca")


async def test_hints_and_constraints_arrive_as_they_are(serve, fake) -> None:
    endpoint = serve(fake)
    hints = Hints(program_id="p", more_follows=True, idle_seconds=1.5, fork_size=3, fork_index=0)
    spec = ConstraintSpec(kind=ConstraintKind.LARK, text='start: "H"', whitespace=Whitespace.SPACED)
    prompt = Prompt(text="hi", token_ids=(104, 105))
    [answer] = await endpoint.generate(prompt, Call(constraint=spec, hints=hints))
    assert (answer.text, answer.token_ids) == (ANSWER, tuple(ANSWER.encode()))
    assert fake.hints == [hints]
    [sampling] = fake.sampling
    assert sampling.constraint == spec


async def test_reasoning_is_told_apart_as_in_process(endpoint, engine) -> None:
    near = EngineBackend(engine)
    for end in ("", "<think>"):
        prompt = await prompt_of(endpoint, TEXT + end)
        options = Options(temperature=0.0, max_tokens=24, logit_bias={}, stop=["zz"])
        call = Call(options=options, separate_reasoning=True, reasoning_type="qwen3")
        [far_one], [near_one] = (
            await endpoint.generate(prompt, call),
            await near.generate(prompt, call),
        )
        told = ("text", "reasoning", "token_ids")
        assert [getattr(far_one, f) for f in told] == [getattr(near_one, f) for f in told]
        assert bool(far_one.reasoning) == bool(end)
        pieces = await streamed(endpoint, prompt, call)
        assert "".join(piece.reasoning for piece in pieces) == far_one.reasoning
        assert "".join(piece.text for piece in pieces) == far_one.text
        assert pieces[-1].token_ids == far_one.token_ids


async def test_an_option_without_the_constraint_made_of_it_is_not_left_out(serve, fake) -> None:
    endpoint = serve(fake)
    prompt = Prompt(text="hi", token_ids=(104, 105))
    with pytest.raises(RequestError, match="no constraint made of it"):
        await endpoint.generate(prompt, Call(options={"regex": "a+"}))
    with pytest.raises(RequestError, match="one answer is streamed"):
        await streamed(endpoint, prompt, Call(options={"n": 2}))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_cancelling_ends_the_request_at_the_server(serve) -> None:
    fake = FakeEngine(delay=0.02)
    endpoint = serve(fake)
    prompt = Prompt(text="hi", token_ids=(104, 105))
    task = asyncio.ensure_future(endpoint.generate(prompt, Call(options=GREEDY)))
    await until(lambda: len(fake.running) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not fake.running)
    assert len(fake.aborted) == 1

    async with aclosing(endpoint.stream(prompt, Call(options=GREEDY))) as pieces:
        async for piece in pieces:
            if piece.text:
                break
    await until(lambda: not fake.running)
    assert len(fake.aborted) == 2


async def test_many_requests_at_once_have_connections_in_small_groups(serve) -> None:
    fake = FakeEngine(prefill=0.2)
    endpoint = serve(fake)
    prompt = Prompt(text="hi", token_ids=(104, 105))
    call = Call(options=Options(temperature=0, max_tokens=1))
    answers = await asyncio.gather(*(endpoint.generate(prompt, call) for _ in range(50)))
    assert [answer.text for [answer] in answers] == ["H"] * 50
    opened = endpoint._http._opened
    assert opened is not None
    assert len(opened._groups) == -(-50 // GROUP_CONNECTIONS)
    assert [group.num_busy for group in opened._groups] == [0] * len(opened._groups)


async def test_a_refusal_of_the_server_is_a_request_error_with_its_words(endpoint) -> None:
    prompt = await prompt_of(endpoint, TEXT)
    with pytest.raises(RequestError, match="top_p is 7") as caught:
        await endpoint.generate(prompt, Call(options={"top_p": 7.0}))
    assert caught.value.param == "top_p"
    with pytest.raises(RequestError, match="max_tokens is -1") as caught:
        await streamed(endpoint, prompt, Call(options={"max_tokens": -1}))
    assert caught.value.param == "max_tokens"
    with pytest.raises(RequestError, match="regular expression"):
        await endpoint.generate(prompt, Call(constraint=ConstraintSpec.regex("(")))
    with pytest.raises(RequestError, match="must be one of"):
        await endpoint.encoder.role_text(("narrator",))
    too_long = Prompt(text="", token_ids=(5,) * 5000)
    with pytest.raises(ContextLengthError):
        await endpoint.generate(too_long, Call())


@pytest.mark.parametrize("fail_after", [0, 5])
async def test_a_failure_of_the_engine_is_an_engine_error_with_its_words(serve, fail_after) -> None:
    endpoint = serve(FakeEngine(fail=EngineError("a step failed"), fail_after=fail_after))
    prompt = Prompt(text="hi", token_ids=(104, 105))
    with pytest.raises(EngineError, match="a step failed"):
        await endpoint.generate(prompt, Call(options=GREEDY))
    with pytest.raises(EngineError, match="a step failed"):
        await streamed(endpoint, prompt, Call(options=GREEDY))


async def test_a_server_that_is_not_there_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(EngineError, match="is the server running"):
        RuntimeEndpoint(f"http://127.0.0.1:{port}")


async def test_a_server_that_ends_is_told(serve, fake) -> None:
    context = listening(create_app(fake))
    endpoint = RuntimeEndpoint(context.__enter__())
    prompt = Prompt(text="hi", token_ids=(104, 105))
    await endpoint.generate(prompt, Call(options=GREEDY))
    await asyncio.to_thread(context.__exit__, None, None, None)
    with pytest.raises(EngineError, match=r"cannot connect|connection ended"):
        await endpoint.generate(prompt, Call(options=GREEDY))
    await endpoint.aclose()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:8017", "write http://127.0.0.1:8017"),
        ("http://127.0.0.1:8017/v1/", "leave /v1 out"),
    ],
)
def test_a_url_that_cannot_be_is_refused_with_the_right_one(url: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        RuntimeEndpoint(url)


def test_an_endpoint_works_on_any_loop_and_leaves_no_connection_open(url: str) -> None:
    endpoint = RuntimeEndpoint(url)

    async def asked(endpoint: RuntimeEndpoint) -> Any:
        try:
            return await endpoint.server_info()
        finally:
            await endpoint.aclose()

    for _ in range(2):
        assert asyncio.run(asked(endpoint))["server"] == "sapwood"
    told = sapwood.get_server_info(endpoint)  # on the loop in the background
    assert told["server"] == "sapwood"
    del endpoint
    gc.collect()  # a connection that is left open would be a warning


async def test_a_server_of_another_kind_is_told() -> None:
    from fastapi import FastAPI

    with listening(FastAPI()) as url:
        with pytest.raises(EngineError, match="neither Sapwood's server nor SGLang's"):
            RuntimeEndpoint(url)


async def test_the_server_tells_what_it_did(endpoint) -> None:
    before = (await endpoint.server_info())["stats"]["prompt_tokens"]
    prompt = await prompt_of(endpoint, TEXT)
    await endpoint.generate(prompt, Call(options=GREEDY))
    info = await endpoint.server_info()
    assert info["stats"]["prompt_tokens"] == before + len(prompt.token_ids)
    assert info["model_path"] == endpoint.name


@pytest.mark.real_model
def test_a_conversation_over_http_is_the_one_in_process(real_model: str) -> None:
    @sapwood.function
    def program(s: sapwood.ProgramState) -> None:
        s += sapwood.system("You answer in one word.")
        s += sapwood.user("What is the capital of France?")
        s += sapwood.assistant(sapwood.gen("first", max_tokens=12, temperature=0))
        s += sapwood.user("And of Italy?")
        s += sapwood.assistant(
            "It is " + sapwood.gen("second", max_tokens=12, temperature=0, stop=["."])
        )
        s += sapwood.user("Is that in Europe?")
        s += sapwood.assistant(sapwood.select("third", ["Yes", "No"]))

    def told(state: sapwood.ProgramState) -> list[str]:
        return [state["first"], state["second"], state["third"], state.text()]

    engine = AsyncEngine(real_model, kv_cache_memory=2**26, max_model_len=512)
    try:
        with listening(create_app(engine)) as url:
            endpoint = RuntimeEndpoint(url)
            state = program.run(backend=endpoint)
            far = told(state)
            endpoint.close()
        near = told(program.run(backend=engine))
    finally:
        engine.close()
    assert far == near
    assert all(far)
    first, second = (state.get_meta_info(name) for name in ("first", "second"))
    # All but the last token that was drawn, and the end token, which is no text.
    there = first["prompt_tokens"] + first["completion_tokens"] - 2
    assert second["cached_tokens"] >= there
