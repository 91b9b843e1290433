"""Tiny random models of every kind, saved by transformers, and a runner that puts steps together.

`CASES` is the table that tests/runtime/test_models.py goes through: a row for each way in which an
architecture computes something differently, with the odd values that real checkpoints have.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from sapwood.kernels import AttentionPlan, PrivateSegment, SharedSegment
from sapwood.kernels.interface import Kernels
from sapwood.runtime.batch import BatchArrays, ForwardBatch
from sapwood.runtime.models import Model

BLOCK_SIZE = 4
VOCAB_SIZE = 120
TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Case:
    """A model as its config.json has it, beside what `TINY` has.

    `pinned` is merged into the rope of the reference alone, where transformers looks at the whole
    sequence for what is decided once here. Where `is_compact` the case belongs to the short suite.
    """

    name: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    pinned: dict[str, Any] = field(default_factory=dict)
    is_compact: bool = False


def rope(kind: str, theta: float = 10_000.0, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta} | parameters}


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
SEVEN_TO_ONE = {
    "hidden_size": 56,
    "num_attention_heads": 7,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
EIGHT_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
LONG_FACTORS = [1.0 + 0.37 * index for index in range(8)]
SHORT_FACTORS = [1.0 + 0.05 * index for index in range(8)]
LONGROPE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "original_max_position_embeddings": 64,
    **rope("longrope", short_factor=SHORT_FACTORS, long_factor=LONG_FACTORS),
}
CASES = (
    Case("tied_head", "llama", {"tie_word_embeddings": True}, is_compact=True),
    Case("own_kv_heads", "llama", {"num_key_value_heads": 6}),
    Case("seven_queries_per_kv_head", "llama", SEVEN_TO_ONE),
    Case("wide_heads", "llama", {"head_dim": 32}),
    Case("biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    Case("linear_rope", "llama", rope("linear", 5000.0, factor=2.5)),
    Case("dynamic_rope", "llama", rope("dynamic", factor=4.0)),
    Case("llama3_rope", "llama", LLAMA3, is_compact=True),
    Case("yarn_rope", "llama", YARN, is_compact=True),
    Case(
        "yarn_rope_with_all_its_fields",
        "llama",
        {
            "head_dim": 32,
            **rope(
                "yarn",
                factor=8.0,
                original_max_position_embeddings=64,
                beta_fast=4.0,
                beta_slow=1.5,
                mscale=1.2,
                mscale_all_dim=0.7,
                truncate=False,
            ),
        },
    ),
    Case("yarn_rope_with_its_factor", "llama", rope("yarn", factor=4.0, attention_factor=1.3)),
    Case("gelu", "llama", {"hidden_act": "gelu_pytorch_tanh"}),
    Case("no_window", "mistral", {"sliding_window": None}),
    Case("window", "mistral", {"sliding_window": 11, "head_dim": 12}, is_compact=True),
    Case("window_of_one_token", "mistral", {"sliding_window": 1}),
    Case("window_of_the_whole_context", "mistral", {"sliding_window": 4096}),
    Case("no_window", "qwen2", is_compact=True),
    Case("tied_head_and_seven_queries", "qwen2", {"tie_word_embeddings": True, **SEVEN_TO_ONE}),
    Case("window_that_is_off", "qwen2", {"sliding_window": 7}),
    Case(
        "window_in_upper_layers",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    Case("yarn_rope", "qwen2", YARN),
    Case("head_norms", "qwen3", {"head_dim": 32}, is_compact=True),
    Case("biases", "qwen3", {"head_dim": 10, "attention_bias": True, "num_key_value_heads": 6}),
    Case(
        "windows_by_layer",
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Case("yarn_rope", "qwen3", {"head_dim": 16, "tie_word_embeddings": True, **YARN}),
    Case(
        "soft_caps",
        "gemma2",
        {
            "head_dim": 20,
            "sliding_window": 11,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 7.0,
            "tie_word_embeddings": False,
        },
        is_compact=True,
    ),
    Case(
        "no_soft_caps",
        "gemma2",
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "layer_types": ["full_attention"] * 3,
            **rope("linear", 5e4, factor=2.0),
        },
    ),
    Case(
        "local_and_global_layers",
        "gemma3_text",
        {
            "head_dim": 20,
            "sliding_window": 11,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 7.0,
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        is_compact=True,
    ),
    Case("every_sixth_is_global", "gemma3_text", {"num_hidden_layers": 7, "head_dim": 16}),
    Case(
        "untied_head_and_biases",
        "gemma3_text",
        {
            "head_dim": 16,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "num_key_value_heads": 1,
        },
    ),
    Case("plain", "phi3", is_compact=True),
    Case("window", "phi3", {"sliding_window": 11}),
    Case(
        "a_part_of_each_head",
        "phi3",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            **rope("default", partial_rotary_factor=0.75),
        },
        is_compact=True,
    ),
    Case(
        "longrope_of_a_longer_context",
        "phi3",
        LONGROPE,
        pinned={"short_factor": LONG_FACTORS},
        is_compact=True,
    ),
    Case(
        "longrope_of_the_original_context",
        "phi3",
        {**LONGROPE, "original_max_position_embeddings": 256},
    ),
    Case(
        "multipliers",
        "granite",
        {
            "embedding_multiplier": 1.7,
            "attention_multiplier": 0.21,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.5,
        },
        is_compact=True,
    ),
    Case(
        "multipliers_and_biases",
        "granite",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.125,
            "tie_word_embeddings": True,
        },
    ),
    Case("two_of_eight", "mixtral", EIGHT_EXPERTS, is_compact=True),
    Case("window", "mixtral", {"sliding_window": 11, "head_dim": 16, **EIGHT_EXPERTS}),
    Case("one_of_one", "mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    Case(
        "two_of_eight",
        "qwen3_moe",
        {"head_dim": 16, "moe_intermediate_size": 28, "norm_topk_prob": True, **EIGHT_EXPERTS},
        is_compact=True,
    ),
    Case(
        "some_layers_are_dense",
        "qwen3_moe",
        {
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "moe_intermediate_size": 28,
            **EIGHT_EXPERTS,
        },
    ),
    Case(
        "window_and_all_experts",
        "qwen3_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 11,
            "num_local_experts": 5,
            "num_experts_per_tok": 5,
            "moe_intermediate_size": 28,
        },
    ),
)


@dataclass
class PagedSequence:
    """A sequence's block table. The first `num_shared` blocks are another sequence's too."""

    token_ids: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    num_shared: int = 0

    def fork(self) -> PagedSequence:
        num_shared = len(self.token_ids) // BLOCK_SIZE
        kept = num_shared * BLOCK_SIZE
        return PagedSequence(self.token_ids[:kept], self.table[:num_shared], num_shared)


@dataclass(frozen=True)
class Chunk:
    sequence: PagedSequence
    token_ids: Sequence[int]
    num_logits: int = 1


class Runner:
    """Runs chunks of many sequences in one forward pass over shuffled blocks."""

    def __init__(self, model: Model, kernels: Kernels, num_blocks: int = 256) -> None:
        self.model, self.kernels = model, kernels
        self.kv = kernels.make_kv_cache(model.kv_spec(num_blocks, BLOCK_SIZE))
        self.free = list(np.random.default_rng(0).permutation(num_blocks))

    def step(self, *chunks: Chunk) -> list[Tensor]:
        """Extend each chunk's sequence; the logits of each chunk's last `num_logits` rows."""
        input_ids, positions, slots, logits_rows, private = [], [], [], [], []
        rows_of_prefix: dict[tuple[int, ...], list[int]] = {}
        for chunk in chunks:
            sequence, first_row = chunk.sequence, len(input_ids)
            start = len(sequence.token_ids)
            sequence.token_ids += chunk.token_ids
            end = len(sequence.token_ids)
            while len(sequence.table) * BLOCK_SIZE < end:
                sequence.table.append(int(self.free.pop()))
            input_ids += chunk.token_ids
            positions += range(start, end)
            slots += [
                sequence.table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
                for p in range(start, end)
            ]
            logits_rows += range(len(input_ids) - chunk.num_logits, len(input_ids))
            if prefix := tuple(sequence.table[: sequence.num_shared]):
                rows_of_prefix.setdefault(prefix, []).extend(range(first_row, len(input_ids)))
            private.append(
                PrivateSegment(
                    block_ids=np.array(sequence.table[sequence.num_shared :], dtype=np.int32),
                    start=sequence.num_shared * BLOCK_SIZE,
                    length=end - sequence.num_shared * BLOCK_SIZE,
                    first_row=first_row,
                    num_rows=len(chunk.token_ids),
                )
            )
        shared = [
            SharedSegment(
                block_ids=np.array(prefix, dtype=np.int32),
                start=0,
                length=len(prefix) * BLOCK_SIZE,
                rows=np.array(rows, dtype=np.int32),
            )
            for prefix, rows in rows_of_prefix.items()
        ]
        plan = AttentionPlan(
            num_rows=len(input_ids),
            block_size=BLOCK_SIZE,
            shared=tuple(shared),
            private=tuple(private),
        )
        plan.check()
        arrays = BatchArrays(
            *(np.array(rows, np.int64) for rows in (input_ids, positions, slots, logits_rows))
        )
        logits = self.model.forward(self.batch(arrays, plan), self.kv)
        return list(logits.split([chunk.num_logits for chunk in chunks]))

    def batch(self, arrays: BatchArrays, plan: AttentionPlan) -> ForwardBatch:
        """What the model is run on."""
        tensors = {name: torch.from_numpy(array) for name, array in arrays._asdict().items()}
        attention = self.kernels.plan_attention(plan, self.kv.spec)
        return ForwardBatch(**tensors, attention=attention)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        sequence, token_ids = PagedSequence(), []
        (logits,) = self.step(Chunk(sequence, list(prompt)))
        for _ in range(num_tokens):
            token_ids.append(int(logits.argmax()))
            (logits,) = self.step(Chunk(sequence, token_ids[-1:]))
        return token_ids


def config_of(case: Case) -> PreTrainedConfig:
    """As transformers has it."""
    values = deepcopy(TINY | case.config)  # transformers writes into it
    return AutoConfig.for_model(case.model_type, **values)


def save_random_model(folder: Path, case: Case) -> PreTrainedModel:
    """A tiny model with every parameter random, biases and norms too, written to `folder`.

    Returns it with the rope pinned.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(case)).eval()
    # Gemma keeps what its norms multiply by less one.
    norm = 0.0 if case.model_type.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=norm if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(folder)
    if not case.pinned:
        return model
    pinned = config_of(case)
    pinned.rope_parameters |= case.pinned
    reference = AutoModelForCausalLM.from_config(pinned).eval()
    reference.load_state_dict(model.state_dict())
    return reference


def reference_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)])).logits[0]


def random_tokens(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_tokens).tolist()
