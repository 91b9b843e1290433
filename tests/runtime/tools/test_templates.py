"""Formats against chat templates: a call that was read is written again as the model wrote it."""

import json
from typing import Any

import pytest

from sapwood.runtime.chat import plain_messages
from sapwood.runtime.tools import ToolChoice, ToolMode, detect_tool_format, tool_format
from tests.runtime.tools.corpus import (
    ARGUMENTS,
    TAKES_ONE_CALL,
    TOOLS,
    read,
    written,
)
from tests.runtime.tools.families import FAITHFUL, TEMPLATES, rendered

USER = {"role": "user", "content": "Well?"}


def wire_message(content: str, calls: list[tuple[str, str]], ids: list[str]) -> dict[str, Any]:
    """The answer as a client sends it back."""
    return {
        "role": "assistant",
        "content": content or None,
        "tool_calls": [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, (name, arguments) in zip(ids, calls, strict=True)
        ],
    }


def prompt(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    known = tool_format(name)
    plain = known.messages(plain_messages(messages), TOOLS, ToolChoice())
    tools = [tool.as_json() for tool in TOOLS] if known.knows_template else []
    return rendered(name, plain, tools, **options)


@pytest.mark.parametrize("name", FAITHFUL)
def test_the_next_prompt_begins_with_the_last_one_and_the_answer_to_it(name: str) -> None:
    for i, arguments in enumerate(ARGUMENTS):
        calls = [("ping", arguments)]
        if name not in TAKES_ONE_CALL:
            calls.append(("ping.all-2", ARGUMENTS[i - 1]))
        lead = {"hermes": "I see.\n", "qwen3_coder": "I see.\n", "mistral_args": "I see."}
        for content in {"", lead.get(name, "")}:
            text = content + written(name, calls)
            transcript = read(name, [text])
            answer = wire_message(transcript.content, transcript.calls, transcript.ids)
            first = prompt(name, [USER], add_generation_prompt=True)
            second = prompt(name, [USER, answer], add_generation_prompt=False)
            assert second == first + text + FAITHFUL[name]


def test_mistral_s_older_template_takes_our_ids() -> None:
    transcript = read("mistral", [written("mistral", [("ping", {}), ("ping", {"text": "x"})])])
    answer = wire_message("", transcript.calls, transcript.ids)
    assert f'"id": "{transcript.ids[1]}"' in prompt("mistral", [USER, answer])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_the_format(name: str) -> None:
    assert detect_tool_format(TEMPLATES[name]) == name


def test_a_model_without_a_template_gets_the_generic_format() -> None:
    assert detect_tool_format(None) == "generic"


def test_a_format_that_is_not_known_is_not_guessed() -> None:
    template = "{% if tools %}<tools>{{ tools }}</tools>{% endif %}<calls>{{ messages }}</calls>"
    assert detect_tool_format(template) is None


@pytest.mark.parametrize("name", TEMPLATES)
def test_where_the_template_knows_tools_messages_stay_as_they_are(name: str) -> None:
    known = tool_format(name)
    messages = [USER]
    if known.knows_template:
        assert known.messages(messages, TOOLS, ToolChoice()) is messages
        assert known.instructions(TOOLS, ToolChoice()) == ""
        assert name != "generic"


def test_generic_instructions_end_the_system_message_or_are_one() -> None:
    generic = tool_format("generic")
    instructions = generic.instructions(TOOLS, ToolChoice())
    system = {"role": "system", "content": "Be brief."}
    assert generic.messages([USER], TOOLS, ToolChoice()) == [
        {"role": "system", "content": instructions},
        USER,
    ]
    assert generic.messages([system, USER], TOOLS, ToolChoice()) == [
        {"role": "system", "content": f"Be brief.\n\n{instructions}"},
        USER,
    ]
    assert generic.messages([system, USER], TOOLS, ToolChoice(ToolMode.NONE)) == [system, USER]


def test_generic_instructions_have_all_tools_and_the_form_whichever_have_to_be_called() -> None:
    generic = tool_format("generic")
    auto = generic.instructions(TOOLS, ToolChoice())
    for tool in TOOLS:
        assert json.dumps(tool.as_json()["function"]) in auto
    for choice in (ToolChoice(ToolMode.REQUIRED), ToolChoice.named("ping.all-2")):
        assert generic.instructions(TOOLS, choice) == auto
    assert "several" in auto
    assert "several" not in generic.instructions(TOOLS, ToolChoice(), parallel=False)
    form = next(line for line in auto.splitlines() if '"arguments":' in line)
    example = json.loads(form[form.index("{") :])
    assert list(example) == ["name", "arguments"]


def test_generic_calls_and_results_are_text_of_known_roles() -> None:
    answer = wire_message("", [("ping", '{"text": "é"}')], ["call_1"])
    result = {"role": "tool", "tool_call_id": "call_1", "content": "42"}
    messages = plain_messages([USER, answer, result])
    plain = tool_format("generic").messages(messages, TOOLS, ToolChoice())
    assert [message["role"] for message in plain] == ["system", "user", "assistant", "user"]
    assert plain[2]["content"] == '{"name": "ping", "arguments": {"text": "é"}}'
    assert "42" in plain[3]["content"]
