"""Readers of answers with calls: the corpus, cut everywhere, and answers that break off."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.runtime.tools import Tool, ToolChoice, ToolMode, tool_format
from sapwood.runtime.tools.xml_arguments import json_value
from tests.runtime.tools.corpus import (
    ARGUMENTS,
    FORMATS,
    TAKES_ONE_CALL,
    TAKES_TEXT_BEFORE,
    TOOLS,
    arguments_text,
    read,
    written,
)


def cuts(text: str) -> list[list[str]]:
    """The text whole, in two at every place, and in single characters."""
    return [[text], *([text[:i], text[i:]] for i in range(1, len(text))), [*text, ""]]


def answers(name: str) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Answers with what is in them: content and calls."""
    lead = "Let me see.\n" if name in ("hermes", "qwen3_coder") else "Let me see."
    found = []
    for i, arguments in enumerate(ARGUMENTS):
        calls = [("ping", arguments)]
        if name not in TAKES_ONE_CALL:
            calls.append(("ping.all-2", ARGUMENTS[i - 1]))
        expected = [(tool, arguments_text(name, each)) for tool, each in calls]
        found.append((written(name, calls), "", expected))
        if name in TAKES_TEXT_BEFORE:
            found.append((lead + written(name, calls), "Let me see.", expected))
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_the_corpus_reads_the_same_however_it_is_cut(name: str) -> None:
    for text, content, calls in answers(name):
        for pieces in cuts(text):
            assert read(name, pieces).as_tuple() == (content, calls), pieces


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_ends_anywhere_reads_the_same_in_pieces(name: str) -> None:
    for i, (text, _, _) in enumerate(answers(name)):
        for end in range(1 + i % 5, len(text), 5):
            whole = read(name, [text[:end]])
            assert read(name, [*text[:end]]).as_tuple() == whole.as_tuple()


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_handed_on_as_the_beginning_of_json(name: str) -> None:
    """Whatever a call's arguments are cut at, they go on to be those of the whole answer."""
    for i, (text, _, calls) in enumerate(answers(name)):
        for end in range(1 + i % 3, len(text), 3):
            cut = read(name, [text[:end], ""]).calls
            for (tool, arguments), (whole_tool, whole) in zip(cut, calls, strict=False):
                assert tool == whole_tool
                assert whole.startswith(arguments)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (name, text)
        for name in FORMATS
        for text in (
            "Just text.",
            "",
            "\n\n  text ",
            "a <tool_call> in prose",
            "<tool_call>\n{not JSON",
            '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
            '{"name": "unknown", "parameters": {}}',
            '{"temperature": 3}',
            '{"name": "ping"}',
            "[1, 2, 3]",
            "[unknown(a=1)]",
            "[ping(1)]",
            "[TOOL_CALLS]",
            "[TOOL_CALLS][]",
            "[TOOL_CALLS]ping",
            "<tool_call>\n<function=ping>\nplain</function>",
            "<tool_call><tool_call><tool_c",
            "<|python_tag|>print(1)",
            '<tool_call>\n{"name": "ping' + " " * 100,
            "<tool_call>" + " " * 100 + '{"name": "ping", "arguments": {}}',
        )
    ],
)
def test_what_is_no_call_is_content_and_nothing_is_lost(name: str, text: str) -> None:
    for pieces in cuts(text):
        assert read(name, pieces).as_tuple() == (text, []), pieces


@pytest.mark.parametrize("name", FORMATS)
def test_names_of_tools_that_may_not_be_called_are_content(name: str) -> None:
    answer_format = tool_format(name).answer_format(TOOLS, ToolChoice.named("ping.all-2"))
    text = written(name, [("ping", {"text": "x"})])
    parts = answer_format.reader().feed(text, finished=True)
    assert (parts.content, parts.tool_calls) == (text, ())


@pytest.mark.parametrize("name", FORMATS)
def test_without_tools_an_answer_is_content(name: str) -> None:
    answer_format = tool_format(name).answer_format(TOOLS, ToolChoice(ToolMode.NONE))
    text = written(name, [("ping", {"text": "x"})])
    assert answer_format.reader().feed(text, finished=True).content == text
    assert answer_format.markers == ()


def test_text_behind_calls_is_content_and_space_is_not() -> None:
    call = written("hermes", [("ping", {})])
    assert read("hermes", [call + "\n \n"]).as_tuple() == ("", [("ping", "{}")])
    assert read("hermes", [call + "\nDone."]).as_tuple() == ("\nDone.", [("ping", "{}")])
    two = f"{call}\n\n{call}"
    assert read("hermes", [*two, ""]).as_tuple() == ("", [("ping", "{}")] * 2)


def test_other_whitespace_between_the_words_is_read() -> None:
    text = '<tool_call>{ "name" : "ping" ,\n"arguments" :{"text": "x"} }</tool_call>'
    assert read("hermes", [*text, ""]).as_tuple() == ("", [("ping", '{"text": "x"}')])
    assert read("llama3", ['\n{"name":"ping","parameters":{}}']).calls == [("ping", "{}")]
    assert read("pythonic", ["[ping( text = 'x' ,value=1 ,), ping.all-2()]"]).calls == [
        ("ping", '{"text": "x", "value": 1}'),
        ("ping.all-2", "{}"),
    ]


@pytest.mark.parametrize("missing", ["}\n</tool_call>", "\n</tool_call>", "</tool_call>"])
def test_a_call_without_its_end_is_a_call(missing: str) -> None:
    text = written("hermes", [("ping", {"text": "x"})]).removesuffix(missing)
    assert read("hermes", [*text, ""]).as_tuple() == ("", [("ping", '{"text": "x"}')])


def test_arguments_that_break_off_stay_and_the_rest_is_content() -> None:
    text = '<tool_call>\n{"name": "ping", "arguments": {"text": oops}}\n</tool_call>'
    for pieces in cuts(text):
        transcript = read("hermes", pieces)
        assert transcript.calls == [("ping", '{"text": ')]
        assert transcript.content == "oops}}\n</tool_call>"


def test_an_id_that_a_model_writes_behind_arguments_is_no_content() -> None:
    text = (
        '[TOOL_CALLS][{"name": "ping", "arguments": {}, "id": "a1B2c3D4e"}, '
        '{"name": "ping", "arguments": {"value": 1}, "id": "a1B2c3D4f"}]'
    )
    for pieces in cuts(text):
        assert read("mistral", pieces).as_tuple() == (
            "",
            [("ping", "{}"), ("ping", '{"value": 1}')],
        )


def test_llama_s_special_token_announces_a_call_and_is_a_marker() -> None:
    text = '<|python_tag|>{"name": "ping", "parameters": {"value": 1}}'
    for pieces in cuts(text):
        assert read("llama3", pieces).as_tuple() == ("", [("ping", '{"value": 1}')])
    markers = tool_format("llama3").answer_format(TOOLS, ToolChoice()).markers
    assert markers == ("<|python_tag|>",)


@pytest.mark.parametrize(
    ("literal", "json_text"),
    [
        ("'it\\'s \\x41\\u00e9\\U0001f600\\\n'", '"it\'s Aé😀"'),
        ("'\\d'", '"\\\\d"'),
        ("(1, 2,)", "[1, 2]"),
        ("1_000", "1000"),
        ("0x1F", "31"),
        (".5", "0.5"),
        ("-5.", "-5.0"),
        ("+3", "3"),
        ("1.50", "1.50"),
        ("1e400", "1e400"),
        ("007.5", "7.5"),
        ("{'a': {}, \"b\": [None, True]}", '{"a": {}, "b": [null, true]}'),
        ("'\\ud83d\\ude00'", '"\\ud83d\\ude00"'),
    ],
)
def test_python_literals_become_json(literal: str, json_text: str) -> None:
    text = f"[ping(value={literal}, text='y')]"
    expected = f'{{"value": {json_text}, "text": "y"}}'
    for pieces in cuts(text):
        assert read("pythonic", pieces).as_tuple() == ("", [("ping", expected)]), pieces
    json.loads(expected)


@pytest.mark.parametrize(
    "literal",
    ["open('f')", "x", "1+1", "[i for i in x]", "f'{x}'", "b'x'", "007", "{1: 2}", "'\\N{DASH}'"]
    + ["inf", "-nan", "1__0", "0x", "[" * 100, "'a\nb'", "lambda: 0", "*x", "..."],
)
def test_what_is_no_literal_is_never_evaluated_and_ends_the_call(literal: str) -> None:
    transcript = read("pythonic", [f"[ping(value={literal})]"])
    assert [name for name, _ in transcript.calls] == ["ping"]
    assert transcript.content.endswith(")]")
    with pytest.raises(ValueError):
        json.loads(transcript.calls[0][1])


def test_element_texts_are_of_the_types_that_the_schema_says() -> None:
    text = written("qwen3_coder", [("ping", {"text": "12", "value": 12})])
    assert read("qwen3_coder", [text]).calls == [("ping", '{"text": "12", "value": 12}')]
    odd = "<tool_call><function=ping><parameter=value>NaN</parameter></function></tool_call>"
    assert read("qwen3_coder", [odd]).calls == [("ping", '{"value": "NaN"}')]


@pytest.mark.parametrize(
    ("schema", "text", "json_text"),
    [
        ({"enum": ["1", 2]}, "1", '"1"'),
        ({"enum": ["1", 2]}, "2", "2"),
        ({"enum": ["null", True]}, "null", '"null"'),
        ({"const": "{}"}, "{}", '"{}"'),
        ({"enum": 5}, "5", "5"),
        (7, "null", "null"),
    ],
)
def test_an_element_s_text_is_the_string_that_its_schema_lists(
    schema: Any, text: str, json_text: str
) -> None:
    assert json_value(text, schema) == json_text


@pytest.mark.parametrize(
    ("schema", "text", "json_text"),
    [
        ({"$ref": "#/$defs/name"}, "12", '"12"'),
        ({"$ref": "#/$defs/size"}, "12", "12"),
        ({"anyOf": [{"$ref": "#/$defs/size"}, {"type": "null"}]}, "12", '"12"'),
        ({"anyOf": [{"$ref": "#/$defs/size"}, {"type": "null"}]}, "null", "null"),
    ],
)
def test_an_element_s_text_is_of_the_type_that_its_schema_refers_to(
    schema: Any, text: str, json_text: str
) -> None:
    size = {"enum": ["12", "L"]} if "anyOf" in schema else {"type": "integer"}
    root = {"$defs": {"name": {"type": "string"}, "size": size}}
    assert json_value(text, schema, root) == json_text


@pytest.mark.parametrize("properties", [5, ["value"], None])
def test_elements_are_read_by_what_is_no_schema_as_well(properties: Any) -> None:
    tools = [Tool(name="ping", parameters={"type": "object", "properties": properties})]
    text = written("qwen3_coder", [("ping", {"value": 1})])
    assert read("qwen3_coder", [text], tools).calls == [("ping", '{"value": 1}')]


@pytest.mark.parametrize("name", FORMATS)
def test_ids_are_of_the_format_and_come_from_whoever_gives_them(name: str) -> None:
    text = written(name, [("ping", {"text": "x"})])
    pattern = r"[A-Za-z0-9]{9}" if name.startswith("mistral") else r"call_[0-9a-f]{24}"
    assert re.fullmatch(pattern, read(name, [text]).ids[0])
    assert read(name, [text]).ids != read(name, [text]).ids
    ours = tool_format(name).answer_format(TOOLS, ToolChoice(), new_call_id=lambda: "mine")
    assert ours.reader().feed(text, finished=True).tool_calls[0].id == "mine"


fragments = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "\n", " ", "{", "}", "[", "]", "(", ")", ",", ":", '"'),
        *('"name"', '"arguments"', '"parameters"', "ping", '"ping"', "text", "=", "1", "\\", "é"),
        *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<function=", ">", "<parameter=", "'"),
        *("</function>", "</parameter>", "ping.all-2", "null", '{"name": "ping", "arguments": {'),
        *('{"name": "ping", "parameters": {', "[ping(", "<tool_call>\n<function=ping>\n"),
        *("[TOOL_CALLS]ping[ARGS]{", "<parameter=text>\n"),
    ]
)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(parts=st.lists(fragments, max_size=30), data=st.data())
def test_any_text_reads_the_same_however_it_is_cut(
    name: str, parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    whole = read(name, [text]).as_tuple()
    assert read(name, [*text, ""]).as_tuple() == whole
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]
    assert read(name, pieces).as_tuple() == whole
    if not whole[1]:
        assert whole[0] == text
