"""`select` where an API scores no given texts: the model answers with one of them."""

import math
from collections.abc import Sequence
from typing import Protocol

from sapwood.frontend_lang.backends.interface import Answer, Call, Prompt, Score, TokenIds
from sapwood.frontend_lang.options import Options
from sapwood.runtime.constraints.spec import ConstraintSpec
from sapwood.runtime.errors import EngineError, RequestError
from sapwood.runtime.hints import Hints


class Generates(Protocol):
    """The part of a backend that answers."""

    name: str

    async def generate(self, prompt: Prompt, call: Call) -> list[Answer]: ...


async def score_by_answer(
    backend: Generates, prompt: Prompt, texts: Sequence[str], hints: Hints
) -> list[Score]:
    """0 for the text that the model gives when it is held to one of them, else minus infinity.

    One request, at temperature 0 where the model has one. Raises SapwoodError.
    """
    if not prompt.messages and not prompt.text:
        raise RequestError(
            f"{backend.name} tells no probabilities of texts, which the method "
            "unconditional_likelihood_normalized needs; choose token_length_normalized, or use a "
            "backend that tells them: Engine, RuntimeEndpoint, or a model for completions",
            param="choices_method",
        )
    constraint = ConstraintSpec.choice(list(texts))
    greedy = Call(options=Options(temperature=0.0), constraint=constraint, hints=hints)
    try:
        [answer] = await backend.generate(prompt, greedy)
    except RequestError as error:
        if error.param != "temperature":
            raise
        # Models that reason before they answer take no temperature.
        [answer] = await backend.generate(prompt, Call(constraint=constraint, hints=hints))
    if answer.text not in texts:
        raise EngineError(
            f"{backend.name} answered {answer.text[:200]!r}, which is none of the choices; the "
            "server may ignore constraints"
        )
    return [Score(logprobs=(0.0 if text == answer.text else -math.inf,)) for text in texts]


def only_texts(continuations: Sequence[TokenIds | str]) -> list[str]:
    """Continuations of a backend without an encoder. Raises RequestError."""
    texts = [text for text in continuations if isinstance(text, str)]
    if len(texts) != len(continuations) or not all(texts):
        raise RequestError("an API scores texts, not token ids, and none that is empty")
    return texts
