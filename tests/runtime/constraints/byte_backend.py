"""The default backend over small vocabularies: all bytes, and some longer tokens."""

from collections.abc import Iterator

import numpy as np

from sapwood.runtime.constraints.interface import Matcher, TokenMask, Vocabulary
from sapwood.runtime.constraints.llguidance_backend import LlguidanceBackend, LlguidanceGrammar
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec

SPECIAL = (b"<eos>", b"<|call|>", b"<|user|>")
LONGER = (
    *(b'{"', b'":', b'","', b'"}', b'": "', b'", "', b'"]', b"[{", b"}}", b"}]", b"},", b'":"'),
    *(b"true", b"false", b"null", b"name", b"the", b"ing", b"er", b"  ", b"\n  ", b"00", b"12"),
    *(b"000", b"1.", b".5", b"foo", b"bar", b"ba", b"er foo", "é".encode(), "日本".encode()),
)


def vocabulary(*longer: bytes) -> Vocabulary:
    """Bytes, `longer` tokens, then the special ones; texts are encoded by the longest token."""
    tokens = (*(bytes([i]) for i in range(256)), *longer)
    ids = {token: i for i, token in enumerate(tokens)}
    first_special = len(tokens)

    def encode(text: str) -> list[int]:
        return list(_longest(text.encode(), ids))

    return Vocabulary(
        token_bytes=(*tokens, *SPECIAL),
        special_token_ids=tuple(range(first_special, first_special + len(SPECIAL))),
        eos_token_ids=(first_special,),
        logits_size=first_special + len(SPECIAL) + 7,
        encode=encode,
    )


def _longest(text: bytes, ids: dict[bytes, int]) -> Iterator[int]:
    size = max(map(len, ids))
    at = 0
    while at < len(text):
        token = next(text[at : at + n] for n in range(size, 0, -1) if text[at : at + n] in ids)
        yield ids[token]
        at += len(token)


def compiled(
    backend: LlguidanceBackend, text: str, kind: ConstraintKind = ConstraintKind.REGEX
) -> LlguidanceGrammar:
    return backend.compile(ConstraintSpec(kind=kind, text=text), deadline=5)


def allowed(matcher: Matcher, size: int) -> list[int]:
    """The ids in a mask, of which every word has been written."""
    mask: TokenMask = np.full(-(-size // 32), -1, np.int32)
    assert matcher.fill_mask(mask)
    return [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def accepts(grammar: LlguidanceGrammar, text: str) -> bool:
    """Whether a text is an answer, byte by byte; masks and `advance` must agree on each."""
    matcher = grammar.matcher()
    mask: TokenMask = np.empty(9, np.int32)
    for byte in text.encode():
        matcher.fill_mask(mask)
        is_allowed = bool(int(mask[byte >> 5]) >> (byte & 31) & 1)
        assert matcher.advance(byte) == is_allowed
        if not is_allowed:
            return False
    return matcher.is_accepting
