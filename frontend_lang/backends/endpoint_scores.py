"""How likely texts are, asked of a server's `/generate`, which then generates nothing."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeVar

from sapwood.frontend_lang.backends.generate_wire import asked_hints
from sapwood.frontend_lang.backends.http import HttpClient
from sapwood.frontend_lang.backends.interface import Score, TokenIds
from sapwood.runtime.errors import EngineError
from sapwood.runtime.hints import Hints

T = TypeVar("T")

MAX_PROMPTS = 1024  # that one request takes
_NOTHING: Mapping[str, Any] = MappingProxyType({"max_new_tokens": 0, "temperature": 0})
# Tokens of a text's end that may be cut otherwise when another text follows.
_WINDOW = 8


async def score_tokens(
    http: HttpClient, before: TokenIds, continuations: Sequence[TokenIds], hints: Hints
) -> list[Score]:
    """The continuations of our server's tokens, as `Backend.score`."""
    start = max(1, len(before))  # the first token of all has no probability
    scored = [(*before, *further) for further in continuations]
    asked = list(dict.fromkeys(ids for ids in scored if len(ids) > start))
    results: list[Any] = []
    for some in _batches(asked, MAX_PROMPTS):
        body = {
            "input_ids": [list(ids) for ids in some],
            "sampling_params": dict(_NOTHING),
            "return_logprob": True,
            "logprob_start_len": start,
            "sapwood": asked_hints(hints),
        }
        results += await http.post("/generate", body)
    told = dict(zip(asked, results, strict=True))
    return [_score(ids, told.get(ids)) for ids in scored]


async def score_texts(http: HttpClient, before: str, continuations: Sequence[str]) -> list[Score]:
    """The continuations of a text, by SGLang's native API.

    The server cuts each text with its continuation; what is scored begins with the first token that
    any of the continuations changes, the same for all of them. Where something is before them that
    takes two requests: one computes it and counts its tokens.
    """
    num_tokens = 0
    if before:
        told = await http.post("/generate", {"text": before, "sampling_params": dict(_NOTHING)})
        num_tokens = int(told["meta_info"]["prompt_tokens"])
    first = max(0, num_tokens - _WINDOW)
    texts = [*([before] if before else ()), *(before + further for further in continuations)]
    results: list[Any] = []
    for some in _batches(texts, MAX_PROMPTS):
        body = {
            "text": some,
            "sampling_params": dict(_NOTHING),
            "return_logprob": True,
            "logprob_start_len": first,
        }
        results += await http.post("/generate", body)
    tails = [_entries(result) for result in results]
    own, others = (tails[0], tails[1:]) if before else ([], tails)
    common = min(_common_length(own, tail) for tail in others)
    return [Score(logprobs=_logprobs(tail[common:])) for tail in others]


def _score(token_ids: TokenIds, result: Any) -> Score:
    if result is None:
        return Score(logprobs=(), token_ids=token_ids)
    return Score(
        logprobs=_logprobs(_entries(result)),
        token_ids=token_ids,
        num_cached_tokens=result["meta_info"]["cached_tokens"],
    )


def _entries(result: Any) -> list[Any]:
    """For each scored token its log-probability (null where there is none), id and text."""
    try:
        entries: list[Any] = result["meta_info"]["input_token_logprobs"]
    except (KeyError, TypeError) as error:
        raise EngineError(f"the server told no log-probabilities: {str(result)[:300]}") from error
    return entries


def _logprobs(entries: Sequence[Any]) -> tuple[float, ...]:
    return tuple(entry[0] for entry in entries if entry[0] is not None)


def _common_length(entries: Sequence[Any], others: Sequence[Any]) -> int:
    """Tokens that two begin with."""
    pairs = zip(entries, others, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a[1] != b[1]), None)
    return min(len(entries), len(others)) if same is None else same


def _batches(items: Sequence[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some
