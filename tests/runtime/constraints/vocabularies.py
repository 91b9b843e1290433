"""Vocabularies for tests of constraint backends."""

from sapwood.runtime.constraints.interface import Vocabulary
from sapwood.runtime.constraints.vocabulary import vocabulary_of
from sapwood.runtime.tokenizer import Tokenizer
from tests.conftest import SPECIAL_TOKENS, tiny_tokenizer

NUM_SPARE_ROWS = 13  # of the model, beyond the tokenizer's


def tiny_vocabulary() -> Vocabulary:
    """Every byte, a few words, three special tokens of which the first and the last are ends."""
    backend = tiny_tokenizer()
    ends = tuple(backend.token_to_id(token) for token in (SPECIAL_TOKENS[0], SPECIAL_TOKENS[2]))
    tokenizer = Tokenizer(backend, special_tokens={}, eos_token_ids=ends, chat_template=None)
    return vocabulary_of(tokenizer, tokenizer.vocab_size + NUM_SPARE_ROWS)
