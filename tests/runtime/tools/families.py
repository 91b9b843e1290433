"""Chat templates as the families of models have them, small and in our own words, and conversations
with calls."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sapwood.runtime.chat import Chat, ChatOptions
from sapwood.runtime.chat_template import ChatTemplate
from sapwood.runtime.tools import TOOL_FORMATS

_HERMES = """
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
    {%- for call in message.tool_calls or [] %}
        {%- if message.content or not loop.first %}{{ '\n' }}{% endif -%}
        <tool_call>{{ '\n' }}{"name": "{{ call.function.name }}", "arguments": {{
            call.function.arguments | tojson }}}{{ '\n' }}</tool_call>
    {%- endfor %}<|im_end|>{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"""

_QWEN3_CODER = """
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
    {%- for call in message.tool_calls or [] %}
        {%- if message.content or not loop.first %}{{ '\n' }}{% endif -%}
        <tool_call>{{ '\n' }}<function={{ call.function.name }}>{{ '\n' }}
        {%- for name, value in call.function.arguments.items() -%}
            <parameter={{ name }}>{{ '\n' }}{{ value if value is string else value | tojson
            }}{{ '\n' }}</parameter>{{ '\n' }}
        {%- endfor -%}
        </function>{{ '\n' }}</tool_call>
    {%- endfor %}<|im_end|>{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"""

_LLAMA3 = """
{%- if tools %}<|start_header_id|>system<|end_header_id|>

Answer with {"name": function name, "parameters": arguments}. {{ tools | tojson }}<|eot_id|>
{%- endif %}
{%- for message in messages -%}
    <|start_header_id|>{{ message.role }}<|end_header_id|>{{ '\n\n' }}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call only') }}{% endif -%}
        {%- set function = message.tool_calls[0].function -%}
        {"name": "{{ function.name }}", "parameters": {{ function.arguments | tojson }}}
    {%- else %}{{ message.content }}{% endif -%}
    <|eot_id|>
{%- endfor %}
{%- if add_generation_prompt -%}
    <|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}
{%- endif %}"""

_MISTRAL_ARGS = """
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}{{ message.content }}
        {%- for call in message.tool_calls or [] -%}
            [TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
        {%- endfor %}</s>
    {%- else %}[INST]{{ message.content }}[/INST]{% endif %}
{%- endfor %}"""

# Mistral's older templates write the ids of calls, which the model does not.
_MISTRAL = """
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
    {%- if message.tool_calls -%}
        [TOOL_CALLS][
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
            {{- (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}
            {{- ', ' if not loop.last }}
        {%- endfor -%}
        ]</s>
    {%- elif message.role == 'assistant' %}{{ message.content }}</s>
    {%- else %}[INST]{{ message.content }}[/INST]{% endif %}
{%- endfor %}"""

_PYTHONIC = """
{%- if tools %}Call functions as [func_name1(params_name1=params_value1)]. {{ tools | tojson }}
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}{{ '\n' }}{% endfor %}"""

_GENERIC = """
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"""

TEMPLATES: Mapping[str, str] = MappingProxyType(
    {
        "generic": _GENERIC,
        "hermes": _HERMES,
        "llama3": _LLAMA3,
        "mistral": _MISTRAL,
        "mistral_args": _MISTRAL_ARGS,
        "mistral_spaced": _MISTRAL.replace("[TOOL_CALLS][", "[TOOL_CALLS] ["),
        "pythonic": _PYTHONIC,
        "qwen3_coder": _QWEN3_CODER,
    }
)
# Those that write a call as the model did, and what ends an answer in them.
FAITHFUL: Mapping[str, str] = MappingProxyType(
    {
        "generic": "<|im_end|>\n",
        "hermes": "<|im_end|>\n",
        "llama3": "<|eot_id|>",
        "mistral_args": "</s>",
        "qwen3_coder": "<|im_end|>\n",
    }
)


def rendered(
    name: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], **options: Any
) -> str:
    template = ChatTemplate(TEMPLATES[name], {}, tool_format=TOOL_FORMATS[name])
    return template.render(Chat(messages, ChatOptions(tools=tools, **options))).text
