"""Constraints enforced by llguidance: an Earley parser over derivatives of regular expressions.

Its masks are exact, cost microseconds, and where text is forced have one token only, so that
appending forced tokens changes no answer. It computes lazily: what a grammar costs shows at its
masks, so that both compiling and each mask have limits of work here.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from sapwood.runtime.constraints.compile_errors import require
from sapwood.runtime.constraints.interface import GrammarError, TokenMask, Vocabulary
from sapwood.runtime.constraints.likely_cuts import LikelyCuts
from sapwood.runtime.constraints.llguidance_grammar import SpecialTokens
from sapwood.runtime.constraints.llguidance_translator import (
    ThreadTranslator,
    Translator,
    make_translator,
)
from sapwood.runtime.constraints.mask_bits import clear_tokens, has_token, set_tokens
from sapwood.runtime.constraints.number_limit import NumberLimit, NumberTokens
from sapwood.runtime.constraints.rehearsal import Rehearsal
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

logger = logging.getLogger(__name__)

MAX_LIKELY_TOKENS = 4
MAX_LEXER_STATES = 50_000  # of all answers of a grammar
MAX_MASK_FUEL = 200_000  # the lexer's work for one mask, and for all until the next
# What llguidance says where a lexer is spent: it gives no answer anything any more.
_LEXER_IS_SPENT = ("too many states", "too many expressions")
_REPLAYED_AT_ONCE = 64  # tokens
_UNSATISFIABLE = "no answer satisfies this constraint; make it less strict"
# What llguidance's messages have in them, the keyword, and what is said instead.
_KNOWN_ERRORS = (
    ("Unsatisfiable schema", None, _UNSATISFIABLE),
    ("NoExtension", None, _UNSATISFIABLE),
    (
        "no start rule found",
        None,
        "the grammar has no rule where an answer begins; name it start in Lark's notation",
    ),
    (
        "not supported yet; Start in regex",
        "pattern",
        "a regular expression has ^ after its beginning; leave it out",
    ),
    (
        "not supported yet; End in regex",
        "pattern",
        "a regular expression has $ before its end; leave it out",
    ),
    (
        "patternProperty regexes",
        "patternProperties",
        "'patternProperties': two of the patterns may match the same name; make them exclusive",
    ),
    (
        "circular references with sibling keys",
        "$ref",
        "'$ref': a schema that refers to itself has keywords beside the $ref; move them into the "
        "schema that is referred to",
    ),
    (
        "min/maxProperties only supported",
        "maxProperties",
        "'minProperties' and 'maxProperties' can be enforced only where all properties that are "
        "listed are required; leave them out",
    ),
    *(
        (part, None, "the constraint is too much work; use fewer alternatives and repetitions")
        for part in ("items; max is", "Too many items", "too many", "fuel", "Too complex")
    ),
    ("schema too large", None, "the schema is too large where it is multiplied out; simplify it"),
    ("stack level exceeded", None, "the schema's combinations are nested too deeply; simplify it"),
)
_MAX_KEPT_TEXTS, _MAX_KEPT_CHARS = 4096, 256  # of forced texts whose tokens are kept
_JSON_KINDS = frozenset({ConstraintKind.JSON_SCHEMA, ConstraintKind.STRUCTURAL_TAG})


def make_backend(vocabulary: Vocabulary) -> "LlguidanceBackend":
    """The backend of an engine: a process translates what is long. Close it."""
    require("llguidance")
    translator = make_translator(SpecialTokens.of(vocabulary))
    try:
        return LlguidanceBackend(vocabulary, translator)
    except BaseException:
        translator.close()
        raise


class LlguidanceBackend:
    """Compiles constraints for one vocabulary. Thread-safe.

    Making one takes about a second for 50,000 tokens: the tokens become a trie.
    """

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary, translator: Translator | None = None) -> None:
        """`translator` is the backend's to close; None: all is translated where it is compiled."""
        self._translator = translator or ThreadTranslator(SpecialTokens.of(vocabulary))
        self._vocabulary = vocabulary
        self._text_tokens = _TokenizerObject(vocabulary)
        self._tokenizer = _tokenizer_of(self._text_tokens, vocabulary)
        self._limits = _limits()
        self._ordinary = _mask_of_ordinary_tokens(vocabulary)
        self._numbers = NumberTokens(vocabulary)
        self._cuts = LikelyCuts(self._text_tokens, vocabulary.token_bytes)
        self._rehearsal = Rehearsal(vocabulary)

    def turn(self, spec: ConstraintSpec) -> AbstractContextManager[object]:
        return self._translator.turn(spec)

    def compile(self, spec: ConstraintSpec, *, deadline: float) -> "LlguidanceGrammar":
        """Raises GrammarError for what is not enforced exactly, and for what is too much work.

        `deadline` is that of the translator. llguidance itself cannot be stopped: its own limits of
        work end what takes more than about a second. Other threads run meanwhile.
        """
        if not self._vocabulary.eos_token_ids:
            raise GrammarError(
                "this model names no end token, so that a constrained answer could not end; add "
                "eos_token_id to its generation_config.json"
            )
        text = self._translator.translate(spec, deadline=deadline)
        numbers = self._numbers if spec.kind in _JSON_KINDS else None
        allowed = self._ordinary.copy()
        set_tokens(allowed, text.special_token_ids)
        compiled = LlguidanceGrammar(
            partial(self._warm_matcher, text.grammar),
            allowed,
            self._vocabulary.eos_token_ids,
            self._cuts,
            numbers,
            num_chars=len(text.grammar),
        )
        self._rehearsal.run(compiled.matcher())
        return compiled

    def close(self) -> None:
        self._translator.close()

    def _warm_matcher(self, grammar: str) -> "LLMatcher":
        """With its first mask and forced tokens computed: much of the work is done only then, and
        some errors are found only then."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        _raise_error_of(matcher)
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        _raise_error_of(matcher)
        matcher.compute_ff_tokens()
        _raise_error_of(matcher)
        if not words.any():
            raise GrammarError(_UNSATISFIABLE)
        return matcher


class LlguidanceGrammar:
    """A warm matcher, of which each answer gets a copy. Thread-safe.

    All copies share one lexer, whose states are made as answers need them, up to limits: of all of
    them, and of the work for one mask. At either the lexer is spent for all that share it. Then the
    grammar gets a new one, as do the answers under way.
    """

    def __init__(
        self,
        warm_matcher: Callable[[], "LLMatcher"],
        allowed: TokenMask,
        eos_token_ids: tuple[int, ...],
        cuts: LikelyCuts,
        numbers: NumberTokens | None,
        *,
        num_chars: int,
    ) -> None:
        """`warm_matcher` makes a new one. Raises GrammarError."""
        self._warm_matcher = warm_matcher
        self._origin: LLMatcher | None = warm_matcher()
        self._numbers = numbers
        self._num_chars = num_chars
        self.allowed = allowed
        self.eos_token_ids = eos_token_ids
        self.cuts = cuts

    @property
    def num_bytes(self) -> int:
        """An estimate: llguidance does not tell. Most of a small one are the lexer's states."""
        return 100_000 + 50 * self._num_chars + self.allowed.nbytes

    def matcher(self) -> "LlguidanceMatcher":
        limit = NumberLimit(self._numbers) if self._numbers is not None else None
        return LlguidanceMatcher(self, self.origin(), limit)

    def origin(self) -> "LLMatcher":
        """A matcher at the start of an answer; made anew, in milliseconds, where the last one was
        forgotten. Raises GrammarError."""
        origin = self._origin
        if origin is None:
            origin = self._origin = self._warm_matcher()
        return origin

    def forget(self, spent: "LLMatcher") -> None:
        """Let no other answer have this origin, whose lexer is spent."""
        if self._origin is spent:
            self._origin = None


class LlguidanceMatcher:
    """One answer's parser. The end token, of which llguidance keeps no count, is counted here."""

    def __init__(
        self, grammar: LlguidanceGrammar, origin: "LLMatcher", number_limit: NumberLimit | None
    ) -> None:
        """`origin` is the grammar's, at the start of an answer."""
        self._grammar = grammar
        self._origin = origin
        self._matcher = origin.deep_copy()
        self._allowed = grammar.allowed
        self._eos_token_ids = grammar.eos_token_ids
        self._number_limit = number_limit
        self._token_ids: list[int] = []  # without end tokens
        self._num_ends = 0
        self._tried: tuple[bytes, int] | None = None  # a text and its first likely token

    @property
    def is_complete(self) -> bool:
        if self._matcher.is_stopped():
            self._raise_error()
            return True
        return self._num_ends > 0 or (self.is_accepting and self._ends_only())

    @property
    def is_accepting(self) -> bool:
        accepting = self._matcher.is_accepting()
        if not accepting:
            self._raise_error()
        return accepting

    def fill_mask(self, mask: TokenMask) -> bool:
        """See Matcher. Microseconds for most states; at most what the limits of work allow."""
        if self._num_ends:
            mask[:] = 0
            set_tokens(mask, self._eos_token_ids)
            return True
        matcher = self._matcher
        matcher.unsafe_compute_mask_ptr(_address(mask), mask.nbytes)
        if matcher.is_error():
            self._renew()
            self._matcher.unsafe_compute_mask_ptr(_address(mask), mask.nbytes)
            self._raise_error()
        np.bitwise_and(mask, self._allowed, out=mask)
        if has_token(mask, self._eos_token_ids[0]) and not self.is_accepting:
            clear_tokens(mask, self._eos_token_ids)  # a grammar may allow any token
        if self._number_limit is not None:
            self._number_limit.narrow(mask)
        return True

    def advance(self, token_id: int) -> bool:
        if token_id in self._eos_token_ids:
            accepted = self.is_accepting
            self._num_ends += accepted
            return accepted
        if self._num_ends or not self._allows(token_id):
            return False
        if not self._consume(token_id):
            return False
        self._token_ids.append(token_id)
        self._learn(token_id)
        if self._number_limit is not None:
            self._number_limit.push(token_id)
        return True

    def forced_tokens(self) -> Sequence[int]:
        if self._num_ends:
            return ()
        forced = self._matcher.compute_ff_tokens()
        if not forced:
            self._raise_error()
        for i, token_id in enumerate(forced):
            if token_id in self._eos_token_ids or not has_token(self._allowed, token_id):
                return forced[:i]
        return forced

    def likely_tokens(self) -> Sequence[int]:
        """The text that llguidance knows and holds back, as its tokens could merge with others."""
        if self._num_ends:
            return ()
        text = self._matcher.compute_ff_bytes()
        if not text:
            return ()
        likely = self._grammar.cuts.of(text)[:MAX_LIKELY_TOKENS]
        likely = likely[: self._matcher.validate_tokens(likely)]
        if likely:
            self._tried = text, likely[0]
        return likely

    def rollback(self, num_tokens: int) -> None:
        num_ends = min(self._num_ends, num_tokens)
        self._num_ends -= num_ends
        num_tokens -= num_ends
        if num_tokens:
            del self._token_ids[len(self._token_ids) - num_tokens :]
            self._tried = None
            self._matcher.rollback(num_tokens)
            self._raise_error()
            if self._number_limit is not None:
                self._number_limit.pop(num_tokens)

    def copy(self) -> "LlguidanceMatcher":
        limit = self._number_limit.copy() if self._number_limit is not None else None
        other = LlguidanceMatcher(self._grammar, self._origin, limit)
        other._matcher = self._matcher.deep_copy()
        other._token_ids = self._token_ids.copy()
        other._num_ends = self._num_ends
        return other

    def verdict(self, text: bytes) -> str | None:
        """None: the masks enforce all of a constraint."""
        return None

    def _consume(self, token_id: int) -> bool:
        matcher = self._matcher
        if matcher.try_consume_tokens([token_id]):
            return True
        if not matcher.is_error() and not matcher.is_stopped():
            matcher.compute_bitmask()  # only a mask tells whether the lexer is at fault
        if not matcher.is_error():
            return False
        self._renew()
        taken = self._matcher.try_consume_tokens([token_id])
        self._raise_error()
        return bool(taken)

    def _renew(self) -> None:
        """Put a matcher with another lexer in the place of one in the error state, where its lexer
        is spent: others may have done that. Raises GrammarError for other errors."""
        if not _is_spent(self._matcher):
            _raise_error_of(self._matcher)
        self._grammar.forget(self._origin)
        self._origin = self._grammar.origin()
        self._matcher = self._origin.deep_copy()
        for start in range(0, len(self._token_ids), _REPLAYED_AT_ONCE):
            self._matcher.try_consume_tokens(self._token_ids[start : start + _REPLAYED_AT_ONCE])
            self._matcher.compute_bitmask()  # the lexer's limit of work begins anew with a mask
        self._raise_error()

    def _raise_error(self) -> None:
        """Where the matcher is in the error state. What it spent is kept from other answers."""
        if self._matcher.is_error():
            if _is_spent(self._matcher):
                self._grammar.forget(self._origin)
            _raise_error_of(self._matcher)

    def _learn(self, token_id: int) -> None:
        """Whether a text was begun with the token that was likely, and if not, with which."""
        tried, self._tried = self._tried, None
        if tried is not None and token_id != tried[1]:
            self._grammar.cuts.learn(tried[0], token_id)

    def _ends_only(self) -> bool:
        """What llguidance does not always tell by itself: of the empty answer, and of numbers."""
        mask = np.empty_like(self._allowed)
        self.fill_mask(mask)
        clear_tokens(mask, self._eos_token_ids)
        return not mask.any()

    def _allows(self, token_id: int) -> bool:
        """What llguidance does not know of: special tokens, and the limit of numbers."""
        if not 0 <= token_id < 32 * len(self._allowed) or not has_token(self._allowed, token_id):
            return False
        if self._number_limit is None or not self._number_limit.is_reached:
            return True
        mask = np.empty_like(self._allowed)
        self.fill_mask(mask)
        return has_token(mask, token_id)


class _TokenizerObject:
    """What llguidance's TokenizerWrapper asks for. Its call must not raise: Rust is above it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        padding = (b"",) * (vocabulary.logits_size - len(vocabulary.token_bytes))
        self.tokens = list(vocabulary.token_bytes + padding)
        self.special_token_ids = list(vocabulary.special_token_ids)
        self.eos_token_id = next(iter(vocabulary.eos_token_ids), 0)
        self.bos_token_id = None
        self._encode = vocabulary.encode
        self._id_by_bytes = {
            token: i for i, token in enumerate(vocabulary.token_bytes) if token
        } | {vocabulary.token_bytes[i]: -1 for i in vocabulary.special_token_ids}
        self._max_token_len = max(map(len, vocabulary.token_bytes), default=1)
        self._kept_ids = lru_cache(_MAX_KEPT_TEXTS)(self._ids_of)

    def __call__(self, text: str) -> Sequence[int]:
        """Ids whose bytes are the text's, as the tokenizer has them where it can.

        Short texts are kept: they are the keys of schemas, asked for in every answer.
        """
        return self._kept_ids(text) if len(text) <= _MAX_KEPT_CHARS else self._ids_of(text)

    def _ids_of(self, text: str) -> list[int]:
        """Tokenizers that put a space in front of a text are asked with a line feed before it."""
        wanted = text.encode(errors="replace")
        for prefix in ("", "\n"):
            token_ids = self._encoded_after(prefix, text)
            if b"".join(self.tokens[i] for i in token_ids) == wanted:
                return token_ids
        return self._greedy(wanted)

    def _encoded_after(self, prefix: str, text: str) -> list[int]:
        try:
            token_ids = [int(i) for i in self._encode(prefix + text)]
        except Exception:  # whatever it is, the greedy way is left
            logger.debug("a forced text cannot be encoded", exc_info=True)
            return []
        for count in range(len(token_ids) + 1):
            if b"".join(self.tokens[i] for i in token_ids[:count]).strip(b" ") == prefix.encode():
                return token_ids[count:]
        return []

    def _greedy(self, text: bytes) -> list[int]:
        """The longest token at each place. A byte that no token has is left out."""
        token_ids, at = [], 0
        while at < len(text):
            for size in range(min(self._max_token_len, len(text) - at), 0, -1):
                token_id = self._id_by_bytes.get(text[at : at + size], -1)
                if token_id >= 0:
                    token_ids.append(token_id)
                    break
            at += max(size, 1)
        return token_ids


def _tokenizer_of(text_tokens: _TokenizerObject, vocabulary: Vocabulary) -> "LLTokenizer":
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(
        TokenizerWrapper(text_tokens),
        eos_token=list(vocabulary.eos_token_ids) or None,
        slices=LLTokenizer.json_slices(),
    )


def _limits() -> "LLParserLimits":
    """Fuel is spent at 50,000 units per millisecond when compiling, 14,000 in a mask."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=6_000,  # an object with 1,000 optional properties has 5,000
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=MAX_MASK_FUEL,
        step_max_items=20_000,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _is_spent(matcher: "LLMatcher") -> bool:
    """Whether a matcher that is in the error state is there because its lexer is spent."""
    return any(words in matcher.get_error() for words in _LEXER_IS_SPENT)


def _raise_error_of(matcher: "LLMatcher") -> None:
    """Where the matcher is in the error state, which it never leaves."""
    if matcher.is_error():
        raise _error_of(matcher.get_error())


def _error_of(message: str) -> GrammarError:
    """What llguidance says, in our words where it is known."""
    for known, keyword, text in _KNOWN_ERRORS:
        if known in message:
            return GrammarError(text, keyword=keyword)
    first_line = message.strip().splitlines()[0] if message.strip() else "no reason given"
    return GrammarError(f"the constraint cannot be enforced: {first_line[:300]}")


def _mask_of_ordinary_tokens(vocabulary: Vocabulary) -> TokenMask:
    """All tokens but special ones; end tokens are in it."""
    special = set(vocabulary.special_token_ids) - set(vocabulary.eos_token_ids)
    bits = np.zeros(32 * vocabulary.mask_size, np.uint8)
    bits[: len(vocabulary.token_bytes)] = 1
    bits[list(special)] = 0
    return np.packbits(bits, bitorder="little").view(np.int32)


def _address(mask: TokenMask) -> int:
    """Where its words begin; a quarter of the time of numpy's own way."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mask.data))
