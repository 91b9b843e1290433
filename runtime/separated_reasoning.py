"""The reasoning of an answer to a plain prompt, told apart from its content.

Conversations have an answer format for that; a program writes its conversation as one text, and
says with each answer whether it wants the reasoning apart. Knows no engine.
"""

from collections.abc import Sequence
from typing import Protocol

from sapwood.runtime.answer_tokens import Speller, tokens_between
from sapwood.runtime.detokenizer import IncrementalDetokenizer
from sapwood.runtime.errors import RequestError
from sapwood.runtime.reasoning import REASONING_TAGS, ReasoningReader, reasoning_start
from sapwood.runtime.reasoning_block import ReasoningTags
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.stop import StopMatcher

# SGLang's names of models that write their reasoning as most others do.
_LIKE_MOST = frozenset(
    "deepseek-r1 deepseek-v3 deepseek-v31 glm45 minimax nano_v3 qwen3 qwen3-thinking step3".split()
)


def tags_of_type(model_type: str | None, own: ReasoningTags | None) -> ReasoningTags | None:
    """How reasoning is marked: by a name of ours or of SGLang's, or as the model itself does; None
    for a model that writes none. Raises RequestError for a name that is not known."""
    if model_type is None:
        return own
    found = REASONING_TAGS.get("think" if model_type in _LIKE_MOST else model_type)
    if found is None:
        known = ", ".join(sorted((*REASONING_TAGS, *_LIKE_MOST)))
        raise RequestError(
            f"model_type: there is no way of reasoning called {model_type!r}; name one of {known}, "
            "or leave it out for the model's own",
            param="model_type",
        )
    return found


class TagSpeller(Speller, Protocol):
    """What is needed of a `Tokenizer`."""

    def special_id(self, content: str) -> int | None: ...


class SeparatedReasoning:
    """Tells the reasoning of one answer from its content, by the tags that are in its text."""

    def __init__(
        self, tags: ReasoningTags, prompt: str, sampling: SamplingParams, tokenizer: TagSpeller
    ) -> None:
        self._tags = tags
        self._start = reasoning_start(tags, prompt)
        self._tokenizer = tokenizer
        markers = {tokenizer.special_id(tag): tag.encode() for tag in (tags.open, tags.close)}
        self._visible = {i: tag for i, tag in markers.items() if i is not None}
        self._reader = ReasoningReader(tags, self._start)
        self._detokenizer = IncrementalDetokenizer(
            tokenizer.token_bytes, StopMatcher.of(sampling), self._visible
        )

    def add(self, token_ids: Sequence[int], *, finished: bool) -> tuple[str, str]:
        """The content and the reasoning that are new with tokens."""
        text = self._detokenizer.add(token_ids, finished=finished)
        parts = self._reader.feed(text, finished=finished)
        return parts.content, parts.reasoning

    def content_token_ids(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Of the tokens of a whole answer those that spell the content."""
        # The content is the answer's end. Bytes that are no UTF-8 become one character each.
        pieces = list(map(self._detokenizer.bytes_of, token_ids))
        whole = b"".join(pieces)
        reader = ReasoningReader(self._tags, self._start)
        parts = reader.feed(whole.decode(errors="surrogateescape"), finished=True)
        num_bytes = len(parts.content.encode(errors="surrogateescape"))
        start = len(whole) - num_bytes
        return tokens_between(self._tokenizer, token_ids, pieces, start, len(whole))
