"""How a `gen` is answered: one type for `gen`, for `run`'s defaults and for every backend.

The names are SGLang's, and ours where it has none. An option that is absent is the backend's own
default. A mapping rather than a class, so that defaults and a `gen`'s own options are merged by
`|` and a signature takes them all as `**options: Unpack[Options]`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, cast

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


class Options(FurtherOptions, total=False):
    """Options of one answer. `None` says the same as leaving an option out."""

    max_tokens: int | None
    dtype: DType | None
    output_type: Any  # whatever outlines understands


OPTION_NAMES = frozenset(Options.__annotations__)
CONSTRAINTS = ("dtype", "regex", "json_schema", "grammar", "output_type")


def given(options: Mapping[str, Any]) -> Options:
    """The options that say something. Raises TypeError for a name that is none."""
    unknown = options.keys() - OPTION_NAMES
    if unknown:
        raise TypeError(
            f"unknown option {sorted(unknown)[0]!r}; there are {', '.join(sorted(OPTION_NAMES))}"
        )
    found = {name: value for name, value in options.items() if value is not None}
    named = [name for name in CONSTRAINTS if name in found]
    if len(named) > 1:
        raise TypeError(f"{' and '.join(named)} both say what the answer must be; give one of them")
    return cast(Options, found)
