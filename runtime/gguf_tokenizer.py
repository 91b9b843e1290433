"""The tokenizer inside a .gguf file as tokenizer.json and tokenizer_config.json.

A GGUF names its way of cutting text before byte-pair encoding (`tokenizer.ggml.pre`) without
describing it. Served are the ones below, each exactly as the model's own tokenizer.json has it; any
other is refused, since a near miss would give the model text it was never trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from sapwood.runtime.errors import ModelError, UnsupportedModelError

_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType
_PRE_TOKENIZERS = ("smollm", "gpt-2", "llama-bpe", "qwen2")
# OpenAI's cl100k pattern; the two differ in how many digits make a word.
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write the tokenizer and, where the file has one, the chat template.

    Raises UnsupportedModelError for a kind that cannot be rebuilt exactly, ModelError where parts
    are missing.
    """
    try:
        tokens = metadata["tokenizer.ggml.tokens"]
        build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    except KeyError as error:
        raise ModelError(f"the GGUF file lacks {error.args[0]}") from error
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{role}_token"] = tokens[token_id]
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """A byte-level byte-pair tokenizer from a GGUF's tokens, merges and token types."""
    kind, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"a GGUF tokenizer of kind {kind!r} with pre-tokenizer {pre!r} is not served; served "
            f"is 'gpt2' with {', '.join(_PRE_TOKENIZERS)}. Load the model's safetensors folder or "
            "hub id instead"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos_id = metadata["tokenizer.ggml.bos_token_id"]
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    types = metadata["tokenizer.ggml.token_type"]
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            is_special = token_type == _CONTROL
            added = AddedToken(token, special=is_special, normalized=False)
            (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)([added])
    return tokenizer


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([digits, words])
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    pattern = Regex(_CL100K.format(digits="{1,3}" if pre == "llama-bpe" else ""))
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, as_bytes])
