"""What a configuration alone says against serving a model: known before any weight is read.

What it does not say is found by the gate. Each reason is a clause that goes on from "... is not
served: ".
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

_PAGED_LAYERS = frozenset({"full_attention", "sliding_attention"})
_OTHER_INPUTS = ("vision", "audio", "image", "video", "vq_config")


def obstacle_in(config: Any, model_class: Any) -> str | None:
    """The first reason against a model of transformers' `config` and class, or None."""
    return next(_obstacles(config, model_class), None)


def _obstacles(config: Any, model_class: Any) -> Iterator[str]:
    checks: tuple[Callable[[Any, Any], str | None], ...] = (
        _two_stacks,
        _other_inputs,
        _biases,
        _layer_kinds,
        _recurrence,
        _temperature,
    )
    yield from (reason for check in checks if (reason := check(config, model_class)))


def _two_stacks(config: Any, model_class: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, and served are decoders alone"
    return None


def _other_inputs(config: Any, model_class: Any) -> str | None:
    parts = [name for name in config.sub_configs if any(word in name for word in _OTHER_INPUTS)]
    if parts:
        return (
            f"it takes image or audio input ({', '.join(parts)}), and served is text; its text "
            "part, saved by itself, may be"
        )
    return None


def _biases(config: Any, model_class: Any) -> str | None:
    text = config.get_text_config()
    own = getattr(text, "alibi", None)
    if own is None:
        own = getattr(getattr(text, "attn_config", None), "alibi", None)
    if own or (own is None and _builds_alibi(model_class)):
        return "its positions are ALiBi biases on the scores, which paged attention does not add"
    return None


def _builds_alibi(model_class: Any) -> bool:
    """Whether the class always builds ALiBi biases: there is no option, and code for it."""
    return any("alibi" in name for name in vars(sys.modules[model_class.__module__]))


def _layer_kinds(config: Any, model_class: Any) -> str | None:
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if others := sorted(map(str, kinds - _PAGED_LAYERS)):
        listed = " and ".join(others)
        return f"it has layers of {listed}; served are full_attention and sliding_attention"
    if getattr(text, "attention_chunk_size", None):
        return "it attends within chunks (chunked_attention), and served are windows"
    return None


def _recurrence(config: Any, model_class: Any) -> str | None:
    if getattr(model_class, "_is_stateful", False):
        return (
            "it carries a recurrent state from token to token (a state-space, linear-attention or "
            "convolution layer), and served is what keeps keys and values alone"
        )
    return None


def _temperature(config: Any, model_class: Any) -> str | None:
    if getattr(config.get_text_config(), "attn_temperature_tuning", False):
        return "it tunes the temperature of attention by the row's place in the batch"
    return None
