"""Which architectures of transformers are served, and are their logits right?

For every causal language model of the installed transformers a tiny one with random weights is made,
written down and loaded as a checkpoint is. It ends as

    native     it has a file of its own; its error is measured all the same
    right      it runs through transformers over paged attention
    refused    loading says why it is not served
    not built  no tiny model of it could be made or run here
    wrong      it is served and its logits are not right: there must be none

The baseline is transformers' own attention on each prompt alone. The error is the largest
difference of logits, in their standard deviations, over prompts longer than every window, computed
in pieces beside each other over scattered blocks. Types with a window are tried with and without.

Each type runs in a process of its own. With `--write-docs` nothing is run, and the tables of
docs/models.md are brought up to date from the results that are there.

    python bench/models.py [--types gpt2 gemma2]
    python bench/models.py --write-docs
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from common import RESULTS, ROOT, commit, fill, machine, make_parser, settings, write_json

DOCUMENT = ROOT / "docs" / "models.md"
RESULT = RESULTS / "models.json"
MAX_ERROR = 1e-3  # in standard deviations of the logits, float32
WINDOW = 8  # tokens
PROMPT_LENS = (40, 39, 38)
TIMEOUT_SECONDS = 240
_WEIGHTS_STD = 0.2  # large enough that every answer hangs on what is attended to

# Sizes by the names that configurations give them.
SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 96,
        "hidden_size": 64,
        "d_model": 64,
        "n_embd": 64,
        "embedding_size": 64,
        "word_embed_proj_dim": 64,
        "intermediate_size": 48,
        "ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "encoder_ffn_dim": 48,
        "n_inner": 48,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "num_hidden_layers": 4,
        "n_layer": 4,
        "n_layers": 4,
        "num_layers": 4,
        "decoder_layers": 4,
        "encoder_layers": 2,
        "num_attention_heads": 4,
        "n_head": 4,
        "n_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rotary_dim": 8,
        "max_position_embeddings": 128,
        "n_positions": 128,
        "max_seq_len": 128,
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "moe_num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_k": 2,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
# What a tiny model of a type needs besides.
OVERRIDES: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "default": {},
        "windows": {"sliding_window": WINDOW, "use_sliding_window": True},
    }
)


def main() -> None:
    arguments = _parse()
    if arguments.write_docs:
        write_docs(DOCUMENT, RESULT)
    elif arguments.one is not None:
        print(json.dumps(run_type(arguments.one)))
    else:
        _run_all(arguments)


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--types", nargs="+", help="these alone, others as measured before")
    parser.add_argument("--one", help="run one type in this process and print its result")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--write-docs", action="store_true", help="update docs/models.md, run none")
    return parser.parse_args()


def causal_types() -> list[str]:
    """The model types of all causal language models that transformers has."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _run_all(arguments: argparse.Namespace) -> None:
    import transformers

    started = time.perf_counter()
    models: dict[str, Any] = {}
    if arguments.types and arguments.out.exists():
        models = json.loads(arguments.out.read_text(encoding="utf-8"))["models"]
    for model_type in arguments.types or causal_types():
        models[model_type] = _run_process(model_type)
        print(model_type, json.dumps(models[model_type]), flush=True)
    result = {
        "question": "which architectures of transformers are served, and are their logits right",
        "machine": machine(),
        "commit": commit(),
        "settings": settings(arguments) | {"window": WINDOW, "prompt_lens": PROMPT_LENS},
        "transformers": transformers.__version__,
        "dtype": "float32",
        "unit": "largest difference of logits in their standard deviations",
        "seconds": time.perf_counter() - started,
        "models": dict(sorted(models.items())),
    }
    write_json(arguments.out, result)
    print(_counts(result["models"]))


def _run_process(model_type: str) -> dict[str, Any]:
    """The result of a type from a process of its own, which may crash or hang."""
    command = [sys.executable, __file__, "--one", model_type]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return _not_built(f"took more than {TIMEOUT_SECONDS} s")
    lines = ended.stdout.strip().splitlines()
    if ended.returncode or not lines:
        return _not_built((ended.stderr.strip().splitlines() or ["no message"])[-1][:300])
    return json.loads(lines[-1])


def _not_built(reason: str) -> dict[str, Any]:
    return {"verdict": "not built", "reason": reason}


# -- one type ------------------------------------------------------------------------------------


def run_type(model_type: str) -> dict[str, Any]:
    """The verdict on a type: the worst of its variants, by the order in which they are named."""
    by_variant = {}
    for variant, options in VARIANTS.items():
        config = tiny_config(model_type, options)
        if isinstance(config, str):
            by_variant[variant] = _not_built(config)
        elif config is not None:
            by_variant[variant] = _run_config(config)
    if len(by_variant) == 1 or len({json.dumps(r) for r in by_variant.values()}) == 1:
        return next(iter(by_variant.values()))
    verdicts = {result["verdict"] for result in by_variant.values()}
    order = ("wrong", "native", "right", "refused", "not built")
    verdict = next(name for name in order if name in verdicts)
    return {"verdict": verdict, "variants": by_variant}


def tiny_config(model_type: str, options: Mapping[str, Any]) -> Any:
    """A small configuration of a type; None where `options` say nothing to it, else why not."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config_class = CONFIG_MAPPING[model_type]
        names = _names(config_class)
        if options is VARIANTS["windows"] and "sliding_window" not in names:
            return None
        wanted = {**SIZES, **options, **OVERRIDES.get(model_type, {})}
        chosen = {name: value for name, value in wanted.items() if name in names}
        for name, part in config_class.sub_configs.items():
            if name in names and isinstance(part, type):
                chosen[name] = _tiny_part(part, options)
        return config_class(**chosen)
    except Exception as error:
        return _quotation(error)


def _tiny_part(config_class: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    names = _names(config_class) if hasattr(config_class, "sub_configs") else set()
    return {name: value for name, value in {**SIZES, **options}.items() if name in names}


def _names(config_class: Any) -> set[str]:
    """What a configuration of this class may say."""
    config = config_class()
    return set(config.to_dict()) | set(config_class.attribute_map)


def _run_config(config: Any) -> dict[str, Any]:
    import torch

    from sapwood.kernels import load_kernels
    from sapwood.runtime.errors import ModelError
    from sapwood.runtime.models import MODELS
    from sapwood.runtime.weights import load_model

    with tempfile.TemporaryDirectory() as folder:
        try:
            reference = _reference(config)
            prompts = [_prompt(length, config) for length in PROMPT_LENS]
            expected = [_reference_logits(reference, prompt) for prompt in prompts]
            if not all(logits.isfinite().all() for logits in expected):
                return _not_built("its logits with random weights are not finite")
            reference.save_pretrained(folder)
        except Exception as error:
            reason = _refusal_of_config(config)
            return reason or _not_built(_quotation(error))
        try:
            kernels = load_kernels("cpu")
            loaded = load_model(folder, kernels=kernels)
        except ModelError as error:
            return {"verdict": "refused", "reason": _reason(str(error), config.model_type, folder)}
        from sapwood.runtime.universal.verify import paged_logits

        with torch.inference_mode():
            actual = list(paged_logits(loaded.model, kernels, prompts))
        error = max(
            float((ours - theirs).abs().max() / theirs.std())
            for ours, theirs in zip(actual, expected, strict=True)
        )
        good = "native" if config.model_type in MODELS else "right"
        return {"verdict": good if error <= MAX_ERROR else "wrong", "error": float(f"{error:.2g}")}


def _refusal_of_config(config: Any) -> dict[str, Any] | None:
    """The refusal where loading refuses by the configuration alone, whether or not it runs here."""
    from sapwood.runtime.errors import ModelError
    from sapwood.runtime.universal.load import read_universal_config

    with tempfile.TemporaryDirectory() as folder:
        try:
            config.save_pretrained(folder)
            read_universal_config(Path(folder))
        except ModelError as error:
            return {"verdict": "refused", "reason": _reason(str(error), config.model_type, folder)}
        except Exception:
            return None
    return None


def _reason(message: str, model_type: str, folder: str) -> str:
    """The clause of a refusal."""
    message = message.replace(folder, "the folder")
    return message.removeprefix(f"model_type {model_type!r} is not served: ").partition(
        ". Served are"
    )[0]


def _reference(config: Any) -> Any:
    """A model with transformers' own attention and random weights in which every token counts."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=_WEIGHTS_STD)
    return model


def _prompt(length: int, config: Any) -> list[int]:
    import numpy as np

    vocab_size = config.get_text_config().vocab_size
    return np.random.default_rng(length).integers(3, vocab_size, length).tolist()


def _reference_logits(model: Any, prompt: list[int]) -> Any:
    import torch

    with torch.inference_mode():
        return model(torch.tensor([prompt]), use_cache=False).logits[0].float()


def _quotation(error: BaseException) -> str:
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line:.200}"


if __name__ == "__main__":
    main()
