"""What requests may say: the parts that all endpoints share.

Every field of a request is of one of three kinds, and its declaration says which:

- it has an effect here: a typed field;
- it cannot have one here, and nothing is lost: `Accepted` (a user's id, a routing hint);
- it would change the answer and is not served: marked `refused`, where null and the neutral values
  pass and any other is an error that says what to do.

A field that is not declared is an error. Null always means that a field was not given.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from sapwood.runtime.errors import RequestError
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.server.body import Refused, json_path
from sapwood.server.connection import is_sound_id
from sapwood.server.engine import Prompt
from sapwood.server.errors import ApiError

if TYPE_CHECKING:
    from sapwood.runtime.build import EngineInfo

MAX_PROMPTS = 1024  # of one request

Accepted = Any
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
ID_RULE = "must be 1 to 200 letters, digits and . : - _"


class Wire(BaseModel):
    """Base of all request schemas: exact types, no unknown fields, no NaN."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


def refused(way_out: str, *neutral: Any) -> Refused:
    """Marks a field that is known and not served, except for its `neutral` values."""

    def check(value: Any) -> None:
        same = (value is other or value == other and type(value) is not bool for other in neutral)
        if value is not None and not any(same):
            raise PydanticCustomError("unsupported", "{way_out}", {"way_out": way_out})

    return Refused(check)


def _sound_id(value: str) -> str:
    if not is_sound_id(value):
        raise PydanticCustomError("request_id", ID_RULE)
    return value


RequestId = Annotated[str, AfterValidator(_sound_id)]


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Stop = Annotated[
    list[str] | None,
    BeforeValidator(_one_or_many),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


def _integer_keys(value: Any) -> Any:
    """JSON's keys are strings; ours are token ids."""
    if not isinstance(value, dict):
        return value
    if not all(isinstance(key, str) and _TOKEN_ID.fullmatch(key) for key in value):
        raise PydanticCustomError("token_ids", "must map token ids to biases")
    return {int(key): bias for key, bias in value.items()}


# Written in one way only, so that no two keys are the same id.
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,18}")

LogitBias = Annotated[dict[int, float] | None, BeforeValidator(_integer_keys)]


def sampling_params(names: Mapping[str, str], values: dict[str, Any]) -> SamplingParams:
    """SamplingParams from `values` without those that are None, but for max_tokens.

    Raises ApiError that speaks of the fields in the caller's words, `names` by our own.
    """
    given = {name: v for name, v in values.items() if v is not None or name == "max_tokens"}
    with in_callers_words(names):
        return SamplingParams(**given)


@contextmanager
def in_callers_words(names: Mapping[str, str]) -> Iterator[None]:
    """Turns a RequestError about our field into an ApiError about `names[field]`."""
    try:
        yield
    except RequestError as error:
        message, param = str(error), error.param
        if param is not None and param in names:
            word = names[param].rpartition(".")[2]
            message = re.sub(rf"\b{re.escape(param)}\b", lambda _: word, message)
            param = names[param]
        raise ApiError(400, message, param=param, code=error.code) from error


def as_prompts(value: Any, param: str, info: "EngineInfo") -> tuple[list[Prompt], bool]:
    """The prompts in a string, a list of strings, token ids or a list of lists of token ids.

    The flag says whether it was a single one. Raises ApiError. A few C calls per prompt, nothing
    per token.
    """
    if isinstance(value, str):
        return [value], True
    if not isinstance(value, list) or not value:
        raise _bad_prompt(param, "must be a string or token ids, or a list of either, not empty")
    if type(value[0]) is int:
        return [_token_ids(value, param, info)], True
    if len(value) > MAX_PROMPTS:
        raise _bad_prompt(param, f"has {len(value)} prompts, at most {MAX_PROMPTS} are taken")
    if set(map(type, value)) == {str}:
        return value, False
    if set(map(type, value)) == {list}:
        places = (json_path((param, i)) for i in range(len(value)))
        return [_token_ids(ids, at, info) for ids, at in zip(value, places, strict=True)], False
    raise _bad_prompt(param, "must hold strings only or lists of token ids only")


def _token_ids(ids: list[Any], param: str, info: "EngineInfo") -> list[int]:
    if len(ids) >= info.max_model_len:  # before each of them is looked at: there may be millions
        raise ApiError(
            400,
            f"This model's maximum context length is {info.max_model_len} tokens, and {param} has "
            f"{len(ids)}, which leaves none for the answer",
            param=param,
            code="context_length_exceeded",
        )
    if set(map(type, ids)) != {int}:
        raise _bad_prompt(param, "must hold token ids, whole numbers, at least one")
    outside = min(ids) if min(ids) < 0 else max(ids)
    if not 0 <= outside < info.vocab_size:
        raise _bad_prompt(
            param, f"has token id {str(outside)[:20]}; the vocabulary is 0 to {info.vocab_size - 1}"
        )
    return ids


def _bad_prompt(param: str, what: str) -> ApiError:
    return ApiError(400, f"{param} {what}", param=param)
