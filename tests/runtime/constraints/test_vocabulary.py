"""What backends are told of a tokenizer."""

from pathlib import Path

import pytest

from sapwood.runtime.constraints.vocabulary import vocabulary_of
from sapwood.runtime.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


def test_tokens_have_their_bytes_and_special_ones_their_spelling(tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size)
    assert vocabulary.token_bytes[:3] == (b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>")
    assert vocabulary.special_token_ids == (0, 1, 2)
    assert vocabulary.eos_token_ids == (2,)
    ids = tokenizer.encode("größer than 日本").tolist()
    assert b"".join(vocabulary.token_bytes[i] for i in ids).decode() == "größer than 日本"


def test_rows_without_a_token_are_no_tokens(tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size + 5)
    assert len(vocabulary.token_bytes) == tokenizer.vocab_size
    assert vocabulary.logits_size == tokenizer.vocab_size + 5


def test_tokens_without_a_row_are_left_out(tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer, 2)
    assert vocabulary.special_token_ids == (0, 1)
    assert vocabulary.eos_token_ids == ()


def test_a_special_token_that_a_text_spells_is_text(tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size)
    for text in ("a<|im_end|>b", "plain text"):
        ids = vocabulary.encode(text)
        assert set(ids).isdisjoint(vocabulary.special_token_ids)
        assert b"".join(vocabulary.token_bytes[i] for i in ids).decode() == text
