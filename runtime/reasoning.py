"""Models that reason before they answer: how it is found out, and how their answers are read.

Knows no tokens and no masks; `constraints/reasoning.py` holds a constraint off meanwhile.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from types import MappingProxyType

from sapwood.runtime.answer_format import AnswerFormat, AnswerParts, AnswerReader
from sapwood.runtime.reasoning_block import (
    MAX_NEWLINES,
    Phase,
    ReasoningStart,
    ReasoningTags,
)

# By name. A model whose chat template has the closing tag of one reasons in it.
REASONING_TAGS: Mapping[str, ReasoningTags] = MappingProxyType(
    {
        # Qwen3, QwQ, DeepSeek R1 and V3.1, GLM, SmolLM3, MiniMax and most others.
        "think": ReasoningTags("<think>", "</think>"),
        "bracketed-think": ReasoningTags("[THINK]", "[/THINK]"),  # Magistral, Ministral
        "seed-think": ReasoningTags("<seed:think>", "</seed:think>"),  # Seed-OSS
        "thought": ReasoningTags("<thought>", "</thought>"),  # EXAONE Deep
        "thought-tokens": ReasoningTags(
            "<|begin_of_thought|>", "<|end_of_thought|>"
        ),  # OpenThinker
        "reasoning": ReasoningTags("<reasoning>", "</reasoning>"),  # many fine-tunes
    }
)


class _Part(StrEnum):
    REASONING = auto()
    MARKUP = auto()  # tags, and newlines around them
    CONTENT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Answers that may have a block of reasoning in front, as `runtime/reasoning_block.py` says.

    `inner` is how what follows the block is read, None: it is content. Without `separate` the
    block stays a part of the content, as it was written; all the same `inner` reads only what
    follows it.
    """

    tags: ReasoningTags
    start: ReasoningStart
    separate: bool = True
    inner: AnswerFormat | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        return self.tags.open, self.tags.close, *(self.inner.markers if self.inner else ())

    def reader(self) -> "ReasoningReader":
        inner = None if self.inner is None else self.inner.reader()
        return ReasoningReader(self.tags, self.start, separate=self.separate, inner=inner)

    def counter(self) -> "ReasoningCounter":
        return ReasoningCounter(self.tags, self.start)


def reasoning_tags(chat_template: str | None, name: str = "auto") -> ReasoningTags | None:
    """The tags of a model; None where it does not reason. O(characters of the template).

    `name` is one of `REASONING_TAGS`, "none", or "auto": what the template has.
    """
    if name != "auto":
        return REASONING_TAGS.get(name)
    found = (tags for tags in REASONING_TAGS.values() if tags.close in (chat_template or ""))
    return next(found, None)


def reasoning_start(
    tags: ReasoningTags, prompt: str, open_message: str | None = None
) -> ReasoningStart:
    """How a rendered conversation leaves its answer.

    A template may end its prompt with the opening tag (DeepSeek R1, QwQ), or with a whole block
    where the caller wants no reasoning (Qwen3 and `enable_thinking`); white space may follow.
    `open_message` is a last message that the prompt leaves open, so that the model goes on with it.
    """
    if open_message is not None and open_message.strip():
        is_open = open_message.lstrip().startswith(tags.open) and tags.close not in open_message
        return ReasoningStart.OPEN if is_open else ReasoningStart.CLOSED
    end = prompt[-_MAX_END_CHARS:].rstrip()
    if end.endswith(tags.close):
        return ReasoningStart.CLOSED
    return ReasoningStart.OPEN if end.endswith(tags.open) else ReasoningStart.EITHER


_MAX_END_CHARS = 256  # of a prompt: more than a tag and the white space that templates write


class ReasoningReader:
    """An `AnswerReader` that takes the block off, and gives the rest to `inner`."""

    def __init__(
        self,
        tags: ReasoningTags,
        start: ReasoningStart,
        *,
        separate: bool = True,
        inner: AnswerReader | None = None,
    ) -> None:
        self._splitter = _Splitter(tags, start)
        self._separate = separate
        self._inner = inner

    def feed(self, text: str, *, finished: bool) -> AnswerParts:
        """What is new with `text`. O(text), but for runs of newlines in the reasoning."""
        told = list(self._splitter.feed(text, finished=finished))
        rest = _joined(told, (_Part.CONTENT,))
        parts = AnswerParts(content=rest)
        if self._inner is not None:
            parts = self._inner.feed(rest, finished=finished)
        if self._separate:
            return replace(parts, reasoning=_joined(told, (_Part.REASONING,)) + parts.reasoning)
        block = _joined(told, (_Part.REASONING, _Part.MARKUP))
        return replace(parts, content=block + parts.content)


def _joined(told: Sequence[tuple[_Part, str]], wanted: tuple[_Part, ...]) -> str:
    return "".join(text for part, text in told if part in wanted)


class _Splitter:
    """Cuts a text that comes in pieces into parts, which joined are the text.

    Held back is what may yet turn out to be markup, and nothing else.
    """

    def __init__(self, tags: ReasoningTags, start: ReasoningStart) -> None:
        self._tags = tags
        self._held = ""
        self._has_begun = False  # whether there was reasoning other than newlines
        self._num_newlines = 0  # after the closing tag
        self._phase = {
            ReasoningStart.OPEN: Phase.REASONING,
            ReasoningStart.CLOSED: Phase.CONTENT,
            ReasoningStart.EITHER: Phase.OPENING,
        }[start]

    def feed(self, text: str, *, finished: bool) -> Iterator[tuple[_Part, str]]:
        self._held += text
        if self._phase is Phase.OPENING:
            yield from self._read_opening()
        if self._phase is Phase.REASONING:
            yield from self._read_reasoning()
        if self._phase is Phase.CLOSED:
            yield from self._read_newlines()
        if self._held and (finished or self._phase is Phase.CONTENT):
            is_reasoning = self._phase is Phase.REASONING
            yield (_Part.REASONING if is_reasoning else _Part.CONTENT), self._taken(len(self._held))

    def _read_opening(self) -> Iterator[tuple[_Part, str]]:
        body = self._held.lstrip("\n")
        num_newlines = len(self._held) - len(body)
        if num_newlines <= MAX_NEWLINES and body.startswith(self._tags.open):
            self._phase = Phase.REASONING
            yield _Part.MARKUP, self._taken(num_newlines + len(self._tags.open))
        elif num_newlines > MAX_NEWLINES or not self._tags.open.startswith(body):
            self._phase = Phase.CONTENT

    def _read_reasoning(self) -> Iterator[tuple[_Part, str]]:
        close = self._tags.close
        if not self._has_begun and self._held.startswith("\n"):
            yield _Part.MARKUP, self._taken(len(self._held) - len(self._held.lstrip("\n")))
        place = self._held.find(close)
        end = len(self._held) - _overlap(self._held, close) if place < 0 else place
        if reasoning := self._taken(len(self._held[:end].rstrip("\n"))):
            self._has_begun = True
            yield _Part.REASONING, reasoning
        if place >= 0:
            self._phase = Phase.CLOSED
            yield _Part.MARKUP, self._taken(self._held.index(close) + len(close))

    def _read_newlines(self) -> Iterator[tuple[_Part, str]]:
        while self._num_newlines < MAX_NEWLINES and self._held.startswith("\n"):
            self._num_newlines += 1
            yield _Part.MARKUP, self._taken(1)
        if self._held:
            self._phase = Phase.CONTENT

    def _taken(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        return taken


def _overlap(text: str, tag: str) -> int:
    """How much of the tag's beginning the text ends with, short of the whole tag."""
    lengths = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(tag[:length])), 0)


class ReasoningCounter:
    """Counts the tokens of an answer's block, its tags included."""

    def __init__(self, tags: ReasoningTags, start: ReasoningStart) -> None:
        self._automaton = tags.automaton
        self._state = self._automaton.start(start)
        self._num_undecided = 0  # tokens of what may yet become a block

    def add(self, token: bytes) -> int:
        """Take in the bytes of the next token; how many more tokens are known to be of a block.

        O(bytes).
        """
        before = self._automaton.phase(self._state)
        self._state = self._automaton.run(self._state, token)
        after = self._automaton.phase(self._state)
        if before in (Phase.OPENING, Phase.REASONING):
            self._num_undecided += 1
        if after in (Phase.OPENING, Phase.PLAIN):
            return 0
        num_new, self._num_undecided = self._num_undecided, 0
        return num_new
