"""A vocabulary as bytes, for a process that compiles; without `encode`, which cannot travel."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sapwood.runtime.constraints.interface import Vocabulary
from sapwood.runtime.constraints.messages import pack, unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """What compilers read of a `Vocabulary`."""

    token_bytes: tuple[bytes, ...]
    special_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    logits_size: int

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> "TokenTable":
        return cls(
            token_bytes=vocabulary.token_bytes,
            special_token_ids=vocabulary.special_token_ids,
            eos_token_ids=vocabulary.eos_token_ids,
            logits_size=vocabulary.logits_size,
        )

    def ordinary_tokens(self) -> Iterator[tuple[int, bytes]]:
        """Ids and bytes of the tokens that spell text: not special, no end, not empty."""
        others = {*self.special_token_ids, *self.eos_token_ids}
        for token_id, spelled in enumerate(self.token_bytes):
            if spelled and token_id not in others:
                yield token_id, spelled

    def to_bytes(self) -> bytes:
        header = {
            "special_token_ids": self.special_token_ids,
            "eos_token_ids": self.eos_token_ids,
            "logits_size": self.logits_size,
        }
        lengths = np.array([len(spelled) for spelled in self.token_bytes], dtype=np.int32)
        return pack(header, lengths.tobytes(), b"".join(self.token_bytes))

    @classmethod
    def from_bytes(cls, content: bytes) -> "TokenTable":
        header, (lengths, spelled) = unpack(content)
        ends = np.cumsum(np.frombuffer(lengths, dtype=np.int32)).tolist()
        starts = [0, *ends[:-1]]
        return cls(
            token_bytes=tuple(spelled[start:end] for start, end in zip(starts, ends, strict=True)),
            special_token_ids=tuple(header["special_token_ids"]),
            eos_token_ids=tuple(header["eos_token_ids"]),
            logits_size=header["logits_size"],
        )
