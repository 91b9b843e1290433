"""Constraints on a small vocabulary: which texts they accept, and texts drawn from masks."""

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from sapwood.runtime.constraints.interface import Matcher, Vocabulary
from sapwood.runtime.constraints.llguidance_backend import LlguidanceBackend
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec, Whitespace

SPECIAL = ("<|end|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>")
# Tokens of several bytes, some of which span what a grammar keeps apart.
_MERGES = (
    *('": ', '", "', '"}', "}}", "}\n", "<tool", "tool_call", "call>", "\n</", "name", '{"', "></"),
    *("the ", "é", "日本", "😀", "=", ")]", "[ping(", "<function=", "parameter=", "12"),
    "\n</parameter>",
)
_ENDS = frozenset('"}])>\n')


class Walker:
    """The real backend on a small vocabulary, in which `special` are special tokens."""

    def __init__(self, special: Sequence[str] = SPECIAL) -> None:
        plain = [*(bytes([i]) for i in range(256)), *(text.encode() for text in _MERGES)]
        self.tokens = [*plain, *(text.encode() for text in special)]
        self.special = {text: len(plain) + i for i, text in enumerate(special)}
        self.end = self.special["<|end|>"]
        self._backend = LlguidanceBackend(
            Vocabulary(
                token_bytes=tuple(self.tokens),
                special_token_ids=tuple(self.special.values()),
                eos_token_ids=(self.end,),
                logits_size=len(self.tokens),
                encode=lambda text: list(text.encode()),
            )
        )
        names = "|".join(map(re.escape, special))
        quoted = r'"(?:[^"\\]|\\.)*"|<parameter=.*?</parameter>'
        self._parts = re.compile(f"{names}|{quoted}|.", re.DOTALL)

    def matcher(self, spec: ConstraintSpec) -> Matcher:
        return self._backend.compile(spec, deadline=5.0).matcher()

    def matcher_of(self, document: Any, whitespace: Whitespace = Whitespace.COMPACT) -> Matcher:
        kind, text = ConstraintKind.STRUCTURAL_TAG, json.dumps(document)
        return self.matcher(ConstraintSpec(kind=kind, text=text, whitespace=whitespace))

    def accepts(self, matcher: Matcher, text: str) -> bool:
        """Whether `text`, byte by byte, is a whole answer. Special tokens are tokens, but within
        quotation marks and elements they are spelled out."""
        copy = matcher.copy()
        return all(map(copy.advance, self.encode(text))) and copy.is_accepting

    def encode(self, text: str) -> list[int]:
        """In single bytes, but for special tokens."""
        ids: list[int] = []
        for part in self._parts.findall(text):
            ids += [self.special[part]] if part in self.special else part.encode()
        return ids

    def draw(self, matcher: Matcher, rng: random.Random, start: str = "") -> str | None:
        """An answer that begins with `start`, its tokens drawn from masks; None if it is too long.

        What ends a value is preferred, more and more, as most answers would never end.
        """
        walk = matcher.copy()
        ids = self.encode(start)
        assert all(map(walk.advance, ids)), start
        for step in range(500):
            allowed = self.allowed(walk)
            if self.end in allowed and (len(allowed) == 1 or rng.random() < 0.3):
                return b"".join(self.tokens[i] for i in ids).decode()
            allowed = [i for i in allowed if i != self.end]
            closing = [i for i in allowed if chr(self.tokens[i][0]) in _ENDS]
            if closing and rng.random() < 0.3 + step / 200:
                allowed = closing
            ids.append(rng.choice(allowed))
            assert walk.advance(ids[-1])
        return None

    def allowed(self, matcher: Matcher) -> list[int]:
        """The tokens that may come next."""
        mask = np.zeros(-(-len(self.tokens) // 32), dtype=np.int32)
        assert matcher.fill_mask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(self.tokens)]
        return [int(i) for i in np.flatnonzero(bits)]
