"""What earlier turns of conversations were made of, so that a later turn continues their tokens.

The tokens that a model generates are not always those that a tokenizer makes of their text. Where
the next turn's prompt is rendered and tokenised anew, its tokens may part from the cached ones
inside the last answer, and all that follows is computed again. `TurnMemory` remembers for the text
of a finished turn (prompt and answer) the tokens that it really had; a prompt that begins with that
text, with a control token right after it, takes them over.

Why that is sound: remembered tokens decode to exactly the text that they are remembered for
(`chat_encoder.py` checks it before), control tokens are real in both texts or in neither
(`ControlledText.keyed`), and texts are compared as a whole, not by digest. So it is only ever
decided in which of several ways the same text is cut into tokens. Turns of one namespace never meet
those of another, and callers who name a key have a namespace of their own. Within one, who sends
the whole text of somebody else's turn, answer included, takes over its tokens; that this text was
there before is all it tells, as the prefix cache's timing does. The newest turn with a text counts.

Knows no tokenizer, no templates and no requests; reads no clock.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sapwood.radix import Namespace
from sapwood.runtime.common_prefix import common_length
from sapwood.runtime.control_tokens import REAL

TokenIds = NDArray[np.int32]

MAX_TURN_TOKENS = 4_000_000  # 16 MB of ids, and about as much of text
MAX_TURNS = 32_768  # each takes almost 1 kB beside its tokens and text
_COMPARED_TURNS = 8  # of those with the same messages
_SHOWN_TOKENS, _SHOWN_CHARS = 8, 40  # of a divergence, on either side


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatPrompt:
    """The prompt of a chat request, as far as later turns need it.

    `keyed` is its text (`ControlledText.keyed`). `conversations` has a digest of the first 1, 2,
    ... messages, `options` one of everything else that the rendering hung on.
    """

    keyed: bytes
    conversations: tuple[bytes, ...]
    options: bytes
    namespace: Namespace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """A finished turn. `token_ids` are those of the prompt and, if `is_exact`, of the answer; else
    the answer has no tokens whose text it is.

    `content` is what a client has of an answer that also had reasoning or tool calls in its text.
    """

    prompt: ChatPrompt
    answer: str
    token_ids: TokenIds
    num_prompt_tokens: int
    is_exact: bool
    content: str | None = None

    @property
    def keyed(self) -> bytes:
        return self.prompt.keyed + self.answer.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where a prompt leaves the tokens of the conversation's last turn.

    `position`: how many tokens they have in common. `expected_text` and `found_text`: the next few
    tokens of the last turn and of the prompt. Of an answer or of options (tools, template
    variables) that the prompt does not have nothing is shown: they may be those of somebody else
    who asked the same.
    """

    position: int
    expected_text: str
    found_text: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReport:
    """What a chat prompt continues. `num_remembered_tokens` of its first tokens are an earlier
    turn's; `divergence` is None where the conversation's last turn is continued whole, or where
    there is none."""

    num_tokens: int
    num_remembered_tokens: int
    divergence: Divergence | None


@dataclass(slots=True, eq=False)
class TurnMemory:
    """The latest turns: at most `max_turns`, of at most `max_tokens` tokens. Thread-safe.

    Invariant: `num_tokens` is the sum over the turns, and each is found under its own text.
    """

    max_tokens: int = MAX_TURN_TOKENS
    max_turns: int = MAX_TURNS
    num_tokens: int = 0
    _turns: OrderedDict[bytes, Turn] = field(default_factory=OrderedDict)  # oldest use first
    _by_conversation: dict[bytes, list[bytes]] = field(default_factory=dict)  # newest last
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def remember(self, turn: Turn) -> None:
        """Keep a turn, and forget the longest unused ones for it. O(its text), amortised."""
        if len(turn.token_ids) > self.max_tokens:
            return
        key = _digest(turn.prompt.namespace, turn.keyed)
        with self._lock:
            self._forget(key)
            self._turns[key] = turn
            self._by_conversation.setdefault(turn.prompt.conversations[-1], []).append(key)
            self.num_tokens += len(turn.token_ids)
            while self.num_tokens > self.max_tokens or len(self._turns) > self.max_turns:
                self._forget(next(iter(self._turns)))

    def recall(self, prompt: ChatPrompt, places: Sequence[int]) -> Turn | None:
        """The exact turn with the longest text that `prompt` has up to one of `places` (ascending
        offsets into its `keyed`). O(length of the text)."""
        keys = list(_digests(prompt.namespace, prompt.keyed, places))
        with self._lock:
            for key, place in zip(reversed(keys), reversed(places), strict=True):
                turn = self._turns.get(key)
                if turn is not None and turn.is_exact and turn.keyed == prompt.keyed[:place]:
                    self._turns.move_to_end(key)
                    return turn
        return None

    def last_turn(self, prompt: ChatPrompt) -> Turn | None:
        """The latest turn whose messages are the first of `prompt`'s, as many as possible.

        Of several (others may have asked the same) the one that has most of its text.
        """
        with self._lock:
            for conversation in reversed(prompt.conversations):
                if keys := self._by_conversation.get(conversation):
                    turns = [self._turns[key] for key in reversed(keys[-_COMPARED_TURNS:])]
                    return max(turns, key=lambda turn: _common_text(turn.keyed, prompt.keyed))
        return None

    def check(self) -> None:
        """Assert the invariants. O(everything)."""
        with self._lock:
            assert self.num_tokens == sum(len(turn.token_ids) for turn in self._turns.values())
            assert self.num_tokens <= self.max_tokens
            assert len(self._turns) <= self.max_turns
            for key, turn in self._turns.items():
                assert key == _digest(turn.prompt.namespace, turn.keyed)
            for conversation, keys in self._by_conversation.items():
                assert keys
                for key in keys:
                    assert self._turns[key].prompt.conversations[-1] == conversation
            assert sum(map(len, self._by_conversation.values())) == len(self._turns)

    def _forget(self, key: bytes) -> None:
        turn = self._turns.pop(key, None)
        if turn is None:
            return
        self.num_tokens -= len(turn.token_ids)
        keys = self._by_conversation[turn.prompt.conversations[-1]]
        keys.remove(key)
        if not keys:
            del self._by_conversation[turn.prompt.conversations[-1]]


def conversation_digests(
    messages: Sequence[Mapping[str, Any]], namespace: Namespace
) -> tuple[bytes, ...]:
    """A digest of the first 1, 2, ... messages. O(characters)."""
    digest = _seeded(namespace)
    digests = []
    for message in messages:
        digest.update(json.dumps(message, sort_keys=True).encode() + b"\n")
        digests.append(digest.digest())
    return tuple(digests)


def find_divergence(
    turn: Turn,
    prompt: ChatPrompt,
    token_ids: TokenIds,
    messages: Sequence[Mapping[str, Any]],
    spell: Callable[[TokenIds], str],
) -> Divergence | None:
    """Where and why a prompt leaves `turn`, whose messages are the first of its own.

    None where it only asks for the same answer once more. `spell` gives the text of tokens.
    """
    num_shared = prompt.conversations.index(turn.prompt.conversations[-1]) + 1
    asks_again = num_shared == len(messages)
    expected = turn.prompt.keyed if asks_again else turn.keyed
    place = _common_text(expected, prompt.keyed)
    if asks_again and place == len(expected):
        return None
    if asks_again:
        reason = _prompt_reason(turn, prompt)
    else:
        reason = _reason(turn, prompt, place, messages[num_shared], f"messages[{num_shared}]")
    position = common_length(turn.token_ids, token_ids)
    return Divergence(
        position=position,
        expected_text=_expected_text(turn, prompt, position, messages[num_shared:], spell),
        found_text=spell(token_ids[position : position + _SHOWN_TOKENS]),
        reason=reason,
    )


def _expected_text(
    turn: Turn,
    prompt: ChatPrompt,
    position: int,
    later: Sequence[Mapping[str, Any]],
    spell: Callable[[TokenIds], str],
) -> str:
    """What a turn has from a token on, as far as `prompt` and `later` messages show that it is
    known."""
    if turn.prompt.options != prompt.options:
        return ""
    end = position + _SHOWN_TOKENS
    if not _has_answer(turn, later):
        return spell(turn.token_ids[position : min(end, turn.num_prompt_tokens)])
    return spell(turn.token_ids[position:end]) or turn.answer[:_SHOWN_CHARS]


def _has_answer(turn: Turn, later: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the next message is the turn's answer, but for white space around it."""
    return (
        bool(later)
        and later[0]["role"] == "assistant"
        and later[0]["content"].strip() == turn.answer.strip()
    )


def _reason(
    turn: Turn, prompt: ChatPrompt, place: int, next_message: Mapping[str, Any], where: str
) -> str:
    """Why texts part at `place`, or, where they do not, why tokens may."""
    is_answer = next_message["role"] == "assistant"
    if place < len(turn.prompt.keyed):
        in_last_header = place >= turn.prompt.keyed.rfind(REAL)
        if in_last_header and not is_answer:
            return f"{where} is not the assistant's answer"
        return _prompt_reason(turn, prompt)
    content = next_message["content"]
    if not _has_answer(turn, [next_message]):
        if turn.content is not None and content.strip() == turn.content.strip():
            return "the answer's reasoning or tool calls are not in the prompt as they were written"
        return f"{where} is not the answer that was given"
    if content != turn.answer:
        return f"{where} has the answer with other white space around it"
    if place < len(turn.keyed):
        trims = content != content.strip()
        return f"the template {'trims' if trims else 'rewrites'} the answer"
    if turn.is_exact:
        return "after the answer the template does not write a control token at once"
    return (
        "the answer's text is not the text of its tokens (it ended within a token or a character, "
        "or had a control token in it), so its text was tokenised anew"
    )


def _prompt_reason(turn: Turn, prompt: ChatPrompt) -> str:
    if turn.prompt.options != prompt.options:
        return "the request has other options, such as tools or chat_template_kwargs"
    return (
        "the template renders the earlier messages differently than in the last turn (it leaves "
        "out or rewrites what is no longer the last message, or it writes the date)"
    )


def _common_text(a: bytes, b: bytes) -> int:
    return common_length(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8))


def _seeded(namespace: Namespace) -> blake2b:
    return blake2b(repr(namespace).encode() + b"\xff", digest_size=32)


def _digest(namespace: Namespace, keyed: bytes) -> bytes:
    digest = _seeded(namespace)
    digest.update(keyed)
    return digest.digest()


def _digests(namespace: Namespace, keyed: bytes, places: Sequence[int]) -> Iterator[bytes]:
    """`_digest` of the text up to each of ascending places, in one pass."""
    digest, view, last = _seeded(namespace), memoryview(keyed), 0
    for place in places:
        digest.update(view[last:place])
        last = place
        yield digest.digest()
