"""Chat templates: what transformers would render, and refusals in the template's own words."""

import itertools
from typing import Any

import pytest

from sapwood.runtime.chat import Chat, ChatOptions, plain_messages
from sapwood.runtime.chat_template import ChatTemplate
from sapwood.runtime.errors import RequestError
from sapwood.runtime.template_meter import RenderLimits
from sapwood.runtime.tools import TOOL_FORMATS

SMOLLM2 = (  # of HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = """
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message.content == 'skip' %}{% continue %}{% endif %}
    {{- bos_token if loop.first }}[{{ message | tojson }}]
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
{% if add_generation_prompt %}
>
{% endif %}
"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello <b> & 'you' é 漢"}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": " two "},
        {"role": "user", "content": "skip"},
    ],
]


def template_of(source: str, **settings: Any) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, **settings)


def render(source: str, messages: Any, **options: Any) -> str:
    return template_of(source).render(Chat(messages, ChatOptions(**options))).text


@pytest.fixture(scope="module")
def transformers_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={"a": 0, "<s>": 1, "</s>": 2}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("source", [SMOLLM2, STRICT])
def test_renders_what_transformers_renders(
    transformers_tokenizer: Any,
    source: str,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool,
) -> None:
    expected = transformers_tokenizer.apply_chat_template(
        messages,
        chat_template=source,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
    )
    assert render(source, messages, add_generation_prompt=add_generation_prompt) == expected


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    joined = render(SMOLLM2, [{"role": "user", "content": parts}])
    assert joined == render(SMOLLM2, [{"role": "user", "content": "one\ntwo"}])


@pytest.mark.parametrize("message", [{}, {"content": None, "name": None}])
def test_an_assistant_message_may_leave_its_content_out(message: dict[str, Any]) -> None:
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", **message}]
    empty = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]
    assert render(STRICT, chat) == render(STRICT, empty)


def test_a_developer_message_is_a_system_message_where_the_template_knows_no_other() -> None:
    chat = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "x"}]
    assert render(SMOLLM2, chat).startswith("<|im_start|>system\nbe brief")
    knows = "{% for m in messages %}{{ 'D' if m.role == 'developer' else m.role }} {% endfor %}"
    assert render(knows, chat) == "D user "


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one"),
        ("hello", "must be a list"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\].role is None; it must be one of system"),
        ([{"role": "king", "content": "x"}], "'king'"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] must be"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], r"content\[0\] must be"),
        ([{"role": "user", "content": ["text"]}], r"content\[0\] must be"),
    ],
)
def test_malformed_messages_are_refused_by_place(messages: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says) as refusal:
        render(SMOLLM2, messages)
    assert refusal.value.param == "messages"


def test_a_template_refuses_in_its_own_words() -> None:
    with pytest.raises(RequestError, match="Roles must alternate user/assistant") as refusal:
        render(STRICT, [{"role": "assistant", "content": "x"}])
    assert refusal.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",  # TypeError
        "{{ nowhere.content }}",  # undefined
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",  # the sandbox
        "{{ messages.append(1) }}",  # immutable
        "{% for x in range(10000000) %}{% endfor %}",  # the sandbox's limit
        "{% for %}",  # no template at all
    ],
)
def test_whatever_fails_in_a_template_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template") as refusal:
        render(source, CHATS[0])
    assert refusal.value.param == "messages"


def test_rendering_leaves_the_messages_alone() -> None:
    chat = [{"role": "developer", "content": [{"type": "text", "text": "x"}], "name": None}]
    render(SMOLLM2, chat)
    assert chat == [{"role": "developer", "content": [{"type": "text", "text": "x"}], "name": None}]


def test_a_template_may_ask_for_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}", CHATS[0]).startswith("2")


@pytest.mark.parametrize("content", ["Yes, ", "  Yes,\n", "Yes", "", "a </think> b "])
@pytest.mark.parametrize(
    "source",
    [SMOLLM2, STRICT.replace("[{{ message | tojson }}]", "[{{ message.role }}]")],
)
def test_an_open_last_message_is_what_transformers_renders(
    transformers_tokenizer: Any, source: str, content: str
) -> None:
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": content}]
    expected = transformers_tokenizer.apply_chat_template(
        chat, chat_template=source, tokenize=False, continue_final_message=True
    )
    rendered = render(source, chat, continue_final_message=True)
    assert rendered == expected
    assert rendered.endswith(content if source == SMOLLM2 else content.strip() or "]")


def test_an_open_last_message_has_no_generation_prompt_unless_both_are_asked_for() -> None:
    assert ChatOptions().opens_an_answer
    assert not ChatOptions(continue_final_message=True).opens_an_answer
    assert not ChatOptions(add_generation_prompt=False).opens_an_answer
    with pytest.raises(RequestError, match="give one of them") as refusal:
        ChatOptions(add_generation_prompt=True, continue_final_message=True)
    assert refusal.value.param == "continue_final_message"


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content }}", "{% for m in messages * 2 %}{{ m.content }}{% endfor %}"],
)
def test_a_message_that_is_not_written_once_cannot_be_continued(source: str) -> None:
    with pytest.raises(RequestError, match="no place to continue it") as refusal:
        render(source, CHATS[1], continue_final_message=True)
    assert refusal.value.param == "continue_final_message"


THINKER = """
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- set style = 'plain' %}
{%- for m in messages %}{{ m.content }}{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{%- set ns = namespace() %}{{- style }}{{ pad_token }}{{ bos_token }}{{ strftime_now('') }}
"""


def test_a_template_is_told_the_variables_that_it_reads() -> None:
    for value, ends in ((True, "plain<s>"), (False, "<think></think>plain<s>")):
        rendered = render(THINKER, CHATS[0], chat_template_kwargs={"enable_thinking": value})
        assert rendered.endswith(ends)


@pytest.mark.parametrize(
    "name",
    [
        "thinking",
        "style",
        "messages",
        "tools",
        "bos_token",
        "pad_token",
        "strftime_now",
        "namespace",
    ],
)
def test_a_variable_that_is_not_the_callers_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(RequestError, match="those are custom_tools, enable_thinking") as refusal:
        render(THINKER, CHATS[0], chat_template_kwargs={name: "x"})
    assert refusal.value.param == "chat_template_kwargs"
    with pytest.raises(RequestError, match="those are none"):
        render(SMOLLM2, CHATS[0], chat_template_kwargs={name: "x"})


EFFORTS = "{{ messages[0].content }} reasoning: {{ reasoning_effort }}"
ALWAYS = "{{ messages[0].content.split('</think>')[-1] }}<think>"


@pytest.mark.parametrize(
    ("source", "effort", "ends"),
    [
        (THINKER, "none", "<think></think>plain<s>"),
        (THINKER.replace("enable_thinking", "thinking"), "none", "<think></think>plain<s>"),
        (EFFORTS, "none", "reasoning: none"),
        (EFFORTS, "high", "reasoning: high"),
        (SMOLLM2, "none", "assistant\n"),
    ],
)
def test_effort_is_told_to_a_template_in_its_own_words(source: str, effort: str, ends: str) -> None:
    assert render(source, CHATS[0], reasoning_effort=effort).endswith(ends)


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        (THINKER, {"reasoning_effort": "high"}, "max_reasoning_tokens"),
        (SMOLLM2, {"reasoning_effort": "low"}, "knows no reasoning_effort but none"),
        (ALWAYS, {"reasoning_effort": "none"}, "max_reasoning_tokens 0"),
        (EFFORTS, {"reasoning_effort": "much"}, "must be one of none"),
        (
            THINKER,
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "give one of them",
        ),
    ],
)
def test_an_effort_that_a_template_cannot_make_is_refused(
    source: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError, match=says) as refusal:
        render(source, CHATS[0], **options)
    assert refusal.value.param == "reasoning_effort"


def tool(name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def render_with(source: str, tool_format: str | None, messages: Any, **options: Any) -> str:
    template = template_of(source, tool_format=TOOL_FORMATS[tool_format] if tool_format else None)
    return template.render(Chat(messages, ChatOptions(**options))).text


def test_tools_are_given_to_a_template_that_knows_them_unless_none_may_be_called() -> None:
    assert '"name": "f"' in render_with(THINKER, "hermes", CHATS[0], tools=[tool()])
    hidden = render_with(THINKER, "hermes", CHATS[0], tools=[tool()], tool_choice="none")
    assert hidden == render(THINKER, CHATS[0])
    named = {"type": "function", "function": {"name": "f"}}
    chosen = {"tools": [tool("g"), tool("f")], "tool_choice": named}
    assert '"name": "g"' in render_with(THINKER, "hermes", CHATS[0], **chosen)


@pytest.mark.parametrize("tool_format", [None, "hermes"])
def test_tools_that_nobody_would_tell_the_model_are_refused(tool_format: str | None) -> None:
    with pytest.raises(RequestError, match="tool_format, such as generic") as refusal:
        render_with(SMOLLM2, tool_format, CHATS[0], tools=[tool()])
    assert refusal.value.param == "tools"
    none = {"tools": [tool()], "tool_choice": "none"}
    assert render_with(SMOLLM2, tool_format, CHATS[0], **none) == render(SMOLLM2, CHATS[0])


CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": i, "type": "function", "function": {"name": "f", "arguments": arguments}}
            for i, arguments in (("a", '{"city": "Bern"}'), ("b", '{"city": "Rome"}'))
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "blue"},
    {"role": "tool", "tool_call_id": "b", "content": "grey"},
    {"role": "user", "content": "So?"},
]


@pytest.mark.parametrize("options", [{}, {"tools": [tool()]}])
def test_calls_and_results_are_text_where_the_template_knows_none(options: Any) -> None:
    text = render_with(SMOLLM2, "generic", CALLED, **options)
    call = '{"name": "f", "arguments": {"city": "'
    assert text.count(f"<|im_start|>assistant\n{call}Bern") == 1
    assert text.count(f"{call}Rome") == 1
    assert "<|im_start|>tool" not in text
    assert text.index("blue") < text.index("grey") < text.index("Answer my") < text.index("So?")
    assert text.count("Answer my question") == 1
    assert text.startswith("<|im_start|>system\n")
    assert ('"name": "f", "parameters"' in text) == bool(options)


def test_tools_in_words_end_the_callers_system_message() -> None:
    chat = [{"role": "system", "content": "Be brief."}, *CHATS[0]]
    text = render_with(SMOLLM2, "generic", chat, tools=[tool()])
    assert text.startswith("<|im_start|>system\nBe brief.\n\n")
    assert text.count("<|im_start|>system") == 1 and '"name": "f"' in text


def test_a_conversation_without_tools_is_rendered_as_ever() -> None:
    two = [*CHATS[0], *CHATS[0]]  # messages of one role that follow each other stay apart
    assert render_with(SMOLLM2, "generic", two) == render(SMOLLM2, two)


@pytest.mark.parametrize("after", ["auto", "required"])
def test_the_next_prompt_goes_on_from_a_call_whatever_had_to_be_called(after: str) -> None:
    """Else the tools and the conversation would be computed again after a call that had to be."""
    named = {"type": "function", "function": {"name": "f"}}
    tools = {"tools": [tool("f"), tool("g")], "parallel_tool_calls": False}
    first = render_with(SMOLLM2, "generic", CALLED[:1], tool_choice=named, **tools)
    one_call = {**CALLED[1], "tool_calls": CALLED[1]["tool_calls"][:1]}
    history = [CALLED[0], one_call, CALLED[2]]
    second = render_with(SMOLLM2, "generic", history, tool_choice=after, **tools)
    written = '{"name": "f", "arguments": {"city": "Bern"}}<|im_end|>'
    assert second.startswith(first + written)


IN_TURN = """
{%- for m in messages %}
    {%- set is_due = loop.index0 % 2 == 0 %}
    {%- if (m.role == 'user') != is_due %}{{ raise_exception('in turn') }}{% endif %}
    {{- '<' + m.role + '>' + m.content }}
{%- endfor %}"""
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("source", [IN_TURN, NO_SYSTEM], ids=["refused", "dropped"])
def test_tools_in_words_reach_a_model_whose_template_takes_no_system_message(source: str) -> None:
    for chat in (CALLED, [{"role": "system", "content": "Be brief."}, *CALLED]):
        text = render_with(source, "generic", chat, tools=[tool()])
        assert text.startswith("<user>") and "<system>" not in text
        assert '"name": "f", "parameters"' in text and "Weather?" in text
        assert ("Be brief." in text) == (len(chat) > len(CALLED))


def test_what_the_tools_changed_in_a_rendering_is_told_with_it() -> None:
    """Else a conversation that was continued with other tools would be told to have other text."""

    def told(tool_format: str, source: str, **options: Any) -> Any:
        template = template_of(source, tool_format=TOOL_FORMATS[tool_format])
        return template.render(Chat(CHATS[0], ChatOptions(**options))).told_tools

    for tool_format, source in (("generic", SMOLLM2), ("hermes", THINKER)):
        assert not told(tool_format, source)
        assert not told(tool_format, source, tools=[tool()], tool_choice="none")
        one, other = (told(tool_format, source, tools=[tool(name)]) for name in "fg")
        assert one and other and one != other


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        ({"tools": "f"}, "tools", "must be a list"),
        ({"tools": [1]}, "tools[0]", "must be an object"),
        ({"tools": [tool("f g")]}, "tools[0].function.name", "letters"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice", "must be"),
        ({"parallel_tool_calls": None}, "parallel_tool_calls", "true or false"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "an object"),
        ({"chat_template_kwargs": {1: 1}}, "chat_template_kwargs", "no string"),
        ({"chat_template_kwargs": {"a": object()}}, "chat_template_kwargs", "no JSON"),
        ({"chat_template_kwargs": {"a": "x" * 70_000}}, "chat_template_kwargs", "at most"),
        ({"chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs", "surrogate"),
        ({"add_generation_prompt": 1}, "add_generation_prompt", "true or false"),
        ({"continue_final_message": None}, "continue_final_message", "true or false"),
    ],
)
def test_wrong_options_are_refused_by_name(options: Any, param: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as refusal:
        ChatOptions(**options)
    assert refusal.value.param == param


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("field", "says"),
    [
        (nested(100), "nested deeper than 64"),
        (nested(100_000), "nested deeper than 64"),
        (object(), "object, which is no JSON"),
        ({1: 2}, "no string"),
        ([10**5000], "whole number of more than 4096 bits"),
        ("\ud800", "surrogate"),
    ],
)
def test_a_message_holds_json_of_bounded_depth(field: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says) as refusal:
        render(SMOLLM2, [{"role": "user", "content": "x", "extra": field}])
    assert refusal.value.param == "messages"


def call(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [{"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}]


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"city": "Bern", "days": 2}', "city=Bern days=2 "),
        ({"city": "Bern"}, "city=Bern "),
        ("{}", ""),
        ('["Bern"]', '["Bern"]'),
        ("{broken", "{broken"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_of_tool_calls_are_objects_to_a_template(arguments: Any, seen: str) -> None:
    source = """
    {%- set arguments = messages[0].tool_calls[0].function.arguments %}
    {%- if arguments is string %}{{ arguments }}{% else %}
    {%- for name, value in arguments.items() %}{{ name }}={{ value }} {% endfor %}{% endif %}"""
    assert render(source, call(arguments)) == seen


def test_a_message_of_very_many_calls_is_refused() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    plain_messages([{"role": "assistant", "tool_calls": [call] * 1024}])
    with pytest.raises(RequestError, match="1025 calls, at most 1024"):
        plain_messages([{"role": "assistant", "tool_calls": [call] * 1025}])


def test_deep_arguments_of_tool_calls_are_refused() -> None:
    with pytest.raises(RequestError, match="nested deeper"):
        render(SMOLLM2, call('{"a": ' + "[" * 200 + "]" * 200 + "}"))


def test_rendering_is_bounded_in_time_and_size() -> None:
    chat = Chat([{"role": "user", "content": "x" * 200}] * 40)
    quadratic = "{% for a in messages %}{% for b in messages %}{{ '' }}{% endfor %}{% endfor %}"
    ticks = itertools.count()
    slow = template_of(quadratic, limits=RenderLimits(50), clock=lambda: float(next(ticks)))
    with pytest.raises(RequestError, match="more than 50 s"):
        slow.render(chat)
    with pytest.raises(RequestError, match="more than 5000 characters"):
        template_of(SMOLLM2, limits=RenderLimits(max_chars=5000)).render(chat)
    assert template_of(quadratic).render(chat).text == ""


def test_json_is_what_transformers_makes_of_it(transformers_tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "é 漢 😀 \x7f \\u00e9 <b>"}]
    for arguments in ("", "ensure_ascii=True", "indent=2", "sort_keys=True"):
        source = f"{{{{ messages | tojson({arguments}) }}}}"
        expected = transformers_tokenizer.apply_chat_template(
            chat, chat_template=source, tokenize=False
        )
        assert render(source, chat) == expected
