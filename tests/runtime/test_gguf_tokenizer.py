"""Sentencepiece tokenizers in a GGUF: pieces, scores and types become the same token ids.

Compared with sentencepiece's rule written out (join the two neighbours whose piece scores highest)
and, where it is installed, with sentencepiece itself. Byte-level ones are in test_gguf.py.
"""

from __future__ import annotations

import io
import json
import pydoc_data.topics
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers

from sapwood.runtime.errors import ModelError, UnsupportedModelError
from sapwood.runtime.gguf_tokenizer import build_tokenizer, write_tokenizer
from sapwood.runtime.tokenizer import Tokenizer

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
CORPUS = [text[:1500] for text in list(pydoc_data.topics.topics.values())[:12]]
TEXTS = [
    "Hello world, don't we'll",
    "  two spaces before,   three within and two after  ",
    " ",
    "",
    "\t\ttabs\n\n\nand lines\r\n",
    "naïve café ☕️ 日本語 🙂",
    "aaaaaaa sssssss abababab",
    "x=y;  z\u00a0\u3000",
    *[text[:400] for text in CORPUS[:6]],
]


def metadata_of(
    entries: list[tuple[str, float, int]], *, architecture: str = "llama", **more: Any
) -> dict[str, Any]:
    """Metadata of the entries (token, score, type) after <unk>, <s>, </s> and the bytes."""
    head = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    head += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    tokens, scores, types = zip(*head, *entries, strict=True)
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.token_type": list(types),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }


@pytest.fixture(scope="module")
def pieces() -> list[tuple[str, float, int]]:
    """Pieces that a training run merged, each with its rank as the score, and single characters."""
    tokenizer = Backend(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    merged = [token for token in sorted(vocabulary, key=vocabulary.__getitem__) if len(token) > 1]
    single = [token for token in vocabulary if len(token) == 1]
    # Sentencepiece gives single characters the last places.
    return [(token, -float(rank), NORMAL) for rank, token in enumerate(merged + single)]


def encoded_by_rule(text: str, metadata: dict[str, Any], *, has_prefix: bool = True) -> list[int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    scores = {
        token: score
        for token, score, kind in zip(
            tokens,
            metadata["tokenizer.ggml.scores"],
            metadata["tokenizer.ggml.token_type"],
            strict=True,
        )
        if kind == NORMAL
    }
    symbols = list((" " if has_prefix and text else "") + text)
    symbols = [SPACE if symbol == " " else symbol for symbol in symbols]
    while True:
        joined = ["".join(pair) for pair in zip(symbols, symbols[1:], strict=False)]
        known = [index for index, piece in enumerate(joined) if piece in scores]
        if not known:
            break
        best = max(known, key=lambda index: (scores[joined[index]], -index))
        symbols[best : best + 2] = [joined[best]]
    return [
        token_id
        for symbol in symbols
        for token_id in (
            [ids[symbol]] if symbol in scores else [ids[f"<0x{b:02X}>"] for b in symbol.encode()]
        )
    ]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_pieces_are_joined_by_their_scores(
    pieces: list[tuple[str, float, int]], has_prefix: bool
) -> None:
    metadata = metadata_of(pieces, add_space_prefix=has_prefix)
    tokenizer = build_tokenizer(metadata)
    for text in TEXTS:
        found = tokenizer.encode(text, add_special_tokens=False).ids
        assert found == encoded_by_rule(text, metadata, has_prefix=has_prefix)
        assert tokenizer.decode(found) == text


def test_the_order_of_scores_counts_and_not_the_order_of_pieces() -> None:
    entries = [("ab", -1.0, NORMAL), ("bc", -0.5, NORMAL), *[(c, -9.0, NORMAL) for c in "abc"]]
    tokenizer = build_tokenizer(metadata_of(entries, add_space_prefix=False))
    assert tokenizer.encode("abc", add_special_tokens=False).tokens == ["a", "bc"]


def test_a_first_token_is_put_before_every_text_unless_the_file_says_otherwise(
    pieces: list[tuple[str, float, int]],
) -> None:
    assert build_tokenizer(metadata_of(pieces)).encode("a").ids[0] == 1
    assert 1 not in build_tokenizer(metadata_of(pieces, add_bos_token=False)).encode("a").ids


def test_special_tokens_are_found_and_the_text_after_them_begins_with_a_space(
    pieces: list[tuple[str, float, int]],
) -> None:
    tokenizer = build_tokenizer(metadata_of(pieces))
    found = tokenizer.encode("<s>the</s>the<unk>", add_special_tokens=False)
    the = tokenizer.encode("the", add_special_tokens=False).ids
    assert found.ids == [1, *the, 2, *the, 0]


def test_tokens_that_users_defined_are_found_whole_and_kept_in_what_is_said() -> None:
    # As Gemma's files have them: with real spaces, and no piece of one tab.
    entries = [(c, -9.0, NORMAL) for c in f"ab{SPACE}"]
    entries += [("  ", -1000.0, USER_DEFINED), ("   ", -1000.0, USER_DEFINED)]
    entries += [
        ("\n\n", -1000.0, USER_DEFINED),
        (f"{SPACE}b", -1.0, NORMAL),
        ("\t\t", -2.0, NORMAL),
    ]
    tokenizer = build_tokenizer(metadata_of(entries, architecture="gemma3", add_space_prefix=False))
    encoding = tokenizer.encode("a   b b     b\n\na\ta\t\ta", add_special_tokens=False)
    whole = ["a", "   ", "b", f"{SPACE}b", "   ", "  ", "b", "\n\n", "a", "\t", "a", "\t\t", "a"]
    assert encoding.tokens == whole
    assert encoding.ids[9] == 3 + 9, "the tab is the token of its byte"
    assert tokenizer.decode(encoding.ids) == "a   b b     b\n\na\ta\t\ta"


def test_phi3_special_tokens_swallow_the_space_after_them(
    pieces: list[tuple[str, float, int]],
) -> None:
    entries = [*pieces, ("<|user|>", -1000.0, CONTROL), ("<|endoftext|>", -1000.0, CONTROL)]
    phi = build_tokenizer(metadata_of(entries, architecture="phi3", add_bos_token=False))
    llama = build_tokenizer(metadata_of(entries, add_bos_token=False))
    assert phi.encode("<|user|>\n the").ids == phi.encode("<|user|>the").ids
    assert llama.encode("<|user|>\n the").ids != llama.encode("<|user|>the").ids
    assert phi.encode("<|endoftext|>\nthe").ids == llama.encode("<|endoftext|>\nthe").ids


def test_the_written_tokenizer_gives_every_token_its_bytes(
    pieces: list[tuple[str, float, int]], tmp_path: Path
) -> None:
    write_tokenizer(metadata_of(pieces), tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        said = b"".join(tokenizer.token_bytes[token_id] for token_id in ids)
        assert said == (b" " + text.encode() if text else b"")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "bert"}, "kind 'bert' with pre-tokenizer 'default'"),
        ({"pre": "tekken"}, "kind 'llama' with pre-tokenizer 'tekken'"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap"),
        ({"add_eos_token": True}, "end token after every text"),
    ],
)
def test_a_kind_that_cannot_be_rebuilt_is_refused(
    pieces: list[tuple[str, float, int]], change: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        build_tokenizer(metadata_of(pieces, **change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": None}, "lacks tokenizer.ggml.tokens"),
        ({"tokens": "abc"}, "not a list of str"),
        ({"tokens": ["a", 1]}, "not a list of str"),
        ({"token_type": [1]}, "tokens and 1 token types"),
        ({"scores": [1.0]}, "tokens and 1 scores"),
        ({"scores": None}, "lacks tokenizer.ggml.scores"),
        ({"bos_token_id": 10**6}, "bos_token_id of 1000000"),
        ({"bos_token_id": None}, "lacks tokenizer.ggml.bos_token_id"),
        ({"unknown_token_id": "a"}, "unknown_token_id of 'a'"),
        ({"add_bos_token": 3}, "add_bos_token is 3"),
        ({"model": None}, "lacks 'tokenizer.ggml.model'"),
        ({"model": "gpt2", "pre": "qwen2", "merges": ["a"]}, "merge 'a' of one part"),
        ({"model": "gpt2", "pre": "qwen2", "merges": ["?? !!"]}, "does not fit together"),
    ],
)
def test_parts_that_are_missing_or_do_not_fit_are_named(
    pieces: list[tuple[str, float, int]], change: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        build_tokenizer(metadata_of(pieces, **change))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_prefix", "defined"),
    [(True, ()), (False, ()), (False, ("▁▁", "▁▁▁", "\n\n", "<table>"))],
)
def test_token_ids_are_those_of_sentencepiece(has_prefix: bool, defined: tuple[str, ...]) -> None:
    """Written as llama.cpp's converter writes a tokenizer.model with its added tokens.

    A prefix and defined tokens together are left out: after such a token, tokenizer.json and
    llama.cpp put the prefix again, and sentencepiece does not.
    """
    sentencepiece = pytest.importorskip("sentencepiece")
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.split("\n\n")]),
        model_writer=trained,
        model_type="bpe",
        vocab_size=1200,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=has_prefix,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=list(defined),
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    entries = []
    for token_id in range(model.vocab_size()):
        token, score, kind = model.IdToPiece(token_id), model.GetScore(token_id), NORMAL
        if model.IsUnknown(token_id):
            kind = UNKNOWN
        elif model.IsControl(token_id):
            kind = CONTROL
        elif model.IsByte(token_id):
            kind = BYTE
        elif token in defined:
            token, score, kind = token.replace(SPACE, " "), -1000.0, USER_DEFINED
        entries.append((token, score, kind))
    metadata = metadata_of([], add_space_prefix=has_prefix)
    for index, name in enumerate(("tokens", "scores", "token_type")):
        metadata[f"tokenizer.ggml.{name}"] = [entry[index] for entry in entries]
    tokenizer = build_tokenizer(metadata)
    for text in [*TEXTS, "<table>x</table>  y\n\n\nz"]:
        assert tokenizer.encode(text, add_special_tokens=False).ids == model.encode(text)
