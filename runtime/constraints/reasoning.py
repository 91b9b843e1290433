"""A constraint that holds for the answer, not for the reasoning in front of it.

While the model reasons, every token may come but special ones and those that end the answer. The
constraint holds from the token after the closing tag on, whichever tokens spell the tag, also where
several tokens are taken in at once. What belongs to the reasoning is what the bytes say
(`runtime/reasoning_block.py`), so the reader of the text cuts at the same place. A token that ends
the reasoning and goes on with content is not allowed, since no constraint has a say in half a
token; one that goes on with the newlines behind the tag is.
"""

import threading
from array import array
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from sapwood.runtime.constraints.interface import Matcher, TokenMask, Vocabulary
from sapwood.runtime.constraints.mask_bits import has_token, mask_of
from sapwood.runtime.errors import RequestError
from sapwood.runtime.reasoning_block import (
    BlockAutomaton,
    Phase,
    ReasoningStart,
    ReasoningTags,
)

_NO_TOKENS: tuple[int, ...] = ()


class ReasoningMatchers:
    """Makes the matchers of one engine. Thread-safe.

    `make_vocabulary` is called when it is first needed.
    """

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._masks: dict[ReasoningTags, BlockMasks] = {}
        self._lock = threading.Lock()

    def prepare(
        self,
        tags: ReasoningTags,
        start: ReasoningStart,
        *,
        is_constrained: bool,
        max_tokens: int | None,
    ) -> None:
        """Work out what `around` will need of the vocabulary: a pass over it, once for some tags.

        Raises RequestError where the reasoning is to be ended and no tokens spell its end.
        """
        if _makes_a_difference(start, is_constrained, max_tokens):
            masks = self._masks_of(tags)
            if max_tokens is not None:
                masks.check_closing()

    def around(
        self,
        inner: Matcher | None,
        tags: ReasoningTags,
        start: ReasoningStart,
        *,
        max_tokens: int | None = None,
    ) -> Matcher | None:
        """A matcher for an answer that `inner` (None: nothing) constrains; microseconds, if it was
        prepared.

        None where there is nothing to constrain. After `max_tokens` tokens of reasoning, its tags
        not counted, the closing tag is forced, or the rest of it where the model has begun it. That
        may cut the reasoning within a character.
        """
        if not _makes_a_difference(start, inner is not None, max_tokens):
            return inner
        masks = self._masks_of(tags)
        return ReasoningMatcher(masks, masks.automaton.start(start), inner, max_tokens)

    def _masks_of(self, tags: ReasoningTags) -> "BlockMasks":
        with self._lock:
            if tags not in self._masks:
                self._masks[tags] = BlockMasks(self._make_vocabulary(), tags.automaton)
            return self._masks[tags]


def _makes_a_difference(
    start: ReasoningStart, is_constrained: bool, max_tokens: int | None
) -> bool:
    """Whether reasoning in front of an answer changes what may come next."""
    return start is not ReasoningStart.CLOSED and (is_constrained or max_tokens is not None)


class BlockMasks:
    """For each state of a block's automaton, the tokens that may follow, worked out at first use.

    Thread-safe: a mask that two threads work out at once is the same. A mask costs a look at the
    few hundred tokens that could meet a tag or a newline.
    """

    def __init__(self, vocabulary: Vocabulary, automaton: BlockAutomaton) -> None:
        self.automaton = automaton
        self.mask_size = vocabulary.mask_size
        self._vocabulary = vocabulary
        self._tokens = vocabulary.token_bytes
        special = {*vocabulary.special_token_ids, *vocabulary.eos_token_ids}
        # A special token is no text, unless it is a tag.
        self._special_openings = self._with_text(special, automaton.opening)
        tags = self._special_openings | self._with_text(special, automaton.closing)
        self._silent = frozenset(special) - tags
        self._has_text = np.zeros(vocabulary.logits_size, bool)
        self._has_text[: len(self._tokens)] = list(map(len, self._tokens))
        self._has_text[list(self._silent)] = False
        suspects = self._suspects()
        self._near = self._near_tokens(suspects)
        parts = (i for i in reversed(suspects) if self._tokens[i] in automaton.closing)
        self._closing_parts = {self._tokens[i]: i for i in parts}  # the first of equal ones
        self._block: dict[int, TokenMask] = {}
        self._content: dict[int, TokenMask] = {}
        self._first_of_closing: dict[int, int] = {}

    def block(self, state: int) -> TokenMask:
        """Tokens with which the answer may still become a block, or is one without content yet."""
        mask = self._block.get(state)
        return self._worked_out(state)[0] if mask is None else mask

    def content(self, state: int) -> TokenMask:
        """Tokens of which all is content; also those that are no text."""
        mask = self._content.get(state)
        return self._worked_out(state)[1] if mask is None else mask

    def after(self, state: int, token_id: int) -> int:
        """The state after a token. O(its bytes)."""
        if not self._has_text[token_id]:
            return self.automaton.content(state)
        return self.automaton.run(state, self._tokens[token_id])

    def first_of_closing(self, state: int) -> int:
        """The first token of what the closing tag lacks, in REASONING."""
        token_id = self._first_of_closing.get(state)
        if token_id is None:
            rest = self.automaton.closing[self.automaton.num_closing_bytes(state) :]
            token_id = self._first_of_closing[state] = self._first_token(rest)
        return token_id

    def check_closing(self) -> None:
        """Raise RequestError where the closing tag cannot be spelled, wherever it was begun."""
        start = self.automaton.start(ReasoningStart.OPEN)
        for state in range(start, start + len(self.automaton.closing)):
            self.first_of_closing(state)

    def _worked_out(self, state: int) -> tuple[TokenMask, TokenMask]:
        """Both masks. Of tokens that could not meet a tag or a newline the phase says it all."""
        is_reasoning = self.automaton.phase(state) is Phase.REASONING
        nothing = np.zeros_like(self._has_text)
        is_block = self._has_text.copy() if is_reasoning else nothing.copy()
        is_content = nothing if is_reasoning else ~nothing
        for token_id in self._near:
            is_block[token_id], is_content[token_id] = self._sides(state, token_id)
        block = self._block[state] = mask_of(
            np.flatnonzero(is_block).astype(np.int32), self.mask_size
        )
        content = self._content[state] = mask_of(
            np.flatnonzero(is_content).astype(np.int32), self.mask_size
        )
        return block, content

    def _sides(self, state: int, token_id: int) -> tuple[bool, bool]:
        """Whether a token that has text is in the block mask, and in the content mask."""
        automaton, token = self.automaton, self._tokens[token_id]
        if token_id in self._special_openings and automaton.phase(state) is not Phase.OPENING:
            return False, False
        first = automaton.run(state, token[:1])
        last = automaton.run(first, token[1:])
        if not automaton.has_content(last):
            return True, False
        return False, automaton.has_content(first) or automaton.phase(last) is Phase.PLAIN

    def _suspects(self) -> list[int]:
        """Tokens with text that begin with a newline or any byte of a tag, or end the reasoning."""
        closing = self.automaton.closing
        firsts = {bytes([byte]) for byte in (*b"\n", *self.automaton.opening, *closing)}
        found = (
            i for i, token in enumerate(self._tokens) if token[:1] in firsts or closing in token
        )
        return [token_id for token_id in found if self._has_text[token_id]]

    def _near_tokens(self, suspects: Iterable[int]) -> list[int]:
        """Those that could meet a tag or a newline."""
        opening, closing, tokens = self.automaton.opening, self.automaton.closing, self._tokens
        heads = (b"\n", *_tails(opening), *_tails(closing))
        return [
            token_id
            for token_id in suspects
            if tokens[token_id].startswith(heads)
            or tokens[token_id] in opening
            or closing in tokens[token_id]
        ]

    def _first_token(self, text: bytes) -> int:
        """The token that is all of a part of the closing tag, or else the first that it is usually
        spelled with."""
        parts = self._closing_parts
        if text in parts:
            return parts[text]
        usual = self._usual_tokens(text)
        if usual and text.startswith(first := self._tokens[usual[0]]) and first in parts:
            return parts[first]
        fitting = [text[:n] for n in range(len(text), 0, -1) if text[:n] in parts]
        if not fitting:
            raise RequestError(
                f"no token of this model begins {text.decode(errors='replace')!r}, so its "
                "reasoning cannot be ended; leave max_reasoning_tokens out",
                param="max_reasoning_tokens",
            )
        return parts[fitting[0]]

    def _usual_tokens(self, text: bytes) -> Sequence[int]:
        try:
            return list(self._vocabulary.encode(text.decode()))
        except UnicodeDecodeError:  # the tag was begun with a part of a character
            return _NO_TOKENS

    def _with_text(self, token_ids: Iterable[int], text: bytes) -> frozenset[int]:
        tokens = self._tokens
        return frozenset(i for i in token_ids if i < len(tokens) and tokens[i] == text)


class ReasoningMatcher:
    """A `Matcher` around the one of the answer.

    Where the prompt leaves it open whether there is a block, both ways are followed until the text
    says which: the tokens allowed are those that may begin a block, and those of `inner`.

    Invariants: `_states` has the state before each token taken in. `_opening` has those of them
    after which it was open whether there is a block. `inner` (None: all may come) holds the
    content's tokens; while it is open, the first `_num_followed` of `_opening`, as many as it
    allows; in a block, none of them.
    """

    def __init__(
        self, masks: BlockMasks, state: int, inner: Matcher | None, max_tokens: int | None
    ) -> None:
        self._masks = masks
        self._state = state
        self._inner = inner
        self._max_tokens = max_tokens
        self._num_reasoning_tokens = 0
        self._states = array("B")
        self._opening: list[int] = []  # tokens that began, or may begin, a block
        self._num_followed = 0

    @property
    def is_complete(self) -> bool:
        has_content = self._phase in (Phase.CONTENT, Phase.PLAIN)
        return has_content and self._inner is not None and self._inner.is_complete

    @property
    def is_accepting(self) -> bool:
        return self._may_be_content and (self._inner is None or self._inner.is_accepting)

    def fill_mask(self, mask: TokenMask) -> bool:
        if self._phase is Phase.REASONING:
            if self._must_close:
                _fill_only(mask, self._masks.first_of_closing(self._state))
            else:
                np.copyto(mask, self._masks.block(self._state))
            return True
        if self._inner is None:
            return False
        if self._phase in (Phase.CONTENT, Phase.PLAIN):
            return self._inner.fill_mask(mask)
        self._fill_either(mask, self._inner)
        return True

    def advance(self, token_id: int) -> bool:
        before = self._state
        match self._phase:
            case Phase.REASONING:
                is_allowed = self._take_reasoning(token_id)
            case Phase.OPENING | Phase.CLOSED:
                is_allowed = self._take_either(token_id)
            case _:
                is_allowed = self._take_content(token_id)
        if is_allowed:
            self._states.append(before)
        return is_allowed

    def forced_tokens(self) -> Sequence[int]:
        if self._must_close:
            return self._rest_of_closing_tag()
        if self._phase in (Phase.CONTENT, Phase.PLAIN) and self._inner is not None:
            return self._inner.forced_tokens()
        return _NO_TOKENS

    def likely_tokens(self) -> Sequence[int]:
        if self._phase in (Phase.CONTENT, Phase.PLAIN) and self._inner is not None:
            return self._inner.likely_tokens()
        return _NO_TOKENS

    def rollback(self, num_tokens: int) -> None:
        automaton = self._masks.automaton
        for _ in range(num_tokens):
            after, self._state = self._state, self._states.pop()
            if self._phase is Phase.REASONING:
                self._num_reasoning_tokens -= 1
            elif automaton.has_content(after):
                if self._inner is not None:
                    self._inner.rollback(1)
            elif self._phase is Phase.OPENING:
                if automaton.phase(after) is Phase.OPENING:
                    self._shorten_opening()
                else:
                    self._follow_opening()

    def copy(self) -> "ReasoningMatcher":
        inner = None if self._inner is None else self._inner.copy()
        other = ReasoningMatcher(self._masks, self._state, inner, self._max_tokens)
        other._num_reasoning_tokens = self._num_reasoning_tokens
        other._states = self._states[:]
        other._opening = self._opening[:]
        other._num_followed = self._num_followed
        return other

    def verdict(self, text: bytes) -> str | None:
        if self._inner is None:
            return None
        start = self._states[0] if self._states else self._state
        content = self._masks.automaton.content_of(start, text)
        if content is None:
            return "the answer ended within its reasoning"
        return self._inner.verdict(content)

    @property
    def _phase(self) -> Phase:
        return self._masks.automaton.phase(self._state)

    @property
    def _must_close(self) -> bool:
        return (
            self._max_tokens is not None
            and self._num_reasoning_tokens >= self._max_tokens
            and self._phase is Phase.REASONING
        )

    @property
    def _may_be_content(self) -> bool:
        """Whether what `inner` allows may come next."""
        match self._phase:
            case Phase.REASONING:
                return False
            case Phase.OPENING:
                return self._inner is None or self._num_followed == len(self._opening)
            case _:
                return True

    def _fill_either(self, mask: TokenMask, inner: Matcher) -> None:
        """A block may begin or go on, or its newlines may; or there is content."""
        block = self._masks.block(self._state)
        if not self._may_be_content:
            np.copyto(mask, block)
            return
        if not inner.fill_mask(mask):
            mask.fill(-1)
        mask &= self._masks.content(self._state)
        mask |= block

    def _take_reasoning(self, token_id: int) -> bool:
        if self._must_close:
            is_allowed = token_id == self._masks.first_of_closing(self._state)
        else:
            is_allowed = has_token(self._masks.block(self._state), token_id)
        if is_allowed:
            self._state = self._masks.after(self._state, token_id)
            self._num_reasoning_tokens += 1
        return is_allowed

    def _take_either(self, token_id: int) -> bool:
        after = self._masks.after(self._state, token_id)
        if has_token(self._masks.block(self._state), token_id):
            if self._masks.automaton.phase(after) is Phase.OPENING:
                self._opening.append(token_id)
                self._follow_opening()
            elif self._phase is Phase.OPENING:
                self._unfollow_opening()
        elif self._inner is not None and not (
            self._may_be_content
            and has_token(self._masks.content(self._state), token_id)
            and self._inner.advance(token_id)
        ):
            return False
        self._state = after
        return True

    def _take_content(self, token_id: int) -> bool:
        if self._inner is not None and not self._inner.advance(token_id):
            return False
        self._state = self._masks.automaton.content(self._state)
        return True

    def _follow_opening(self) -> None:
        """Give `inner` what it lacks of the opening, as far as it allows that."""
        if self._inner is None:
            return
        mask = np.empty(self._masks.mask_size, np.int32)
        for token_id in self._opening[self._num_followed :]:
            if self._inner.fill_mask(mask) and not has_token(mask, token_id):
                return  # before `advance`: a matcher may be of no use after it refused
            self._inner.advance(token_id)
            self._num_followed += 1

    def _unfollow_opening(self) -> None:
        """It was a block, so nothing of it is content."""
        if self._inner is not None and self._num_followed:
            self._inner.rollback(self._num_followed)
        self._num_followed = 0

    def _shorten_opening(self) -> None:
        """Take its last token back."""
        self._opening.pop()
        if self._num_followed > len(self._opening):
            assert self._inner is not None
            self._inner.rollback(1)
            self._num_followed -= 1

    def _rest_of_closing_tag(self) -> list[int]:
        """Each is the one that its mask would have: it makes no difference who appends them."""
        tokens, state, masks = [], self._state, self._masks
        while masks.automaton.phase(state) is Phase.REASONING:
            tokens.append(masks.first_of_closing(state))
            state = masks.after(state, tokens[-1])
        return tokens


def _fill_only(mask: TokenMask, token_id: int) -> None:
    mask.fill(0)
    mask[token_id >> 5] = np.uint32(1 << (token_id & 31)).view(np.int32)


def _tails(tag: bytes) -> list[bytes]:
    return [tag[start:] for start in range(len(tag))]
