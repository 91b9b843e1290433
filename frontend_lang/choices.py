"""Which of several texts a model prefers, by the log-probabilities of their tokens.

`select` has the texts scored; a method, one of the three frozen objects here or a user's own,
decides. A text is scored as the tokenizer cuts it together with the constant text before it, so
that no choice suffers from a cut that the model has never seen.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import fmean
from typing import Any, Protocol, cast

from sapwood.frontend_lang.backends.interface import (
    Backend,
    Encoder,
    Piece,
    Prompt,
    Score,
    TokenIds,
)
from sapwood.runtime.errors import RequestError
from sapwood.runtime.hints import NO_HINTS, Hints

Logprobs = Sequence[float]  # of the tokens of one choice, natural logarithms


@dataclass(frozen=True, slots=True)
class Decision:
    """The index of the choice that was taken, and what `get_meta_info` tells of it."""

    index: int
    meta: Mapping[str, Any] = field(default_factory=dict)


class ChoicesMethod(Protocol):
    """How to choose. Ties go to the first."""

    @property
    def needs_unconditional(self) -> bool:
        """Whether it also asks for the choices' scores without the prompt."""
        ...

    def __call__(
        self,
        choices: Sequence[str],
        logprobs: Sequence[Logprobs],
        token_ids: Sequence[Sequence[int]],
        unconditional: Sequence[Logprobs] | None,
    ) -> Decision:
        """`token_ids` are those of the choices, empty for a backend that tells none.

        `unconditional` lacks the first token of each choice, which has no probability when nothing
        is before it.
        """
        ...


@dataclass(frozen=True, slots=True)
class TokenLengthNormalized:
    """Takes the choice whose tokens have the highest mean log-probability."""

    needs_unconditional: bool = field(default=False, init=False)

    def __call__(
        self,
        choices: Sequence[str],
        logprobs: Sequence[Logprobs],
        token_ids: Sequence[Sequence[int]],
        unconditional: Sequence[Logprobs] | None = None,
    ) -> Decision:
        return Decision(_first_best(list(map(fmean, logprobs))), _scores_meta(logprobs, token_ids))


@dataclass(frozen=True, slots=True)
class GreedyTokenSelection:
    """Takes token after token the likeliest among the choices that are left.

    A choice that has ended goes on with its mean, so that it can be compared with longer ones that
    begin with it.
    """

    needs_unconditional: bool = field(default=False, init=False)

    def __call__(
        self,
        choices: Sequence[str],
        logprobs: Sequence[Logprobs],
        token_ids: Sequence[Sequence[int]],
        unconditional: Sequence[Logprobs] | None = None,
    ) -> Decision:
        num_columns = max(map(len, logprobs))
        rows = [[*row, *[fmean(row)] * (num_columns - len(row))] for row in logprobs]
        # Token by token from the first: the order of lists, whose maximum is the first of equals.
        index = _first_best(rows)
        return Decision(index, {**_scores_meta(logprobs, token_ids), "greedy_logprob_matrix": rows})


@dataclass(frozen=True, slots=True)
class UnconditionalLikelihoodNormalized:
    """Takes the choice to whose tokens the text before it adds the most log-probability in the
    mean. Its first token counts whole: without a text before it there is nothing to compare."""

    needs_unconditional: bool = field(default=True, init=False)

    def __call__(
        self,
        choices: Sequence[str],
        logprobs: Sequence[Logprobs],
        token_ids: Sequence[Sequence[int]],
        unconditional: Sequence[Logprobs] | None,
    ) -> Decision:
        if unconditional is None:
            raise ValueError("this method needs the choices' scores without the prompt")
        gains = [
            (sum(row) - sum(alone)) / len(row)
            for row, alone in zip(logprobs, unconditional, strict=True)
        ]
        meta = {
            **_scores_meta(logprobs, token_ids),
            "unconditional_token_logprobs": [
                _entries((None, *alone), ids)
                for alone, ids in zip(unconditional, token_ids, strict=True)
            ],
            "normalized_unconditional_prompt_logprobs": gains,
        }
        return Decision(_first_best(gains), meta)


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """What became of a `select`.

    `token_ids` follow the settled ones: they spell the pending pieces and the choice. None for a
    backend without an encoder. `meta` is the decision's, with the counts of all choices together.
    """

    text: str
    index: int
    token_ids: TokenIds | None
    meta: Mapping[str, Any]


async def select(
    backend: Backend,
    prompt: Prompt,
    choices: Sequence[str],
    method: ChoicesMethod = token_length_normalized,
    *,
    settled: TokenIds = (),
    pending: Sequence[Piece] = (),
    hints: Hints = NO_HINTS,
) -> Selected:
    """The one of `choices` that `method` prefers as the continuation of a prompt.

    With an encoder the prompt is `settled` and `pending` (the constants that are not encoded yet);
    of `prompt` its text and messages are passed on, and its tokens not looked at. All choices
    are scored in one call, and in a second one without the prompt where the method needs it.
    A backend that takes messages only scores by what it answers when it is held to the choices.
    Raises RequestError for choices that cannot be told apart, and for a backend that cannot score.
    """
    choices = checked_choices(choices)
    if backend.chat_only and method.needs_unconditional:
        raise RequestError(
            f"{backend.name} takes messages only and tells no probabilities of texts alone, which "
            "the method needs; choose token_length_normalized, or take a backend that scores texts",
            param="choices_method",
        )
    if backend.encoder is None:
        return await _select_by_text(backend, prompt, choices, method, hints)
    cut = await _cut(backend.encoder, settled, pending, choices)
    before = Prompt(text=prompt.text, token_ids=cut.prompt, messages=prompt.messages)
    scores = await backend.score(before, cut.continuations, hints)
    unconditional = None
    if method.needs_unconditional:
        nothing = Prompt(text="", token_ids=())
        unconditional = await backend.score(nothing, cut.continuations, NO_HINTS)
    decision = _decide(method, choices, scores, cut.continuations, unconditional)
    whole = (*cut.prompt, *cut.continuations[decision.index])
    return Selected(
        text=choices[decision.index],
        index=decision.index,
        token_ids=whole[len(settled) :],
        meta={**decision.meta, **_counts(scores)},
    )


def checked_method(method: object) -> ChoicesMethod:
    """A method of a `select`. Raises TypeError."""
    if callable(method) and hasattr(method, "needs_unconditional"):
        return cast(ChoicesMethod, method)
    raise TypeError(
        "choices_method is token_length_normalized, greedy_token_selection, "
        "unconditional_likelihood_normalized, or an object as ChoicesMethod describes it, not "
        f"{str(method)[:60]!r}"
    )


def checked_choices(choices: Sequence[str]) -> tuple[str, ...]:
    """The choices of a `select`. Raises RequestError, `param` "choices"."""
    if isinstance(choices, str):
        raise RequestError("choices must be a list of strings", param="choices")
    for choice in choices:
        if not isinstance(choice, str):
            raise RequestError(
                f"choices must be a list of strings, not of {type(choice).__name__}; write "
                f"str({choice!r})",
                param="choices",
            )
    if not choices:
        raise RequestError("there are no choices; give at least one", param="choices")
    if not all(choices):
        raise RequestError(
            "a choice is empty, and the empty text has no probability; leave it out",
            param="choices",
        )
    for index, choice in enumerate(choices):
        if choice in choices[:index]:
            raise RequestError(
                f"the choice {choice!r} is given twice; leave one out", param="choices"
            )
    return tuple(choices)


@dataclass(frozen=True, slots=True)
class _Cut:
    """One prompt for all choices, and the tokens with which each of them continues it."""

    prompt: TokenIds
    continuations: tuple[TokenIds, ...]


async def _cut(
    encoder: Encoder, settled: TokenIds, pending: Sequence[Piece], choices: Sequence[str]
) -> _Cut:
    """Where the choices' tokens begin: with the first one that any of them changes.

    The tokens of the pending pieces up to there are the same whatever is chosen. Tokens that the
    choices have in common are scored too, as they count in a mean.
    """
    texts = [pending, *([*pending, Piece(choice)] for choice in choices)]
    encoded = await asyncio.gather(
        *(encoder.encode(pieces, at_start=not settled) for pieces in texts)
    )
    num_common = min(_common_len(encoded), min(map(len, encoded[1:])) - 1)
    if num_common < 0:
        raise RequestError(
            "this model's tokenizer gives no token for a choice; leave it out", param="choices"
        )
    prompt = (*settled, *encoded[0][:num_common])
    if not prompt:
        raise RequestError(
            "nothing is before the choices, and the first token of a text has no probability; "
            "append a text before select",
            param="choices",
        )
    return _Cut(prompt, tuple(ids[num_common:] for ids in encoded[1:]))


async def _select_by_text(
    backend: Backend,
    prompt: Prompt,
    choices: tuple[str, ...],
    method: ChoicesMethod,
    hints: Hints,
) -> Selected:
    scores = await backend.score(prompt, choices, hints)
    unconditional = None
    if method.needs_unconditional:
        unconditional = await backend.score(Prompt(text=""), choices, NO_HINTS)
    decision = _decide(method, choices, scores, [()] * len(choices), unconditional)
    return Selected(
        text=choices[decision.index],
        index=decision.index,
        token_ids=None,
        meta={**decision.meta, **_counts(scores)},
    )


def _decide(
    method: ChoicesMethod,
    choices: Sequence[str],
    scores: Sequence[Score],
    token_ids: Sequence[TokenIds],
    unconditional: Sequence[Score] | None,
) -> Decision:
    logprobs = [score.logprobs for score in scores]
    if not all(logprobs):
        raise RequestError(
            "the backend told no log-probability of a choice; choices need at least one token "
            "after the prompt",
            param="choices",
        )
    alone = None if unconditional is None else [score.logprobs for score in unconditional]
    return method(choices, logprobs, token_ids, alone)


def _counts(scores: Sequence[Score]) -> dict[str, int]:
    """Tokens that were asked about and found computed; empty where the backend tells none."""
    known = [score for score in scores if score.token_ids is not None]
    if not known:
        return {}
    return {
        "prompt_tokens": sum(len(score.token_ids or ()) for score in known),
        "completion_tokens": 0,
        "cached_tokens": sum(score.num_cached_tokens for score in known),
    }


def _scores_meta(
    logprobs: Sequence[Logprobs], token_ids: Sequence[Sequence[int]]
) -> dict[str, Any]:
    return {
        "normalized_prompt_logprobs": list(map(fmean, logprobs)),
        "input_token_logprobs": [
            _entries(row, ids) for row, ids in zip(logprobs, token_ids, strict=True)
        ],
        "output_token_logprobs": [[] for _ in logprobs],  # nothing is generated
    }


def _entries(
    logprobs: Sequence[float | None], token_ids: Sequence[int]
) -> list[tuple[float | None, int | None, None]]:
    """SGLang's form of a token's log-probability: with its id, and a text that is not told."""
    ids: Sequence[int | None] = token_ids or [None] * len(logprobs)
    return [(logprob, token_id, None) for logprob, token_id in zip(logprobs, ids, strict=True)]


def _first_best(values: Sequence[Any]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _common_len(sequences: Sequence[TokenIds]) -> int:
    """How many tokens they all begin with."""
    columns = zip(*sequences, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
