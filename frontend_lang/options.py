"""How a `gen` is answered: one type for `gen`, for `run`'s defaults and for every backend.

The names are SGLang's, and ours where it has none. An option that is absent is the backend's own
default. A mapping rather than a class, so that defaults and a `gen`'s own options are merged by
`|` and a signature takes them all as `**options: Unpack[Options]`.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal, TypedDict, cast, get_args

from sapwood.runtime.errors import RequestError

DType = type[int] | type[float] | type[str] | type[bool] | Literal["int", "float", "str", "bool"]


class FurtherOptions(TypedDict, total=False):
    """The options that a signature does not name on its own."""

    min_tokens: int | None
    n: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    stop_regex: str | Sequence[str] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    ignore_eos: bool | None
    seed: int | None
    logit_bias: Mapping[int, float] | None
    return_logprob: bool | None
    logprob_start_len: int | None
    top_logprobs_num: int | None
    return_text_in_logprobs: bool | None
    regex: str | None
    json_schema: str | Mapping[str, Any] | None
    grammar: str | None  # Lark or EBNF, told apart by its text
    output_tokens: int | None  # a guess how long the answer will be: a hint, not a limit


class GenOptions(FurtherOptions, total=False):
    """Those of `gen`, with a name that only SGLang has."""

    ebnf: str | None  # grammar


class Options(FurtherOptions, total=False):
    """Options of one answer. `None` says the same as leaving an option out."""

    max_tokens: int | None
    dtype: DType | None
    output_type: Any  # whatever outlines understands


OPTION_NAMES = frozenset(Options.__annotations__)
ALIASES: Mapping[str, str] = MappingProxyType({"max_new_tokens": "max_tokens", "ebnf": "grammar"})
CONSTRAINTS = ("dtype", "regex", "json_schema", "grammar", "output_type")


def by_own_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without aliases. Raises TypeError where one is given under both names."""
    for alias, name in ALIASES.items():
        if alias in options and name in options:
            raise TypeError(f"{alias} is {name} by another name; give one of them")
    return {ALIASES.get(name, name): value for name, value in options.items()}


def given(options: Mapping[str, Any]) -> Options:
    """The options that say something. Raises TypeError for a name that is none, and RequestError
    for a value that is no number, or not True or False, where one belongs."""
    unknown = sorted(options.keys() - OPTION_NAMES)
    if unknown:
        near = get_close_matches(unknown[0], sorted(OPTION_NAMES), n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise TypeError(
            f"unknown option {unknown[0]!r}; {hint}there are {', '.join(sorted(OPTION_NAMES))}"
        )
    found = {name: value for name, value in options.items() if value is not None}
    for name, value in found.items():
        _check_kind(name, value)
    named = [name for name in CONSTRAINTS if name in found]
    if len(named) > 1:
        raise TypeError(f"{' and '.join(named)} both say what the answer must be; give one of them")
    return cast(Options, found)


def _check_kind(name: str, value: object) -> None:
    is_bool = isinstance(value, bool)
    match get_args(Options.__annotations__[name])[:1]:
        case (kind,) if kind is bool:
            fits, expected = is_bool, "True or False"
        case (kind,) if kind is int:
            fits, expected = isinstance(value, Integral) and not is_bool, "a whole number"
        case (kind,) if kind is float:
            fits, expected = isinstance(value, Real) and not is_bool, "a number"
        case _:
            return
    if not fits:
        raise RequestError(f"{name} is {expected}, not {value!r}", param=name)
