"""The text of a `CHOICE`, read."""

import json

from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.limits import MAX_CHOICES


def read_choices(text: str) -> list[str]:
    """The strings, at least one. Raises GrammarError."""
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the choices are not valid JSON: {error}") from error
    if not isinstance(choices, list) or not choices or not all(map(_is_text, choices)):
        raise GrammarError("choices are a list of at least one string, of valid Unicode")
    if len(choices) > MAX_CHOICES:
        raise GrammarError(
            f"there are {len(choices)} choices, the limit is {MAX_CHOICES}; write them as a "
            "regular expression"
        )
    return choices


def _is_text(value: object) -> bool:
    """Half of a surrogate pair reaches us through JSON escapes and has no bytes."""
    return isinstance(value, str) and not any(0xD800 <= ord(c) <= 0xDFFF for c in value)
