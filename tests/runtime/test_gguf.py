"""A .gguf file becomes the model and the tokenizer it was made from.

The files are written here the way llama.cpp's converter writes them: rotary coordinates next to
each other, tokenizer as lists of tokens and merges.
"""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sapwood.kernels import load_kernels
from sapwood.runtime.errors import ModelError, UnsupportedModelError
from sapwood.runtime.gguf_convert import convert_gguf
from sapwood.runtime.pull import packaged_model_path
from sapwood.runtime.weights import find_model, load_model

TEXTS = [
    "Hello world, don't we'll I'VE it's",
    "3.14159 and 2024-01-02 12345, x2 =   7",
    "naïve café ☕️ 日本語 кириллица العربية हिन्दी ١٢٣ ½ ² Ⅷ",
    "🙂🙃👨‍👩‍👧‍👦\u200b\u00a0 wide\u3000space",
    "def f(x):\n\treturn x**2  # comment\n\n\n    pass\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>",
    "  both ends  ",
    "",
    " ",
    "\n \n",
    *[text[:2000] for text in list(pydoc_data.topics.topics.values())[:10]],
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = "<think>"
HIDDEN_SIZE, HEAD_DIM = 32, 8  # a row of 32 is one quantised block


@pytest.fixture(scope="module")
def vocabulary() -> dict[str, Any]:
    """Tokens, types and merges of a small byte-level tokenizer, as a GGUF lists them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[*SPECIAL, USER_DEFINED],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [3] * len(SPECIAL) + [4] + [1] * (len(tokens) - len(SPECIAL) - 1)
    return {"tokens": tokens, "types": types, "merges": [" ".join(m) for m in model["merges"]]}


def random_llama(vocab_size: int, **overrides: Any) -> LlamaForCausalLM:
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(fields | overrides))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=0.3)
    return model


def pairs_together(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """The order of a head's outputs in a GGUF: the coordinates of each frequency side by side."""
    halves = weights.reshape(num_heads, 2, HEAD_DIM // 2, -1)
    return halves.swapaxes(1, 2).reshape(weights.shape)


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    vocabulary: dict[str, Any],
    *,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    kind: str = "gpt2",
    pre: str = "smollm",
    adds_bos: bool = False,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    writer.add_token_merges(vocabulary["merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_add_bos_token(adds_bos)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weights = tensor.numpy()
        if "q_proj" in name:
            weights = pairs_together(weights, config.num_attention_heads)
        elif "k_proj" in name:
            weights = pairs_together(weights, config.num_key_value_heads)
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        kept = quantisation if weights.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(weights, kept), raw_dtype=kept)
    for name, weights in (extra_tensors or {}).items():
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted(folder: Path, *args: Any, **options: Any) -> Path:
    write_gguf(folder / "model.gguf", *args, **options)
    target = folder / "converted"
    target.mkdir()
    convert_gguf(folder / "model.gguf", target)
    return target


@pytest.mark.parametrize("is_tied", [True, False])
def test_float_weights_come_back_as_they_were(
    tmp_path: Path, vocabulary: dict[str, Any], is_tied: bool
) -> None:
    model = random_llama(len(vocabulary["tokens"]), tie_word_embeddings=is_tied)
    folder = converted(tmp_path, model, vocabulary)
    expected = dict(model.state_dict())
    if is_tied:
        del expected["lm_head.weight"]
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16"])
def test_quantised_weights_come_back_within_their_precision(
    tmp_path: Path, vocabulary: dict[str, Any], kind: str
) -> None:
    model = random_llama(len(vocabulary["tokens"]))
    quantisation = gguf.GGMLQuantizationType[kind]
    folder = converted(tmp_path, model, vocabulary, quantisation=quantisation)
    tolerance = 0.2 if kind.startswith("Q4") else 0.01
    weights = load_file(folder / "model.safetensors")
    for name, expected in model.state_dict().items():
        assert weights[name].dtype == torch.float32
        assert (weights[name] - expected).abs().max() <= tolerance * expected.abs().max()


def test_the_converted_folder_loads_in_transformers_and_here(
    tmp_path: Path, vocabulary: dict[str, Any]
) -> None:
    model = random_llama(len(vocabulary["tokens"]))
    folder = converted(tmp_path, model, vocabulary)
    again = LlamaForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(20).unsqueeze(0)
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, model(ids).logits)
    loaded = load_model(folder, kernels=load_kernels("reference"))
    assert loaded.config.rms_norm_eps == 1e-5
    assert loaded.config.eos_token_ids == (2, 0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template == "{{ messages[0].content }}"


def test_a_file_is_converted_once_and_again_only_when_it_changes(
    tmp_path: Path, vocabulary: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    model = random_llama(len(vocabulary["tokens"]))
    write_gguf(path, model, vocabulary)
    first = find_model(path)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert find_model(path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    write_gguf(path, model, vocabulary, adds_bos=True)
    assert find_model(path) != first


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_read_back_from_its_divisors(
    tmp_path: Path, vocabulary: dict[str, Any], factor: float
) -> None:
    # Only slow frequencies are divided; so small a head has slow ones only with a large base.
    parameters: dict[str, Any] = {
        "rope_type": "llama3",
        "rope_theta": 5e6,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = random_llama(len(vocabulary["tokens"]), rope_parameters=parameters)
    plain = {"rope_type": "default", "rope_theta": 5e6}
    unscaled = random_llama(32, rope_parameters=plain).model.rotary_emb.inv_freq
    divisors = (unscaled / model.model.rotary_emb.inv_freq).numpy()
    assert divisors.max() == pytest.approx(factor)
    folder = converted(tmp_path, model, vocabulary, extra_tensors={"rope_freqs.weight": divisors})
    assert json.loads((folder / "config.json").read_text())["rope_parameters"] == parameters


def test_other_divisors_are_refused(tmp_path: Path, vocabulary: dict[str, Any]) -> None:
    model = random_llama(len(vocabulary["tokens"]))
    divisors = np.array([1, 2, 3, 4], dtype=np.float32)
    with pytest.raises(UnsupportedModelError, match="not the scaling of a released Llama 3"):
        converted(tmp_path, model, vocabulary, extra_tensors={"rope_freqs.weight": divisors})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"architecture": "mamba"}, "'mamba' GGUF; served as GGUF are llama"),
        ({"kind": "bert"}, "kind 'bert' with pre-tokenizer 'smollm'"),
        ({"pre": "falcon"}, "'llama' with 'default' and 'gpt2' with smollm"),
        ({"extra_tensors": {"blk.0.attn_rot_embd": np.ones(4)}}, "tensor 'blk.0.attn_rot_embd'"),
    ],
)
def test_what_is_not_served_is_named(
    tmp_path: Path, vocabulary: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    model = random_llama(len(vocabulary["tokens"]))
    with pytest.raises(UnsupportedModelError, match=said):
        converted(tmp_path, model, vocabulary, **options)


def test_a_damaged_file_is_named(tmp_path: Path, vocabulary: dict[str, Any]) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, random_llama(len(vocabulary["tokens"])), vocabulary)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        convert_gguf(path, tmp_path)
    path.write_bytes(b"not at all")
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        convert_gguf(path, tmp_path)


def as_its_own_tokenizer_cuts(pre: str) -> pre_tokenizers.PreTokenizer | None:
    """The cutting that transformers leaves out when it reads a GGUF, else None."""
    if pre not in ("smollm", "refact", "starcoder"):
        return None
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated")
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


@pytest.mark.parametrize(
    "pre",
    ["smollm", "refact", "starcoder", "gpt-2", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o"],
)
def test_tokens_are_those_of_transformers(
    tmp_path: Path, vocabulary: dict[str, Any], pre: str
) -> None:
    model = random_llama(len(vocabulary["tokens"]))
    folder = converted(tmp_path, model, vocabulary, pre=pre)
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf").backend_tokenizer
    if cutting := as_its_own_tokenizer_cuts(pre):
        theirs.pre_tokenizer = cutting
    if pre == "qwen2":
        theirs.normalizer = normalizers.NFC()
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def test_digits_of_smollm_are_single_and_leave_the_spaces_before_them_whole(
    tmp_path: Path, vocabulary: dict[str, Any]
) -> None:
    folder = converted(tmp_path, random_llama(len(vocabulary["tokens"])), vocabulary)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("  12").tokens[-3:] == ["ĠĠ", "1", "2"]


def test_special_tokens_are_one_token_and_only_special_ones_are_skipped(
    tmp_path: Path, vocabulary: dict[str, Any]
) -> None:
    folder = converted(tmp_path, random_llama(len(vocabulary["tokens"])), vocabulary)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("<|im_start|><think>").ids
    assert ids == [1, 3]
    assert tokenizer.decode(ids) == "<think>"


def test_the_first_token_is_added_where_the_file_says_so(
    tmp_path: Path, vocabulary: dict[str, Any]
) -> None:
    model = random_llama(len(vocabulary["tokens"]))
    folder = converted(tmp_path, model, vocabulary, adds_bos=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("a").ids[0] == 1
    assert 1 not in tokenizer.encode("a", add_special_tokens=False).ids


@pytest.mark.real_model
@pytest.mark.slow
def test_smollm2_tokenises_like_transformers() -> None:
    path = packaged_model_path("smollm2")
    if not path.exists():
        pytest.skip("smollm2 is not in the cache; run `sapwood pull smollm2`")
    ours = Tokenizer.from_file(str(find_model("smollm2") / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    theirs.pre_tokenizer = as_its_own_tokenizer_cuts("smollm")
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
