"""What the object `sapwood` of a request asks of an answer of `/generate`."""

from dataclasses import dataclass, field, replace
from typing import Any

from sapwood.runtime.answer_tokens import answer_token_ids
from sapwood.runtime.outputs import CompletionOutput
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.separated_reasoning import SeparatedReasoning
from sapwood.server.engine import ServingTokenizer


@dataclass(slots=True, kw_only=True)
class SapwoodAnswer:
    """One answer in the making, whole or in pieces. What it tells is cumulative.

    `sampling` is what the answer was asked for with. `reasoning` is None where none is asked for
    apart, and for a model that writes none.
    """

    tokenizer: ServingTokenizer
    sampling: SamplingParams
    with_text_ids: bool
    with_reasoning: bool
    reasoning: SeparatedReasoning | None
    token_ids: list[int] = field(default_factory=list)
    said_reasoning: str = ""

    def add(self, piece: CompletionOutput) -> str:
        """Take in what is new, and return the text of it: without the reasoning, where that is
        asked for apart."""
        self.token_ids += piece.token_ids
        if self.reasoning is None:
            return piece.text
        spelled = piece.token_ids[:-1] if piece.ended_by_token else piece.token_ids
        content, said = self.reasoning.add(spelled, finished=piece.finish_reason is not None)
        self.said_reasoning += said
        return content

    def told(self, last: CompletionOutput) -> dict[str, Any]:
        """What to tell in the answer's own object `sapwood`; empty where there is nothing.

        `text_ids` come with the end: ids that spell exactly the text.
        """
        told: dict[str, Any] = {}
        if self.with_reasoning:
            told["reasoning"] = self.said_reasoning
        if self.with_text_ids and last.finish_reason is not None:
            told["text_ids"] = self._text_ids(last)
        return told

    def _text_ids(self, last: CompletionOutput) -> tuple[int, ...]:
        whole = replace(last, token_ids=tuple(self.token_ids))
        token_ids = answer_token_ids(whole, self.sampling, self.tokenizer)
        if self.reasoning is None:
            return token_ids
        return self.reasoning.content_token_ids(token_ids)
