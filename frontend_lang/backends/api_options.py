"""Options of a `gen` as fields of an API's request; shared by the APIs that others serve."""

from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

from sapwood.frontend_lang.backends.interface import Prompt
from sapwood.frontend_lang.nodes import ASSISTANT, Message
from sapwood.frontend_lang.options import Options
from sapwood.runtime.errors import RequestError

# Values that ask for nothing: what an API does of itself. Empty lists and texts are others.
NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        "min_tokens": 0,
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": False,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "return_text_in_logprobs": False,
    }
)


def asked(options: Options) -> dict[str, Any]:
    """The options that say something, neutral values too."""
    return {name: value for name, value in options.items() if value is not None}


def is_neutral(name: str, value: Any) -> bool:
    """Whether leaving the option out says the same to an API without defaults of its own."""
    if name in NEUTRAL:
        return bool(value == NEUTRAL[name])
    return isinstance(value, str | Sequence | Mapping) and not value


def served_fields(
    options: Mapping[str, Any], served: Set[str], *, api: str, way_out: str
) -> dict[str, Any]:
    """The options with names in `served`. Raises RequestError for another one that asks for
    something."""
    for name, value in options.items():
        if name not in served and not is_neutral(name, value):
            raise RequestError(f"{api} has no {name}; leave it out, or {way_out}", param=name)
    return {name: value for name, value in options.items() if name in served}


def stops(options: Mapping[str, Any]) -> list[str]:
    """The stop strings."""
    stop = options.get("stop") or ()
    return [stop] if isinstance(stop, str) else list(stop)


def conversation(prompt: Prompt, *, api: str) -> tuple[list[Message], str]:
    """The closed messages of a prompt, and how the open one of the assistant begins.

    Raises RequestError where no assistant's message is open.
    """
    if not prompt.messages or prompt.messages[-1]["role"] != ASSISTANT:
        raise RequestError(
            f"{api} answers in an assistant's message only; write s += assistant(gen(...))",
            param="messages",
        )
    *closed, opened = prompt.messages
    if not closed:
        raise RequestError(
            f"{api} answers a conversation, and there is none before the assistant's message; "
            "begin with s += user(...)",
            param="messages",
        )
    return closed, opened["content"]
