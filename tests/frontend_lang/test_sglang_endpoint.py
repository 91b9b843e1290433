"""Programs over SGLang's native API: text both ways, conversations by a named format."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from sapwood import EngineError, RequestError
from sapwood.frontend_lang.backends.interface import Call, Prompt
from sapwood.frontend_lang.backends.runtime_endpoint import RuntimeEndpoint
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec
from sapwood.runtime.hints import NO_HINTS, Hints
from tests.frontend_lang.serving import listening
from tests.frontend_lang.sglang_server import ANSWER, TH, SGLangLike, logprob

pytestmark = pytest.mark.anyio
Serve = Callable[..., tuple[SGLangLike, RuntimeEndpoint]]
HI = Prompt(text="hi")
TALK = Prompt(
    text="user: hi\nassistant: I",
    messages=({"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}),
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    opened: list[tuple[Any, RuntimeEndpoint]] = []

    def make(chat_template: str | None = None, **options: Any) -> Any:
        server = SGLangLike(**options)
        context = listening(server.app)
        endpoint = RuntimeEndpoint(context.__enter__(), chat_template=chat_template)
        opened.append((context, endpoint))
        return server, endpoint

    yield make
    for context, endpoint in opened:
        await endpoint.aclose()
        await asyncio.to_thread(context.__exit__, None, None, None)


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info"])
async def test_a_server_of_sglangs_takes_text_and_has_no_encoder(serve, path) -> None:
    server, endpoint = serve(info_path=path, deterministic=True)
    assert endpoint.encoder is None
    assert endpoint.name == "org/Qwen3-0.6B"
    options = {"max_tokens": 7, "min_tokens": 1, "seed": 3, "logit_bias": {5: 1.0}, "stop": ["x"]}
    call = Call(options=options, hints=Hints(more_follows=True))
    [answer] = await endpoint.generate(HI, call)
    assert (answer.text, answer.token_ids, answer.finish_reason) == (ANSWER, None, "stop")
    assert answer.meta["prompt_tokens"] == 2
    [body] = server.bodies
    assert body == {
        "text": "hi",
        "sampling_params": {
            "stop": ["x"],
            "logit_bias": {"5": 1.0},
            "max_new_tokens": 7,
            "min_new_tokens": 1,
            "sampling_seed": 3,
        },
        "stream": False,
    }


async def test_a_seed_that_the_server_does_not_heed_is_refused(serve) -> None:
    server, endpoint = serve()
    with pytest.raises(RequestError, match="does not heed it") as caught:
        await endpoint.generate(HI, Call(options={"seed": 3}))
    assert caught.value.param == "seed"
    assert not server.bodies


async def test_several_answers_are_a_list(serve) -> None:
    _, endpoint = serve()
    answers = await endpoint.generate(HI, Call(options={"n": 3}))
    assert [answer.text for answer in answers] == [ANSWER] * 3


@pytest.mark.parametrize(
    ("model", "chat_template", "text"),
    [
        (
            "org/Qwen3-0.6B",
            None,
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nI",
        ),
        (
            "meta/Llama-3.1-8B",
            None,
            "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nI",
        ),
        ("mine", "chatml", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nI"),
        (
            "mine",
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}",
            "[user]hi[/][assistant]I",
        ),
    ],
)
async def test_conversations_are_written_by_a_format(serve, model, chat_template, text) -> None:
    server, endpoint = serve(model=model, chat_template=chat_template)
    await endpoint.generate(TALK, Call())
    assert server.bodies[0]["text"] == text


async def test_a_conversation_without_a_known_format_is_refused(serve) -> None:
    _, endpoint = serve(model="mine")
    with pytest.raises(RequestError, match="chat_template='chatml' or 'llama-3'") as caught:
        await endpoint.generate(TALK, Call())
    assert caught.value.param == "chat_template"
    await endpoint.generate(HI, Call())


async def test_a_stream_is_told_piece_by_piece_and_never_half_a_character(serve) -> None:
    _, endpoint = serve()
    pieces = [piece async for piece in endpoint.stream(HI, Call())]
    assert "".join(piece.text for piece in pieces) == ANSWER
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]


async def test_reasoning_is_told_apart_by_the_name_of_its_way(serve) -> None:
    _, endpoint = serve(answer="<think>Hm.</think>\n\nYes")
    call = Call(separate_reasoning=True, reasoning_type="qwen3")
    [answer] = await endpoint.generate(HI, call)
    assert (answer.text, answer.reasoning) == ("Yes", "Hm.")
    pieces = [piece async for piece in endpoint.stream(HI, call)]
    assert "".join(piece.text for piece in pieces) == "Yes"
    assert "".join(piece.reasoning for piece in pieces) == "Hm."
    with pytest.raises(RequestError, match="model_type="):
        await endpoint.generate(HI, Call(separate_reasoning=True))


async def test_a_server_that_streams_segments_is_told(serve) -> None:
    _, endpoint = serve(segments=True)
    with pytest.raises(EngineError, match="streams pieces of text"):
        [_ async for _ in endpoint.stream(HI, Call())]


async def test_closing_a_stream_closes_its_connection(serve) -> None:
    server, endpoint = serve(delay=0.02)
    async with aclosing(endpoint.stream(HI, Call())) as pieces:
        async for _ in pieces:
            break
    async with asyncio.timeout(5):
        while not server.left:
            await asyncio.sleep(0.005)


async def test_constraints_go_where_sglang_takes_them(serve) -> None:
    server, endpoint = serve()
    ebnf = {"ebnf": "root ::= [0-9]"}
    for spec, field in (
        (ConstraintSpec.regex("a+"), {"regex": "a+"}),
        (ConstraintSpec.choice(["a.b", "c|d"]), {"regex": r"(a\.b|c\|d)"}),
        (ConstraintSpec.json_schema({"type": "object"}), {"json_schema": '{"type": "object"}'}),
        (ConstraintSpec(kind=ConstraintKind.EBNF, text="root ::= [0-9]"), ebnf),
    ):
        await endpoint.generate(HI, Call(constraint=spec))
        assert server.bodies[-1]["sampling_params"] == field


async def test_a_constraint_that_sglang_does_not_take_is_refused(serve) -> None:
    server, endpoint = serve()
    for spec in (
        ConstraintSpec(kind=ConstraintKind.LARK, text='start: "a"'),
        ConstraintSpec(kind=ConstraintKind.REGEX, text="a", backend="xgrammar"),
    ):
        with pytest.raises(RequestError, match="SGLang takes"):
            await endpoint.generate(HI, Call(constraint=spec))
    assert not server.bodies


async def test_choices_are_scored_from_the_first_token_that_any_of_them_changes(serve) -> None:
    server, endpoint = serve()
    # "t" and "he" become "th" and "e": the last token of the text alone is not that of the whole.
    scores = await endpoint.score(Prompt(text="I know t"), ["he", "oo"], NO_HINTS)
    assert [score.logprobs for score in scores] == [
        pytest.approx([logprob(TH), logprob(ord("e"))]),
        pytest.approx([logprob(ord(c)) for c in "too"]),
    ]
    assert all(score.token_ids is None for score in scores)
    counted, scored = server.bodies
    assert counted["text"] == "I know t"
    assert scored["text"] == ["I know t", "I know the", "I know too"]
    assert scored["logprob_start_len"] == 0


async def test_only_the_end_of_a_long_text_is_scored_anew(serve) -> None:
    server, endpoint = serve()
    [score] = await endpoint.score(Prompt(text="x" * 100), ["ab"], NO_HINTS)
    assert score.logprobs == pytest.approx([logprob(ord("a")), logprob(ord("b"))])
    assert server.bodies[-1]["logprob_start_len"] == 92


async def test_without_a_text_before_them_choices_are_scored_from_their_second_token(serve) -> None:
    server, endpoint = serve()
    scores = await endpoint.score(Prompt(text=""), ["ab", "c"], NO_HINTS)
    assert [score.logprobs for score in scores] == [pytest.approx([logprob(ord("b"))]), ()]
    assert len(server.bodies) == 1


async def test_what_the_server_refuses_or_gives_up_is_told_in_its_words(serve) -> None:
    server, endpoint = serve()
    with pytest.raises(RequestError, match="the prompt is bad"):
        await endpoint.generate(Prompt(text="bad"), Call())
    server.abort = "out of memory"
    with pytest.raises(EngineError, match="gave the request up: out of memory"):
        await endpoint.generate(HI, Call())
    with pytest.raises(EngineError, match="gave the request up: out of memory"):
        [_ async for _ in endpoint.stream(HI, Call())]


async def test_the_cache_is_flushed_and_the_server_tells_of_itself(serve) -> None:
    server, endpoint = serve()
    await endpoint.flush_cache()
    assert server.num_flushes == 1
    assert (await endpoint.server_info())["version"] == "0.5.10"
