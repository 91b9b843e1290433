"""Identifiers of tool calls, which results refer to."""

import secrets
import string
from collections.abc import Callable

NewCallId = Callable[[], str]

_ALPHANUMERIC = string.ascii_letters + string.digits


def new_call_id() -> str:
    """`call_` and 24 hexadecimal digits, random."""
    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """9 random letters and digits: Mistral's templates take no others."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
