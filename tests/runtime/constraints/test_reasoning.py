"""A constraint holds from the token after the closing tag on, however tokens cut the tag."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from tokenizers import AddedToken

from sapwood.runtime.constraints.interface import TokenMask, Vocabulary
from sapwood.runtime.constraints.reasoning import ReasoningMatcher, ReasoningMatchers
from sapwood.runtime.errors import RequestError
from sapwood.runtime.reasoning_block import ReasoningStart, ReasoningTags
from tests.runtime.tiny_tokenizers import byte_level, tokenizer_of

OPEN, CLOSED, EITHER = ReasoningStart.OPEN, ReasoningStart.CLOSED, ReasoningStart.EITHER
THINK = ReasoningTags("<think>", "</think>")
CHOICES = (b"yes", b"yes\n", b"<th", b"\nno", b"<think", b"\n\n<")
ALPHABET = b"<>/think\nyeso "
EOS = b"<eos>"


def vocabulary_of(words: Sequence[bytes], special: Sequence[bytes] = ()) -> Vocabulary:
    """Single letters, words, special tokens and the end token; two rows that have no token."""
    letters = [bytes([byte]) for byte in ALPHABET]
    tokens = (*letters, *words, *special, EOS)

    def encode(text: str) -> list[int]:
        known = text.encode().translate(None, delete=bytes(set(range(256)) - set(ALPHABET)))
        return [letters.index(bytes([byte])) for byte in known]

    first_special = len(tokens) - len(special) - 1
    return Vocabulary(
        token_bytes=tokens,
        special_token_ids=tuple(range(first_special, len(tokens))),
        eos_token_ids=(len(tokens) - 1,),
        logits_size=len(tokens) + 2,
        encode=encode,
    )


@dataclass
class ChoiceMatcher:
    """The answer is one of a few texts. Poisoned by a token that it refuses."""

    vocabulary: Vocabulary
    choices: tuple[bytes, ...] = CHOICES
    tokens: list[int] = field(default_factory=list)
    is_poisoned: bool = False

    @property
    def text(self) -> bytes:
        return b"".join(self.vocabulary.token_bytes[i] for i in self.tokens)

    @property
    def is_complete(self) -> bool:
        return self.is_accepting and not any(self._allowed())

    @property
    def is_accepting(self) -> bool:
        return self.text in self.choices

    def _allowed(self) -> list[int]:
        vocabulary = self.vocabulary
        ordinary = set(range(len(vocabulary.token_bytes))) - set(vocabulary.special_token_ids)
        texts = {i: self.text + vocabulary.token_bytes[i] for i in ordinary}
        return [i for i, text in texts.items() if any(c.startswith(text) for c in self.choices)]

    def fill_mask(self, mask: TokenMask) -> bool:
        assert not self.is_poisoned
        ends = self.vocabulary.eos_token_ids if self.is_accepting else ()
        mask[:] = mask_of(self.vocabulary, [*self._allowed(), *ends])
        return True

    def advance(self, token_id: int) -> bool:
        assert not self.is_poisoned
        ends = self.vocabulary.eos_token_ids if self.is_accepting else ()
        if token_id not in (*self._allowed(), *ends):
            self.is_poisoned = True
            return False
        self.tokens.append(token_id)
        return True

    def forced_tokens(self) -> Sequence[int]:
        return ()

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= len(self.tokens)
        del self.tokens[len(self.tokens) - num_tokens :]

    def copy(self) -> "ChoiceMatcher":
        return replace(self, tokens=list(self.tokens))

    def verdict(self, text: bytes) -> str | None:
        return None if text in self.choices else f"{text!r} is no choice"


def mask_of(vocabulary: Vocabulary, token_ids: Sequence[int]) -> TokenMask:
    mask = np.zeros(vocabulary.mask_size, np.uint32)
    for token_id in token_ids:
        mask[token_id // 32] |= np.uint32(1 << (token_id % 32))
    return mask.view(np.int32)


def allowed(matcher: ReasoningMatcher, vocabulary: Vocabulary) -> set[int] | None:
    """The ids in its mask; None where all are."""
    mask = np.full(vocabulary.mask_size, 0x55555555, np.int32)
    if not matcher.fill_mask(mask):
        return None
    return {i for i in range(vocabulary.mask_size * 32) if int(mask[i // 32]) >> i % 32 & 1}


def matcher_of(
    vocabulary: Vocabulary,
    start: ReasoningStart = OPEN,
    *,
    tags: ReasoningTags = THINK,
    choices: tuple[bytes, ...] | None = CHOICES,
    max_tokens: int | None = None,
) -> ReasoningMatcher:
    inner = None if choices is None else ChoiceMatcher(vocabulary, choices)
    matchers = ReasoningMatchers(lambda: vocabulary)
    matchers.prepare(tags, start, is_constrained=inner is not None, max_tokens=max_tokens)
    matcher = matchers.around(inner, tags, start, max_tokens=max_tokens)
    assert isinstance(matcher, ReasoningMatcher)
    return matcher


def take(matcher: ReasoningMatcher, vocabulary: Vocabulary, *tokens: bytes) -> None:
    for token in tokens:
        assert matcher.advance(vocabulary.token_bytes.index(token)), token


def read(text: bytes, start: ReasoningStart) -> tuple[str, bytes]:
    """Where a beginning of an answer is, by the definition, and its content so far."""
    if start is EITHER:
        opening = re.match(rb"\n{0,2}<think>", text)
        if opening is None:
            beginnings = (b"\n" * n + b"<think>" for n in range(3))
            is_open = any(beginning.startswith(text) for beginning in beginnings)
            return ("undecided" if is_open else "plain"), text
        text = text[opening.end() :]
    _, closing, rest = text.partition(b"</think>")
    return ("answer" if closing else "reasoning"), re.sub(rb"\A\n{1,2}", b"", rest)


def may_follow(
    vocabulary: Vocabulary, written: bytes, token_id: int, start: ReasoningStart
) -> bool:
    """Whether a token may come next, by the definition, where the content is a choice."""
    token = vocabulary.token_bytes[token_id]
    was, content_before = read(written, start)
    if token_id in vocabulary.eos_token_ids:
        return was != "reasoning" and content_before in CHOICES
    now, content = read(written + token, start)
    if token_id in vocabulary.special_token_ids:
        opens = token == b"<think>" and (was, now) == ("undecided", "reasoning")
        return opens or (token == b"</think>" and was == "reasoning")
    if now in ("reasoning", "undecided") or (now == "answer" and not content):
        return True
    is_all_content = now == "plain" or len(content) == len(content_before) + len(token)
    return is_all_content and any(choice.startswith(content) for choice in CHOICES)


WORDS = (
    b"</", b"think", b">\n\n", b">\n", b">y", b"</think>\n", b"</think>y", b"</think", b"\n\n",
    b"\n\n\n", b"<th", b"ink>", b"<think>\n", b"yes", b"\nno", b"no", b"<think></think>",
    b"s</think>\n\n", b"\n\nyes", b"</t</think", b"o>", b"\n<",
)  # fmt: skip
VOCABULARIES = (
    vocabulary_of(WORDS),
    vocabulary_of([*WORDS, b"<think>", b"</think>"]),
    vocabulary_of(WORDS, special=[b"<think>", b"</think>", b"<|user|>"]),
)


@pytest.mark.parametrize("start", [OPEN, EITHER])
@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=["spelled", "ordinary", "special"])
def test_on_random_walks_masks_are_what_the_definition_says(
    vocabulary: Vocabulary, start: ReasoningStart
) -> None:
    draw = random.Random(0)
    reached = set()
    for _ in range(150):
        matcher, written, taken = matcher_of(vocabulary, start), b"", list[int]()
        for _ in range(25):
            ids = allowed(matcher, vocabulary)
            every = range(len(vocabulary.token_bytes))
            assert ids == {i for i in every if may_follow(vocabulary, written, i, start)}, written
            reached.add(read(written, start)[0])
            if taken and draw.random() < 0.15:
                num_back = draw.randint(1, len(taken))
                matcher.rollback(num_back)
                del taken[len(taken) - num_back :]
                written = b"".join(vocabulary.token_bytes[i] for i in taken)
                continue
            refused = draw.choice([i for i in every if i not in ids] or [-1])
            if refused >= 0 and written == b"":
                assert not matcher.copy().advance(refused)
            assert ids
            long = [i for i in ids if len(vocabulary.token_bytes[i]) > 2]
            token_id = draw.choice(long if long and draw.random() < 0.6 else sorted(ids))
            other = matcher.copy()
            assert other.advance(token_id)
            if draw.random() < 0.5:
                matcher, other = other, matcher
            else:
                assert matcher.advance(token_id)
            written += vocabulary.token_bytes[token_id]
            taken.append(token_id)
            if token_id in vocabulary.eos_token_ids:
                break
    assert reached == {"reasoning", "answer"} | (
        {"undecided", "plain"} if start is EITHER else set()
    )


def cuts(data: bytes, tokens: Sequence[bytes]) -> list[tuple[bytes, ...]]:
    """Every way to spell some bytes in tokens."""
    if not data:
        return [()]
    heads = [token for token in tokens if token and data.startswith(token)]
    return [(head, *rest) for head in heads for rest in cuts(data[len(head) :], tokens)]


@pytest.mark.parametrize("newlines", [b"", b"\n", b"\n\n"])
def test_the_constraint_starts_right_after_the_tag_however_it_is_cut(newlines: bytes) -> None:
    vocabulary = VOCABULARIES[1]
    choices = (b"yes", b"no")
    ways = cuts(b"</think>" + newlines, vocabulary.token_bytes)
    assert len(ways) >= 8
    for way in ways:
        matcher = matcher_of(vocabulary, choices=choices)
        take(matcher, vocabulary, b"s", b"\n", *way)
        content = {vocabulary.token_bytes.index(token) for token in (b"y", b"yes", b"n", b"no")}
        ids = allowed(matcher, vocabulary)
        assert ids is not None
        starts = {i for i in ids if not vocabulary.token_bytes[i].startswith(b"\n")}
        assert starts == content
        assert not matcher.is_accepting
        take(matcher, vocabulary, b"yes", EOS)


def test_reasoning_cannot_end_the_answer_nor_have_special_tokens() -> None:
    vocabulary = VOCABULARIES[2]
    matcher = matcher_of(vocabulary)
    ids = allowed(matcher, vocabulary)
    assert ids is not None
    ordinary = set(range(len(vocabulary.token_bytes))) - set(vocabulary.special_token_ids)
    crossing = {vocabulary.token_bytes.index(b"</think>y")}
    assert ids == ordinary - crossing | {vocabulary.token_bytes.index(b"</think>")}
    assert not matcher.is_accepting
    assert not matcher.is_complete


def test_newlines_of_the_constraint_come_after_those_of_the_block() -> None:
    vocabulary = VOCABULARIES[0]
    matcher = matcher_of(vocabulary, choices=(b"\nno",))
    take(matcher, vocabulary, b"</think", b">\n")
    ids = allowed(matcher, vocabulary)
    assert ids == {vocabulary.token_bytes.index(b"\n")}
    take(matcher, vocabulary, b"\n", b"\nno", EOS)
    assert matcher.verdict(b"</think>\n\n\nno") is None


def test_a_closed_start_is_the_constraint_itself() -> None:
    inner = ChoiceMatcher(VOCABULARIES[0])
    matchers = ReasoningMatchers(lambda: VOCABULARIES[0])
    assert matchers.around(inner, THINK, CLOSED, max_tokens=3) is inner
    assert matchers.around(None, THINK, OPEN) is None


@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=["spelled", "ordinary", "special"])
@pytest.mark.parametrize("begun", [b"", b"s", b"s</", b"</th", b"</think", b"</t</think"])
@pytest.mark.parametrize("by_hand", [True, False])
def test_after_the_cap_the_rest_of_the_tag_is_forced(
    vocabulary: Vocabulary, begun: bytes, by_hand: bool
) -> None:
    """Whether tokens are appended as forced or drawn from their masks makes no difference."""
    way = min(cuts(begun, vocabulary.token_bytes), key=len)
    matcher = matcher_of(vocabulary, choices=(b"yes",), max_tokens=len(way))
    take(matcher, vocabulary, *way)
    forced = list(matcher.forced_tokens())
    spelled = b"".join(vocabulary.token_bytes[i] for i in forced)
    assert (begun + spelled).endswith(b"</think>")
    assert (begun + spelled).count(b"</think>") == 1
    for place, token_id in enumerate(forced):
        if by_hand:
            assert allowed(matcher, vocabulary) == {token_id}
            assert not matcher.copy().advance((token_id + 1) % len(vocabulary.token_bytes))
            assert list(matcher.forced_tokens()) == forced[place:]
        assert matcher.advance(token_id)
    assert not matcher.forced_tokens()
    matcher.rollback(len(forced))
    assert list(matcher.forced_tokens()) == forced
    for token_id in forced:
        assert matcher.advance(token_id)
    take(matcher, vocabulary, b"\n", b"yes", EOS)


def test_the_tag_is_forced_as_one_token_where_there_is_one() -> None:
    for vocabulary in VOCABULARIES[1:]:
        forced = matcher_of(vocabulary, max_tokens=0).forced_tokens()
        assert [vocabulary.token_bytes[i] for i in forced] == [b"</think>"]


def test_the_cap_counts_what_was_thought_and_not_the_opening_tag() -> None:
    vocabulary = VOCABULARIES[0]
    matcher = matcher_of(vocabulary, EITHER, max_tokens=2)
    take(matcher, vocabulary, b"\n", b"<th", b"ink>", b"y")
    assert not matcher.forced_tokens()
    take(matcher, vocabulary, b"e")
    assert matcher.forced_tokens()
    matcher.rollback(1)
    assert not matcher.forced_tokens()
    take(matcher, vocabulary, b"</think>y"[:7], b">")
    assert not matcher.forced_tokens()


def test_a_tokenizer_that_puts_a_space_in_front_still_spells_the_tag() -> None:
    spaced = vocabulary_of([b" </", *WORDS[:-4]])
    spaced = replace(spaced, encode=lambda text: [spaced.token_bytes.index(b" </")])
    forced = matcher_of(spaced, max_tokens=0).forced_tokens()
    assert b"".join(spaced.token_bytes[i] for i in forced) == b"</think>"


def test_a_vocabulary_that_cannot_spell_the_tag_is_refused() -> None:
    tags = ReasoningTags("<think>", "(end)")
    with pytest.raises(RequestError, match="max_reasoning_tokens"):
        matcher_of(VOCABULARIES[0], tags=tags, max_tokens=5)


def test_a_free_answer_is_free_after_the_tag_and_before_a_block() -> None:
    vocabulary = VOCABULARIES[0]
    matcher = matcher_of(vocabulary, EITHER, choices=None, max_tokens=3)
    assert allowed(matcher, vocabulary) is None
    assert matcher.is_accepting
    take(matcher, vocabulary, b"<th", b"ink>")
    assert not matcher.is_accepting
    take(matcher, vocabulary, b"y", b"</", b"think", b">")
    assert allowed(matcher, vocabulary) is None
    assert matcher.is_accepting
    take(matcher, vocabulary, b"\n\n\n", b"<think>\n", b"y")
    assert allowed(matcher, vocabulary) is None
    assert not matcher.is_complete
    matcher.rollback(4)
    assert [vocabulary.token_bytes[i] for i in matcher.forced_tokens()] == [b">"]
    assert matcher.verdict(b"never closed") is None


def test_an_answer_without_a_block_may_end_and_forces_what_the_constraint_does() -> None:
    vocabulary = VOCABULARIES[0]
    matcher = matcher_of(vocabulary, EITHER)
    take(matcher, vocabulary, b"<th")
    assert matcher.is_accepting
    assert not matcher.is_complete
    take(matcher.copy(), vocabulary, EOS)
    take(matcher.copy(), vocabulary, b"ink>", b"y")
    matcher = matcher_of(vocabulary, EITHER, choices=(b"yes",))
    take(matcher, vocabulary, b"yes")
    assert matcher.is_complete
    assert allowed(matcher, vocabulary) == set(vocabulary.eos_token_ids)


@pytest.mark.parametrize(
    ("start", "text", "complaint"),
    [
        (OPEN, b"so\n</think>\n\nyes", None),
        (OPEN, b"so\n</think>yes\n", None),
        (OPEN, b"so\n</think>\n\nno", "b'no' is no choice"),
        (OPEN, b"so\n</think>\n", "b'' is no choice"),
        (OPEN, b"yes", "the answer ended within its reasoning"),
        (EITHER, b"\n<think>so</think>yes", None),
        (EITHER, b"yes", None),
        (EITHER, b"<th", None),
        (EITHER, b"<think>yes", "the answer ended within its reasoning"),
        (EITHER, b"yes<think>so</think>yes", "b'yes<think>so</think>yes' is no choice"),
    ],
)
def test_the_verdict_is_on_the_content_alone(
    start: ReasoningStart, text: bytes, complaint: str | None
) -> None:
    matcher = matcher_of(VOCABULARIES[0], start)
    assert matcher.verdict(text) == complaint
    take(matcher, VOCABULARIES[0], b"<th")  # wherever it is
    assert matcher.verdict(text) == complaint


@pytest.mark.parametrize("special", [True, False])
def test_with_a_real_byte_level_vocabulary_any_text_can_be_thought(special: bool) -> None:
    backend = byte_level()
    tags = [AddedToken(tag, special=special, normalized=False) for tag in ("<think>", "</think>")]
    (backend.add_special_tokens if special else backend.add_tokens)(tags)
    tokenizer = tokenizer_of(backend)
    vocabulary = Vocabulary(
        token_bytes=tuple(map(tokenizer.token_raw_bytes, range(tokenizer.vocab_size))),
        special_token_ids=tuple(filter(tokenizer.is_special, range(tokenizer.vocab_size))),
        eos_token_ids=(int(tokenizer.encode("<|end|>")[0]),),
        logits_size=tokenizer.vocab_size,
        encode=lambda text: tokenizer.encode(text).tolist(),
    )
    matcher = matcher_of(vocabulary, EITHER, choices=("漢字".encode(),))
    spelled = "<think>\nthe </thé 漢 <think> </ think></think>\n\n漢字"
    for token_id in tokenizer.encode(spelled.replace(" <think> ", " ")).tolist():
        ids = allowed(matcher, vocabulary)
        assert ids is not None
        assert token_id in ids
        assert matcher.advance(token_id)
    assert matcher.is_complete
    assert matcher.verdict(spelled.encode()) is None
