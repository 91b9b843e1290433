"""outlines and OpenAI's library, unmodified, ask our server for answers of a type.

A fake engine shows what arrives of each type; a real one, that answers are of it.
"""

import asyncio
import datetime
import enum
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from sapwood import AsyncEngine, ConstraintSpec, Whitespace
from sapwood.runtime.constraints.spec import ConstraintKind
from sapwood.server.app import create_app
from tests.clients.conftest import listening
from tests.server.fakes import FakeEngine

openai = pytest.importorskip("openai")
outlines = pytest.importorskip("outlines")
types = outlines.types

pytestmark = [
    # outlines says so of every grammar that it sends to SGLang; we take both notations.
    pytest.mark.filterwarnings("ignore:SGLang grammar-based structured outputs:UserWarning"),
]
K = ConstraintKind
PROMPT = "Who is it?"
IS_ENFORCED = all(
    find_spec(f"sapwood.runtime.constraints.{name}") for name in ("llguidance_backend", "compiler")
)


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


class Item(BaseModel):
    model_config = ConfigDict(extra="forbid")  # else a model may invent fields for ever

    size: Size
    count: int = Field(ge=0, le=99)
    is_new: bool = True


@dataclass
class Point:
    __pydantic_config__ = ConfigDict(extra="forbid")

    x: Literal[1, 2]
    label: Literal["a", "b"] | None = None


ITEM = '{"size":"small","count":7,"is_new":true}'
SUM = types.CFG('start: DIGIT "+" DIGIT\nDIGIT: /[0-9]/')
SUM_EBNF = types.CFG('root ::= [0-9] "+" [0-9]')
FROM: dict[str, Any] = {
    "openai": outlines.from_openai,
    "vllm": outlines.from_vllm,
    "sglang": outlines.from_sglang,
}
# What each client can say; from_openai refuses the rest before anything is sent.
JSON_TYPES: list[tuple[Any, str]] = [
    (Item, ITEM),
    (Point, '{"x":1,"label":null}'),
    (types.JsonSchema({"type": "object", "properties": {"z": {"const": "ü"}}}), '{"z":"ü"}'),
]
OTHER_TYPES: list[tuple[Any, str]] = [
    (Literal["yes", "no"], "yes"),
    (Size, "large"),
    (types.Choice(["one", 2]), "2"),
    (types.Regex("[a-c]{3}"), "abc"),
    (int, "42"),
    (float, "1.5"),
    (bool, "True"),
    (datetime.date, "2024-02-29"),
    (list[int], "[1, 2]"),
]
GRAMMARS: list[tuple[Any, str, ConstraintKind]] = [
    (SUM, "1+2", K.LARK),
    (SUM_EBNF, "1+2", K.EBNF),
    (dict, "{}", K.LARK),
]


@pytest.fixture(scope="module")
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def fake_url(fake: FakeEngine) -> Iterator[str]:
    with listening(create_app(fake)) as url:
        yield f"{url}/v1"


@pytest.fixture
def client(fake_url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=fake_url, api_key="none", max_retries=0) as client:
        yield client


def asked(fake: FakeEngine) -> ConstraintSpec:
    constraint = fake.sampling[-1].constraint
    assert constraint is not None
    return constraint


def schema_of(output_type: Any) -> dict[str, Any]:
    if isinstance(output_type, types.JsonSchema):
        found: dict[str, Any] = json.loads(output_type.schema)
        return found
    return TypeAdapter(output_type).json_schema()


# -- what arrives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FROM)
@pytest.mark.parametrize(("output_type", "answer"), JSON_TYPES)
def test_a_type_with_fields_arrives_as_its_schema(
    client: Any, fake: FakeEngine, name: str, output_type: Any, answer: str
) -> None:
    fake.answer = answer
    assert FROM[name](client, "fake/model")(PROMPT, output_type) == answer
    spec, schema = asked(fake), schema_of(output_type)
    assert spec.kind is K.JSON_SCHEMA
    if name != "vllm":  # what OpenAI wants of a strict schema
        schema["additionalProperties"] = False
    assert json.loads(spec.text) == schema
    assert list(json.loads(spec.text)["properties"]) == list(schema["properties"])
    assert spec.whitespace is (Whitespace.BOUNDED if name == "vllm" else Whitespace.COMPACT)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize(("output_type", "answer"), OTHER_TYPES)
def test_another_type_arrives_as_a_regex(
    client: Any, fake: FakeEngine, name: str, output_type: Any, answer: str
) -> None:
    fake.answer = answer
    assert FROM[name](client, "fake/model")(PROMPT, output_type) == answer
    term = types.dsl.python_types_to_terms(output_type)
    assert asked(fake) == ConstraintSpec.regex(types.dsl.to_regex(term))


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize(("output_type", "answer", "kind"), GRAMMARS)
def test_a_grammar_arrives_in_the_notation_it_is_written_in(
    client: Any, fake: FakeEngine, name: str, output_type: Any, answer: str, kind: ConstraintKind
) -> None:
    fake.answer = answer
    assert FROM[name](client, "fake/model")(PROMPT, output_type) == answer
    term = types.dsl.python_types_to_terms(output_type)
    assert asked(fake) == ConstraintSpec(kind=kind, text=term.definition)


def test_dict_is_any_object_for_openai(client: Any, fake: FakeEngine) -> None:
    fake.answer = '{"a": 1}'
    assert outlines.from_openai(client, "fake/model")(PROMPT, dict) == fake.answer
    assert asked(fake) == ConstraintSpec.json_schema({"type": "object"})


def test_a_whitespace_pattern_arrives(client: Any, fake: FakeEngine) -> None:
    fake.answer = ITEM
    output_type = types.JsonSchema(Item, whitespace_pattern=r"[ ]?")
    assert outlines.from_vllm(client, "fake/model")(PROMPT, output_type) == ITEM
    assert asked(fake).whitespace_pattern == r"[ ]?"


@pytest.mark.parametrize("name", FROM)
def test_a_stream_adds_up_to_the_answer(client: Any, fake: FakeEngine, name: str) -> None:
    fake.answer = ITEM
    assert "".join(FROM[name](client, "fake/model").stream(PROMPT, Item)) == ITEM
    assert asked(fake).kind is K.JSON_SCHEMA


@pytest.mark.parametrize("name", FROM)
def test_asynchronous_clients_are_answered(fake_url: str, fake: FakeEngine, name: str) -> None:
    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=fake_url, api_key="none", max_retries=0) as client:
            model = FROM[name](client, "fake/model")
            whole = await model(PROMPT, Item)
            pieces = [piece async for piece in model.stream(PROMPT, Item)]
            return whole, "".join(pieces)

    fake.answer = ITEM
    assert asyncio.run(ask()) == (ITEM, ITEM)


def test_openais_parse_gives_the_object_and_no_refusal(client: Any, fake: FakeEngine) -> None:
    fake.answer = ITEM
    answer = client.chat.completions.parse(
        model="fake/model", messages=[{"role": "user", "content": PROMPT}], response_format=Item
    )
    [choice] = answer.choices
    assert choice.message.refusal is None
    assert choice.message.parsed == Item(size=Size.SMALL, count=7)
    spec = asked(fake)
    assert spec.whitespace is Whitespace.COMPACT
    assert json.loads(spec.text)["required"] == ["size", "count", "is_new"]


def test_openais_stream_helper_gives_the_object(client: Any, fake: FakeEngine) -> None:
    fake.answer = ITEM
    with client.chat.completions.stream(
        model="fake/model", messages=[{"role": "user", "content": PROMPT}], response_format=Item
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.done" in kinds
    assert "refusal.delta" not in kinds
    assert final.choices[0].message.parsed == Item(size=Size.SMALL, count=7)


def test_a_constraint_that_is_refused_is_the_librarys_error(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="fake/model",
            messages=[{"role": "user", "content": PROMPT}],
            extra_body={"structured_outputs": {"choice": []}},
        )
    assert refused.value.param == "structured_outputs.choice"


# -- what is answered ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tiny", pytest.param("real", marks=pytest.mark.real_model)])
def real_client(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Any]:
    if not IS_ENFORCED:
        pytest.skip("nothing enforces constraints here")
    tiny = request.param == "tiny"
    model = str(tiny_model) if tiny else request.getfixturevalue("real_model")
    engine = AsyncEngine(model, max_model_len=1024, num_kv_blocks=256, quantize="none")
    try:
        with (
            listening(create_app(engine, served_model_names=["m"])) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield client
    finally:
        engine.close()


# Of these every answer is short, whatever a model that knows nothing draws.
SHORT_TYPES: list[tuple[Any, str]] = [
    (Literal["yes", "no"], "yes|no"),
    (Size, "small|large"),
    (types.Choice(["one", 2]), "one|2"),
    (types.Regex("[a-c]{3}"), "[a-c]{3}"),
    (types.Regex("[一-龥]{1,4}"), "[一-龥]{1,4}"),
    (bool, "True|False"),
    (datetime.date, r"\d{4}-[0-9]{2}-[0-9]{2}"),
    (SUM, r"[0-9]\+[0-9]"),
    (SUM_EBNF, r"[0-9]\+[0-9]"),
]


@pytest.mark.parametrize("name", FROM)
def test_an_answer_of_a_type_with_fields_can_be_read(real_client: Any, name: str) -> None:
    model = FROM[name](real_client, "m")
    for seed in range(2):
        Item.model_validate_json(model(PROMPT, Item, seed=seed, max_tokens=400))
        TypeAdapter(Point).validate_json(model(PROMPT, Point, seed=seed, max_tokens=400))


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize(("output_type", "pattern"), SHORT_TYPES)
def test_an_answer_is_of_its_type(
    real_client: Any, name: str, output_type: Any, pattern: str
) -> None:
    model = FROM[name](real_client, "m")
    for seed in range(2):
        answer = model(PROMPT, output_type, seed=seed)
        assert re.fullmatch(pattern, answer), answer


@pytest.mark.parametrize("name", FROM)
def test_a_streamed_answer_can_be_read(real_client: Any, name: str) -> None:
    model = FROM[name](real_client, "m")
    options = {"seed": 1, "max_tokens": 400}
    streamed = "".join(model.stream(PROMPT, Item, **options))
    assert streamed == model(PROMPT, Item, **options)
    Item.model_validate_json(streamed)


def test_openais_parse_gives_an_object_of_the_model(real_client: Any) -> None:
    answer = real_client.chat.completions.parse(
        model="m",
        messages=[{"role": "user", "content": PROMPT}],
        response_format=Item,
        seed=2,
        n=2,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Item)
        assert choice.message.refusal is None


def test_an_answer_that_is_cut_says_so(real_client: Any) -> None:
    answer = real_client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=2,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "item", "schema": Item.model_json_schema()},
        },
    )
    assert answer.choices[0].finish_reason == "length"


def test_what_cannot_be_enforced_is_refused_in_the_callers_words(real_client: Any) -> None:
    for fields, param in (
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"guided_json": {"type": "wrong"}}, "guided_json"),
        ({"ebnf": "start: missing"}, "ebnf"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            real_client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": PROMPT}], extra_body=fields
            )
        assert refused.value.param == param
