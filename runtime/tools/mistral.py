"""Mistral: one special token and a list of calls; in the newer form one token for each call.

In templates for its SentencePiece tokenizers there is a space before the list.
"""

from dataclasses import replace

from sapwood.runtime.tools.call_syntax import CallSyntax

MISTRAL = CallSyntax(
    trigger="[TOOL_CALLS]",
    opening="[",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}",
    separator=", ",
    closing="]",
    markers=("[TOOL_CALLS]",),
)

MISTRAL_SPACED = replace(MISTRAL, opening=" [")

MISTRAL_ARGS = CallSyntax(
    trigger="[TOOL_CALLS]",
    before_arguments="[ARGS]",
    separator="[TOOL_CALLS]",
    markers=("[TOOL_CALLS]", "[ARGS]"),
)
