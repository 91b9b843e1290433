"""Architectures without a native file: right over paged attention, or refused with the reason.

The reference is transformers' own attention on each prompt alone, from a model of its own.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood import ConfigError, Engine, ModelError, SamplingParams, UnsupportedModelError
from sapwood.kernels import load_kernels
from sapwood.runtime.quantize import Quantize
from sapwood.runtime.scheduler import Scheduler
from sapwood.runtime.universal import attention, gate
from sapwood.runtime.universal.load import load_universal, read_universal_config
from sapwood.runtime.universal.model import UniversalModel
from sapwood.runtime.universal.network import Network
from sapwood.runtime.universal.paged import Chunk, MadeUpSequence, PagedTrial
from sapwood.runtime.universal.verify import paged_logits
from sapwood.runtime.weights import LoadedModel, load_model
from tests.kernels.backends import WITHOUT_DEVICE

WINDOW = 8
PREFIX_LEN, NUM_PROMPTS, NUM_TOKENS = 30, 3, 12
MANY_PROMPTS, MANY_TOKENS = 8, 64
SMALL: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,  # else each token is followed by itself
}
GROUPED = SMALL | {"num_key_value_heads": 2}
GPT2: dict[str, Any] = {
    "vocab_size": 400,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "tie_word_embeddings": False,
}
TYPES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt_neox": SMALL,
    "opt": SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gptj": GPT2 | {"rotary_dim": 8},
    "gpt_bigcode": GPT2,
    "phi": GROUPED,
    "olmo2": GROUPED,
    "cohere": GROUPED,
    "vaultgemma": GROUPED | {"head_dim": 16, "sliding_window": WINDOW},
    "stablelm": GROUPED,
    "starcoder2": GROUPED | {"sliding_window": WINDOW},
    "smollm3": GROUPED | {"num_hidden_layers": 4},
    "nemotron": GROUPED,
    "gpt_oss": GROUPED
    | {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
    },
}


def config_of(model_type: str, **options: Any) -> Any:
    from transformers import AutoConfig

    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(model_type, **(ids | options))


def save(folder: Path, config: Any, tokenizer_of: Path | None = None) -> Any:
    """A checkpoint of random weights in which every token counts; gives the reference model."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            is_norm = "norm" in name or "ln_" in name
            if name.endswith("bias") or "emb" in name or "wte" in name:
                parameter.normal_(std=0.03)  # small, else one token is repeated for ever
            else:
                parameter.normal_(mean=float(is_norm), std=0.15)
    reference.save_pretrained(folder)
    if tokenizer_of is not None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer_of / name, folder / name)
    return reference


def save_config(folder: Path, config: Any) -> Path:
    config.save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(folder, kernels=load_kernels("cpu"), **options)


def load_dummy(folder: Path, **options: Any) -> LoadedModel:
    return load(folder, load_format="dummy", **options)


def prompts_of(count: int) -> list[np.ndarray]:
    """Two thirds share a prefix, the others share nothing; ragged, longer than the window."""
    draw = np.random.default_rng(0)
    prefix = draw.integers(3, 400, PREFIX_LEN)
    return [
        np.concatenate([prefix[: 0 if n % 3 == 2 else PREFIX_LEN], draw.integers(3, 400, 5 + n)])
        .astype(np.int32)
        .tolist()
        for n in range(count)
    ]


def reference_logits(reference: Any, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([token_ids]), use_cache=False).logits[0]


def reference_greedy(reference: Any, prompt: list[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(reference_logits(reference, token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


def largest_error(actual: Tensor, expected: Tensor) -> float:
    """In standard deviations of the logits."""
    return float((actual - expected).abs().max() / expected.std())


def check_engine(folder: Path, reference: Any, num_prompts: int, num_tokens: int) -> None:
    """Greedy tokens and their log-probabilities, from an engine whose prompts share a prefix and
    come in chunks."""
    prompts = prompts_of(num_prompts)
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=True)
    options = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    with Engine(str(folder), num_kv_blocks=512, **options) as engine:
        outputs = engine.generate(prompts, sampling)
    assert any(output.num_cached_tokens >= PREFIX_LEN for output in outputs)
    seen = set()
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        expected = reference_greedy(reference, prompt, num_tokens)
        assert list(answer.token_ids) == expected
        logits = reference_logits(reference, prompt + expected)[len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(dim=-1)[range(num_tokens), expected]
        told = torch.tensor([token.logprob for token in answer.logprobs])
        assert (told - logprobs).abs().max() <= 1e-3 * logits.std()
        seen |= set(expected)
    assert len(seen) > num_prompts, "the reference repeats itself, equality would say little"


@pytest.mark.parametrize("model_type", TYPES)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    model_type: str, tmp_path: Path, tiny_model: Path
) -> None:
    reference = save(tmp_path, config_of(model_type, **TYPES[model_type]), tiny_model)
    kernels = load_kernels("cpu")
    model = load_model(tmp_path, kernels=kernels).model
    prompts = prompts_of(NUM_PROMPTS)
    with torch.inference_mode():
        for prompt, logits in zip(prompts, paged_logits(model, kernels, prompts), strict=True):
            assert largest_error(logits, reference_logits(reference, prompt)) <= 1e-3
    check_engine(tmp_path, reference, NUM_PROMPTS, NUM_TOKENS)


NATIVE: dict[str, dict[str, Any]] = {
    "gemma2": GROUPED
    | {
        "head_dim": 20,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 7.0,
        "query_pre_attn_scalar": 24,
    },
    "phi3": GROUPED | {"sliding_window": WINDOW},
    "qwen3": GROUPED | {"head_dim": 20},
}


@pytest.mark.parametrize("model_type", NATIVE)
def test_what_has_a_native_file_is_right_through_transformers_too(
    model_type: str, tmp_path: Path
) -> None:
    reference = save(tmp_path, config_of(model_type, **NATIVE[model_type]))
    kernels, prompts = load_kernels("cpu"), prompts_of(NUM_PROMPTS)
    config = read_universal_config(tmp_path)
    model = load_universal(
        config,
        tmp_path,
        kernels=kernels,
        dtype=torch.float32,
        device=torch.device("cpu"),
        is_verified=True,
    )
    with torch.inference_mode():
        for prompt, logits in zip(prompts, paged_logits(model, kernels, prompts), strict=True):
            assert largest_error(logits, reference_logits(reference, prompt)) <= 1e-3


def test_a_config_that_its_native_file_refuses_runs_through_transformers(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of("llama", **GROUPED, hidden_act="gelu")
    reference = save(tmp_path, config, tiny_model)
    with caplog.at_level(logging.INFO, logger="sapwood"):
        loaded = load(tmp_path, verify_model=True)
    assert isinstance(loaded.model, UniversalModel)
    assert "hidden_act 'gelu' is not served" in caplog.text
    check_engine(tmp_path, reference, NUM_PROMPTS, NUM_TOKENS)


def test_a_model_that_neither_way_serves_is_refused_with_both_reasons(tmp_path: Path) -> None:
    config = config_of("gemma3_text", **GROUPED, head_dim=16, use_bidirectional_attention=True)
    with pytest.raises(
        UnsupportedModelError, match=r"^config\.json: use_bidirectional.*attends to later tokens"
    ):
        load_dummy(save_config(tmp_path, config))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_long_greedy_answers_are_those_of_transformers(
    model_type: str, tmp_path: Path, tiny_model: Path
) -> None:
    reference = save(tmp_path, config_of(model_type, **TYPES[model_type]), tiny_model)
    check_engine(tmp_path, reference, MANY_PROMPTS, MANY_TOKENS)


# -- answers do not depend on what else runs ------------------------------------------------------


@contextmanager
def preempting_every_step() -> Iterator[None]:
    """Sends every running sequence back to wait before each plan."""
    plan = Scheduler.plan

    def preempt_and_plan(scheduler: Scheduler, now: float) -> Any:
        scheduler.preempt(scheduler.num_running)
        return plan(scheduler, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "plan", preempt_and_plan)
        yield


def answers(engine: Engine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [output.outputs[0].token_ids for output in engine.generate(prompts, sampling)]


@pytest.mark.parametrize("model_type", ["gpt2", "vaultgemma", "gpt_oss"])
def test_answers_are_equal_cold_warm_chunked_preempted_and_batched(
    model_type: str, tmp_path: Path, tiny_model: Path
) -> None:
    save(tmp_path, config_of(model_type, **TYPES[model_type]), tiny_model)
    prompts, folder = prompts_of(4), str(tmp_path)
    with Engine(folder, num_kv_blocks=256, prefix_caching=False, max_num_seqs=1) as engine:
        expected = [answers(engine, [prompt])[0] for prompt in prompts]
    with Engine(folder, num_kv_blocks=256) as engine:
        assert answers(engine, prompts) == expected, "batched and cold"
        assert answers(engine, prompts) == expected, "warm"
        engine.flush_cache()
        with preempting_every_step():
            assert answers(engine, prompts) == expected, "preempted"
    with Engine(
        folder, num_kv_blocks=64, block_size=4, max_num_batched_tokens=8, max_num_seqs=8
    ) as engine:
        assert answers(engine, prompts) == expected, "chunked"


ROPE_THETA = 10_000.0
BATCH_DEPENDENT: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": ROPE_THETA},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": ROPE_THETA,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + n for n in range(8)],
        "original_max_position_embeddings": 32,
        "partial_rotary_factor": 1.0,
    },
}


@pytest.mark.parametrize("kind", BATCH_DEPENDENT)
def test_neighbours_do_not_change_logits_whatever_the_rotary_scaling(
    kind: str, tmp_path: Path
) -> None:
    config = config_of("olmo2", **GROUPED, rope_parameters=BATCH_DEPENDENT[kind])
    save(tmp_path, config)
    kernels = load_kernels("cpu")
    model = load_model(tmp_path, kernels=kernels).model
    trial = PagedTrial(model, kernels, 400)
    short, long = prompts_of(1)[0][:20], list(range(100, 300))
    with torch.inference_mode():
        (alone,) = trial.step(Chunk(sequence=MadeUpSequence(), token_ids=short))
        beside, _ = trial.step(
            Chunk(sequence=MadeUpSequence(), token_ids=short),
            Chunk(sequence=MadeUpSequence(), token_ids=long, first_position=56),
        )
    assert largest_error(beside, alone) <= 1e-5


def test_longrope_is_pinned_to_the_frequencies_of_the_full_context(tmp_path: Path) -> None:
    """A prompt longer than the first training's context is what transformers gives for it."""
    config = config_of("olmo2", **GROUPED, rope_parameters=BATCH_DEPENDENT["longrope"])
    reference = save(tmp_path, config)
    kernels = load_kernels("cpu")
    model = load_model(tmp_path, kernels=kernels).model
    prompt = prompts_of(1)[0] + list(range(50, 70))
    with torch.inference_mode():
        (logits,) = paged_logits(model, kernels, [prompt])
    assert largest_error(logits, reference_logits(reference, prompt)) <= 1e-3


@pytest.mark.parametrize("name", WITHOUT_DEVICE)
def test_every_backend_serves_windows_and_sinks(name: str, tmp_path: Path) -> None:
    reference = save(tmp_path, config_of("gpt_oss", **TYPES["gpt_oss"]))
    kernels, prompt = load_kernels(name), prompts_of(1)[0]
    model = load_model(tmp_path, kernels=kernels).model
    with torch.inference_mode():
        (logits,) = paged_logits(model, kernels, [prompt])
    assert largest_error(logits, reference_logits(reference, prompt)) <= 1e-3


def test_two_models_in_one_process_keep_apart(tmp_path: Path) -> None:
    kernels = load_kernels("cpu")
    references = {
        name: save(tmp_path / name, config_of(name, **TYPES[name]))
        for name in ("gpt2", "vaultgemma")
    }
    models = {name: load_model(tmp_path / name, kernels=kernels).model for name in references}
    prompt = prompts_of(1)[0]
    for name in ("gpt2", "vaultgemma", "gpt2"):
        with torch.inference_mode():
            (logits,) = paged_logits(models[name], kernels, [prompt])
        assert largest_error(logits, reference_logits(references[name], prompt)) <= 1e-3


def test_keys_wider_than_values_are_served(tmp_path: Path) -> None:
    """Multi-head latent attention, expanded: deepseek_v3."""
    config = config_of(
        "deepseek_v3",
        **SMALL,
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
    )
    reference = save(tmp_path, config)
    kernels = load_kernels("cpu")
    model = load_model(tmp_path, kernels=kernels, verify_model=True).model
    assert model.kv_spec(1, 16).head_dim == 24
    prompt = prompts_of(1)[0]
    with torch.inference_mode():
        (logits,) = paged_logits(model, kernels, [prompt])
    assert largest_error(logits, reference_logits(reference, prompt)) <= 1e-3


# -- refusals -------------------------------------------------------------------------------------

PHIMOE = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}
LLAMA4 = GROUPED | {
    "head_dim": 16,
    "intermediate_size_mlp": 64,
    "num_local_experts": 2,
    "attention_chunk_size": 16,
    "pad_token_id": 0,
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("bloom", SMALL, "ALiBi"),
    "mpt": ("mpt", {"vocab_size": 400, "d_model": 64, "n_layers": 2, "n_heads": 4}, "ALiBi"),
    "falcon with alibi": ("falcon", SMALL | {"alibi": True}, "ALiBi"),
    "falcon without": ("falcon", SMALL | {"alibi": False}, "a list of its own"),
    "mamba": ("mamba", {"vocab_size": 400, "hidden_size": 64}, "linear_attention"),
    "xglm": (
        "xglm",
        {"vocab_size": 400, "d_model": 64, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
        "XGLMForCausalLM computes attention by itself",
    ),
    "llama4_text": ("llama4_text", LLAMA4, "chunked_attention"),
    "phimoe with a window": ("phimoe", PHIMOE, "in the mask alone"),
    "t5": ("t5", {}, "encoder-decoder"),
    "bart": ("bart", {}, "encoder-decoder"),
    "bert": ("bert", SMALL, "is_decoder is false"),
    "gemma3": ("gemma3", {}, "image or audio input"),
    "qwen3_next": ("qwen3_next", GROUPED, "linear_attention"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    model_type, options, reason = REFUSED[name]
    folder = save_config(tmp_path, config_of(model_type, **options))
    with pytest.raises(UnsupportedModelError, match=reason) as refusal:
        load_dummy(folder)
    assert str(refusal.value).startswith(f"model_type {model_type!r} is not served: ")
    assert "Served are llama" in str(refusal.value)


def test_a_bert_that_is_a_decoder_is_served(tmp_path: Path) -> None:
    folder = save_config(tmp_path, config_of("bert", **SMALL, is_decoder=True))
    assert load_dummy(folder, verify_model=True).config.model_type == "bert"


def write_json(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "vit"}, "not a causal language model"),
        ({"model_type": "none_such"}, "does not know it"),
        ({"model_type": "mine", "auto_map": {"AutoModel": "mine.Mine"}}, "is never run"),
        ({"model_type": "gpt2", "quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"model_type": "gpt2", "vocab_size": 0}, "0 for vocab_size"),
    ],
)
def test_a_config_alone_can_say_no(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        load_dummy(write_json(tmp_path, **config))


def test_a_config_that_does_not_parse_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no gpt2 configuration"):
        load_dummy(write_json(tmp_path, model_type="gpt2", n_layer="many"))


def test_int8_is_refused_and_auto_is_none(tmp_path: Path) -> None:
    folder = save_config(tmp_path, config_of("gpt2", **GPT2))
    with pytest.raises(ConfigError, match="runs through transformers"):
        load_dummy(folder, quantize="int8")
    assert load_dummy(folder, quantize="auto").quantize is Quantize.NONE


def test_dummy_weights_are_the_same_every_time(tmp_path: Path) -> None:
    folder = save_config(tmp_path, config_of("gpt2", **GPT2))
    kernels, prompt = load_kernels("cpu"), prompts_of(1)[0]
    first, second = (
        next(paged_logits(load_dummy(folder).model, kernels, [prompt])) for _ in range(2)
    )
    assert torch.equal(first, second)


def test_a_native_model_has_nothing_to_verify(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="llama has a native file"):
        Engine(str(tiny_model), verify_model=True)


def test_a_checkpoint_with_other_tensors_than_the_model_is_told(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save(tmp_path, config_of("gpt2", **GPT2))
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    kept = {name: tensor for name, tensor in weights.items() if "h.1.mlp" not in name}
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks transformer\.h\.1\.mlp"):
        load(tmp_path)
    save_file(weights | {"transformer.h.0.extra": torch.ones(2)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"transformer\.h\.0\.extra, which the model has no place"):
        load(tmp_path)
    save_file(weights | {"transformer.ln_f.weight": torch.ones(5)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"has transformer\.ln_f\.weight of another shape"):
        load(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = save_config(tmp_path, config_of("gpt2", **GPT2))
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="only pickled weights"):
        load(folder)


# -- the gate itself ------------------------------------------------------------------------------


def patched_gpt2(
    tmp_path: Path, patch: pytest.MonkeyPatch, around: Callable[..., Any]
) -> LoadedModel:
    """A GPT-2 whose calls of paged attention go through `around(original, *arguments)`."""
    original = attention.PagedStep.attend

    def attend(step: attention.PagedStep, *arguments: Any, **options: Any) -> Tensor:
        return around(original, step, *arguments, **options)

    patch.setattr(attention.PagedStep, "attend", attend)
    folder = save_config(tmp_path, config_of("gpt2", **GPT2, initializer_range=0.2))
    return load_dummy(folder)


def test_the_gate_sees_a_softmax_scale_that_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(original: Any, *arguments: Any, scale: float, **options: Any) -> Tensor:
        return original(*arguments, scale=1.1 * scale, **options)

    with pytest.raises(UnsupportedModelError, match="not those over transformers' own attention"):
        patched_gpt2(tmp_path, monkeypatch, off)


def test_the_gate_sees_keys_that_are_lost_between_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(original: Any, step: attention.PagedStep, *heads: Any, **options: Any) -> Tensor:
        if int(step.batch.positions[0]) > 0:
            step.kv.keys.zero_()
        return original(step, *heads, **options)

    with pytest.raises(UnsupportedModelError, match="computed in pieces has other logits"):
        patched_gpt2(tmp_path, monkeypatch, forget)


def test_the_gate_sees_rows_that_touch_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = Network.logits

    def mixed(network: Network, ids: Tensor, positions: Tensor | None, rows: Tensor) -> Tensor:
        if positions is not None and (positions == 0).sum() > 1:
            positions = torch.arange(len(positions))
        return logits(network, ids, positions, rows)

    monkeypatch.setattr(Network, "logits", mixed)
    folder = save_config(tmp_path, config_of("gpt2", **GPT2, initializer_range=0.2))
    with pytest.raises(UnsupportedModelError, match="with its place in the batch"):
        load_dummy(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model_type", ["vaultgemma", "gpt_oss"])
def test_the_gate_lets_half_precision_through(model_type: str, dtype: str, tmp_path: Path) -> None:
    save(tmp_path, config_of(model_type, **TYPES[model_type]))
    spec = load(tmp_path, dtype=dtype).model.kv_spec(1, 16)
    assert str(spec.dtype) == f"torch.{dtype}"


def test_rows_taken_for_positions_are_seen_in_half_precision_too(tmp_path: Path) -> None:
    options = {"d_model": 64, "decoder_layers": 2, "encoder_layers": 2, "vocab_size": 400}
    config = config_of(
        "blenderbot-small",
        **options,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        is_encoder_decoder=False,
        is_decoder=True,
        init_std=0.2,
    )
    with pytest.raises(UnsupportedModelError, match="with its place in the batch"):
        load_dummy(save_config(tmp_path, config), dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_positions_that_do_not_start_at_zero_are_seen(dtype: str, tmp_path: Path) -> None:
    config = config_of("roberta", **SMALL, is_decoder=True)
    with pytest.raises(UnsupportedModelError, match="counts positions in a way of its own"):
        load_dummy(save_config(tmp_path, config), dtype=dtype)


def test_whatever_a_forward_pass_raises_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Tensor:
        raise ZeroDivisionError("seven")

    with pytest.raises(UnsupportedModelError, match="ZeroDivisionError: seven"):
        patched_gpt2(tmp_path, monkeypatch, fail)


def test_verify_model_refuses_what_only_long_prompts_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off_when_long(original: Any, *arguments: Any, **options: Any) -> Tensor:
        attended: Tensor = original(*arguments, **options)
        return 1.1 * attended if len(attended) > 20 else attended

    loaded = patched_gpt2(tmp_path, monkeypatch, off_when_long)
    assert loaded.config.model_type == "gpt2"
    with pytest.raises(UnsupportedModelError, match="its logits for 64 tokens"):
        load_dummy(tmp_path, verify_model=True)


@pytest.mark.parametrize("model_type", ["vaultgemma", "gpt_oss"])
def test_verify_model_admits_what_is_right(model_type: str, tmp_path: Path) -> None:
    folder = save_config(tmp_path, config_of(model_type, **TYPES[model_type]))
    model = load_dummy(folder, verify_model=True).model
    assert WINDOW in model.kv_spec(1, 16).windows


def test_a_window_too_long_to_verify_is_told(tmp_path: Path) -> None:
    options = GROUPED | {"sliding_window": 16384, "max_position_embeddings": 32768}
    folder = save_config(tmp_path, config_of("starcoder2", **options))
    with pytest.raises(UnsupportedModelError, match="16384 tokens.*without verify_model"):
        load_dummy(folder, verify_model=True)
    assert isinstance(load_dummy(folder).model, UniversalModel)


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    options = GROUPED | {"sliding_window": GROUPED["max_position_embeddings"]}
    folder = save_config(tmp_path, config_of("starcoder2", **options))
    assert load_dummy(folder).model.kv_spec(1, 16).windows == {None}


def test_attention_outside_a_step_fails_rather_than_attends_to_another(tmp_path: Path) -> None:
    folder = save_config(tmp_path, config_of("gpt2", **GPT2))
    network = load_dummy(folder).model._network
    with pytest.raises(LookupError):
        network.module(torch.tensor([[1, 2, 3]]))


def test_layers_of_different_heads_are_refused_with_both() -> None:
    from sapwood.runtime.universal.probe import AttentionCall

    call = AttentionCall(
        layer=0,
        num_heads=4,
        num_kv_heads=2,
        key_dim=16,
        value_dim=16,
        window=None,
        mask=None,
        has_position_bias=False,
        is_causal=True,
        unknown=(),
    )
    with pytest.raises(UnsupportedModelError, match="2 of 16, 4 of 16"):
        gate._layout([call, replace(call, layer=1, num_kv_heads=4)], context=64)
