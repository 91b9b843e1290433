"""Qwen3-Coder and Qwen3.5: one element for each argument, strings as they are."""

from sapwood.runtime.tools.call_syntax import ArgumentStyle, CallSyntax

QWEN3_CODER = CallSyntax(
    lead="\n",
    trigger="<tool_call>",
    opening="\n",
    before_name="<function=",
    before_arguments=">\n",
    style=ArgumentStyle.QWEN_XML,
    after_arguments="</function>",
    separator="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
)
