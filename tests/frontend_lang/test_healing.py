"""Constrained answers begin with the token that text and answer have in common."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sapwood import AsyncEngine
from sapwood.frontend_lang.backends.engine import EngineBackend, EngineEncoder
from sapwood.frontend_lang.backends.interface import Answer, Call, Piece, Prompt, TokenIds
from sapwood.frontend_lang.healing import MAX_BEGINNINGS, Healed, heal
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec
from sapwood.runtime.tokenizer import Tokenizer
from sapwood.runtime.weights import find_model
from tests.frontend_lang.fakes import ByteEncoder

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20}
FOX = ConstraintSpec.regex("(fox|dog)s?")


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


def healed(
    backend: EngineBackend,
    text: str | Sequence[Piece],
    constraint: ConstraintSpec | None,
    settled: TokenIds = (),
    **options: Any,
) -> Healed:
    pending = [Piece(text)] if isinstance(text, str) else text
    call = Call(options={**GREEDY, **options}, constraint=constraint)  # type: ignore[typeddict-item]
    return run(lambda: heal(backend.encoder, settled, pending, call))  # type: ignore[no-any-return]


def answered(backend: EngineBackend, found: Healed) -> Answer:
    prompt = Prompt(text="", token_ids=found.token_ids)
    [answer] = run(lambda: backend.generate(prompt, found.call))
    return found.answer(answer)


def encoded(engine: AsyncEngine, text: str) -> tuple[int, ...]:
    return tuple(engine.tokenizer.encode(text).tolist())


CONSTRAINTS = {
    "a pattern": FOX,
    "a pattern with anchors": ConstraintSpec.regex("^(fox|dog)s?$"),
    "choices": ConstraintSpec.choice(["fox", "dogs"]),
    "choices of any words": ConstraintSpec.choice(["lazy", "quick brown", "1"]),
}
WORDS = ("fox", "dog", "foxs", "dogs", "lazy", "quick brown", "1")


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_healed_answer_is_one_of_those_that_were_asked_for(
    backend: EngineBackend, engine: AsyncEngine, name: str
) -> None:
    before = "The quick brown "
    found = healed(backend, before, CONSTRAINTS[name])
    assert found.tail == " "
    assert found.token_ids == encoded(engine, "The quick brown")
    answer = answered(backend, found)
    assert answer.text in WORDS
    assert answer.token_ids is not None
    assert engine.tokenizer.decode((*found.token_ids, *answer.token_ids)) == before + answer.text


def test_where_all_of_an_answer_is_forced_it_is_cut_as_the_whole_text_would_be(
    backend: EngineBackend, engine: AsyncEngine
) -> None:
    found = healed(backend, "The quick brown ", ConstraintSpec.choice(["fox jumps"]))
    answer = answered(backend, found)
    assert answer.token_ids is not None
    whole = encoded(engine, "The quick brown fox jumps")
    assert (*found.token_ids, *answer.token_ids) == whole


def test_without_healing_the_last_space_is_a_token_of_its_own(engine: AsyncEngine) -> None:
    alone, joint = encoded(engine, "The quick brown "), encoded(engine, "The quick brown fox")
    assert alone[-1] == engine.tokenizer.token_bytes.index(b" ")
    assert joint[: len(alone)] != alone


def test_json_behind_a_text_is_a_structural_tag(backend: EngineBackend) -> None:
    schema = {"type": "string", "enum": ["fox", "dog"]}
    word = ConstraintSpec.json_schema(schema)
    call = Call(options={**GREEDY}, constraint=word)  # type: ignore[typeddict-item]

    async def body(takes: bool) -> Healed:
        return await heal(_Sticky(), (), [Piece("It is ")], call, takes_structural_tags=takes)

    found = run(lambda: body(True))
    assert found.tail == " "
    assert found.call.constraint.kind == ConstraintKind.STRUCTURAL_TAG
    elements = json.loads(found.call.constraint.text)["format"]["elements"]
    assert elements[0] == {"type": "const_string", "value": " "}
    assert elements[1]["json_schema"] == schema
    answer = answered(backend, replace(found, token_ids=(5, 6)))
    assert answer.text in ('"fox"', '"dog"')
    assert run(lambda: body(False)).call is call


class _Sticky(ByteEncoder):
    """A space and the byte after it are one token."""

    async def encode(self, pieces: Sequence[Piece], *, at_start: bool) -> TokenIds:
        ids = await super().encode(pieces, at_start=at_start)
        joined: list[int] = []
        for token_id in ids:
            if joined and joined[-1] == ord(" ") and token_id < 256:
                joined[-1] = 1000 + token_id
            else:
                joined.append(token_id)
        return tuple(joined)


@pytest.mark.parametrize(
    ("pending", "constraint", "options"),
    [
        pytest.param("The quick brown ", None, {}, id="no constraint"),
        pytest.param("The quick brown", ConstraintSpec.regex(" fox"), {}, id="nothing merges"),
        pytest.param("", FOX, {}, id="no text"),
        pytest.param([Piece("The quick ", is_control=True)], FOX, {}, id="a template's text"),
        pytest.param("The quick brown ", FOX, {"stop": " "}, id="a stop is in the tail"),
        pytest.param("The quick brown ", FOX, {"stop": [" f"]}, id="a stop begins in the tail"),
        pytest.param("The quick brown ", FOX, {"stop_regex": "x+"}, id="a stop_regex"),
        pytest.param(
            "The quick brown ",
            ConstraintSpec(kind=ConstraintKind.LARK, text='start: "fox"'),
            {},
            id="a grammar",
        ),
        pytest.param("The quick brown ", ConstraintSpec.regex(r"\Dfox"), {}, id="not readable"),
    ],
)
def test_what_needs_no_healing_or_cannot_be_healed_is_left(
    backend: EngineBackend,
    pending: str | list[Piece],
    constraint: ConstraintSpec | None,
    options: dict[str, Any],
) -> None:
    found = healed(backend, pending, constraint, settled=(5,), **options)
    pieces = [Piece(pending)] if isinstance(pending, str) else pending
    assert found.token_ids == run(lambda: backend.encoder.encode(pieces, at_start=False))
    assert (found.tail, found.call.constraint) == ("", constraint)
    answer = Answer(text="x", token_ids=(1,))
    assert found.answer(answer) is answer


def test_a_stop_that_the_tail_is_no_part_of_stays(backend: EngineBackend) -> None:
    assert healed(backend, "The quick brown ", FOX, stop=["x", "og"]).tail == " "


def test_a_prompt_never_becomes_empty(backend: EngineBackend) -> None:
    assert healed(backend, " ", FOX).tail == ""
    assert healed(backend, " ", FOX, settled=(5,)).tail == " "


def test_only_the_programs_own_text_is_taken_off(backend: EngineBackend) -> None:
    pieces = [Piece("<|im_start|>user\n ", is_control=True), Piece("The quick brown"), Piece(" ")]
    found = healed(backend, pieces, FOX)
    kept = run(lambda: backend.encoder.encode(pieces[:2], at_start=True))
    assert (found.tail, found.token_ids) == (" ", kept)


def test_the_tails_tokens_are_none_of_max_tokens(backend: EngineBackend) -> None:
    found = healed(backend, "The quick brown ", FOX, max_tokens=3)
    assert found.call.options["max_tokens"] == 3 + len(found.tail_token_ids)
    unlimited = healed(backend, "The quick brown ", FOX, max_tokens=None)
    assert unlimited.call.options["max_tokens"] is None


def test_a_stream_tells_the_same_as_the_whole_answer(backend: EngineBackend) -> None:
    found = healed(backend, "The quick brown ", CONSTRAINTS["choices of any words"])
    whole = answered(backend, found)

    async def body() -> list[Answer]:
        prompt = Prompt(text="", token_ids=found.token_ids)
        return [piece async for piece in found.pieces(backend.stream(prompt, found.call))]

    pieces = run(body)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[-1].token_ids == whole.token_ids


def test_the_tails_tokens_are_none_of_those_that_are_told(backend: EngineBackend) -> None:
    found = healed(backend, "The quick brown ", FOX, max_tokens=1)
    assert found.tail
    whole = answered(backend, found)

    async def body() -> list[Answer]:
        prompt = Prompt(text="", token_ids=found.token_ids)
        return [piece async for piece in found.pieces(backend.stream(prompt, found.call))]

    for answer in (whole, run(body)[-1]):
        assert answer.meta["finish_reason"] == {"type": "length", "length": 1}
        assert answer.meta["completion_tokens"] == 1


TAIL = Healed(token_ids=(1,), call=Call(), tail=" - ", tail_token_ids=(7, 8))


def test_an_answer_that_ended_within_the_tail_leaves_the_prompt_as_it_was() -> None:
    answer = TAIL.answer(Answer(text=" -", token_ids=(9,), finish_reason="length"))
    assert (answer.text, answer.token_ids) == ("", (7, 8))


@pytest.mark.parametrize(
    ("texts", "expected", "token_ids"),
    [
        ([" - fox"], ["fox"], (9,)),
        ([" ", "-", " fo", "x"], ["", "", "fo", "x"], (9,)),
        ([" -", ""], ["", ""], (7, 8)),
    ],
)
def test_the_tail_is_taken_off_wherever_pieces_end(
    texts: list[str], expected: list[str], token_ids: TokenIds
) -> None:
    async def pieces() -> AsyncIterator[Answer]:
        for text in texts[:-1]:
            yield Answer(text=text)
        yield Answer(text=texts[-1], token_ids=(9,), finish_reason="length")

    async def body() -> list[Answer]:
        return [piece async for piece in TAIL.pieces(pieces())]

    told = run(body)
    assert [piece.text for piece in told] == expected
    assert told[-1].token_ids == token_ids


def test_a_pattern_with_many_beginnings_costs_a_bounded_number_of_encodings() -> None:
    encoder = ByteEncoder()
    many = "|".join(f"{chr(97 + i // 26)}{chr(97 + i % 26)}x" for i in range(600))
    call = Call(constraint=ConstraintSpec.regex(many))
    asyncio.run(heal(encoder, (), [Piece("a ")], call))
    assert len(encoder.encoded) == 1 + MAX_BEGINNINGS


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("before", "constraint", "tail"),
    [
        ("The capital of France is ", ConstraintSpec.regex("[A-Z][a-z]+"), " "),
        ("The answer, as JSON: ", ConstraintSpec.json_schema({"type": "object"}), " "),
        ("The sum of 1 and 2 is ", ConstraintSpec.regex("[0-9]{1,3}"), ""),
        ("The answer:\n", ConstraintSpec.json_schema({"type": "object"}), ""),
        ("It is ", ConstraintSpec.choice(["true", "false"]), " "),
    ],
)
def test_on_smollm2_words_and_objects_merge_with_a_space_and_digits_do_not(
    real_model: str, before: str, constraint: ConstraintSpec, tail: str
) -> None:
    encoder = EngineEncoder(Tokenizer.from_folder(find_model(real_model)), max_model_len=8192)
    call = Call(constraint=constraint)
    found = asyncio.run(heal(encoder, (), [Piece(before)], call))
    assert found.tail == tail
