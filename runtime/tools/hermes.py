"""Hermes, Qwen2.5 and Qwen3: each call between its own tags."""

from sapwood.runtime.tools.call_syntax import CallSyntax

HERMES = CallSyntax(
    lead="\n",
    trigger="<tool_call>",
    opening="\n",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}",
    separator="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
)
