"""What a caller may ask of sampling, checked once at the edge.

Knows nothing of tensors; `runtime/sampler.py` carries it out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sapwood.runtime.constraints.limits import fault_of
from sapwood.runtime.constraints.spec import ConstraintSpec
from sapwood.runtime.errors import RequestError
from sapwood.runtime.regex_syntax import RegexError
from sapwood.runtime.stop_regex import MAX_REGEX_SIZE, StopRegex

MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 1024  # characters, of one stop string
MAX_STOP_REGEXES = 16
MAX_STOP_TOKEN_IDS = 256
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_FILTERED_TOKEN_IDS = 65_536  # allowed, or banned
MAX_NUM_ANSWERS = 128
MAX_REPETITION_PENALTY = 10.0
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1

TokenIdArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenEdits:
    """What happens to the logits of single tokens, as arrays: made once, used at every token.

    `allowed` is what is left of the allowed tokens without the banned ones, None if all are
    allowed; `banned` is empty where `allowed` says it all. No id occurs twice in an array.
    """

    allowed: TokenIdArray | None
    banned: TokenIdArray
    biased: TokenIdArray
    biases: NDArray[np.float64]  # added to the logits of `biased`


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one answer, when to end it, and how many answers to give.

    What is done to the model's logits, in this order (vLLM's, but for min_p, which comes last):

    1. tokens that are banned, or not allowed, or would end the answer before `min_tokens`, are
       taken out
    2. `logit_bias` is added
    3. `repetition_penalty` divides the logits above 0, and multiplies those below, of every token
       that occurs in the prompt or in the answer (Keskar et al. 2019)
    4. `frequency_penalty` times the token's count in the answer is subtracted, and
       `presence_penalty` where it occurs in it (as OpenAI's API defines them)
    5. `temperature`, `top_k`, `top_p`, `min_p`

    The defaults are those of the model's own distribution: temperature 1 and no filter.
    `temperature=0` is greedy. Log-probabilities are the model's own, before all of it.

    `seed` fixes the noise: the uniform number that picks the token at a position is a function of
    the seed and the position alone, so an answer does not depend on its neighbours, on
    preemption or on what was cached. Without a seed one is drawn when the request is submitted.

    `stop_regex` takes what `runtime/regex_syntax.py` describes: Python's syntax without anchors,
    look-around, back-references and flags. The text ends where the match starts; of all stops the
    match that ends first counts, and of several that end there the one that starts first.

    With a `constraint` every token keeps the answer within it, and the answer ends where the
    constraint is satisfied and nothing more may follow, also with `ignore_eos`. Stops, `max_tokens`
    and the context may end it sooner. Options that could leave no token to draw are refused beside
    it: `min_tokens`, `allowed_token_ids` and `banned_token_ids`.

    Raises RequestError, with `param` set, for a value outside its range or a contradiction.
    """

    max_tokens: int | None = 128  # None: as many as the context has room for; 0: only score
    min_tokens: int = 0  # end tokens and stops are held off until then
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
    stop_regex: tuple[str, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()  # kept as sorted pairs
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    banned_token_ids: tuple[int, ...] = ()
    n: int = 1  # answers to give
    best_of: int | None = None  # answers to compute; those of the highest mean log-probability
    prompt_logprobs: int | None = None  # alternatives to each prompt token; 0: the tokens' own only
    prompt_logprobs_start: int = 0  # the first prompt position that is asked for
    constraint: ConstraintSpec | None = None  # what the answer's text must satisfy
    max_reasoning_tokens: int | None = None  # of a model that reasons first; None: no limit

    token_edits: TokenEdits | None = field(init=False, repr=False, compare=False)
    compiled_stop_regexes: tuple[StopRegex, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._settle("stop", _as_stop(self.stop))
        self._settle("stop_regex", _as_stop_regex(self.stop_regex))
        self._settle("compiled_stop_regexes", _compiled(self.stop_regex))
        self._settle("stop_token_ids", _as_stop_token_ids(self.stop_token_ids))
        self._settle("logit_bias", _as_logit_bias(self.logit_bias))
        self._settle("allowed_token_ids", _as_allowed(self.allowed_token_ids))
        self._settle("banned_token_ids", _as_banned(self.banned_token_ids))
        self._check_length()
        self._check_distribution()
        self._check_logprobs()
        self._check_answers()
        self._check_constraint()
        self._settle("token_edits", self._make_token_edits())
        self._check_that_a_token_is_left()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    @property
    def num_computed_answers(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def needs_logprobs(self) -> bool:
        """Whether generated tokens need theirs: to be told, or to choose the best answers."""
        return self.logprobs or self.num_computed_answers > self.n

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_length(self) -> None:
        _check_int("max_tokens", self.max_tokens, low=0, high=MAX_COUNT, optional=True)
        _check_int("min_tokens", self.min_tokens, low=0, high=MAX_COUNT)
        name = "max_reasoning_tokens"
        _check_int(name, self.max_reasoning_tokens, low=0, high=MAX_COUNT, optional=True)
        _check_bool("ignore_eos", self.ignore_eos)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}",
                param="min_tokens",
            )

    def _check_distribution(self) -> None:
        _check_float("temperature", self.temperature, low=0.0, high=100.0)
        _check_float("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _check_int("top_k", self.top_k, low=-1, high=MAX_COUNT)
        if self.top_k == 0:
            raise RequestError("top_k is 0; use -1 for all tokens or at least 1", param="top_k")
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        _check_int("seed", self.seed, low=-MAX_SEED - 1, high=MAX_SEED, optional=True)
        _check_float("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _check_float("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_float(
            "repetition_penalty",
            self.repetition_penalty,
            low=0.0,
            high=MAX_REPETITION_PENALTY,
            open_low=True,
        )

    def _check_logprobs(self) -> None:
        _check_bool("logprobs", self.logprobs)
        _check_int("top_logprobs", self.top_logprobs, low=0, high=MAX_TOP_LOGPROBS)
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                f"top_logprobs is {self.top_logprobs} and logprobs is off; ask for logprobs too",
                param="top_logprobs",
            )
        _check_int(
            "prompt_logprobs", self.prompt_logprobs, low=0, high=MAX_TOP_LOGPROBS, optional=True
        )
        _check_int("prompt_logprobs_start", self.prompt_logprobs_start, low=0, high=MAX_COUNT)
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise RequestError(
                f"prompt_logprobs_start is {self.prompt_logprobs_start} and prompt_logprobs is not "
                "asked for; set prompt_logprobs to 0 or more",
                param="prompt_logprobs_start",
            )

    def _check_answers(self) -> None:
        _check_int("n", self.n, low=1, high=MAX_NUM_ANSWERS)
        _check_int("best_of", self.best_of, low=1, high=MAX_NUM_ANSWERS, optional=True)
        if self.num_computed_answers < self.n:
            raise RequestError(
                f"best_of is {self.best_of} and n is {self.n}: the best n of best_of answers are "
                "given; raise best_of or lower n",
                param="best_of",
            )
        if self.num_computed_answers > self.n and self.is_greedy:
            raise RequestError(
                f"best_of is {self.best_of} with temperature 0, where all answers are the same; "
                "leave best_of out, or raise the temperature",
                param="best_of",
            )
        if self.max_tokens == 0:
            self._check_scoring()

    def _check_scoring(self) -> None:
        """Without an answer there must be something else to give."""
        if self.prompt_logprobs is None:
            raise RequestError(
                "max_tokens is 0, which leaves nothing to give; it must be at least 1, or "
                "prompt_logprobs be asked for",
                param="max_tokens",
            )
        if self.num_computed_answers > 1:
            raise RequestError(
                f"{self.num_computed_answers} answers are asked for and max_tokens is 0; "
                "leave n and best_of out, or raise max_tokens",
                param="n" if self.n > 1 else "best_of",
            )

    def _check_constraint(self) -> None:
        if self.constraint is None:
            return
        if not isinstance(self.constraint, ConstraintSpec):
            raise RequestError(
                f"constraint must be a ConstraintSpec, not {_shown(self.constraint)}; "
                "sapwood.constraint_of makes one of a type",
                param="constraint",
            )
        if (fault := fault_of(self.constraint)) is not None:
            raise RequestError(f"constraint {fault}", param="constraint")
        if self.max_tokens == 0:
            raise RequestError(
                "constraint is given and max_tokens is 0, which generates nothing; leave it out",
                param="constraint",
            )
        for name, value in (
            ("min_tokens", self.min_tokens),
            ("allowed_token_ids", self.allowed_token_ids),
            ("banned_token_ids", self.banned_token_ids),
        ):
            if value:
                raise RequestError(
                    f"{name} could leave no token that the constraint allows; leave out one of the "
                    "two",
                    param=name,
                )

    def _make_token_edits(self) -> TokenEdits | None:
        if self.allowed_token_ids is None and not self.banned_token_ids and not self.logit_bias:
            return None
        banned = _unique(self.banned_token_ids)
        allowed = None
        if self.allowed_token_ids is not None:
            allowed = np.setdiff1d(_unique(self.allowed_token_ids), banned)
            banned = banned[:0]
        bias_by_id = dict(self.logit_bias)
        return TokenEdits(
            allowed=allowed,
            banned=banned,
            biased=np.array(list(bias_by_id), np.int64),
            biases=np.array(list(bias_by_id.values()), np.float64),
        )

    def _check_that_a_token_is_left(self) -> None:
        edits = self.token_edits
        if edits is None:
            return
        if edits.allowed is not None and not len(edits.allowed):
            raise RequestError(
                "every token of allowed_token_ids is banned by banned_token_ids, which leaves none",
                param="banned_token_ids",
            )
        if edits.allowed is None:
            is_excluded = np.isin(edits.biased, edits.banned)
        else:
            is_excluded = np.isin(edits.biased, edits.allowed, invert=True)
        if is_excluded.any():
            raise RequestError(
                f"logit_bias has token {edits.biased[is_excluded][0]}, which is banned or not "
                "allowed; leave it out",
                param="logit_bias",
            )


def _check_int(name: str, value: Any, *, low: int, high: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be a whole number, not {_shown(value)}", param=name)
    if not low <= value <= high:
        raise RequestError(
            f"{name} is {_shown(value)}; it must be from {low} to {high}", param=name
        )


def _check_float(name: str, value: Any, *, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, not {_shown(value)}", param=name)
    # Comparisons are false for NaN, and exact for whole numbers that no float can hold.
    if not low <= value <= high or (open_low and value == low):
        bound = "above" if open_low else "from"
        raise RequestError(
            f"{name} is {_shown(value)}; it must be {bound} {low} to {high}", param=name
        )


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false", param=name)


def _shown(value: Any) -> str:
    """A value as an error repeats it: never more than a few words to who sent it."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return "out of range"
    if (
        value is None
        or isinstance(value, int | float)
        or (isinstance(value, str) and len(value) < 40)
    ):
        return repr(value)
    return f"a {type(value).__name__}"


def _as_strings(name: str, given: Any, *, max_count: int) -> tuple[str, ...]:
    """One string or a list of them, none empty and all of them valid Unicode."""
    strings = (given,) if isinstance(given, str) else given
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) for s in strings):
        raise RequestError(f"{name} must be a string or a list of strings", param=name)
    if len(strings) > max_count:
        raise RequestError(
            f"{len(strings)} strings were given as {name}, at most {max_count} are taken",
            param=name,
        )
    for s in strings:
        if not s:
            raise RequestError(f"a string of {name} is empty; leave it out", param=name)
        try:
            s.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"a string of {name} is not valid Unicode", param=name) from error
    return tuple(strings)


def _as_stop(stop: Any) -> tuple[str, ...]:
    strings = _as_strings("stop", stop, max_count=MAX_STOP_STRINGS)
    longest = max(map(len, strings), default=0)
    if longest > MAX_STOP_LENGTH:
        raise RequestError(
            f"a stop string has {longest} characters, at most {MAX_STOP_LENGTH} are taken",
            param="stop",
        )
    return strings


def _as_stop_regex(patterns: Any) -> tuple[str, ...]:
    return _as_strings("stop_regex", patterns, max_count=MAX_STOP_REGEXES)


def _compiled(patterns: Sequence[str]) -> tuple[StopRegex, ...]:
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(StopRegex.compile(pattern))
        except RegexError as error:
            raise RequestError(
                f"the stop_regex {pattern[:40]!r} is not taken: {error}", param="stop_regex"
            ) from error
    size = sum(regex.size for regex in compiled)
    if size > MAX_REGEX_SIZE:
        raise RequestError(
            f"the patterns of stop_regex take {size} states and transitions together, at most "
            f"{MAX_REGEX_SIZE} are taken; use fewer, or smaller counts",
            param="stop_regex",
        )
    return tuple(compiled)


def _as_token_ids(name: str, ids: Any, *, max_count: int) -> tuple[int, ...]:
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes | bytearray):
        raise RequestError(f"{name} must be a list of token ids", param=name)
    if len(ids) > max_count:
        raise RequestError(
            f"{len(ids)} token ids were given as {name}, at most {max_count} are taken",
            param=name,
        )
    for token_id in ids:
        _check_int(name, token_id, low=0, high=MAX_COUNT)
    return tuple(ids)


def _as_stop_token_ids(ids: Any) -> tuple[int, ...]:
    return _as_token_ids("stop_token_ids", ids, max_count=MAX_STOP_TOKEN_IDS)


def _as_banned(ids: Any) -> tuple[int, ...]:
    return _as_token_ids("banned_token_ids", ids, max_count=MAX_FILTERED_TOKEN_IDS)


def _as_allowed(ids: Any) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not (token_ids := _as_token_ids("allowed_token_ids", ids, max_count=MAX_FILTERED_TOKEN_IDS)):
        raise RequestError(
            "allowed_token_ids is empty, which leaves no token; leave it out to allow all",
            param="allowed_token_ids",
        )
    return token_ids


def _as_logit_bias(given: Any) -> tuple[tuple[int, float], ...]:
    """Sorted pairs of a mapping, or of such pairs."""
    if not isinstance(given, Mapping) and not _are_pairs(given):
        raise RequestError("logit_bias must map token ids to numbers", param="logit_bias")
    if len(given) > MAX_LOGIT_BIASES:
        raise RequestError(
            f"logit_bias has {len(given)} tokens, at most {MAX_LOGIT_BIASES} are taken",
            param="logit_bias",
        )
    pairs = list(given.items() if isinstance(given, Mapping) else given)
    for token_id, bias in pairs:
        _check_int("logit_bias", token_id, low=0, high=MAX_COUNT)
        _check_float("logit_bias", bias, low=-MAX_LOGIT_BIAS, high=MAX_LOGIT_BIAS)
    biases = {token_id: float(bias) for token_id, bias in pairs}
    return tuple(sorted(biases.items()))


def _are_pairs(given: Any) -> bool:
    return isinstance(given, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in given
    )


def _unique(token_ids: Sequence[int]) -> TokenIdArray:
    return np.unique(np.array(token_ids, np.int64))
