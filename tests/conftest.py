"""A tiny model and the real one, for tests that need an engine.

The tiny model's weights are large enough that its answers hang on every key and value: a test in
tests/runtime/test_equalities.py spoils one row of the cache and sees the answer change.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it does so again.",
    "A tree maps prefixes to blocks; a block holds the keys and values of its tokens.",
    "Numbers such as 1, 22 and 333 are split into digits.",
] * 4

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE that knows every byte and a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_weights(folder: Path, *, norm: float = 1.0) -> None:
    """Random weights whose attention is sharp: standard deviation 0.15, norms of `norm`."""
    import torch
    from safetensors.torch import save_file

    from sapwood.runtime.model_config import read_model_config
    from sapwood.runtime.models import load_model_class

    config = read_model_config(folder)
    shapes = load_model_class(config.model_type).weight_shapes(config)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.full(shape, norm)
        if name.endswith("norm.weight")
        else torch.empty(shape).normal_(std=0.15, generator=generator)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")


def write_tiny_model(folder: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> Path:
    """A tiny random model, its tokenizer and a chat template; returns `folder`.

    It is a Llama unless `changes` of its config say otherwise.
    """
    tokenizer = tiny_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {**TINY_CONFIG, "vocab_size": tokenizer.get_vocab_size(), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_config = {
        "eos_token": "<|im_end|>",
        "bos_token": "<|im_start|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    # Gemma's norms multiply by one more than their weight.
    write_weights(folder, norm=0.0 if config["model_type"].startswith("gemma") else 1.0)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def write_model() -> Callable[[Path, Mapping[str, Any]], Path]:
    """Writes a tiny model with other settings into a folder, and returns that."""
    return write_tiny_model


@pytest.fixture(scope="session")
def real_model() -> Iterator[str]:
    """SmolLM2, if it was pulled."""
    from sapwood.runtime.pull import packaged_model_path

    if not packaged_model_path("smollm2").exists():
        pytest.skip("SmolLM2 is not in the cache; run `sapwood pull smollm2`")
    yield "smollm2"
