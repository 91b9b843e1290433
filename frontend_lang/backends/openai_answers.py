"""What OpenAI's API answers, read: whole bodies, streamed chunks, and echoed log-probabilities.

Entries of log-probabilities become SGLang's `[logprob, token_id, text]`; the API tells texts and no
ids, so the id is None.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sapwood.frontend_lang.backends.interface import Answer, Score
from sapwood.frontend_lang.backends.json_format import JsonFormat
from sapwood.runtime.errors import EngineError, RequestError, SapwoodError

_BYTES = "bytes:"  # how a token that is a part of a character is spelled: bytes:\xf0\x9f
_ESCAPED_BYTE = re.compile(rb"\\x([0-9a-fA-F]{2})")

Entry = list[Any]  # [logprob, None, text]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What was asked for, which an answer must have: servers ignore what they do not know."""

    api: str
    is_chat: bool
    num_answers: int = 1
    logprobs: bool = False
    num_top_logprobs: int = 0
    format: JsonFormat | None = None


def whole_answers(body: Any, expected: Expected) -> list[Answer]:
    """All answers of a body, in the order of their indices. Raises EngineError."""
    with _in_form(expected.api):
        choices = sorted(body["choices"], key=lambda choice: choice.get("index", 0))
        usage = body.get("usage") or {}
        if len(choices) != expected.num_answers:
            raise EngineError(
                f"{expected.api} gave {len(choices)} answers where n is {expected.num_answers}; it "
                "may not know n: ask for one at a time"
            )
        return [_whole(choice, usage, expected) for choice in choices]


def _whole(choice: Mapping[str, Any], usage: Mapping[str, Any], expected: Expected) -> Answer:
    said = choice["message"] if expected.is_chat else choice
    if said.get("refusal"):
        raise EngineError(f"the model of {expected.api} refuses: {said['refusal']}")
    text = (said["content"] or "") if expected.is_chat else said["text"]
    reason = finish_reason(choice.get("finish_reason"), expected.api) or "stop"
    if expected.format is not None:
        text = expected.format.text(text)
    pieces = [choice["logprobs"]] if choice.get("logprobs") else []
    return Answer(
        text=text,
        reasoning=_reasoning(said),
        finish_reason=reason,
        meta=_meta(reason, _matched(choice), usage, pieces, expected, has_text=bool(text)),
    )


@dataclass(slots=True)
class StreamReader:
    """One streamed answer, chunk by chunk."""

    expected: Expected
    _held: list[str] = field(default_factory=list)  # text that is only understood when it is whole
    _logprobs: list[Any] = field(default_factory=list)
    _usage: Mapping[str, Any] = field(default_factory=dict)
    _reason: str | None = None
    _matched: Any = None
    _has_text: bool = False

    def feed(self, chunk: Mapping[str, Any]) -> Answer | None:
        """What a chunk says; None where that is nothing. Raises EngineError."""
        with _in_form(self.expected.api):
            self._usage = chunk.get("usage") or self._usage
            if not chunk.get("choices"):
                return None
            return self._of_choice(chunk["choices"][0])

    def _of_choice(self, choice: Mapping[str, Any]) -> Answer | None:
        if choice.get("finish_reason"):
            self._reason = finish_reason(choice["finish_reason"], self.expected.api)
            self._matched = _matched(choice)
        if choice.get("logprobs"):
            self._logprobs.append(choice["logprobs"])
        said = (choice.get("delta") or {}) if self.expected.is_chat else choice
        if said.get("refusal"):
            raise EngineError(f"the model of {self.expected.api} refuses: {said['refusal']}")
        text = said.get("content" if self.expected.is_chat else "text") or ""
        self._has_text = self._has_text or bool(text)
        if self.expected.format is not None:
            self._held.append(text)
            text = ""
        reasoning = _reasoning(said)
        return Answer(text=text, reasoning=reasoning) if text or reasoning else None

    def end(self) -> Answer:
        """The last piece. Raises EngineError for an answer that was cut off."""
        if self._reason is None:
            raise EngineError(f"{self.expected.api} ended a stream before its answer was done")
        text, form = "".join(self._held), self.expected.format
        meta = _meta(
            self._reason,
            self._matched,
            self._usage,
            self._logprobs,
            self.expected,
            has_text=self._has_text,
        )
        return Answer(
            text=text if form is None else form.text(text), finish_reason=self._reason, meta=meta
        )


def echoed_scores(body: Any, full_texts: Sequence[str], start: int, api: str) -> list[Score]:
    """How likely each of `full_texts` is from character `start` on, of an answer that echoes them.

    Where a token of one text reaches over `start`, the scores of all begin at the first token that
    they do not all share, as only so they are about the same text. A first token has no
    log-probability, unless the tokenizer puts one before it.
    """
    with _in_form(api):
        choices = sorted(body["choices"], key=lambda choice: choice.get("index", 0))
        listed = [choice["logprobs"] for choice in choices]
        tokens = [[_token_bytes(token) for token in logprobs["tokens"]] for logprobs in listed]
        values = [logprobs["token_logprobs"] for logprobs in listed]
    if len(listed) != len(full_texts):
        raise EngineError(f"{api} scored {len(listed)} texts of {len(full_texts)}")
    firsts = [
        _first_scored(own, text, start, api) for own, text in zip(tokens, full_texts, strict=True)
    ]
    first = min(min(firsts), _num_shared(tokens))
    return [
        Score(logprobs=tuple(float(value) for value in own[first:] if value is not None))
        for own in values
    ]


def finish_reason(told: str | None, api: str) -> str | None:
    """Ours of the API's. Raises EngineError for an answer that was taken away."""
    if told == "content_filter":
        raise EngineError(f"the content filter of {api} cut the answer off; ask for something else")
    return told if told in (None, "length", "abort") else "stop"


def _first_scored(tokens: Sequence[bytes], text: str, start: int, api: str) -> int:
    """The first token that reaches beyond `start`, counted from the end: a tokenizer may have put
    tokens before the text."""
    wanted = text[start:].encode()
    first, spelled = len(tokens), b""
    while first > 0 and len(spelled) < len(wanted):
        first -= 1
        spelled = tokens[first] + spelled
    if not spelled.endswith(wanted):
        raise EngineError(
            f"{api} echoes tokens that do not spell the text to be scored ({text[start:]!r}); its "
            "log-probabilities cannot be used"
        )
    return first


def _num_shared(tokens: Sequence[Sequence[bytes]]) -> int:
    """Length of the common prefix of all. One alone shares all with itself."""
    shared = min(map(len, tokens))
    for own in tokens[1:]:
        pairs = enumerate(zip(tokens[0], own, strict=False))
        shared = min(shared, next((i for i, (one, other) in pairs if one != other), shared))
    return shared


def _token_bytes(token: str) -> bytes:
    if not token.startswith(_BYTES):
        return token.encode()
    spelled = token.removeprefix(_BYTES).encode()
    return _ESCAPED_BYTE.sub(lambda match: bytes([int(match[1], 16)]), spelled)


def _meta(
    reason: str,
    matched: Any,
    usage: Mapping[str, Any],
    logprobs: Sequence[Mapping[str, Any]],
    expected: Expected,
    *,
    has_text: bool,
) -> dict[str, Any]:
    """SGLang's names. With several answers the API tells the sum of their tokens only, which is no
    answer's own number: then only log-probabilities tell it."""
    meta: dict[str, Any] = {
        "finish_reason": {"type": reason, "matched": matched},
        "prompt_tokens": usage.get("prompt_tokens", 0),
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    }
    if expected.num_answers == 1:
        meta["completion_tokens"] = usage.get("completion_tokens", 0)
    if not expected.logprobs:
        return meta
    if not logprobs and has_text:
        raise RequestError(
            f"{expected.api} told no log-probabilities; leave out return_logprob",
            param="return_logprob",
        )
    entries = [entry for piece in logprobs for entry in _entries(piece)]
    meta["output_token_logprobs"] = [token for token, _ in entries]
    meta.setdefault("completion_tokens", len(entries))
    if expected.num_top_logprobs:
        meta["output_top_logprobs"] = [top[: expected.num_top_logprobs] for _, top in entries]
    return meta


def _entries(logprobs: Mapping[str, Any]) -> Iterator[tuple[Entry, list[Entry]]]:
    """Each token's entry with those of the likeliest, in either form."""
    if (content := logprobs.get("content")) is not None:
        for entry in content:
            top = [[other["logprob"], None, other["token"]] for other in entry["top_logprobs"]]
            yield [entry["logprob"], None, entry["token"]], top
        return
    texts = logprobs.get("tokens") or ()
    tops = logprobs.get("top_logprobs") or [None] * len(texts)
    for text, value, told in zip(texts, logprobs["token_logprobs"], tops, strict=True):
        top = [[logprob, None, other] for other, logprob in (told or {}).items()]
        yield [value, None, text], sorted(top, key=lambda entry: -entry[0])


def _reasoning(said: Mapping[str, Any]) -> str:
    return said.get("reasoning_content") or said.get("reasoning") or ""


def _matched(choice: Mapping[str, Any]) -> Any:
    """The stop string or token that ended the answer, from those servers that tell it."""
    return choice.get("matched_stop", choice.get("stop_reason"))


@contextmanager
def _in_form(api: str) -> Iterator[None]:
    """Turns what a body lacks into an EngineError."""
    try:
        yield
    except SapwoodError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise EngineError(
            f"{api} answered in a form that is not OpenAI's ({type(error).__name__}: {error})"
        ) from error
