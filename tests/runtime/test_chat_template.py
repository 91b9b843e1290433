"""Chat templates: what transformers would render, and refusals in the template's own words."""

from typing import Any

import pytest

from sapwood.runtime.chat import Chat, ChatOptions
from sapwood.runtime.chat_template import ChatTemplate
from sapwood.runtime.errors import RequestError

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
