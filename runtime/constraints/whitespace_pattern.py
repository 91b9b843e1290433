"""A regular expression in place of the rule for whitespace in JSON: of JSON's whitespace alone.

Anything else between two tokens would make an answer that is no JSON.
"""

import re

# Pieces of which every regular expression matches nothing but spaces, tabs and line breaks.
_CHARACTER = r"[ \t\n\r]|\\[tnrs ]|\\x(?:09|0[aAdD]|20)"
_PIECES = re.compile(
    rf"(?:{_CHARACTER}|\[(?:{_CHARACTER})+\]|\(\?:|[()|?*+^$]|\{{[0-9]+(?:,[0-9]*)?\}})+"
)


def is_of_whitespace(pattern: str) -> bool:
    """Whether a pattern can be seen to match nothing but JSON's whitespace. O(length)."""
    return _PIECES.fullmatch(pattern) is not None


def json_whitespace(pattern: str) -> str:
    """Such a pattern as Rust's crate takes it: its \\s is JSON's whitespace, not Unicode's."""
    return pattern.replace(r"\s", r"[ \t\n\r]")
