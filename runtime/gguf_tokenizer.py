"""The tokenizer inside a .gguf file as tokenizer.json and tokenizer_config.json.

A GGUF names its way of cutting text before byte-pair encoding (`tokenizer.ggml.pre`) without
describing it. Served are the ones below, each exactly as the model's own tokenizer.json has it; any
other is refused, since a near miss would give the model text it was never trained on. Of a
sentencepiece model the file holds pieces and scores, which say it all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

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

from sapwood.runtime.checkpoint_json import field_of
from sapwood.runtime.errors import ModelError, UnsupportedModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # gguf.TokenType
_WHERE = "the GGUF file"
_SPACE = "\u2581"  # how sentencepiece spells a space
_ROLES = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
# Phi-3's special tokens swallow the space after them, all but these. Files do not say so.
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")

Metadata = Mapping[str, Any]


def write_tokenizer(metadata: Metadata, folder: Path) -> None:
    """Write the tokenizer and, where the file has one, the chat template.

    Raises UnsupportedModelError for a kind that cannot be rebuilt exactly, ModelError where parts
    are missing or do not fit each other.
    """
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    tokens = _list(metadata, "tokens", str)
    for role, key in _ROLES:
        if (token_id := _token_id(metadata, key, tokens)) is not None:
            config[f"{role}_token"] = tokens[token_id]
    if template := field_of(metadata, "tokenizer.chat_template", str, "", where=_WHERE):
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer that a GGUF's tokens, types and merges or scores describe."""
    kind = _field(metadata, "model", str)
    pre = field_of(metadata, "tokenizer.ggml.pre", str, "default", where=_WHERE)
    if kind == "llama" and pre == "default":
        build, adds_bos = _sentencepiece, True
    elif kind == "gpt2" and pre in _CUTTINGS:
        build, adds_bos = _byte_level, _CUTTINGS[pre].adds_bos
    else:
        raise UnsupportedModelError(
            f"a GGUF tokenizer of kind {kind!r:.40} with pre-tokenizer {pre!r:.40} is not served; "
            f"served are 'llama' with 'default' and 'gpt2' with {', '.join(_CUTTINGS)}. Load the "
            "model's safetensors folder or hub id instead"
        )
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int)
    if len(types) != len(tokens):
        raise ModelError(f"{_WHERE} has {len(tokens)} tokens and {len(types)} token types")
    try:
        tokenizer = build(metadata, tokens, types)
    except (ModelError, MemoryError):
        raise
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{_WHERE} has a tokenizer that does not fit together: {error}") from error
    if _field(metadata, "add_eos_token", bool, False):
        raise UnsupportedModelError(f"{_WHERE} wants an end token after every text: not served")
    if _field(metadata, "add_bos_token", bool, adds_bos):
        tokenizer.post_processor = _first_token(metadata, tokens)
    _add_tokens(tokenizer, metadata, tokens, types)
    return tokenizer


def _first_token(metadata: Metadata, tokens: list[str]) -> processors.PostProcessor:
    """Puts the beginning-of-text token before every text."""
    bos_id = _token_id(metadata, "bos", tokens)
    if bos_id is None:
        raise ModelError(f"{_WHERE} lacks tokenizer.ggml.bos_token_id")
    bos = tokens[bos_id]
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )


def _add_tokens(
    tokenizer: Tokenizer, metadata: Metadata, tokens: list[str], types: list[int]
) -> None:
    """Make the special tokens and those that users defined be found whole in every text."""
    is_sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    special_types = (_CONTROL, _UNKNOWN) if is_sentencepiece else (_CONTROL,)
    swallows = is_sentencepiece and metadata.get("general.architecture") == "phi3"

    def added(wanted: tuple[int, ...], *, special: bool) -> list[AddedToken]:
        return [
            AddedToken(
                token,
                special=special,
                normalized=False,
                rstrip=swallows and token not in _PHI3_PLAIN,
            )
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in wanted
        ]

    tokenizer.add_special_tokens(added(special_types, special=True))
    tokenizer.add_tokens(added((_USER_DEFINED,), special=False))


# Byte-level byte-pair encoding (Radford et al. 2019).


class _Cutting(NamedTuple):
    """How text is cut before byte-pair encoding.

    `ignore_merges` takes a piece that is a token as it is. `adds_bos` is for files that do not say.
    """

    make: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    adds_bos: bool = False
    normalizer: Callable[[], normalizers.Normalizer] | None = None


def _gpt2_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _gpt2_words()])


def _by_pattern(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def make() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, as_bytes])

    return make


# OpenAI's patterns: cl100k, with the number of digits that make a word left open, and o200k, with
# what may follow a word left open.
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _o200k(*, suffix: str, digits: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}|\p{{N}}{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_CUTTINGS = MappingProxyType(
    {
        "smollm": _Cutting(_single_digits),
        "refact": _Cutting(_single_digits),  # StarCoder's vocabulary, Granite 3's too
        "starcoder": _Cutting(_single_digits),
        "gpt-2": _Cutting(_gpt2_words),
        "llama-bpe": _Cutting(
            _by_pattern(_CL100K.format(digits="{1,3}")), ignore_merges=True, adds_bos=True
        ),
        "dbrx": _Cutting(_by_pattern(_CL100K.format(digits="{1,3}"))),  # Phi-4's, Granite 4's
        "qwen2": _Cutting(_by_pattern(_CL100K.format(digits="")), normalizer=normalizers.NFC),
        "tekken": _Cutting(  # Mistral's since NeMo
            _by_pattern(_o200k(suffix="", digits="")), ignore_merges=True, adds_bos=True
        ),
        "gpt-4o": _Cutting(  # Phi-4-mini's
            _by_pattern(_o200k(suffix=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", digits="{1,3}"))
        ),
    }
)


def _byte_level(metadata: Metadata, tokens: list[str], types: list[int]) -> Tokenizer:
    cutting = _CUTTINGS[metadata["tokenizer.ggml.pre"]]
    merges = [_pair(merge) for merge in _list(metadata, "merges", str)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=cutting.ignore_merges,
        )
    )
    tokenizer.pre_tokenizer = cutting.make()
    tokenizer.decoder = decoders.ByteLevel()
    if cutting.normalizer is not None:
        tokenizer.normalizer = cutting.normalizer()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise ModelError(f"{_WHERE} has a merge {merge!r:.40} of one part")
    return left, right


# Sentencepiece's byte-pair encoding (Kudo & Richardson 2018).


def _sentencepiece(metadata: Metadata, tokens: list[str], types: list[int]) -> Tokenizer:
    """Pieces that are merged in the order of their scores, and bytes for what is no piece."""
    for name in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if metadata.get(f"tokenizer.ggml.{name}"):
            raise UnsupportedModelError(f"{_WHERE} has tokenizer.ggml.{name}, which is not served")
    scores = [float(score) for score in _list(metadata, "scores", float)]
    if len(scores) != len(tokens):
        raise ModelError(f"{_WHERE} has {len(tokens)} tokens and {len(scores)} scores")
    pieces = [
        (token, score)
        for token, score, token_type in zip(tokens, scores, types, strict=True)
        if token_type == _NORMAL
    ]
    vocabulary = _spelled({token: token_id for token_id, token in enumerate(tokens)}, pieces)
    unknown = _token_id(metadata, "unknown", tokens)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=list(_merges(pieces, vocabulary)),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = _field(metadata, "add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", _SPACE)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(
    pieces: list[tuple[str, float]], vocabulary: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """Every two parts of every piece, the best pieces first.

    Sentencepiece joins the neighbours whose piece scores highest, whichever parts it is made of.
    """
    for piece, _ in sorted(pieces, key=lambda scored: -scored[1]):
        for cut in range(len(piece) - 1, 0, -1):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                yield left, right


def _spelled(vocabulary: dict[str, int], pieces: list[tuple[str, float]]) -> dict[str, int]:
    """The vocabulary with a byte spelled as its character where longer pieces begin with that.

    Gemma has pieces of several tabs and none of one, which is a byte. Sentencepiece merges
    characters, be they pieces or not; this library merges tokens.
    """
    lonely = {
        character
        for piece, _ in pieces
        if len(piece) > 1
        for character in piece
        if character.isascii() and character not in vocabulary
    }
    respelled = {f"<0x{ord(character):02X}>": character for character in lonely}
    return {respelled.get(token, token): token_id for token, token_id in vocabulary.items()}


# Reading.


def _field(metadata: Metadata, name: str, kind: type[Any], default: Any = None) -> Any:
    return field_of(metadata, f"tokenizer.ggml.{name}", kind, default, where=_WHERE)


def _list(metadata: Metadata, name: str, kind: type[Any]) -> list[Any]:
    """The values of a list, all of one kind."""
    key = f"tokenizer.ggml.{name}"
    values = metadata.get(key)
    if values is None:
        raise ModelError(f"{_WHERE} lacks {key}")
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise ModelError(f"{_WHERE} has {key} that is not a list of {kind.__name__}")
    return values


def _token_id(metadata: Metadata, role: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    token_id = metadata.get(key)
    if token_id is not None and not (type(token_id) is int and 0 <= token_id < len(tokens)):
        raise ModelError(f"{_WHERE} has {key} of {token_id!r:.40}, and {len(tokens)} tokens")
    return token_id
