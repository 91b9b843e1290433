"""Our own server behind its OpenAI endpoints, with a tiny model: the backend and it agree."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import pytest

import sapwood as sgl
from sapwood.frontend_lang.backends.interface import Answer, Call, Prompt
from sapwood.frontend_lang.backends.openai import OpenAI
from sapwood.frontend_lang.options import Options
from sapwood.frontend_lang.process import PROCESS
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec
from sapwood.runtime.errors import RequestError
from sapwood.runtime.hints import NO_HINTS, Hints
from sapwood.server.app import create_app
from tests.clients.conftest import listening

T = TypeVar("T")
TURNS = ({"role": "user", "content": "A trée maps 🌍"},)
TEXT = Prompt(text="The quick brown fox jümps 🌍 and")
CHAT = Prompt(text="", messages=(*TURNS, {"role": "assistant", "content": ""}))


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[sgl.AsyncEngine]:
    engine = sgl.AsyncEngine(str(tiny_model), num_kv_blocks=256, max_num_seqs=8)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def url(engine: sgl.AsyncEngine) -> Iterator[str]:
    with listening(create_app(engine)) as url:
        yield f"{url}/v1"


def on(url: str, work: Callable[[OpenAI], Awaitable[T]], *, is_chat_model: bool) -> T:
    async def main() -> T:
        backend = OpenAI("tiny", base_url=url, is_chat_model=is_chat_model, max_retries=0)
        # The server knows its model by its folder's name; any request may leave the name out.
        backend.model_name = (await backend.server_info())["models"]["data"][0]["id"]
        try:
            return await asyncio.wait_for(work(backend), 30)
        finally:
            await backend.aclose()

    return asyncio.run(main())


def calling(**options: Any) -> Call:
    return Call(options=Options(temperature=0.0, **options))  # type: ignore[typeddict-item]


def one(url: str, prompt: Prompt, call: Call) -> Answer:
    is_chat = bool(prompt.messages)
    [answer] = on(url, lambda b: b.generate(prompt, call), is_chat_model=is_chat)
    return answer


def test_our_server_is_known_for_what_it_is(url: str) -> None:
    info = on(url, lambda b: b.server_info(), is_chat_model=True)
    assert info["dialect"] == "sapwood"


@pytest.mark.parametrize("prompt", [TEXT, CHAT], ids=["completion", "chat"])
def test_a_stream_says_what_a_whole_answer_does(url: str, prompt: Prompt) -> None:
    call = calling(max_tokens=12, return_logprob=True, top_logprobs_num=2)
    whole = one(url, prompt, call)

    async def streamed(backend: OpenAI) -> list[Answer]:
        async with aclosing(backend.stream(prompt, call)) as pieces:  # type: ignore[type-var]
            return [piece async for piece in pieces]

    pieces = on(url, streamed, is_chat_model=bool(prompt.messages))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[-1].finish_reason == whole.finish_reason
    assert pieces[-1].meta["output_token_logprobs"] == whole.meta["output_token_logprobs"]
    assert pieces[-1].meta["output_top_logprobs"] == whole.meta["output_top_logprobs"]
    assert whole.meta["completion_tokens"] == len(whole.meta["output_token_logprobs"]) <= 12


def test_the_answer_is_that_of_the_engine(url: str, engine: sgl.AsyncEngine) -> None:
    params = sgl.SamplingParams(temperature=0, max_tokens=10)

    async def of_engine() -> str:
        [output] = await engine.generate([TEXT.text], params)
        return output.outputs[0].text

    assert one(url, TEXT, calling(max_tokens=10)).text == asyncio.run(of_engine())


def test_scores_are_the_engines_log_probabilities(url: str, engine: sgl.AsyncEngine) -> None:
    """The texts begin with a letter that merges with nothing before it."""
    texts = ["~x", "|", "~é🌍"]

    async def of_engine(text: str) -> list[float]:
        params = sgl.SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
        num_before = len(engine.tokenizer.encode(TEXT.text))
        [output] = await engine.generate([TEXT.text + text], params)
        assert output.prompt_logprobs is not None
        return [entry.logprob for entry in output.prompt_logprobs[num_before:] if entry]

    async def all_of_engine() -> list[list[float]]:
        return [await of_engine(text) for text in texts]

    scores = on(url, lambda b: b.score(TEXT, texts, NO_HINTS), is_chat_model=False)
    for score, expected in zip(scores, asyncio.run(all_of_engine()), strict=True):
        assert score.logprobs == pytest.approx(expected, abs=1e-4)


def test_several_answers_are_several(url: str) -> None:
    call = Call(options=Options(n=3, temperature=1.0, seed=1, max_tokens=12))
    answers = on(url, lambda b: b.generate(CHAT, call), is_chat_model=True)
    assert len({answer.text for answer in answers}) == 3


@pytest.mark.parametrize("prompt", [TEXT, CHAT], ids=["completion", "chat"])
@pytest.mark.parametrize(
    "spec, texts",
    [
        (ConstraintSpec.choice(["yes", "nö 🌍"]), {"yes", "nö 🌍"}),
        (ConstraintSpec.regex("(12|34)"), {"12", "34"}),
        (
            ConstraintSpec(kind=ConstraintKind.LARK, text='start: "fox" | "tree"'),
            {"fox", "tree"},
        ),
        (ConstraintSpec.json_schema({"const": 7}), {"7"}),
    ],
    ids=["choice", "regex", "lark", "json"],
)
def test_constraints_hold(url: str, prompt: Prompt, spec: ConstraintSpec, texts: set[str]) -> None:
    call = Call(options=Options(temperature=0.0, max_tokens=40), constraint=spec)
    assert one(url, prompt, call).text in texts


def test_a_chat_is_continued_where_it_is(url: str) -> None:
    whole = one(url, CHAT, calling(max_tokens=8))
    begun = Prompt(text="", messages=(*TURNS, {"role": "assistant", "content": "~~"}))
    more = one(url, begun, calling(max_tokens=8))
    assert more.meta["prompt_tokens"] > whole.meta["prompt_tokens"]


def test_a_chat_model_selects_one_of_the_texts(url: str) -> None:
    scores = on(url, lambda b: b.score(CHAT, ["yes", "no"], NO_HINTS), is_chat_model=True)
    assert sorted(score.logprobs[0] for score in scores) == [float("-inf"), 0.0]


def test_hints_are_taken(url: str) -> None:
    hints = Hints(program_id="p", more_follows=True, idle_seconds=0.5)
    call = Call(options=Options(temperature=0.0, max_tokens=2), hints=hints)
    assert one(url, TEXT, call).finish_reason


@pytest.mark.parametrize(
    "options, param", [({"temperature": 99.0}, "temperature"), ({"max_tokens": -1}, "max_tokens")]
)
def test_what_the_server_refuses_has_its_param(
    url: str, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        one(url, CHAT, Call(options=Options(**options)))  # type: ignore[typeddict-item]
    assert caught.value.param == param


def test_a_program_runs_on_completions_and_on_chat(url: str) -> None:
    @sgl.function
    def ask(s: Any) -> None:
        s += sgl.user("Which animal?")
        s += sgl.assistant("I say " + sgl.gen("why", max_tokens=4, stop="\n", temperature=0))
        s += sgl.user("One word.")
        s += sgl.assistant(sgl.select("animal", choices=["fox", "dog"]))

    name = on(url, lambda b: b.server_info(), is_chat_model=True)["models"]["data"][0]["id"]
    for is_chat_model in (True, False):
        backend = OpenAI(name, base_url=url, is_chat_model=is_chat_model)
        try:
            state = ask.run(backend=backend)
            assert state["animal"] in ("fox", "dog")
            assert state["why"] in state.text()
        finally:
            PROCESS.background.run(backend.aclose())


@pytest.mark.parametrize("is_chat_model", [True, False])
def test_speculation_changes_no_answer(url: str, is_chat_model: bool) -> None:
    """A tiny model says nothing that a program expects, so that every guess is wrong; then what an
    ordinary call says must come."""

    def text(num_api_spec_tokens: int | None) -> tuple[str, str]:
        @sgl.function(num_api_spec_tokens=num_api_spec_tokens)
        def fields(s: Any) -> None:
            s += sgl.user("Which animal?") + sgl.assistant_begin()
            s += sgl.gen("a", max_tokens=6, stop=["e", "\n"], temperature=0) + "~"
            s += sgl.gen("b", max_tokens=6, stop=["a", "\n"], temperature=0)
            s += sgl.assistant_end()

        backend = OpenAI(name, base_url=url, is_chat_model=is_chat_model)
        try:
            state = fields.run(backend=backend)
            return state["a"], state["b"]
        finally:
            PROCESS.background.run(backend.aclose())

    name = on(url, lambda b: b.server_info(), is_chat_model=True)["models"]["data"][0]["id"]
    assert text(32) == text(None)
