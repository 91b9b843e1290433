"""transformers' module for a checkpoint: built, filled, and called on flattened rows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sapwood.runtime.checkpoint_json import read_json_object
from sapwood.runtime.checkpoint_tensors import some_of
from sapwood.runtime.errors import ModelError, UnsupportedModelError
from sapwood.runtime.quantized_checkpoint import quantization_settings
from sapwood.runtime.universal.attention import PAGED, register_paged_attention
from sapwood.runtime.universal.obstacles import obstacle_in
from sapwood.runtime.universal.refusal import refused
from sapwood.runtime.universal.rotary import pin_rotary_frequencies

# Old checkpoints store these; they are computed from the configuration.
_COMPUTED = (".inv_freq", ".masked_bias", ".attn.bias", ".attention.bias")


class Network:
    """transformers' module and how its `forward` is called. Its parameters are never changed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module.eval().requires_grad_(False)
        self._picks_rows = "logits_to_keep" in inspect.signature(module.forward).parameters

    @property
    def config(self) -> Any:
        """transformers' configuration of the text part."""
        return self.module.config.get_text_config()  # type: ignore[union-attr, operator]

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    def logits(self, input_ids: Tensor, positions: Tensor | None, rows: Tensor) -> Tensor:
        """float32 [num_rows, vocab_size] of `rows` int64 [n] out of the flattened `input_ids` [T].

        Without `positions` the model counts them itself.
        """
        options: dict[str, Any] = {"use_cache": False}
        if positions is not None:
            options["position_ids"] = positions.unsqueeze(0)
        if self._picks_rows:
            options["logits_to_keep"] = rows
        logits: Tensor = self.module(input_ids.unsqueeze(0), **options).logits[0]
        return (logits if self._picks_rows else logits[rows]).to(torch.float32)


def read_config(folder: Path) -> Any:
    """transformers' configuration of a checkpoint that its own code could run.

    Raises UnsupportedModelError with the reason where it could not, or where the configuration
    already says why it is not served; ModelError for a config.json that does not parse.
    """
    from transformers import AutoConfig

    raw = read_json_object(folder / "config.json")
    model_type = str(raw.get("model_type"))
    with _told_about(model_type):
        _check_known(model_type, raw)
    if (settings := quantization_settings(raw)) is not None:
        method = settings.get("quant_method", "an unnamed method")
        raise UnsupportedModelError(
            f"{model_type} runs through transformers, with float weights alone, and these are "
            f"quantised by {method}; load the model's float weights"
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each configuration class checks in its own way
        raise ModelError(f"config.json is no {model_type} configuration: {error}") from error
    with _told_about(model_type):
        if reason := obstacle_in(config, _model_class(config)):
            raise UnsupportedModelError(reason)
    return config


def _check_known(model_type: str, raw: dict[str, Any]) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    if model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModelError("it is an encoder-decoder, and served are decoders alone")
    if model_type in CONFIG_MAPPING_NAMES:
        raise UnsupportedModelError("it is not a causal language model of text")
    if raw.get("auto_map"):
        raise UnsupportedModelError(
            "it needs the code that comes with the checkpoint, which is never run"
        )
    raise UnsupportedModelError("the installed transformers does not know it either")


@contextmanager
def _told_about(model_type: str) -> Iterator[None]:
    """Refusals inside are told with the architecture in front and what is served behind."""
    try:
        yield
    except UnsupportedModelError as error:
        raise refused(model_type, str(error)) from error.__cause__


def _model_class(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM._model_mapping[type(config)]


def build_network(config: Any, dtype: torch.dtype, device: torch.device) -> Network:
    """A network with random weights, the same ones every time. Raises UnsupportedModelError."""
    from transformers import AutoModelForCausalLM

    register_paged_attention()
    with torch.random.fork_rng(), _quoted():
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PAGED)
        return _ready(module.to(device))


def read_network(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Network:
    """A network with a checkpoint's weights, from safetensors alone.

    Raises UnsupportedModelError where transformers cannot build it over our attention, ModelError
    for a checkpoint that does not fit its configuration.
    """
    from transformers import AutoModelForCausalLM

    register_paged_attention()
    with _quoted():
        module, found = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=PAGED,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, like what is missing
        )
    _check_complete(folder, found)
    return _ready(module.to(device))


def _ready(module: nn.Module) -> Network:
    pin_rotary_frequencies(module)
    return Network(module)


@contextmanager
def _quoted() -> Iterator[None]:
    """Whatever goes wrong while transformers builds the model is a refusal that quotes it."""
    try:
        yield
    except KeyError as error:
        if error.args != (PAGED,):
            raise _not_built(error) from error
        raise UnsupportedModelError(
            "it chooses its attention from a list of its own, where ours cannot be"
        ) from error
    except Exception as error:
        raise _not_built(error) from error


def _not_built(error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"transformers cannot build it over our attention: {quotation(error)}"
    )


def quotation(error: BaseException) -> str:
    """An exception in one line."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line:.200}"


def _check_complete(folder: Path, found: dict[str, Any]) -> None:
    """Every parameter was read and every tensor has a place. transformers only warns of these."""
    unexpected = sorted(n for n in found["unexpected_keys"] if not n.endswith(_COMPUTED))
    complaints = [
        f"{verb} {some_of(names)}{rest}"
        for verb, names, rest in (
            ("lacks", sorted(map(str, found["missing_keys"])), ""),
            ("has", unexpected, ", which the model has no place for"),
            ("has", sorted(str(n[0]) for n in found["mismatched_keys"]), " of another shape"),
        )
        if names
    ]
    complaints += [str(error) for error in found.get("error_msgs", ())]
    if complaints:
        raise ModelError(f"the checkpoint in {folder} {'; '.join(complaints)}")
