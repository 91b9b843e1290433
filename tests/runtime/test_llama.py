"""Parity of the native Llama with transformers: tiny random models of every kind, and SmolLM2."""

from __future__ import annotations

import json
import pydoc_data.topics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sapwood.kernels import KERNELS, AttentionPlan, PrivateSegment, SharedSegment, load_kernels
from sapwood.kernels.interface import Kernels
from sapwood.runtime.batch import ForwardBatch
from sapwood.runtime.models import Model
from sapwood.runtime.pull import packaged_model_path
from sapwood.runtime.weights import load_model

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
}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied_head": {"tie_word_embeddings": True},
    "untied_head_and_own_kv_heads": {"num_key_value_heads": 6},
    "eight_queries_per_kv_head": {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
    },
    "wide_heads": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear_rope": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}
    },
    "llama3_rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.fixture(params=sorted(KERNELS))
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_kernels(request.param)


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
        batch = ForwardBatch(
            input_ids=torch.tensor(input_ids),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            logits_rows=torch.tensor(logits_rows, dtype=torch.int64),
            attention=self.kernels.plan_attention(plan, self.kv.spec),
        )
        logits = self.model.forward(batch, self.kv)
        return list(logits.split([chunk.num_logits for chunk in chunks]))

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        sequence, token_ids = PagedSequence(), []
        (logits,) = self.step(Chunk(sequence, list(prompt)))
        for _ in range(num_tokens):
            token_ids.append(int(logits.argmax()))
            (logits,) = self.step(Chunk(sequence, token_ids[-1:]))
        return token_ids


def save_random_llama(folder: Path, **overrides: Any) -> LlamaForCausalLM:
    """A tiny model with every parameter random, biases and norms too, written to `folder`."""
    torch.manual_seed(0)
    config = LlamaConfig(**(TINY | overrides))
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=0.2)
    model.save_pretrained(folder)
    return model


def reference_logits(model: LlamaForCausalLM, token_ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)])).logits[0]


def reference_greedy(model: LlamaForCausalLM, prompt: Sequence[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    # Whether a prompt's token is padding is not to be guessed, and generation runs to the end.
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def assert_logits_match(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 1e-3 * expected.std()


def random_tokens(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_tokens).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_random_llama_gives_the_logits_and_tokens_of_transformers(
    variant: str, kernels: Kernels, tmp_path: Path
) -> None:
    reference = save_random_llama(tmp_path, **VARIANTS[variant])
    model = load_model(tmp_path, kernels=kernels).model
    prompt = random_tokens(90)
    (logits,) = Runner(model, kernels).step(Chunk(PagedSequence(), prompt, num_logits=90))
    assert_logits_match(logits, reference_logits(reference, prompt))
    greedy = reference_greedy(reference, prompt[:20], 64)
    assert len(set(greedy)) > 3, "the reference repeats one token, equality would say little"
    assert Runner(model, kernels).greedy(prompt[:20], 64) == greedy


def test_ragged_steps_give_each_sequence_the_logits_it_has_alone(
    kernels: Kernels, tmp_path: Path
) -> None:
    reference = save_random_llama(tmp_path)
    runner = Runner(load_model(tmp_path, kernels=kernels).model, kernels)
    prefix, first, second, third = (random_tokens(n, seed=n) for n in (18, 9, 40, 5))
    parent = PagedSequence()
    runner.step(Chunk(parent, prefix, num_logits=0), Chunk(PagedSequence(), second, num_logits=0))
    # Two forks below 16 shared tokens, one resuming the other two; the parent goes on meanwhile.
    a, b, c = parent.fork(), parent.fork(), PagedSequence()
    runner.step(
        Chunk(a, [*prefix[16:], *first[:4]], num_logits=0),
        Chunk(parent, third[:1], num_logits=0),
        Chunk(c, second[:30], num_logits=0),
    )
    results = runner.step(
        Chunk(parent, third[1:2]),
        Chunk(a, first[4:], num_logits=5),
        Chunk(b, [*prefix[16:], *second], num_logits=3),
        Chunk(c, second[30:], num_logits=1),
    )
    for sequence, logits in zip((parent, a, b, c), results, strict=True):
        expected = reference_logits(reference, sequence.token_ids)[-len(logits) :]
        assert_logits_match(logits, expected)


def test_a_step_without_logits_returns_none_and_still_writes_its_keys(
    kernels: Kernels, tmp_path: Path
) -> None:
    reference = save_random_llama(tmp_path)
    runner = Runner(load_model(tmp_path, kernels=kernels).model, kernels)
    sequence, prompt = PagedSequence(), random_tokens(12)
    (nothing,) = runner.step(Chunk(sequence, prompt[:11], num_logits=0))
    assert nothing.shape == (0, VOCAB_SIZE)
    (logits,) = runner.step(Chunk(sequence, prompt[11:]))
    assert_logits_match(logits, reference_logits(reference, prompt)[-1:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(dtype: str, kernels: Kernels, tmp_path: Path) -> None:
    reference = save_random_llama(tmp_path)
    runner = Runner(load_model(tmp_path, kernels=kernels, dtype=dtype).model, kernels)
    prompt = random_tokens(30)
    (logits,) = runner.step(Chunk(PagedSequence(), prompt, num_logits=30))
    expected = reference_logits(reference, prompt)
    assert logits.dtype == torch.float32
    assert (logits - expected).std() <= 0.03 * expected.std()


def test_rope_written_the_old_way_means_the_same(kernels: Kernels, tmp_path: Path) -> None:
    reference = save_random_llama(tmp_path, **VARIANTS["llama3_rope"])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    path.write_text(json.dumps(config | {"rope_scaling": scaling}))
    runner = Runner(load_model(tmp_path, kernels=kernels).model, kernels)
    prompt = random_tokens(90)
    (logits,) = runner.step(Chunk(PagedSequence(), prompt, num_logits=90))
    assert_logits_match(logits, reference_logits(reference, prompt))


@pytest.fixture(scope="module")
def smollm2() -> Iterator[tuple[Path, LlamaForCausalLM]]:
    if not packaged_model_path("smollm2").exists():
        pytest.skip("smollm2 is not in the cache; run `sapwood pull smollm2`")
    loaded = load_model("smollm2", kernels=load_kernels("cpu"))
    assert loaded.path is not None
    reference = LlamaForCausalLM.from_pretrained(loaded.path, dtype=torch.float32).eval()
    yield loaded.path, reference


def real_prompts(folder: Path, num_prompts: int) -> list[list[int]]:
    """English of 40 to 200 tokens out of Python's manual."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    topics = sorted(pydoc_data.topics.topics.items())
    texts = [text for _, text in topics if len(text) > 1500][:num_prompts]
    return [
        tokenizer.encode(text[50:1400]).ids[: 40 + 8 * number] for number, text in enumerate(texts)
    ]


def greedy_differences(
    folder: Path, reference: LlamaForCausalLM, kernels: Kernels, num_prompts: int, num_tokens: int
) -> list[str]:
    """Where greedy tokens differ, with the gap between the reference's two largest logits.

    After a difference the texts are no longer comparable, so each prompt counts its first.
    """
    model = load_model(folder, kernels=kernels).model
    differences = []
    prompts = real_prompts(folder, num_prompts)
    assert len(prompts) == num_prompts
    for number, prompt in enumerate(prompts):
        expected = reference_greedy(reference, prompt, num_tokens)
        actual = Runner(model, kernels).greedy(prompt, num_tokens)
        for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            if ours != theirs:
                logits = reference_logits(reference, [*prompt, *expected[:index]])[-1]
                first, second = logits.topk(2).values.tolist()
                differences.append(f"prompt {number} token {index}: gap {first - second:.2e}")
                break
    return differences


@pytest.mark.real_model
def test_smollm2_writes_the_text_that_transformers_writes(
    smollm2: tuple[Path, LlamaForCausalLM], kernels: Kernels
) -> None:
    assert greedy_differences(*smollm2, kernels, num_prompts=3, num_tokens=16) == []


@pytest.mark.real_model
@pytest.mark.slow
def test_smollm2_writes_the_text_that_transformers_writes_for_long(
    smollm2: tuple[Path, LlamaForCausalLM], kernels: Kernels
) -> None:
    assert greedy_differences(*smollm2, kernels, num_prompts=20, num_tokens=64) == []


@pytest.mark.real_model
def test_smollm2_has_the_logits_of_transformers(
    smollm2: tuple[Path, LlamaForCausalLM], kernels: Kernels
) -> None:
    folder, reference = smollm2
    (prompt,) = real_prompts(folder, 1)
    runner = Runner(load_model(folder, kernels=kernels).model, kernels)
    (logits,) = runner.step(Chunk(PagedSequence(), prompt, num_logits=len(prompt)))
    assert_logits_match(logits, reference_logits(reference, prompt))
