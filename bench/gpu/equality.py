"""Greedy tokens: with CUDA graphs and overlap, without, and on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gpu.context import Context
from gpu.engines import BenchEngine, EngineShape, Prompt, give_back_memory, random_prompt
from gpu.models import TINY_QWEN3
from gpu.sections import Row
from sapwood.kernels import load_kernels
from sapwood.kernels.interface import Kernels
from sapwood.runtime.model_config import ModelConfig
from sapwood.runtime.models import Model, load_model_class


def equality(context: Context) -> Iterator[Row]:
    """A float32 model, whose rounding is far below the distance between its best tokens."""
    config = context.pick(
        replace(
            TINY_QWEN3,
            vocab_size=4096,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            head_dim=64,
        ),
        TINY_QWEN3,
    )
    weights = _weights(config)
    prompts = _prompts(context, config.vocab_size)
    shape = EngineShape(
        max_num_seqs=context.pick(16, 3),
        max_num_batched_tokens=context.pick(128, 8),  # prompts come in chunks beside decoding
        max_model_len=max(len(prompt.token_ids) + prompt.num_generated for prompt in prompts),
        num_tokens=context.pick(4096, 512),
        has_graphs=False,
        has_overlap=False,
    )
    cpu = torch.device("cpu")
    expected = _generate(context, config, weights, load_kernels("cpu"), shape, prompts, cpu)
    kinds = (
        ("graphs and overlap", replace(shape, has_graphs=True, has_overlap=True)),
        ("neither", shape),
        ("CUDA graphs", replace(shape, has_graphs=True)),
        ("overlap", replace(shape, has_overlap=True)),
    )
    for name, changed in context.pick(kinds, kinds[:2]):
        got = _generate(context, config, weights, context.kernels, changed, prompts, context.device)
        equal = sum(a == b for a, b in zip(got, expected, strict=True))
        yield Row(
            name=f"float32, {name}: answers equal to the CPU's",
            figures={
                "answers": len(expected),
                "equal": equal,
                "tokens": sum(map(len, expected)),
            },
            bar="all",
            is_met=equal == len(expected),
        )
        give_back_memory(context.device)


def _weights(config: ModelConfig) -> Mapping[str, Tensor]:
    """Random ones that keep the size of what goes through.

    The best two logits of every drawn token lie 7e-4 apart at the least in the full run, and 0.2 in
    the median (measured on a CPU), where float32 rounds by about 1e-5.
    """
    generator = torch.Generator().manual_seed(14)
    shapes = load_model_class(config.model_type).weight_shapes(config)
    return {
        name: torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
        if len(shape) > 1
        else torch.ones(shape)
        for name, shape in shapes.items()
    }


def _prompts(context: Context, vocab_size: int) -> list[Prompt]:
    """Some below a common prefix, some alone, of many lengths; more than run at once."""
    rng = np.random.default_rng(10)
    count, longest, num_generated = context.pick((40, 300, 48), (4, 12, 3))
    prefix = rng.integers(0, vocab_size, longest // 3).astype(np.int32)
    prompts = []
    for index, length in enumerate(rng.integers(1, longest, count).tolist()):
        prompt = random_prompt(rng, vocab_size, length, int(rng.integers(1, num_generated + 1)))
        if index % 2:
            joined = np.concatenate([prefix, prompt.token_ids])
            prompt = replace(prompt, token_ids=joined)
        prompts.append(prompt)
    return prompts


def _generate(
    context: Context,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    kernels: Kernels,
    shape: EngineShape,
    prompts: list[Prompt],
    device: torch.device,
) -> list[list[int]]:
    on_device = {name: weight.to(device, copy=True) for name, weight in weights.items()}
    model: Model = load_model_class(config.model_type)(config, on_device, kernels)
    running = BenchEngine(context, model, kernels, config.vocab_size, shape, device)
    return running.run(prompts)
