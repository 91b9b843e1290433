"""Tiny tokenizers of every kind, with a chat template, for tests."""

from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sapwood.runtime.tokenizer import Tokenizer

START, END = "<|start|>", "<|end|>"
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant {% endif %}"
)


def added(**flags: Any) -> list[AddedToken]:
    defaults = {"special": True, "normalized": False}
    return [AddedToken(token, **{**defaults, **flags}) for token in (START, END)]


def byte_level(*, add_prefix_space: bool = False, **flags: Any) -> Backend:
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {token: len(vocab) + i for i, token in enumerate(["Ġt", "he", "Ġthe"])}
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(added(**flags))
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return backend


def sentencepiece(normalizer: Any = None, pre_tokenizer: Any = None, **flags: Any) -> Backend:
    tokens = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
        "▁ab",
    ]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken("<unk>", special=True), *added(**flags)])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return backend


def prepend() -> Any:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def metaspace(scheme: str) -> Any:
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)


def tokenizer_of(backend: Backend) -> Tokenizer:
    return Tokenizer(backend, special_tokens={}, eos_token_ids=(), chat_template=TEMPLATE)
