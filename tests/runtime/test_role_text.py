"""What a template writes around one message, joined up, is what it writes around them all."""

import itertools

import pytest

from sapwood.runtime.chat import Chat, ChatOptions, Message
from sapwood.runtime.chat_template import ChatTemplate
from sapwood.runtime.errors import RequestError
from sapwood.runtime.role_text import MAX_ROLES, Render, role_text

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A system message of its own where there is none.
SMOLLM = "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}"
    "{% if m.role == 'user' %}<s>[INST] {{ (system if loop.first else '') + m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
REASONING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
# As some of Mistral do: what the system said stands in front of the last question.
MOVES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last and rest != messages %}{{ messages[0].content }}\n{% endif %}"
    "{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


def renderer(source: str) -> Render:
    template = ChatTemplate(source, {})

    def render(messages: list[Message], opens: bool) -> str:
        return template.render(Chat(messages, ChatOptions(add_generation_prompt=opens))).text

    return render


def written(render: Render, messages: list[Message]) -> str:
    """A conversation written message by message."""
    roles = [message["role"] for message in messages]
    text = ""
    for i, message in enumerate(messages):
        prefix, suffix = role_text(render, roles[: i + 1])
        text += prefix + message["content"] + suffix
    return text


def conversation(*roles: str) -> list[Message]:
    return [{"role": role, "content": f"said {i}"} for i, role in enumerate(roles)]


@pytest.mark.parametrize("source", [CHATML, SMOLLM + CHATML])
@pytest.mark.parametrize("num_turns", [1, 2, 3])
@pytest.mark.parametrize("system", [[], ["system"]])
def test_messages_written_one_by_one_are_the_whole_conversation(
    source: str, num_turns: int, system: list[str]
) -> None:
    render = renderer(source)
    messages = conversation(*system, *["user", "assistant"] * num_turns)
    assert written(render, messages) == render(messages, False)
    prefix, _ = role_text(render, [message["role"] for message in messages])
    assert written(render, messages[:-1]) + prefix == render(messages[:-1], True)


def test_without_a_generation_prompt_the_model_writes_the_space_before_its_answer() -> None:
    render = renderer(LLAMA_2)
    messages = conversation("system", "user", "assistant", "user", "assistant")
    generated = [
        {**m, "content": f" {m['content']}"} if m["role"] == "assistant" else m for m in messages
    ]
    assert written(render, generated) == render(messages, False)


def test_any_order_of_roles_that_a_template_writes_is_written() -> None:
    render = renderer(CHATML)
    for roles in itertools.product(["system", "user", "assistant"], repeat=3):
        assert written(render, conversation(*roles)) == render(conversation(*roles), False)


def test_a_system_message_that_stands_in_the_users_ends_with_its_content() -> None:
    render = renderer(LLAMA_2)
    assert role_text(render, ["system"]) == ("<s>[INST] <<SYS>>\n", "")
    assert role_text(render, ["system", "user"]) == ("\n<</SYS>>\n\n", " [/INST]")


def test_an_assistants_prefix_is_the_generation_prompt() -> None:
    assert role_text(renderer(REASONING), ["user", "assistant"]) == (
        "<|assistant|><think>\n",
        "<|end|>",
    )


def test_a_template_that_moves_earlier_messages_is_told() -> None:
    render = renderer(MOVES_SYSTEM)
    assert role_text(render, ["system", "user"]) == ("\n", "[/INST]")
    with pytest.raises(RequestError, match="written message by message") as caught:
        role_text(render, ["system", "user", "assistant", "user"])
    assert caught.value.param == "roles"


def test_what_the_template_refuses_is_told_in_its_words() -> None:
    with pytest.raises(RequestError, match="alternate"):
        role_text(renderer(LLAMA_2), ["assistant"])
    with pytest.raises(RequestError, match="must be one of"):
        role_text(renderer(CHATML), ["narrator"])


@pytest.mark.parametrize("num_roles", [0, MAX_ROLES + 1])
def test_a_conversation_of_none_or_of_too_many_is_refused(num_roles: int) -> None:
    with pytest.raises(RequestError, match="1 to 1024 messages"):
        role_text(renderer(CHATML), ["user"] * num_roles)
