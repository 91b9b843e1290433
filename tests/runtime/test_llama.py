"""Llama step by step, and SmolLM2 beside transformers; test_models.py has the architectures."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from sapwood.kernels import load_kernels
from sapwood.kernels.interface import Kernels
from sapwood.runtime.pull import packaged_model_path
from sapwood.runtime.weights import load_model
from tests.kernels.backends import WITHOUT_DEVICE
from tests.runtime.tiny_models import (
    Case,
    Chunk,
    PagedSequence,
    Runner,
    random_tokens,
    reference_logits,
    save_random_model,
)


@pytest.fixture(params=WITHOUT_DEVICE)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_kernels(request.param)


def save_random_llama(folder: Path) -> PreTrainedModel:
    return save_random_model(folder, Case("llama", "llama"))


def reference_greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(dtype: str, kernels: Kernels, tmp_path: Path) -> None:
    reference = save_random_llama(tmp_path)
    runner = Runner(load_model(tmp_path, kernels=kernels, dtype=dtype).model, kernels)
    prompt = random_tokens(30)
    (logits,) = runner.step(Chunk(PagedSequence(), prompt, num_logits=30))
    expected = reference_logits(reference, prompt)
    assert logits.dtype == torch.float32
    assert (logits - expected).std() <= 0.03 * expected.std()


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
