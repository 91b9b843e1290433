"""Options of a `gen` as the engine's sampling parameters."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from sapwood.frontend_lang.backends.interface import Call
from sapwood.frontend_lang.options import CONSTRAINTS, Options, given
from sapwood.runtime.errors import RequestError
from sapwood.runtime.sampling_params import SamplingParams

# Options that the engine has under the same name.
_SAME = (
    "max_tokens", "min_tokens", "n", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p",
    "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos",
    "seed", "logit_bias",
)  # fmt: skip

# The engine's words, where an option has another one.
_OPTION_BY_FIELD: Mapping[str, str] = MappingProxyType(
    {
        "logprobs": "return_logprob",
        "top_logprobs": "top_logprobs_num",
        "prompt_logprobs": "top_logprobs_num",
        "prompt_logprobs_start": "logprob_start_len",
    }
)


def sampling_params(call: Call) -> SamplingParams:
    """How the engine is to answer.

    As with SGLang, the other options about log-probabilities say nothing without `return_logprob`,
    and `logprob_start_len` of -1 asks for none of the prompt's. Raises RequestError that speaks of
    the options.
    """
    options = given(call.options)
    unmade = [name for name in CONSTRAINTS if name in options]
    if unmade and call.constraint is None:
        raise RequestError(
            f"{unmade[0]} says what the answer must be, and the call has no constraint made of it",
            param=unmade[0],
        )
    fields: dict[str, Any] = {name: options[name] for name in _SAME if name in options}  # type: ignore[literal-required]
    fields |= _logprob_fields(options)
    with in_options_words():
        return SamplingParams(**fields, constraint=call.constraint)


@contextmanager
def in_options_words() -> Iterator[None]:
    """Turns a RequestError about a field of the engine into one about the option."""
    try:
        yield
    except RequestError as error:
        field = error.param or ""
        if field not in _OPTION_BY_FIELD:
            raise
        option = _OPTION_BY_FIELD[field]
        message = re.sub(rf"\b{field}\b", option, str(error))
        raise RequestError(message, param=option, code=error.code) from error


def _logprob_fields(options: Options) -> dict[str, Any]:
    if not options.get("return_logprob"):
        return {}
    num_top = options.get("top_logprobs_num") or 0
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": num_top}
    start = options.get("logprob_start_len")
    if start is not None and start != -1:
        fields |= {"prompt_logprobs": num_top, "prompt_logprobs_start": start}
    return fields
