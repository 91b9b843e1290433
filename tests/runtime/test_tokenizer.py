"""The tokenizer: exact bytes per token, whatever a checkpoint folder may say about the rest."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from sapwood.runtime.errors import RequestError, UnsupportedModelError
from sapwood.runtime.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level_backend() -> Backend:
    """GPT-2's scheme, with merges, special tokens and added tokens of several kinds."""
    tokens = ["<|end|>", "<|start|>", *ALPHABET, "Ġt", "he", "Ġthe", "Ã©", "ðŁ"]
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ã", "©"), ("ð", "Ł")]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 1)]
    )
    backend.add_special_tokens(["<|end|>", "<|start|>"])
    backend.add_tokens([AddedToken("<tool>"), AddedToken("  "), AddedToken("漢"), AddedToken("é")])
    return backend


def sentencepiece_backend(decoder: Any) -> Backend:
    """Llama's older scheme: a mark for the space, and a token per byte for what is not known."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "b", "▁a", "ab", "▁ab", "é", "▁▁", "<", ">"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", "▁")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoder
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("<tool▁call>", normalized=False)])
    return backend


LLAMA_DECODER = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
GEMMA_DECODER = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
)
METASPACE_DECODER = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])


def wrap(backend: Backend, **options: Any) -> Tokenizer:
    defaults = {"special_tokens": {}, "eos_token_ids": (), "chat_template": None}
    return Tokenizer(backend, **{**defaults, **options})


BYTE_LEVEL = wrap(byte_level_backend())
LLAMA = wrap(sentencepiece_backend(LLAMA_DECODER))
GEMMA = wrap(sentencepiece_backend(GEMMA_DECODER))


def joined(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes[token_id] for token_id in ids)


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1)))
def test_byte_level_bytes_are_exactly_what_decode_decodes(ids: list[int]) -> None:
    assert joined(BYTE_LEVEL, ids).decode(errors="replace") == BYTE_LEVEL.decode(ids)


@pytest.mark.parametrize("tokenizer", [LLAMA, GEMMA])
@given(data=st.data())
def test_sentencepiece_bytes_are_exactly_what_decode_adds_to_a_text(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Runs of byte tokens are whole characters here; the next test has the others."""
    word = st.sampled_from([0, 1, 2, *range(259, tokenizer.vocab_size)]).map(lambda i: [i])
    character = st.characters(codec="utf-8").map(lambda c: [3 + byte for byte in c.encode()])
    runs = data.draw(st.lists(st.one_of(word, character)))
    ids = [token_id for run in runs for token_id in run]
    anchor = 260  # "a": the text has begun, so no leading space is dropped
    assert "a" + joined(tokenizer, ids).decode() == tokenizer.decode([anchor, *ids])


def test_valid_characters_in_an_invalid_run_of_byte_tokens_are_kept() -> None:
    ids = [3 + byte for byte in "é".encode() + b"\xff"]
    assert LLAMA.decode(ids) == "\ufffd" * 3
    assert joined(LLAMA, ids).decode(errors="replace") == "é\ufffd"


@given(st.text().filter(lambda text: "é" not in text))  # an added token that decodes to a byte
def test_text_comes_back_from_byte_level_ids(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert joined(BYTE_LEVEL, ids.tolist()) == text.encode()


@pytest.mark.parametrize(
    ("spelling", "added"), [("<|end|>", b""), ("<tool>", b"<tool>"), ("漢", "漢".encode())]
)
def test_special_tokens_add_nothing_and_added_tokens_their_spelling(
    spelling: str, added: bytes
) -> None:
    ids = BYTE_LEVEL.encode(spelling, add_special_tokens=False)
    assert len(ids) == 1
    assert joined(BYTE_LEVEL, ids.tolist()) == added


def test_ids_that_only_the_model_knows_add_nothing() -> None:
    tokenizer = wrap(byte_level_backend(), model_vocab_size=1000)
    assert len(tokenizer.token_bytes) == 1000
    assert set(tokenizer.token_bytes[tokenizer.vocab_size :]) == {b""}


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        METASPACE_DECODER,
    ],
)
def test_a_decoder_that_looks_at_neighbours_is_refused(decoder: Any) -> None:
    backend = sentencepiece_backend(LLAMA_DECODER)
    backend.decoder = decoder
    with pytest.raises(UnsupportedModelError, match="token by token"):
        _ = wrap(backend).token_bytes


def test_a_token_is_shown_as_a_person_may_read_it() -> None:
    end, half = 0, BYTE_LEVEL.encode("\u0100", add_special_tokens=False)[0]
    assert BYTE_LEVEL.token_text(end) == "<|end|>"
    assert BYTE_LEVEL.token_raw_bytes(end) == b"<|end|>"
    assert BYTE_LEVEL.token_text(int(half)) == "\ufffd"
    assert BYTE_LEVEL.token_raw_bytes(10**6) == b""


def test_ids_are_contiguous_int32_whatever_the_text() -> None:
    for text in ("", "the", "é" * 100):
        ids = BYTE_LEVEL.encode(text)
        assert ids.dtype == np.int32
        assert ids.ndim == 1 and ids.flags.c_contiguous
        assert ids[0] == 1
        np.testing.assert_array_equal(ids[1:], BYTE_LEVEL.encode(text, add_special_tokens=False))


def test_a_batch_is_encoded_as_its_texts_alone() -> None:
    texts = ["the", "", "a the 漢"]
    for ids, text in zip(BYTE_LEVEL.encode_batch(texts), texts, strict=True):
        np.testing.assert_array_equal(ids, BYTE_LEVEL.encode(text))


def test_a_prompt_is_never_cut_or_padded_by_the_file() -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = wrap(backend)
    assert len(tokenizer.encode("x" * 50, add_special_tokens=False)) == 50
    assert len(tokenizer.encode("x", add_special_tokens=False)) == 1


@pytest.mark.parametrize("call", ["encode", "encode_batch"])
def test_a_lone_surrogate_is_a_request_error(call: str) -> None:
    text = json.loads('"ab\\ud800"')
    with pytest.raises(RequestError, match="surrogate at character 2") as refusal:
        getattr(BYTE_LEVEL, call)(text if call == "encode" else ["fine", text])
    assert refusal.value.param == "prompt"


@pytest.mark.parametrize("token_id", [-1, BYTE_LEVEL.vocab_size, 2**40])
def test_decoding_an_id_outside_the_vocabulary_is_a_request_error(token_id: int) -> None:
    with pytest.raises(RequestError, match=str(token_id)):
        BYTE_LEVEL.decode([5, token_id])


def test_decode_takes_arrays_and_shows_special_tokens_when_asked() -> None:
    ids = np.array([1, *BYTE_LEVEL.encode(" the", add_special_tokens=False)], dtype=np.int32)
    assert BYTE_LEVEL.decode(ids) == " the"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "<|start|> the"


def test_threads_get_the_same_ids() -> None:
    text = "the é 漢 " * 500
    expected = BYTE_LEVEL.encode(text)
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(BYTE_LEVEL.encode(text))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(np.array_equal(ids, expected) for ids in results)


def folder_with(folder: Path, **files: Any) -> Path:
    byte_level_backend().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_end_tokens_are_gathered_from_all_files(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path,
        config={"eos_token_id": 7},
        generation_config={"eos_token_id": [5, 7]},
        tokenizer_config={"eos_token": {"content": "<|end|>"}, "bos_token": None},
        special_tokens_map={"bos_token": "<|start|>", "eos_token": "a"},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == (5, 7, 0)
    assert tokenizer.bos_token_id == 1


def test_a_folder_with_nothing_but_the_tokenizer_is_enough(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(str(folder_with(tmp_path)))
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.bos_token_id is None
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template") as refusal:
        tokenizer.render_chat([{"role": "user", "content": "x"}])
    assert refusal.value.param == "messages"


def test_the_vocabulary_of_the_text_model_counts(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config={"text_config": {"vocab_size": 700, "eos_token_id": 3}})
    tokenizer = Tokenizer.from_folder(folder)
    assert len(tokenizer.token_bytes) == 700
    assert tokenizer.eos_token_ids == (3,)


def test_a_chat_is_encoded_without_a_second_start_token(tmp_path: Path) -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    config = {"bos_token": "<|start|>", "chat_template": source}
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, tokenizer_config=config))
    assert tokenizer.has_chat_template
    chat = [{"role": "user", "content": "the"}]
    assert tokenizer.render_chat(chat).text == "<|start|>the"
    np.testing.assert_array_equal(tokenizer.encode_chat(chat), tokenizer.encode("the"))


def test_of_several_templates_the_default_is_taken_and_a_file_comes_first(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    folder = folder_with(tmp_path, tokenizer_config={"chat_template": named})
    chat = [{"role": "user", "content": "x"}]
    assert Tokenizer.from_folder(folder).render_chat(chat).text == "D"
    (folder / "chat_template.jinja").write_text("F", encoding="utf-8")
    assert Tokenizer.from_folder(folder).render_chat(chat).text == "F"


def test_a_missing_or_broken_tokenizer_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_file_beside_it_says_so(tmp_path: Path, content: str) -> None:
    folder = folder_with(tmp_path)
    (folder / "tokenizer_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("file", "content", "field"),
    [
        ("config", {"eos_token_id": 2.5}, "eos_token_id"),
        ("config", {"eos_token_id": ["2"]}, "eos_token_id"),
        ("config", {"eos_token_id": -1}, "eos_token_id"),
        ("generation_config", {"eos_token_id": "2"}, "eos_token_id"),
        ("generation_config", {"eos_token_id": [[2]]}, "eos_token_id"),
        ("config", {"text_config": "x"}, "text_config"),
        ("config", {"vocab_size": "many"}, "vocab_size"),
        ("tokenizer_config", {"chat_template": 5}, "chat_template"),
        ("tokenizer_config", {"chat_template": {"default": "D"}}, "chat_template"),
        ("tokenizer_config", {"chat_template": [{"template": "D"}]}, "chat_template"),
        ("tokenizer_config", {"chat_template": [{"name": "default"}]}, "chat_template"),
        ("tokenizer_config", {"chat_template": ["D"]}, "chat_template"),
        ("tokenizer_config", {"chat_template": [{"name": [], "template": "D"}]}, "chat_template"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named_with_its_file(
    tmp_path: Path, file: str, content: Any, field: str
) -> None:
    folder = folder_with(tmp_path, **{file: content})
    with pytest.raises(UnsupportedModelError, match=rf"^{file}\.json: .*{field} is "):
        Tokenizer.from_folder(folder)


@pytest.mark.real_model
def test_smollm2_is_exact_and_renders_as_transformers_does(real_model: str) -> None:
    from transformers import AutoTokenizer

    from sapwood.runtime.weights import find_model

    folder = find_model(real_model)
    tokenizer, reference = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    draw = np.random.default_rng(0)
    for _ in range(20):
        ids = draw.integers(0, tokenizer.vocab_size, size=500).tolist()
        assert joined(tokenizer, ids).decode(errors="replace") == tokenizer.decode(ids)
    assert tokenizer.eos_token_ids == (2,)
    for chat in (
        [{"role": "user", "content": "Hello é 漢 😀\n"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 12 + 34? "}],
    ):
        text = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert tokenizer.render_chat(chat).text == text
        expected = reference(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode_chat(chat).tolist() == expected
