"""Which format a model writes calls in, told from its chat template.

The template writes earlier calls, and has to write them as the model does.
"""

import re
from collections.abc import Sequence

# The first that is found decides: what names fewer families stands first.
_SIGNS: Sequence[tuple[str, str]] = (
    (r"\[ARGS\]", "mistral_args"),
    (r"\[TOOL_CALLS\] \[", "mistral_spaced"),
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"<parameter=", "qwen3_coder"),
    (r"<tool_call>", "hermes"),
    (r"func_name1\(params_name1=|<\|python_start\|>", "pythonic"),
    (r"<\|python_tag\|>|['\"]parameters['\"]\s*:", "llama3"),
)
_READS_TOOLS = re.compile(r"\btools\b")


def detect_tool_format(template: str | None) -> str | None:
    """A name of `TOOL_FORMATS` for the model with this chat template.

    "generic" for a template that knows no tools, or none at all; None for one that writes calls in
    a format not known here.
    """
    if template is None or not _READS_TOOLS.search(template):
        return "generic"
    found = (name for sign, name in _SIGNS if re.search(sign, template))
    return next(found, None)
