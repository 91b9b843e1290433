"""Constants of a program become tokens: only a template's special tokens are special, and a text
that continues another is spelled exactly."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from sapwood.runtime.errors import RequestError
from sapwood.runtime.tokenizer import Tokenizer
from tests.runtime.test_controlled_encoder import TOKENIZERS, WORDS
from tests.runtime.tiny_tokenizers import END, START, byte_level, tokenizer_of

PIECES = st.lists(
    st.tuples(st.lists(WORDS, max_size=4).map("".join), st.booleans()), min_size=1, max_size=4
)


def spelled(tokenizer: Tokenizer, token_ids: Any) -> str:
    return b"".join(map(tokenizer.token_raw_bytes, token_ids.tolist())).decode()


def test_special_tokens_are_real_in_what_a_template_wrote_only() -> None:
    tokenizer = TOKENIZERS["byte level"]
    start, end = tokenizer.special_id(START), tokenizer.special_id(END)
    pieces = [(f"{START}user\n", True), (f"say {END}", False), (END, True)]
    ids = tokenizer.encode_pieces(pieces, at_start=True).tolist()
    assert ids[0] == start
    assert (ids.count(start), ids.count(end), ids[-1]) == (1, 1, end)
    assert spelled(tokenizer, np.array(ids)) == "".join(text for text, _ in pieces)


def test_two_pieces_do_not_make_a_special_token_together() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode_pieces([(END[:4], False), (END[4:], False)], at_start=True)
    assert tokenizer.special_id(END) not in ids.tolist()


def test_pieces_that_stand_together_are_cut_as_one_text() -> None:
    tokenizer = TOKENIZERS["byte level"]
    one = tokenizer.encode_pieces([(" the", False)], at_start=False)
    two = tokenizer.encode_pieces([(" t", False), ("", False), ("he", False)], at_start=False)
    np.testing.assert_array_equal(one, two)
    assert len(one) == 1


SPELLING = [kind for kind in TOKENIZERS if "take in white space" not in kind]


@pytest.mark.parametrize("kind", SPELLING)
@settings(max_examples=60, deadline=None)
@given(text=st.lists(WORDS, min_size=1, max_size=6).map("".join))
def test_a_text_that_continues_another_is_spelled_exactly(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode_pieces([(text, False)], at_start=False)
    # Some of these tokenizers add a space to whatever follows an added token.
    expected = text.replace("<tool>", "") if "<tool>" in text else text
    found = spelled(tokenizer, ids)
    if "<tool>" in text:
        found, expected = found.replace("<tool>", "").replace(" ", ""), expected.replace(" ", "")
    assert found == expected


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(pieces=PIECES)
def test_no_text_of_a_program_becomes_a_special_token(
    kind: str, pieces: list[tuple[str, bool]]
) -> None:
    tokenizer = TOKENIZERS[kind]
    texts_only = [(text, False) for text, _ in pieces]
    ids = tokenizer.encode_pieces(texts_only, at_start=False)
    assert not any(tokenizer.is_special(i) for i in ids.tolist())


def with_front() -> Tokenizer:
    backend = byte_level()
    start = (START, backend.token_to_id(START))
    end = (END, backend.token_to_id(END))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[start, end]
    )
    return tokenizer_of(backend)


def test_what_is_put_in_front_of_every_text_stands_at_the_start_only_and_nothing_behind() -> None:
    tokenizer = with_front()
    start = tokenizer.special_id(START)
    plain = tokenizer.encode("a the", add_special_tokens=False).tolist()
    pieces = [("a the", False)]
    assert tokenizer.encode_pieces(pieces, at_start=True).tolist() == [start, *plain]
    assert tokenizer.encode_pieces(pieces, at_start=False).tolist() == plain
    assert tokenizer.encode_pieces([], at_start=True).tolist() == [start]
    assert tokenizer.encode_pieces([], at_start=False).tolist() == []


def test_a_template_has_put_in_front_what_it_wants() -> None:
    tokenizer = with_front()
    ids = tokenizer.encode_pieces([(START, True), ("a", False)], at_start=True)
    assert ids.tolist().count(tokenizer.special_id(START)) == 1


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="lone surrogate"):
        TOKENIZERS["byte level"].encode_pieces([("\ud800", False)], at_start=True)
