"""What a caller may ask of sampling, checked once at the edge.

Knows nothing of tensors; `runtime/sampler.py` carries it out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sapwood.runtime.errors import RequestError

MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 1024  # characters, of one stop string
MAX_STOP_TOKEN_IDS = 256
MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one answer and when to end it.

    Filters apply in the order temperature, top_k, top_p, min_p. The defaults are those of the
    model's own distribution: temperature 1 and no filter. `temperature=0` is greedy.

    `seed` fixes the noise: the uniform number that picks the token at a position is a function of
    the seed and the position alone, so an answer does not depend on its neighbours, on
    preemption or on what was cached. Without a seed one is drawn when the request is submitted.

    Raises RequestError, with `param` set, for a value outside its range.
    """

    max_tokens: int | None = 128  # None: as many as the context has room for
    min_tokens: int = 0  # end tokens and stop strings are held off until then
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False  # log-probability of each generated token
    top_logprobs: int = 0  # and of that many most likely alternatives

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_token_ids(self.stop_token_ids))
        _check_int("max_tokens", self.max_tokens, low=1, high=MAX_COUNT, optional=True)
        _check_int("min_tokens", self.min_tokens, low=0, high=MAX_COUNT)
        _check_float("temperature", self.temperature, low=0.0, high=100.0)
        _check_float("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _check_int("top_k", self.top_k, low=-1, high=MAX_COUNT)
        if self.top_k == 0:
            raise RequestError("top_k is 0; use -1 for all tokens or at least 1", param="top_k")
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        _check_int("seed", self.seed, low=-MAX_SEED - 1, high=MAX_SEED, optional=True)
        _check_int("top_logprobs", self.top_logprobs, low=0, high=MAX_TOP_LOGPROBS)
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false", param=name)
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                f"top_logprobs is {self.top_logprobs} and logprobs is off; set logprobs=True",
                param="top_logprobs",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}",
                param="min_tokens",
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _check_int(name: str, value: Any, *, low: int, high: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be a whole number, not {value!r}", param=name)
    if not low <= value <= high:
        # A number of a thousand digits is not repeated to who sent it.
        given = str(value) if abs(value) < 2**64 else "out of range"
        raise RequestError(f"{name} is {given}; it must be from {low} to {high}", param=name)


def _check_float(name: str, value: Any, *, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, not {value!r}", param=name)
    outside = not math.isfinite(value) or not low <= value <= high or (open_low and value == low)
    if outside:
        bound = "above" if open_low else "from"
        raise RequestError(f"{name} is {value}; it must be {bound} {low} to {high}", param=name)


def _as_stop(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) for s in strings):
        raise RequestError("stop must be a string or a list of strings", param="stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(
            f"{len(strings)} stop strings were given, at most {MAX_STOP_STRINGS} are taken",
            param="stop",
        )
    for s in strings:
        if not s:
            raise RequestError("a stop string is empty; leave it out", param="stop")
        if len(s) > MAX_STOP_LENGTH:
            raise RequestError(
                f"a stop string has {len(s)} characters, at most {MAX_STOP_LENGTH} are taken",
                param="stop",
            )
        try:
            s.encode()
        except UnicodeEncodeError as error:
            raise RequestError("a stop string is not valid Unicode", param="stop") from error
    return tuple(strings)


def _as_token_ids(ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, Sequence) or isinstance(ids, str):
        raise RequestError("stop_token_ids must be a list of token ids", param="stop_token_ids")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"{len(ids)} stop token ids were given, at most {MAX_STOP_TOKEN_IDS} are taken",
            param="stop_token_ids",
        )
    for token_id in ids:
        _check_int("stop_token_ids", token_id, low=0, high=MAX_COUNT)
    return tuple(ids)
