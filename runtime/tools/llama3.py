"""Llama 3.1 to 3.3: an answer that is one JSON object. Their templates take one call a message."""

from sapwood.runtime.tools.call_syntax import CallSyntax

LLAMA3 = CallSyntax(
    trigger="<|python_tag|>",
    bare=True,
    before_name='{"name": "',
    before_arguments='", "parameters": ',
    after_arguments="}",
    markers=("<|python_tag|>",),
)
