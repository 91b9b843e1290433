"""Vocabularies for tests of constraint backends."""

from collections.abc import Sequence

from sapwood.runtime.constraints.interface import Vocabulary
from sapwood.runtime.tokenizer import Tokenizer
from tests.conftest import SPECIAL_TOKENS, tiny_tokenizer

NUM_SPARE_ROWS = 13  # of the model, beyond the tokenizer's


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Of a model that has a few rows more than the tokenizer has tokens."""

    def encode(text: str) -> Sequence[int]:
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).tolist()
        return token_ids

    ids = range(tokenizer.vocab_size)
    return Vocabulary(
        token_bytes=tuple(map(tokenizer.token_raw_bytes, ids)) + (b"",) * NUM_SPARE_ROWS,
        special_token_ids=tuple(filter(tokenizer.is_special, ids)),
        eos_token_ids=tokenizer.eos_token_ids,
        logits_size=tokenizer.vocab_size + NUM_SPARE_ROWS,
        encode=encode,
    )


def tiny_vocabulary() -> Vocabulary:
    """Every byte, a few words, three special tokens of which the first and the last are ends."""
    backend = tiny_tokenizer()
    ends = tuple(backend.token_to_id(token) for token in (SPECIAL_TOKENS[0], SPECIAL_TOKENS[2]))
    return vocabulary_of(
        Tokenizer(backend, special_tokens={}, eos_token_ids=ends, chat_template=None)
    )
