"""Programs over an engine in process: tokens, roles, options, and what the cache finds again."""

import asyncio
import itertools
import json
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import sapwood as sgl
from sapwood import AsyncEngine, Engine, RequestError, SamplingParams
from sapwood.frontend_lang.backends.engine import EngineBackend, EngineEncoder
from sapwood.frontend_lang.backends.engine_options import sampling_params
from sapwood.frontend_lang.backends.interface import Answer, Call, Piece, Prompt
from sapwood.frontend_lang.choices import select
from sapwood.frontend_lang.options import OPTION_NAMES
from sapwood.frontend_lang.state import ProgramState
from sapwood.runtime.chat import Chat, ChatOptions
from sapwood.runtime.constraints.spec import ConstraintSpec
from sapwood.runtime.hints import Hints
from sapwood.runtime.tokenizer import Tokenizer
from tests.runtime.test_controlled_encoder import TOKENIZERS
from tests.runtime.tiny_tokenizers import byte_level

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[AsyncEngine]:
    made = AsyncEngine(str(tiny_model), num_kv_blocks=512, check_invariants=True)
    yield made
    made.close()


@pytest.fixture
def backend(engine: AsyncEngine) -> EngineBackend:
    return EngineBackend(engine)


def run(body: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(body(), 60))


def call_of(**options: Any) -> Call:
    return Call(options={**GREEDY, **options})  # type: ignore[typeddict-item]


async def prompt_of(backend: EngineBackend, text: str) -> Prompt:
    token_ids = await backend.encoder.encode([Piece(text)], at_start=True)
    return Prompt(text=text, token_ids=token_ids)


def spelled(engine: AsyncEngine, answer: Answer) -> str:
    assert answer.token_ids is not None
    table = engine.tokenizer.token_bytes
    return b"".join(table[token_id] for token_id in answer.token_ids).decode(errors="replace")


# -- encoding and roles ------------------------------------------------------------------------

# As the families write them, small and in our own words.
FAMILIES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "smollm2": (
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
        "<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "<|begin|>{% if messages[0].role == 'system' %}{% set said = messages[0].content | trim %}"
        "{% set rest = messages[1:] %}{% else %}{% set said = '' %}{% set rest = messages %}"
        "{% endif %}<|head|>system<|/head|>\n\nToday: 26 Jul 2024\n\n{{ said }}<|eot|>"
        "{% for m in rest %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>"
        "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
    ),
    "mistral": (
        "<s>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant/user/...') }}{% endif %}"
        "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    ),
    "gemma": (
        "<bos>{% if messages[0].role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
        "{% endif %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "<|turn|>{{ role }}\n{{ m.content | trim }}<|/turn|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>model\n{% endif %}"
    ),
    "gemma3": (
        "<bos>{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}"
        "{% endif %}{% for m in rest %}"
        "{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "<|turn|>{{ role }}\n{{ first if loop.first else '' }}{{ m.content | trim }}<|/turn|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|turn|>model\n{% endif %}"
    ),
    # Reasoning of earlier answers is dropped; the newest answer has a block, if an empty one.
    "qwen3": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
        "{% endif %}{% endif %}"
    ),
    "phi3": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
    ),
}
TAKES_SYSTEM = [name for name in FAMILIES if name not in ("mistral", "gemma")]
CONTENTS = ("Be brief.", "Who are you?", "A model.", "Since when?", "Ever since.")


def tokenizer_with(template: str) -> Tokenizer:
    return Tokenizer(byte_level(), special_tokens={}, eos_token_ids=(), chat_template=template)


async def written(encoder: EngineEncoder, roles: tuple[str, ...]) -> str:
    """A conversation as a program writes it, up to where the assistant's answer begins."""
    text = ""
    for i in range(len(roles)):
        around = await encoder.role_text(roles[: i + 1])
        text += around.prefix + CONTENTS[i] + around.suffix
    return text + (await encoder.role_text((*roles, "assistant"))).prefix


@pytest.mark.parametrize(
    ("family", "roles"),
    [
        *((name, ("system", "user", "assistant", "user")) for name in TAKES_SYSTEM),
        *((name, ("user", "assistant", "user", "assistant", "user")) for name in FAMILIES),
        *((name, ("user",)) for name in FAMILIES),
    ],
)
def test_role_texts_joined_are_the_models_own_rendering(
    family: str, roles: tuple[str, ...]
) -> None:
    tokenizer = tokenizer_with(FAMILIES[family])
    encoder = EngineEncoder(tokenizer, max_model_len=4096)
    text = asyncio.run(written(encoder, roles))
    messages = [{"role": r, "content": c} for r, c in zip(roles, CONTENTS, strict=False)]
    assert text == tokenizer.render_chat(messages).text


@pytest.mark.parametrize(
    ("family", "roles", "match"),
    [
        ("gemma", ("system",), "System role not supported"),
        ("gemma", ("user", "user"), "alternate"),
        ("mistral", ("assistant",), "must alternate"),
        ("chatml", ("referee",), "referee"),
    ],
)
def test_an_order_that_the_template_refuses_is_a_request_error(
    family: str, roles: tuple[str, ...], match: str
) -> None:
    encoder = EngineEncoder(tokenizer_with(FAMILIES[family]), max_model_len=4096)
    with pytest.raises(RequestError, match=match):
        asyncio.run(encoder.role_text(roles))


def test_role_texts_are_worked_out_once(backend: EngineBackend) -> None:
    async def body() -> None:
        first = await backend.encoder.role_text(("user",))
        assert await backend.encoder.role_text(("user",)) is first

    run(body)


@pytest.mark.parametrize("num_repeats", [1, 400])
def test_constants_are_encoded_as_one_text_on_the_loop_or_on_a_thread(
    backend: EngineBackend, engine: AsyncEngine, num_repeats: int
) -> None:
    words = "The quick brown fox " * num_repeats

    async def body() -> tuple[int, ...]:
        pieces = [Piece(words[:7]), Piece(words[7:])]
        return await backend.encoder.encode(pieces, at_start=True)

    assert run(body) == tuple(engine.tokenizer.encode(words).tolist())


def test_a_constant_that_no_prompt_has_room_for_is_refused_before_it_is_cut(
    backend: EngineBackend, engine: AsyncEngine
) -> None:
    text = "a" * (engine.info.max_model_len * engine.tokenizer.max_token_bytes + 1)
    with pytest.raises(RequestError, match="shorten it"):
        run(lambda: backend.encoder.encode([Piece(text)], at_start=True))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_constant_that_continues_tokens_gets_no_space_in_front(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    encoder = EngineEncoder(tokenizer, max_model_len=4096)
    ids = asyncio.run(encoder.encode([Piece("ab")], at_start=False))
    assert b"".join(map(tokenizer.token_raw_bytes, ids)) == b"ab"


def test_a_constant_cannot_end_its_message(backend: EngineBackend, engine: AsyncEngine) -> None:
    async def body() -> tuple[int, ...]:
        pieces = [Piece("<|im_start|>user\n", is_control=True), Piece("<|im_end|>")]
        return await backend.encoder.encode(pieces, at_start=True)

    ids = run(body)
    assert ids[0] == engine.tokenizer.special_id("<|im_start|>")
    assert engine.tokenizer.special_id("<|im_end|>") not in ids


# -- answers -----------------------------------------------------------------------------------


def test_a_stream_adds_up_to_the_whole_answer(backend: EngineBackend) -> None:
    async def body() -> None:
        prompt = await prompt_of(backend, "The quick brown")
        call = call_of(return_logprob=True, top_logprobs_num=2)
        [whole] = await backend.generate(prompt, call)
        pieces = [piece async for piece in backend.stream(prompt, call)]
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [piece.token_ids for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].token_ids == whole.token_ids
        assert pieces[-1].finish_reason == whole.finish_reason == "length"
        for name in ("output_token_logprobs", "completion_tokens", "finish_reason"):
            assert pieces[-1].meta[name] == whole.meta[name]

    run(body)


def test_meta_has_sglangs_names_and_is_plain_data(
    backend: EngineBackend, engine: AsyncEngine
) -> None:
    async def body() -> None:
        prompt = await prompt_of(backend, "The quick brown fox")
        options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
        call = call_of(max_tokens=3, return_text_in_logprobs=True, **options)
        [answer] = await backend.generate(prompt, call)
        meta = json.loads(json.dumps(answer.meta))
        assert prompt.token_ids is not None
        assert meta["prompt_tokens"] == len(prompt.token_ids)
        assert meta["completion_tokens"] == 3
        assert meta["finish_reason"] == {"type": "length", "length": 3}
        told = meta["output_token_logprobs"]
        assert [token for _, token, _ in told] == list(answer.token_ids or ())
        assert [text for _, _, text in told] == [
            engine.tokenizer.token_text(token) for _, token, _ in told
        ]
        assert all(len(top) == 2 for top in meta["output_top_logprobs"])
        of_prompt = meta["input_token_logprobs"]
        assert [token for _, token, _ in of_prompt] == list(prompt.token_ids)
        assert of_prompt[0][0] is None
        assert all(logprob <= 0 for logprob, _, _ in of_prompt[1:])

    run(body)


def test_several_answers_have_tokens_and_texts_of_their_own(
    backend: EngineBackend, engine: AsyncEngine
) -> None:
    async def body() -> None:
        prompt = await prompt_of(backend, "The quick brown")
        answers = await backend.generate(prompt, call_of(n=3, temperature=1.0, seed=7))
        assert len({answer.token_ids for answer in answers}) == 3
        assert [spelled(engine, answer) for answer in answers] == [a.text for a in answers]
        with pytest.raises(RequestError, match="one answer is streamed at a time"):
            async with aclosing(backend.stream(prompt, call_of(n=2))) as pieces:  # type: ignore[type-var]
                await anext(pieces)

    run(body)


def test_where_a_stop_begins_inside_a_token_the_text_is_still_spelled_exactly(
    backend: EngineBackend, engine: AsyncEngine
) -> None:
    """Every second byte of an answer is tried as a stop, so that tokens are cut everywhere."""

    async def body() -> None:
        prompt = await prompt_of(backend, "The quick brown")
        [free] = await backend.generate(prompt, call_of(max_tokens=16))
        table, cut = engine.tokenizer.token_bytes, 0
        for start in range(0, len(free.text) - 2, 2):
            stop = free.text[start : start + 2]
            if "\ufffd" in stop:
                continue
            [answer] = await backend.generate(prompt, call_of(max_tokens=16, stop=stop))
            assert answer.text == free.text[: free.text.index(stop)]
            assert spelled(engine, answer) == answer.text
            kept = answer.token_ids or ()
            generated = free.token_ids or ()
            num_kept = len(os.path.commonprefix([kept, generated]))
            part = b"".join(table[token_id] for token_id in kept[num_kept:])
            cut += bool(part)
            # All that was replaced is one token, by its part that stays.
            assert len(part) < len(table[generated[num_kept]]) or answer.text.endswith("\ufffd")
        assert cut, "no stop began inside a token"

    run(body)


def test_closing_a_stream_ends_its_request(backend: EngineBackend, engine: AsyncEngine) -> None:
    async def body() -> None:
        prompt = await prompt_of(backend, "The quick")
        async with aclosing(backend.stream(prompt, call_of(max_tokens=1500))) as pieces:  # type: ignore[type-var]
            await anext(pieces)
        while engine.stats().num_running:
            await asyncio.sleep(0.001)

    run(body)


def test_cancelling_a_call_ends_its_request(backend: EngineBackend, engine: AsyncEngine) -> None:
    async def body() -> None:
        prompt = await prompt_of(backend, "The quick")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await backend.generate(prompt, call_of(max_tokens=1900))
        while engine.stats().num_running:
            await asyncio.sleep(0.001)

    run(body)


def test_reasoning_is_told_apart_and_its_tokens_are_not_continued(
    backend: EngineBackend, engine: AsyncEngine
) -> None:
    """The answer is held to a text with a block in it, as no tiny model writes one by itself."""
    text = "<think>\nThe fox.\n</think>\n\nA quick dog"
    call = Call(
        options={"temperature": 0.0, "max_tokens": 100},
        constraint=ConstraintSpec.choice([text]),
        separate_reasoning=True,
        reasoning_type="qwen3",
    )

    async def body() -> None:
        prompt = await prompt_of(backend, "The quick")
        [answer] = await backend.generate(prompt, call)
        assert (answer.reasoning, answer.text) == ("The fox.", "A quick dog")
        assert spelled(engine, answer) == "A quick dog"
        pieces = [piece async for piece in backend.stream(prompt, call)]
        assert "".join(piece.text for piece in pieces) == answer.text
        assert "".join(piece.reasoning for piece in pieces) == answer.reasoning
        assert pieces[-1].token_ids == answer.token_ids

    run(body)


def test_a_way_of_reasoning_that_is_not_known_is_refused(backend: EngineBackend) -> None:
    async def body() -> None:
        prompt = await prompt_of(backend, "The quick")
        await backend.generate(prompt, Call(separate_reasoning=True, reasoning_type="loudly"))

    with pytest.raises(RequestError, match="no way of reasoning called 'loudly'.*qwen3"):
        run(body)


def test_of_a_model_that_writes_no_reasoning_there_is_none(backend: EngineBackend) -> None:
    async def body() -> None:
        prompt = await prompt_of(backend, "The quick")
        [plain] = await backend.generate(prompt, call_of())
        call = Call(options={**GREEDY}, separate_reasoning=True)  # type: ignore[typeddict-item]
        [apart] = await backend.generate(prompt, call)
        assert (apart.reasoning, apart.text) == ("", plain.text)
        assert apart.token_ids == plain.token_ids

    run(body)


# -- options -----------------------------------------------------------------------------------


def test_every_option_has_an_effect_or_is_none_of_the_engines() -> None:
    values: dict[str, Any] = {
        "max_tokens": 7, "min_tokens": 2, "n": 3, "stop": ["x"], "stop_token_ids": [5],
        "stop_regex": "a+", "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1,
        "frequency_penalty": 0.1, "presence_penalty": 0.2, "repetition_penalty": 1.1,
        "ignore_eos": True, "seed": 3, "logit_bias": {4: 1.0}, "return_logprob": True,
    }  # fmt: skip
    with_logprobs = {"top_logprobs_num": 2, "logprob_start_len": 4}
    told_elsewhere = {"dtype", "regex", "json_schema", "grammar", "output_type"}
    of_answers = {"return_text_in_logprobs", "output_tokens"}
    assert values.keys() | with_logprobs.keys() | told_elsewhere | of_answers == OPTION_NAMES
    nothing = sampling_params(Call())
    for name, value in values.items():
        assert sampling_params(Call(options={name: value})) != nothing, name  # type: ignore[misc]
    scored = sampling_params(Call(options={"return_logprob": True}))
    for name, value in with_logprobs.items():
        options = {"return_logprob": True, name: value}
        assert sampling_params(Call(options=options)) != scored, name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "param", "match"),
    [
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"stop": [""]}, "stop", "empty"),
        (
            {"return_logprob": True, "top_logprobs_num": 99},
            "top_logprobs_num",
            "top_logprobs_num is 99",
        ),
        (
            {"return_logprob": True, "logprob_start_len": -2},
            "logprob_start_len",
            "logprob_start_len is -2",
        ),
        ({"regex": "a"}, "regex", "no constraint made of it"),
    ],
)
def test_a_wrong_option_is_refused_in_its_own_words(
    options: dict[str, Any], param: str, match: str
) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        sampling_params(Call(options=options))  # type: ignore[arg-type]
    assert caught.value.param == param


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="unknown option 'temprature'"):
        sampling_params(Call(options={"temprature": 1}))  # type: ignore[typeddict-unknown-key]


def test_hints_reach_the_requests(tiny_model: Path) -> None:
    told: list[Any] = []

    class Listening(AsyncEngine):
        async def generate(self, inputs: Any, sampling: Any = None, **more: Any) -> Any:
            told.append(more["hints"])
            return await super().generate(inputs, sampling, **more)

    hints = Hints(program_id="p", more_follows=True)
    with Engine(str(tiny_model), num_kv_blocks=64) as engine:
        backend = EngineBackend(Listening.over(engine))

        async def body() -> None:
            prompt = await prompt_of(backend, "The quick")
            await backend.generate(prompt, Call(options={"max_tokens": 1}, hints=hints))
            await backend.score(prompt, [(5, 6), (7,)], hints)

        run(body)
    assert told[0] == hints
    assert [told[1][0].program_id, len(told[1])] == ["p", 2]


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(TypeError, match="not a str"):
        EngineBackend("smollm2")  # type: ignore[arg-type]


def test_the_engine_stays_open_and_its_info_is_told(engine: AsyncEngine) -> None:
    async def body() -> None:
        backend = EngineBackend(engine)
        info = await backend.server_info()
        assert info["model_path"] == engine.info.model_name
        assert info["stats"]["num_running"] == 0
        assert (info["max_num_batched_tokens"], info["max_graph_rows"]) == (512, 0)
        prompt, call = await prompt_of(backend, "The quick"), call_of(max_tokens=1)
        await backend.generate(prompt, call)
        await backend.flush_cache()
        [answer] = await backend.generate(prompt, call)
        assert answer.meta["cached_tokens"] == 0
        await backend.aclose()
        assert engine.is_alive

    run(body)


# -- programs ----------------------------------------------------------------------------------


class _Listening(EngineBackend):
    """Notes prompts and answers."""

    def __init__(self, engine: AsyncEngine | Engine) -> None:
        super().__init__(engine)
        self.heard: list[tuple[tuple[int, ...], Answer]] = []

    async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
        answers = await super().generate(prompt, call)
        self.heard.append((prompt.token_ids or (), answers[0]))
        return answers


@sgl.function
def interview(s: ProgramState) -> None:
    s += sgl.system("The quick brown fox.")
    for i in range(3):
        s += sgl.user(f"Number {i} of 22?")
        s += sgl.assistant("It " + sgl.gen(f"first {i}") + ", and then" + sgl.gen(f"second {i}"))


def check_continuations(backend: _Listening) -> None:
    for (before, answer), (after, later) in itertools.pairwise(backend.heard):
        known = (*before, *(answer.token_ids or ()))
        assert after[: len(known)] == known
        assert later.meta["cached_tokens"] >= len(known) - 2


def test_every_prompt_begins_with_the_one_before_and_its_answers_tokens(tiny_model: Path) -> None:
    with Engine(str(tiny_model), num_kv_blocks=512) as engine:
        backend = _Listening(engine)
        interview.run(backend=backend, temperature=0.9, seed=5, max_tokens=9)
        interview.run(backend=backend, temperature=0, max_tokens=30, stop=["e", "1"])
    assert len(backend.heard) == 12
    for program in (backend.heard[:6], backend.heard[6:]):
        one = _Listening.__new__(_Listening)
        one.heard = program
        check_continuations(one)


def test_an_engine_is_a_backend_by_itself(tiny_model: Path) -> None:
    with Engine(str(tiny_model), num_kv_blocks=512) as engine:
        state = interview.run(backend=engine, temperature=0, max_tokens=4)
        again = engine.generate(
            list(engine.tokenizer.encode(state.text())), SamplingParams(max_tokens=1)
        )
    assert len(state.messages()) == 7
    assert again[0].num_cached_tokens > 0


@pytest.mark.real_model
def test_a_conversation_on_smollm2_is_its_own_rendering_and_all_but_two_tokens_are_cached(
    real_model: str,
) -> None:
    with Engine(real_model, num_kv_blocks=256) as engine:
        backend = _Listening(engine)
        state = interview.run(backend=backend, temperature=0, max_tokens=8)
        options = ChatOptions(add_generation_prompt=False)
        messages = [dict(message) for message in state.messages()]
        rendered = engine.tokenizer.render_chat(Chat(messages, options)).text
    check_continuations(backend)
    assert state.text() == rendered


@pytest.mark.real_model
def test_smollm2_chooses_by_what_it_knows(real_model: str) -> None:
    async def body(backend: EngineBackend) -> list[str]:
        chosen = []
        for before, choices in (
            ("The capital of France is ", ["Berlin", "Paris", "Madrid"]),
            ("Two plus two is", [" four", " nine", " a dog"]),
            ("Water is wet. True or false? Answer:", [" False", " True"]),
        ):
            found = await select(backend, Prompt(text=""), choices, pending=[Piece(before)])
            chosen.append(found.text)
        return chosen

    with Engine(real_model, num_kv_blocks=256) as engine:
        found = asyncio.run(body(EngineBackend(engine)))
    assert found == ["Paris", " four", " True"]


@pytest.mark.parametrize("options", [{}, {"regex": "ab"}, {"n": 2}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_gen_with_nothing_before_it_is_told_that_the_prompt_is_empty(
    backend: EngineBackend, monkeypatch: pytest.MonkeyPatch, options: Any, stream: bool
) -> None:
    async def nothing(pieces: Any, *, at_start: bool) -> tuple[int, ...]:
        return ()  # as a tokenizer without a first token of its own

    monkeypatch.setattr(backend.encoder, "encode", nothing)

    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.gen("x", **options)

    state = program.with_options(backend=backend, stream=stream)
    with pytest.raises(sgl.ProgramError, match="the prompt is empty"):
        state.run().text()
