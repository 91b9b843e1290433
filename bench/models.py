"""Which architectures of transformers are served, and are their logits right?

For every causal language model of the installed transformers a tiny one with random weights is
made, written down and loaded as a checkpoint is. It ends as

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
import multiprocessing
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from common import RESULTS, ROOT, commit, fill, machine, make_parser, settings, write_json

from sapwood.kernels import load_kernels
from sapwood.runtime.errors import ModelError, UnsupportedModelError
from sapwood.runtime.models import MODELS
from sapwood.runtime.universal.load import read_universal_config
from sapwood.runtime.universal.verify import paged_logits
from sapwood.runtime.weights import load_model

DOCUMENT = ROOT / "docs" / "models.md"
RESULT = RESULTS / "models.json"
MAX_ERROR = 1e-3  # in standard deviations of the logits, float32
WINDOW = 8  # tokens
PROMPT_LENS = (40, 39, 38)
TIMEOUT_SECONDS = 240
MAX_BYTES = 6 * 2**30  # address space of a type's process
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
_ROPE = MappingProxyType({"rope_type": "default", "rope_theta": 1e4})
# What a tiny model of a type needs besides.
OVERRIDES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "cohere_compass_text": {"rope_parameters": {"full_attention": dict(_ROPE)}},
        "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
        "dots1": {"n_shared_experts": 1},
        "fuyu": {"text_config": {"model_type": "persimmon", **SIZES}},
        "gemma3n_text": {
            "num_hidden_layers": 10,
            "num_kv_shared_layers": 5,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 96,
            "laurel_rank": 8,
        },
        "gemma4_unified_assistant": {
            "text_config": {"model_type": "gemma4_unified_text", **SIZES},
        },
        "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
        # As the published models have them; the configurations' defaults are of one kind.
        "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
        "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
        "xmod": {"default_language": "en_XX", "is_decoder": True},
        "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (8, 16)},
        "zamba2": {"layer_types": ["linear_attention", "hybrid"] * 2},
        "zaya": {"num_experts_per_tok": 1},
        "mamba2": {"num_heads": 8, "head_dim": 16},
        "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    }
)
VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "default": {},
        "windows": {"sliding_window": WINDOW, "use_sliding_window": True},
        "decoder": {"is_decoder": True},
    }
)


def main() -> None:
    arguments = _parse()
    if arguments.write_docs:
        write_docs(DOCUMENT, RESULT)
    else:
        _run_all(arguments)


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--types", nargs="+", help="these alone, others as measured before")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--write-docs", action="store_true", help="update docs/models.md, run none")
    return parser.parse_args()


def causal_types() -> list[str]:
    """The model types of all causal language models that transformers has."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _run_all(arguments: argparse.Namespace) -> None:
    import transformers
    import transformers.models.llama.modeling_llama  # once here and not in each forked process

    started, at_commit = time.perf_counter(), commit()
    torch.set_num_threads(1)  # a fork of a process with workers would wait for them for ever
    torch.set_num_threads(1)  # a fork of a process with workers would wait for them for ever
    models: dict[str, Any] = {}
    if arguments.types and arguments.out.exists():
        models = json.loads(arguments.out.read_text(encoding="utf-8"))["models"]
    for model_type in arguments.types or causal_types():
        models[model_type] = _run_process(model_type)
        print(model_type, json.dumps(models[model_type]), flush=True)
        result = {
            "question": "which architectures of transformers are served, and are they right",
            "machine": machine(),
            "commit": at_commit,
            "settings": settings(arguments) | {"window": WINDOW, "prompt_lens": PROMPT_LENS},
            "transformers": transformers.__version__,
            "dtype": "float32",
            "unit": "largest difference of logits in their standard deviations",
            "seconds": time.perf_counter() - started,
            "models": dict(sorted(models.items())),
        }
        write_json(arguments.out, result)  # what is done is kept if a later one ends it all
    print(_counts(models))


def _run_process(model_type: str) -> dict[str, Any]:
    """The result of a type from a process of its own, which may crash or hang.

    It is forked from this one, which has imported transformers and computed nothing.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, model_type))
    process.start()
    sender.close()
    try:
        if not receiver.poll(TIMEOUT_SECONDS):
            return _not_built(f"took more than {TIMEOUT_SECONDS} s")
        return receiver.recv()
    except EOFError:
        process.join()
        return _not_built(f"its process ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _send_result(sender: Connection, model_type: str) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # progress bars and warnings of tiny models
    # A configuration that is not tiny after all must not take the machine's memory.
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    sender.send(run_type(model_type))


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
        if options and next(iter(options)) not in names:
            return None
        wanted = {**SIZES, **options, **OVERRIDES.get(model_type, {})}
        if "kv_lora_rank" in names:  # latent attention: one key-value head for each query head
            wanted |= {"num_key_value_heads": 4, "head_dim": 8}
        chosen = {name: value for name, value in wanted.items() if name in names}
        for name, part in config_class.sub_configs.items():
            if name in names and name not in wanted and isinstance(part, type):
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
    is_native = config.model_type in MODELS
    if not is_native and (reason := _refusal_of_config(config)) is not None:
        return {"verdict": "refused", "reason": reason}
    with tempfile.TemporaryDirectory() as folder:
        try:
            reference = _written_down(config, folder)
            prompts = [_prompt(length, config) for length in PROMPT_LENS]
            expected = [_reference_logits(reference, prompt) for prompt in prompts]
            if not all(logits.isfinite().all() for logits in expected):
                return _not_built("its logits with random weights are not finite")
        except Exception as error:
            return _not_built(_quotation(error))
        kernels = load_kernels("cpu")
        try:
            model = load_model(folder, kernels=kernels).model
        except UnsupportedModelError as error:
            return {"verdict": "refused", "reason": _clause(str(error), config.model_type)}
        except ModelError as error:
            return _not_built(str(error).replace(folder, "the folder"))
        with torch.inference_mode():
            actual = list(paged_logits(model, kernels, prompts))
    error = max(
        float((ours - theirs).abs().max() / theirs.std())
        for ours, theirs in zip(actual, expected, strict=True)
    )
    good = "native" if is_native else "right"
    return {"verdict": good if error <= MAX_ERROR else "wrong", "error": float(f"{error:.2g}")}


def _refusal_of_config(config: Any) -> str | None:
    """Why the configuration alone is refused, whether or not a model of it runs here."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            config.save_pretrained(folder)
            read_universal_config(Path(folder))
        except UnsupportedModelError as error:
            return _clause(str(error), config.model_type)
        except Exception:  # what is wrong with it shows where it is built
            return None
    return None


def _clause(message: str, model_type: str) -> str:
    """The reason out of a refusal."""
    reason = message.removeprefix(f"model_type {model_type!r} is not served: ")
    return reason.partition(". Served are")[0]


def _written_down(config: Any, folder: str) -> Any:
    """A checkpoint of random weights in which every token counts, and transformers' own reading of
    it with its own attention: which weights are tied shows only when they are read."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = name.endswith("weight") and ("norm" in name or "ln_" in name)
            parameter.normal_(mean=float(is_scale), std=_WEIGHTS_STD)
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _prompt(length: int, config: Any) -> list[int]:
    vocab_size = config.get_text_config().vocab_size
    return np.random.default_rng(length).integers(3, vocab_size, length).tolist()


def _reference_logits(model: Any, prompt: list[int]) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([prompt]), use_cache=False).logits[0].float()


def _quotation(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}"


# -- the document --------------------------------------------------------------------------------


def _counts(models: Mapping[str, Any]) -> str:
    counts = Counter(result["verdict"] for result in models.values())
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))


def write_docs(document: Path, results: Path) -> None:
    """Fill the tables of `document` from the registry and the results."""
    text = document.read_text(encoding="utf-8")
    result = json.loads(results.read_text(encoding="utf-8"))
    for name, figures in figures_of(result):
        text = fill(text, name, figures)
    document.write_text(text, encoding="utf-8")


def figures_of(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name of the marks, figures) for docs/models.md.

    What is native is for the registry to say, so that a type which has got a file of its own since
    the results were measured is not listed as another.
    """
    yield "native", ", ".join(f"`{name}`" for name in sorted(MODELS)) + "."
    others = {name: r for name, r in result["models"].items() if name not in MODELS}
    by_verdict = {
        verdict: {name: r for name, r in others.items() if r["verdict"] == verdict}
        for verdict in ("right", "refused", "not built")
    }
    yield "source", _source(result, by_verdict)
    yield "right", _right_table(by_verdict["right"])
    yield "refused", _reason_table(by_verdict["refused"])
    yield "not built", _reason_table(by_verdict["not built"])


def _source(result: Mapping[str, Any], by_verdict: Mapping[str, Mapping[str, Any]]) -> str:
    counts = ", ".join(f"{len(models)} {verdict}" for verdict, models in by_verdict.items())
    facts = result["machine"]
    return (
        f"Of the types without a native file: {counts}. From `bench/results/{RESULT.name}`: "
        f"transformers {result['transformers']}, torch {facts['torch']}, {result['dtype']}, "
        f"{facts['processor']}, commit {(result['commit'] or 'unknown')[:12]}."
    )


def _right_table(models: Mapping[str, Any]) -> str:
    rows = [
        "| model_type | error | with a window | what is not served of it |",
        "|---|---|---|---|",
    ]
    for name, result in models.items():
        variants = result.get("variants", {"default": result})
        errors = {variant: f"{r['error']:.0e}" for variant, r in variants.items() if "error" in r}
        plain = errors.get("default") or (
            f"{errors['decoder']} (is_decoder true)" if "decoder" in errors else ""
        )
        left_out = "; ".join(
            f"{variant}: {r['reason']}" for variant, r in variants.items() if "reason" in r
        )
        rows.append(f"| `{name}` | {plain} | {errors.get('windows', '')} | {left_out} |")
    return "\n".join(rows)


def _reason_table(models: Mapping[str, Any]) -> str:
    rows = ["| model_type | why |", "|---|---|"]
    for name, result in models.items():
        reason = result.get("reason") or "; ".join(
            f"{variant}: {r['reason']}" for variant, r in result["variants"].items()
        )
        rows.append(f"| `{name}` | {reason.replace('|', '/')} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
