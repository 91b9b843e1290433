"""API speculation: one call answers several gens (Zheng et al. 2024, §3).

An API is paid by the prompt at every call, so a `gen` with a stop asks for more than it needs: the
stop is left out, and the model goes on as it expects the program to. What it says beyond the first
answer is the surplus. Where the program's next constants are just what the model said, the next
`gen` begins inside the surplus and is answered from it, if it ends there too; otherwise it is an
ordinary call. With a model that continues equal texts equally, a program's answers are those
without speculation.

A chat model's surplus is the assistant's whole message, constants before the first `gen` included:
such an API cannot go on with a message that has begun, and this is how a program with several gens
in one message runs on it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

from sapwood.frontend_lang.backends.api_options import asked, is_neutral, stops
from sapwood.frontend_lang.backends.interface import Answer, Backend, Call, Prompt
from sapwood.frontend_lang.nodes import ASSISTANT, Node, RoleEnd
from sapwood.frontend_lang.options import Options
from sapwood.runtime.errors import RequestError

_APPLIED_HERE = frozenset({"stop", "max_tokens"})
# What cannot be applied to a text afterwards. A gen that asks for it is an ordinary call.
_NOT_APPLIED = frozenset(
    {
        "n", "min_tokens", "stop_token_ids", "stop_regex", "ignore_eos", "return_logprob",
        "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs",
    }
)  # fmt: skip
_FREE: Mapping[str, Any] = MappingProxyType(
    {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0, "speculated": True}
)
_LOGPROB_PARAMS = frozenset({"return_logprob", "logprobs", "top_logprobs"})


class Speculator:
    """Asked before each `gen` of one state.

    Each branch of a fork has one of its own, without the surplus of the state that it came from:
    branches that sample are to differ.
    """

    def __init__(self, backend: Backend, num_tokens: int) -> None:
        """`num_tokens`: how long a surplus may be, in tokens from the first answer's beginning.

        Raises RequestError if that is less than one.
        """
        if num_tokens < 1:
            raise RequestError(
                f"num_api_spec_tokens is {num_tokens}; give at least 1, or leave it out",
                param="num_api_spec_tokens",
            )
        self._backend = backend
        self._num_tokens = num_tokens
        self._surplus: Surplus | None = None
        self._tells_tokens = not backend.chat_only  # until it refuses

    async def answer(self, prompt: Prompt, call: Call, upcoming: Sequence[Node]) -> Answer | None:
        """The answer to a call, from the surplus or from one call that makes a new one. None: make
        an ordinary call. `upcoming` are the nodes after this one, as far as they are known.

        The call that made a surplus is counted where its first answer is; later ones cost nothing,
        and their meta says `speculated`. Raises SapwoodError.
        """
        gen = _Gen.of(call)
        if gen is None or self._backend.encoder is not None:  # a cached prefix is cheaper still
            return None
        if (known := self._known(prompt, gen)) is not None:
            return replace(known, meta={**_FREE, **known.meta})
        if not self._is_worth_it(prompt, gen, upcoming):
            return None
        usage = await self._speculate(prompt, call, gen)
        known = self._known(prompt, gen)
        return None if known is None else replace(known, meta={**usage, **known.meta})

    def _known(self, prompt: Prompt, gen: "_Gen") -> Answer | None:
        surplus = self._surplus
        if surplus is None or surplus.options != gen.options:
            return None
        start = surplus.place(prompt)
        return None if start is None else surplus.answer(start, gen)

    def _is_worth_it(self, prompt: Prompt, gen: "_Gen", upcoming: Sequence[Node]) -> bool:
        """Whether anything may be left for later, or no other call could be made at all."""
        if self._backend.chat_only:
            if not prompt.messages or prompt.messages[-1]["role"] != ASSISTANT:
                return False
            if prompt.messages[-1]["content"]:
                return True
            if upcoming and isinstance(upcoming[0], RoleEnd):
                return False
        return bool(gen.stops)

    async def _speculate(self, prompt: Prompt, call: Call, gen: "_Gen") -> Mapping[str, Any]:
        """Make a surplus; what the call for it has cost."""
        before = _before_message(prompt) if self._backend.chat_only else prompt
        limit = max(self._num_tokens, gen.max_tokens)
        answer = await self._said(before, call, {**gen.options, "max_tokens": limit})
        meta = answer.meta
        self._surplus = Surplus(
            before=before,
            is_message=self._backend.chat_only,
            options=gen.options,
            text=answer.text,
            token_ends=_token_ends(answer),
            num_tokens=meta.get("completion_tokens"),
            limit=limit,
            is_ended=answer.finish_reason == "stop",
        )
        return {name: value for name, value in meta.items() if not name.endswith("logprobs")}

    async def _said(self, before: Prompt, call: Call, options: dict[str, Any]) -> Answer:
        """Asks for log-probabilities, which tell the tokens, of models that tell them."""
        if self._tells_tokens:
            try:
                return await self._one(before, call, {**options, "return_logprob": True})
            except RequestError as error:
                if error.param not in _LOGPROB_PARAMS:
                    raise
                self._tells_tokens = False
        return await self._one(before, call, options)

    async def _one(self, before: Prompt, call: Call, options: dict[str, Any]) -> Answer:
        [answer] = await self._backend.generate(
            before, replace(call, options=cast(Options, options))
        )
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gen:
    """A call that can be answered from a text. `options` are those that the text hangs on."""

    options: Mapping[str, Any]
    stops: tuple[str, ...]
    max_tokens: int

    @classmethod
    def of(cls, call: Call) -> "_Gen | None":
        """None for a call that cannot, as it asks for what is no text."""
        options = asked(call.options)
        asks_more = any(
            name in _NOT_APPLIED and not is_neutral(name, value) for name, value in options.items()
        )
        is_plain = call.constraint is None and not call.separate_reasoning and not asks_more
        max_tokens = options.get("max_tokens")
        if not is_plain or not max_tokens:
            return None
        return cls(
            options={
                name: value
                for name, value in options.items()
                if name not in _APPLIED_HERE | _NOT_APPLIED
            },
            stops=tuple(stops(options)),
            max_tokens=max_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Stop:
    """A stop string in a text: characters `begin` to `end`."""

    text: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Surplus:
    """What a model said after `before` in one call of at most `limit` tokens.

    `is_message`: it is the assistant's message, else text. `token_ends`: where in `text` each of
    its tokens ends, None where that is not known; `num_tokens` as the API counts them, if it does.
    `is_ended`: by the model, not by the limit.
    """

    before: Prompt
    is_message: bool
    options: Mapping[str, Any]
    text: str
    token_ends: tuple[int, ...] | None
    num_tokens: int | None
    limit: int
    is_ended: bool

    def place(self, prompt: Prompt) -> int | None:
        """Where in the text an answer to `prompt` begins; None if the program went another way."""
        if self.is_message:
            said = self._said_in_message(prompt)
        else:
            said = _without_prefix(prompt.text, self.before.text)
        return len(said) if said is not None and self.text.startswith(said) else None

    def _said_in_message(self, prompt: Prompt) -> str | None:
        *closed, opened = self.before.messages
        if prompt.messages[:-1] != tuple(closed) or not prompt.messages:
            return None
        is_same = prompt.messages[-1]["role"] == opened["role"]
        return prompt.messages[-1]["content"] if is_same else None

    def answer(self, start: int, gen: _Gen) -> Answer | None:
        """What a gen that begins at `start` is answered; None where the text cannot tell: it is too
        short, or it is not known where in it `max_tokens` are over."""
        stop = self._first_stop(start, gen.stops)
        if stop is not None and self._most_tokens(start, stop.end) <= gen.max_tokens:
            return _answer(self.text[start : stop.begin], "stop", stop.text)
        cut = self._cut(start, gen.max_tokens)
        if cut is not None:
            return _answer(self.text[start:cut], "length", None)
        if stop is not None:
            return None
        end = len(self.text)
        if self.is_ended and self._most_tokens(start, end) <= gen.max_tokens:
            return _answer(self.text[start:], "stop", None)
        if not self.is_ended and start == 0 and gen.max_tokens == self.limit:
            return _answer(self.text, "length", None)
        return None

    def _first_stop(self, start: int, stops: Sequence[str]) -> _Stop | None:
        """The one that a server sees first, which looks after every token."""
        found = []
        for text in stops:
            begin = self.text.find(text, start)
            if begin >= 0:
                found.append(_Stop(text, begin, begin + len(text)))
        ends = self.token_ends or ()
        return min(found, key=lambda stop: (bisect_left(ends, stop.end), stop.begin), default=None)

    def _cut(self, start: int, num_tokens: int) -> int | None:
        """Where that many tokens from `start` end; None if not in this text, or not known."""
        if self.token_ends is None or not self._is_token_start(start):
            return None
        last = self._token_at(start) + num_tokens - 1
        return self.token_ends[last] if last < len(self.token_ends) else None

    def _most_tokens(self, start: int, end: int) -> int:
        """At most so many tokens spell this part of the text. None is less than a byte, and the
        rest of a token that is cut at `start` may be any number of them."""
        num_bytes = len(self.text[start:end].encode())
        if self.token_ends is None:
            return num_bytes if self.num_tokens is None else min(num_bytes, self.num_tokens)
        first, last = self._token_at(start), bisect_left(self.token_ends, end)
        if self._is_token_start(start):
            return min(num_bytes, last - first + 1)
        cut_off = self.text[start : min(self.token_ends[first], end)]
        return min(num_bytes, len(cut_off.encode()) + last - first)

    def _token_at(self, start: int) -> int:
        """The index of the token that has the character at `start`."""
        return bisect_right(self.token_ends or (), start)

    def _is_token_start(self, start: int) -> bool:
        first = self._token_at(start)
        return start == 0 or (first > 0 and (self.token_ends or ())[first - 1] == start)


def _answer(text: str, reason: str, matched: str | None) -> Answer:
    meta = {"finish_reason": {"type": reason, "matched": matched}}
    return Answer(text=text, finish_reason=reason, meta=meta)


def _token_ends(answer: Answer) -> tuple[int, ...] | None:
    """Where each token of an answer ends, from its log-probabilities; None where they do not spell
    it, as a token that is a part of a character does not."""
    entries = answer.meta.get("output_token_logprobs")
    ends: list[int] = []
    position = 0
    for _, _, text in entries or ():
        if position == len(answer.text):
            break  # only the end token is left
        if not text or not answer.text.startswith(text, position):
            return None
        position += len(text)
        ends.append(position)
    return tuple(ends) if position == len(answer.text) else None


def _before_message(prompt: Prompt) -> Prompt:
    """The prompt as it was before the open message said anything."""
    *closed, opened = prompt.messages
    return Prompt(
        text=prompt.text.removesuffix(opened["content"]),
        messages=(*closed, {**opened, "content": ""}),
    )


def _without_prefix(text: str, prefix: str) -> str | None:
    return text[len(prefix) :] if text.startswith(prefix) else None
