"""How an answer must be, said in every client's words: what arrives, and what is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest

from sapwood import ConstraintSpec, RequestError, Whitespace
from sapwood.runtime.constraints.limits import JSON_KINDS
from sapwood.runtime.constraints.spec import ConstraintKind
from tests.server.fakes import FakeEngine
from tests.server.helpers import chat, error, events

pytestmark = pytest.mark.anyio

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
K = ConstraintKind
SCHEMA = {"type": "object", "properties": {"z": {"const": "ü"}, "a": {"type": "integer"}}}
SCHEMA_TEXT = json.dumps(SCHEMA, ensure_ascii=False)
ANY_OBJECT = {"type": "object"}
LARK, EBNF = 'start: "a"', 'root ::= "a"'
OLDER_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA | {"default": None}, "end": "</f>"}],
    "triggers": ["<f"],
}
TAG = {"type": "structural_tag", "format": {"type": "any_text", "exclude": None}}


def body(path: str, **fields: Any) -> dict[str, Any]:
    if path == CHAT:
        return chat(**fields)
    if path == TEXT:
        return {"prompt": "hi"} | fields
    return {"text": "hi", "sampling_params": fields}


def of_schema(schema: Any = SCHEMA, **options: Any) -> ConstraintSpec:
    text = json.dumps(schema, ensure_ascii=False)
    return ConstraintSpec(kind=K.JSON_SCHEMA, text=text, **options)


def of_text(kind: ConstraintKind, text: str, **options: Any) -> ConstraintSpec:
    return ConstraintSpec(kind=kind, text=text, **options)


def of_tag(document: dict[str, Any], **options: Any) -> ConstraintSpec:
    return of_text(K.STRUCTURAL_TAG, json.dumps(document, ensure_ascii=False), **options)


def json_format(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA} | fields}


def without_spaces(spec: ConstraintSpec | None) -> ConstraintSpec | None:
    """With its JSON written in one way; the order of what is in it is kept."""
    if spec is None or spec.kind not in JSON_KINDS:
        return spec
    return replace(spec, text=json.dumps(json.loads(spec.text)))


COMPACT = {"whitespace": Whitespace.COMPACT}
BOTH_OPENAI = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "text", "json_schema": None}}, None),
    ({"response_format": None, "structured_outputs": None, "regex": None}, None),
    ({"response_format": {"type": "json_object"}}, of_schema(ANY_OBJECT)),
    ({"response_format": json_format()}, of_schema()),
    ({"response_format": json_format(strict=False, description="d")}, of_schema()),
    ({"response_format": json_format(strict=True)}, of_schema(**COMPACT)),
    ({"response_format": json_format(strict=True, name=None)}, of_schema(**COMPACT)),
    ({"response_format": json_format(schema=SCHEMA_TEXT)}, of_schema()),
    ({"response_format": OLDER_TAG}, of_tag(OLDER_TAG)),
    ({"response_format": TAG}, of_tag(TAG)),
    ({"structured_outputs": {"json": SCHEMA}}, of_schema()),
    ({"structured_outputs": {"json": SCHEMA_TEXT}}, of_schema()),
    ({"structured_outputs": {"regex": "a+"}}, of_text(K.REGEX, "a+")),
    ({"structured_outputs": {"choice": ["a", "ü"]}}, of_text(K.CHOICE, '["a", "ü"]')),
    ({"structured_outputs": {"grammar": LARK}}, of_text(K.LARK, LARK)),
    ({"structured_outputs": {"grammar": EBNF}}, of_text(K.EBNF, EBNF)),
    ({"structured_outputs": {"json_object": True}}, of_schema(ANY_OBJECT)),
    ({"structured_outputs": {"json_object": False, "regex": "a"}}, of_text(K.REGEX, "a")),
    ({"structured_outputs": {"structural_tag": TAG}}, of_tag(TAG)),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, of_tag(TAG)),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
        of_schema(whitespace_pattern=" ?"),
    ),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": ""}}, of_schema(**COMPACT)),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        of_schema(**COMPACT),
    ),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}, of_schema()),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        of_schema(ANY_OBJECT, **COMPACT),
    ),
    (
        {"structured_outputs": {"structural_tag": TAG, "disable_any_whitespace": True}},
        of_tag(TAG, **COMPACT),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": False}},
        of_schema(),
    ),
    ({"structured_outputs": {"json": SCHEMA, "disable_fallback": True}}, of_schema()),
    ({"structured_outputs": {"json": SCHEMA, "backend": "auto"}}, of_schema()),
    (
        {"structured_outputs": {"regex": "a", "backend": "xgrammar"}},
        of_text(K.REGEX, "a", backend="xgrammar"),
    ),
    ({"regex": "(a|b)"}, of_text(K.REGEX, "(a|b)")),
    ({"ebnf": EBNF}, of_text(K.EBNF, EBNF)),
    ({"ebnf": LARK}, of_text(K.LARK, LARK)),
    ({"json_schema": SCHEMA_TEXT}, of_schema()),
    ({"json_schema": SCHEMA}, of_schema()),
    ({"regex": "", "ebnf": "", "json_schema": ""}, None),
    ({"regex": "", "ebnf": EBNF}, of_text(K.EBNF, EBNF)),
    ({"guided_json": SCHEMA}, of_schema()),
    ({"guided_json": SCHEMA_TEXT}, of_schema()),
    ({"guided_regex": "a+"}, of_text(K.REGEX, "a+")),
    ({"guided_choice": ["a", "b"]}, of_text(K.CHOICE, '["a", "b"]')),
    ({"guided_grammar": LARK}, of_text(K.LARK, LARK)),
    ({"guided_grammar": EBNF}, of_text(K.EBNF, EBNF)),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
        of_schema(whitespace_pattern=" ?"),
    ),
    (
        {"response_format": json_format(), "guided_whitespace_pattern": " ?"},
        of_schema(whitespace_pattern=" ?"),
    ),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "outlines"},
     of_schema(backend="outlines_core")),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "outlines_core"},
     of_schema(backend="outlines_core")),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "guidance"},
     of_schema(backend="llguidance")),
    ({"response_format": {"type": "json_object"}, "guided_decoding_backend": "llguidance"},
     of_schema(ANY_OBJECT, backend="llguidance")),
    ({"guided_decoding_backend": "xgrammar"}, None),
]  # fmt: skip
TAKEN = [(path, *case) for path in (CHAT, TEXT) for case in BOTH_OPENAI]
TAKEN += [
    (NATIVE, {"json_schema": SCHEMA_TEXT}, of_schema()),
    (NATIVE, {"json_schema": SCHEMA}, of_schema()),
    (NATIVE, {"regex": "a+"}, of_text(K.REGEX, "a+")),
    (NATIVE, {"ebnf": EBNF}, of_text(K.EBNF, EBNF)),
    (NATIVE, {"ebnf": LARK}, of_text(K.LARK, LARK)),
    (NATIVE, {"structural_tag": json.dumps(OLDER_TAG)}, of_tag(OLDER_TAG)),
    (NATIVE, {"structural_tag": OLDER_TAG}, of_tag(OLDER_TAG)),
    (NATIVE, {"json_schema": "", "regex": "", "ebnf": "", "structural_tag": ""}, None),
    (NATIVE, {"json_schema": None, "regex": "a"}, of_text(K.REGEX, "a")),
]


@pytest.mark.parametrize(("path", "fields", "spec"), TAKEN)
async def test_what_is_said_reaches_the_engine(
    client: Any, engine: FakeEngine, path: str, fields: dict[str, Any], spec: ConstraintSpec | None
) -> None:
    response = await client.post(path, json=body(path, **fields))
    assert response.status_code == 200, response.text
    [sampling] = engine.sampling
    assert without_spaces(sampling.constraint) == without_spaces(spec)


async def test_the_order_of_properties_is_kept(client: Any, engine: FakeEngine) -> None:
    await client.post(CHAT, json=chat(response_format=json_format()))
    constraint = engine.sampling[0].constraint
    assert constraint is not None
    assert list(json.loads(constraint.text)["properties"]) == ["z", "a"]


FORMAT, OUTPUTS = "response_format", "structured_outputs"
WRONG_OPENAI = [
    # what is not known
    ({FORMAT: {"type": "xml"}}, "response_format.type"),
    ({FORMAT: {}}, "response_format.type"),
    ({FORMAT: "json_object"}, "response_format"),
    ({FORMAT: {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({FORMAT: json_format(examples=[])}, "response_format.json_schema.examples"),
    ({OUTPUTS: {"regex": "a", "lark": "b"}}, "structured_outputs.lark"),
    ({OUTPUTS: [1]}, "structured_outputs"),
    ({"guided_decoding_backend": "lm-format-enforcer"}, "guided_decoding_backend"),
    ({"guided_decoding_backend": "xgrammar:no-fallback"}, "guided_decoding_backend"),
    ({OUTPUTS: {"regex": "a", "backend": "magic"}}, "structured_outputs.backend"),
    # what is missing, empty, of another type, or of the wrong type
    ({FORMAT: {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({FORMAT: json_format(schema=None)}, "response_format.json_schema.schema"),
    ({FORMAT: {"type": "json_object", "json_schema": {}}}, "response_format.json_schema"),
    ({FORMAT: {"type": "text", "triggers": []}}, "response_format.triggers"),
    ({FORMAT: json_format() | {"format": {}}}, "response_format.format"),
    ({FORMAT: {"type": "structural_tag"}}, "response_format"),
    ({FORMAT: {"type": "structural_tag", "triggers": ["<"]}}, "response_format"),
    ({FORMAT: {"type": "structural_tag", "structures": []}}, "response_format"),
    ({FORMAT: OLDER_TAG | TAG}, "response_format"),
    ({FORMAT: TAG | {"format": "any_text"}}, "response_format.format"),
    ({FORMAT: json_format(strict="yes")}, "response_format.json_schema.strict"),
    ({FORMAT: json_format(schema=[1])}, "response_format.json_schema.schema"),
    ({FORMAT: json_format(schema="{")}, "response_format.json_schema.schema"),
    ({OUTPUTS: {}}, "structured_outputs"),
    ({OUTPUTS: {"json_object": False}}, "structured_outputs"),
    ({OUTPUTS: {"regex": ""}}, "structured_outputs.regex"),
    ({OUTPUTS: {"regex": 5}}, "structured_outputs.regex"),
    ({OUTPUTS: {"choice": []}}, "structured_outputs.choice"),
    ({OUTPUTS: {"choice": ["a", ""]}}, "structured_outputs.choice"),
    ({OUTPUTS: {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
    ({OUTPUTS: {"choice": ["a"] * 10_001}}, "structured_outputs.choice"),
    ({OUTPUTS: {"grammar": "a b c"}}, "structured_outputs.grammar"),
    ({OUTPUTS: {"json": True}}, "structured_outputs.json"),
    ({OUTPUTS: {"json": "[]"}}, "structured_outputs.json"),
    ({OUTPUTS: {"structural_tag": "[]"}}, "structured_outputs.structural_tag"),
    ({"regex": "x" * 65_537}, "regex"),
    ({"regex": ["a"]}, "regex"),
    ({"ebnf": "no grammar"}, "ebnf"),
    ({"json_schema": "no JSON"}, "json_schema"),
    ({"json_schema": {"title": "x" * 262_144}}, "json_schema"),
    ({"guided_json": "no JSON"}, "guided_json"),
    ({"guided_json": ""}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": "ab"}, "guided_choice"),
    ({"guided_grammar": ""}, "guided_grammar"),
    # what does not go together
    ({OUTPUTS: {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"guided_json": {}, "guided_whitespace_pattern": " " * 257}, "guided_json"),
    ({"guided_json": {}, "guided_whitespace_pattern": ".*"}, "guided_json"),
    (
        {OUTPUTS: {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
        "structured_outputs.whitespace_pattern",
    ),
    (
        {OUTPUTS: {"json": {}, "whitespace_pattern": " "}, "guided_whitespace_pattern": "\n"},
        "guided_whitespace_pattern",
    ),
    (
        {OUTPUTS: {"json": {}, "backend": "xgrammar"}, "guided_decoding_backend": "outlines"},
        "guided_decoding_backend",
    ),
    (
        {OUTPUTS: {"json": {}, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
    ),
    ({"regex": "a", "min_tokens": 3}, "min_tokens"),
    ({"regex": "a", "allowed_token_ids": [3]}, "allowed_token_ids"),
    ({"regex": "a", "banned_token_ids": [3]}, "banned_token_ids"),
    ({"regex": "a", "max_tokens": 0, "prompt_logprobs": 0}, "regex"),
]
WRONG = [(path, *case) for path in (CHAT, TEXT) for case in WRONG_OPENAI]
WRONG += [
    (NATIVE, {"regex": 5}, "sampling_params.regex"),
    (NATIVE, {"regex": "x" * 65_537}, "sampling_params.regex"),
    (NATIVE, {"json_schema": "{"}, "sampling_params.json_schema"),
    (NATIVE, {"json_schema": 5}, "sampling_params.json_schema"),
    (NATIVE, {"ebnf": "abc"}, "sampling_params.ebnf"),
    (NATIVE, {"structural_tag": "abc"}, "sampling_params.structural_tag"),
    (NATIVE, {"response_format": TAG}, "sampling_params.response_format"),
    (NATIVE, {"regex": "a", "min_new_tokens": 2}, "sampling_params.min_new_tokens"),
]


@pytest.mark.parametrize(("path", "fields", "param"), WRONG)
async def test_what_is_wrong_is_a_400_that_names_its_place(
    client: Any, engine: FakeEngine, path: str, fields: dict[str, Any], param: str
) -> None:
    told = error(await client.post(path, json=body(path, **fields)))
    assert told["param"] == param
    assert len(told["message"]) < 400
    assert not engine.started


ONE_EACH: dict[str, Any] = {
    "response_format": (json_format(), "response_format.json_schema.schema"),
    "structured_outputs": ({"regex": "a"}, "structured_outputs.regex"),
    "json_schema": (SCHEMA, "json_schema"),
    "regex": ("a", "regex"),
    "ebnf": (EBNF, "ebnf"),
    "guided_json": (SCHEMA, "guided_json"),
    "guided_regex": ("a", "guided_regex"),
    "guided_choice": (["a"], "guided_choice"),
    "guided_grammar": (LARK, "guided_grammar"),
}
NAMES = list(ONE_EACH)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("first", "second"),
    [(a, b) for i, a in enumerate(NAMES) for b in NAMES[i + 1 :]],
)
async def test_two_constraints_are_refused_and_both_named(
    client: Any, path: str, first: str, second: str
) -> None:
    fields = {name: ONE_EACH[name][0] for name in (second, first)}
    told = error(await client.post(path, json=body(path, **fields)))
    assert told["param"] == ONE_EACH[second][1]
    assert ONE_EACH[first][1] in told["message"]
    assert ONE_EACH[second][1] in told["message"]


async def test_two_constraints_in_one_object_are_refused(client: Any) -> None:
    for path, fields, named in (
        (CHAT, {OUTPUTS: {"regex": "a", "choice": ["a"]}}, f"{OUTPUTS}.choice"),
        (TEXT, {OUTPUTS: {"json": {}, "json_object": True}}, f"{OUTPUTS}.json_object"),
        (NATIVE, {"regex": "a", "json_schema": {}}, "sampling_params.regex"),
        (NATIVE, {"ebnf": EBNF, "structural_tag": TAG}, "sampling_params.structural_tag"),
    ):
        told = error(await client.post(path, json=body(path, **fields)))
        assert told["param"] == named
        assert "both constrain" in told["message"]


# -- what the engine says of a constraint ----------------------------------------------------------

UNKNOWN = RequestError("the constraint has an unknown keyword 'constraints'", param="constraint")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *((path, {name: value}, param)
          for path in (CHAT, TEXT) for name, (value, param) in ONE_EACH.items()),
        (CHAT, {FORMAT: {"type": "json_object"}}, "response_format"),
        (TEXT, {FORMAT: TAG}, "response_format"),
        (NATIVE, {"json_schema": SCHEMA}, "sampling_params.json_schema"),
        (NATIVE, {"regex": "a", "ebnf": ""}, "sampling_params.regex"),
        (NATIVE, {"ebnf": EBNF}, "sampling_params.ebnf"),
        (NATIVE, {"structural_tag": TAG}, "sampling_params.structural_tag"),
    ],
)  # fmt: skip
async def test_the_engines_refusal_names_the_callers_field(
    connect: Any, path: str, fields: dict[str, Any], param: str
) -> None:
    client = connect(FakeEngine(fail=UNKNOWN))
    told = error(await client.post(path, json=body(path, **fields)))
    assert told["param"] == param
    assert told["message"] == f"the {param.rpartition('.')[2]} has an unknown keyword 'constraints'"


async def test_a_long_number_is_refused_in_our_own_words(client: Any) -> None:
    schema = '{"const": ' + "9" * 5000 + "}"
    told = error(await client.post(CHAT, json=body(CHAT, json_schema=schema)))
    assert told["param"] == "json_schema"
    assert "a number of 5000 digits, at most 4300 are taken; write it with fewer" in told["message"]
    assert "sys." not in told["message"]


async def test_of_a_batch_with_several_fields_the_options_are_named(connect: Any) -> None:
    client = connect(FakeEngine(fail=UNKNOWN))
    options = [{"regex": "a"}, {"ebnf": EBNF}]
    request = {"text": ["a", "b"], "sampling_params": options}
    assert error(await client.post(NATIVE, json=request))["param"] == "sampling_params"
    request["sampling_params"] = [{"regex": "a"}, {"regex": "b"}]
    assert error(await client.post(NATIVE, json=request))["param"] == "sampling_params.regex"


async def test_the_options_of_a_batch_have_each_their_place(
    client: Any, engine: FakeEngine
) -> None:
    request = {"text": ["a", "b"], "sampling_params": [{"regex": "a"}, {"regex": "a" * 65_537}]}
    assert error(await client.post(NATIVE, json=request))["param"] == "sampling_params[1].regex"
    request["sampling_params"] = [{"regex": "a"}, {}]
    assert (await client.post(NATIVE, json=request)).status_code == 200
    assert [params.constraint for params in engine.sampling] == [ConstraintSpec.regex("a"), None]


async def test_a_constrained_answer_is_streamed_and_refuses_nothing(connect: Any) -> None:
    client = connect(FakeEngine(answer='{"z":"ü","a":1}'))
    request = chat(response_format=json_format(strict=True), temperature=1)
    [choice] = (await client.post(CHAT, json=request)).json()["choices"]
    assert json.loads(choice["message"]["content"]) == {"z": "ü", "a": 1}
    assert choice["message"].get("refusal") is None
    pieces = events(await client.post(CHAT, json=request | {"stream": True}))
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert "".join(delta.get("content") or "" for delta in deltas) == choice["message"]["content"]
    assert not any(delta.get("refusal") for delta in deltas)
