"""Constraints on a small vocabulary: which texts they accept, and texts drawn from masks."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from sapwood.runtime.constraints.spec import ConstraintSpec, Whitespace
from sapwood.runtime.constraints.structural_tag import to_lark

SPECIAL = ("<|end|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>")
# Tokens of several bytes, some of which span what a grammar keeps apart.
_MERGES = (
    *('": ', '", "', '"}', "}}", "}\n", "<tool", "tool_call", "call>", "\n</", "name", '{"', "></"),
    *("the ", "é", "日本", "😀", "=", ")]", "[ping(", "<function=", "parameter=", "12"),
    "\n</parameter>",
)
_PARTS = re.compile(
    rf"""{"|".join(map(re.escape, SPECIAL))}|"(?:[^"\\]|\\.)*"|<parameter=.*?</parameter>|.""",
    re.DOTALL,
)
_ENDS = frozenset('"}])>\n')


class _Wrapper:
    """The interface that llguidance asks of a tokenizer."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.special_token_ids = list(special_ids)
        self.eos_token_id = special_ids[0]
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        return [self.tokens.index(bytes([byte])) for byte in data]


class Walker:
    """Compiles structural tags for one vocabulary."""

    def __init__(self) -> None:
        plain = [*(bytes([i]) for i in range(256)), *(text.encode() for text in _MERGES)]
        plain = list(dict.fromkeys(plain))
        self.tokens = [*plain, *(text.encode() for text in SPECIAL)]
        self.special = {text: len(plain) + i for i, text in enumerate(SPECIAL)}
        wrapper = _Wrapper(self.tokens, tuple(self.special.values()))
        self.tokenizer = LLTokenizer(
            TokenizerWrapper(wrapper), n_vocab=len(self.tokens), eos_token=[self.special["<|end|>"]]
        )

    def lark(self, spec: ConstraintSpec) -> str:
        return self.lark_of(json.loads(spec.text), spec.whitespace)

    def lark_of(self, document: Mapping[str, Any], whitespace: Whitespace) -> str:
        spaced = whitespace is Whitespace.SPACED
        options = {"whitespace_flexible": False}
        if spaced:
            options |= {"item_separator": ", ", "key_separator": ": "}
        return to_lark(
            document,
            special_token_id=self.special.get,
            json_schema=lambda schema: {**_object(schema), "x-guidance": options},
        )

    def matcher(self, lark: str) -> LLMatcher:
        matcher = LLMatcher(self.tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(self, matcher: LLMatcher, text: str) -> bool:
        """Whether `text`, byte by byte, is a whole answer. Special tokens are tokens, but within
        quotation marks they are spelled out."""
        copy = matcher.deep_copy()
        for token in self.encode(text):
            if copy.try_consume_tokens([token]) == 0:
                return False
        return bool(copy.is_accepting())

    def encode(self, text: str) -> list[int]:
        """In single bytes, but for special tokens."""
        ids: list[int] = []
        for part in _PARTS.findall(text):
            ids += [self.special[part]] if part in self.special else part.encode()
        return ids

    def draw(self, matcher: LLMatcher, rng: random.Random, start: str = "") -> str | None:
        """An answer that begins with `start`, its tokens drawn from masks; None if it is too long.

        What ends a value is preferred, more and more, as most answers would never end.
        """
        walk = matcher.deep_copy()
        ids = self.encode(start)
        assert walk.try_consume_tokens(ids) == len(ids), start
        end = self.special["<|end|>"]
        for step in range(500):
            allowed = self._allowed(walk)
            if end in allowed and (len(allowed) == 1 or rng.random() < 0.3):
                return b"".join(self.tokens[i] for i in ids).decode(errors="strict")
            allowed = [i for i in allowed if i != end]
            closing = [i for i in allowed if chr(self.tokens[i][0]) in _ENDS]
            if closing and rng.random() < 0.3 + step / 200:
                allowed = closing
            ids.append(rng.choice(allowed))
            assert walk.consume_token(ids[-1])
        return None

    def _allowed(self, matcher: LLMatcher) -> list[int]:
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        assert not matcher.is_error(), matcher.get_error()
        bits = np.unpackbits(mask, bitorder="little")[: len(self.tokens)]
        return [int(i) for i in np.flatnonzero(bits)]


def _object(schema: Any) -> Mapping[str, Any]:
    return schema if isinstance(schema, Mapping) else {"anyOf": [{}]}
