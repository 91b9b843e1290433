"""Every native model gives the logits and the tokens of transformers, in batches and in int8."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from sapwood.kernels import load_kernels
from sapwood.kernels.interface import Kernels
from sapwood.runtime.models import MODELS
from sapwood.runtime.weights import load_model
from tests.kernels.backends import WITHOUT_DEVICE
from tests.runtime.tiny_models import (
    CASES,
    VOCAB_SIZE,
    Case,
    Chunk,
    PagedSequence,
    Runner,
    random_tokens,
    reference_logits,
    save_random_model,
)

PROMPT_LENGTHS = (3, 7, 12, 20, 33, 48, 71, 90)
MAX_DISTANCE = 1e-3  # in standard deviations of the reference's logits


def test_every_model_has_a_case_in_the_short_suite() -> None:
    assert {case.model_type for case in CASES if case.is_compact} == set(MODELS)


def case_params(*, compact: bool) -> list[object]:
    """All cases, each with the marks it runs under."""
    return [
        pytest.param(
            case,
            id=f"{case.model_type}-{case.name}",
            marks=[] if case.is_compact and compact else pytest.mark.slow,
        )
        for case in CASES
    ]


@dataclass
class Answer:
    """One prompt's greedy continuation, with the logits of every row of the prompt and of it."""

    sequence: PagedSequence
    prompt_len: int
    logits: list[Tensor]

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.token_ids


def greedy_batch(runner: Runner, num_tokens: int) -> list[Answer]:
    """Continue prompts of all lengths together: prompts in one step, then a token each."""
    prompts = [random_tokens(length, seed=length) for length in PROMPT_LENGTHS]
    answers = [Answer(PagedSequence(), len(prompt), []) for prompt in prompts]
    inputs = prompts
    for _ in range(num_tokens):
        results = runner.step(
            *(
                Chunk(answer.sequence, token_ids, num_logits=len(token_ids))
                for answer, token_ids in zip(answers, inputs, strict=True)
            )
        )
        for answer, logits in zip(answers, results, strict=True):
            answer.logits.append(logits)
        inputs = [[int(logits[-1].argmax())] for logits in results]
    return answers


def check_against(reference: PreTrainedModel, answer: Answer) -> int:
    """Compare all logits, and each token with the reference's for the same tokens before it.

    Returns how many of the tokens are not the reference's, where its best two are as good as equal.
    """
    expected = reference_logits(reference, answer.token_ids)
    actual = torch.cat(answer.logits)
    assert actual.dtype == torch.float32 and actual.shape == expected.shape
    tolerance = MAX_DISTANCE * expected.std()
    assert (actual - expected).abs().max() <= tolerance
    generated = torch.tensor(answer.token_ids[answer.prompt_len :])
    before = expected[answer.prompt_len - 1 : -1]
    chosen = before.gather(1, generated[:, None])[:, 0]
    best = before.max(dim=1).values
    assert (best - chosen <= tolerance).all()
    return int((before.argmax(dim=1) != generated).sum())


def check_parity(case: Case, kernels: Kernels, folder: Path, num_tokens: int) -> None:
    reference = save_random_model(folder, case)
    runner = Runner(load_model(folder, kernels=kernels).model, kernels, num_blocks=512)
    answers = greedy_batch(runner, num_tokens)
    generated = [tuple(answer.token_ids[answer.prompt_len :]) for answer in answers]
    assert len(set(generated)) > 1, "all prompts have one answer, equality would say little"
    differences = sum(check_against(reference, answer) for answer in answers)
    # Ties within the tolerance are rare: if many tokens differ, they are no ties.
    assert differences <= len(answers) * num_tokens // 100


@pytest.mark.parametrize("case", case_params(compact=True))
def test_a_batch_gives_the_logits_and_tokens_of_transformers(case: Case, tmp_path: Path) -> None:
    check_parity(case, load_kernels("cpu"), tmp_path, num_tokens=24)


@pytest.mark.slow
@pytest.mark.parametrize("backend", WITHOUT_DEVICE)
@pytest.mark.parametrize("case", case_params(compact=False))
def test_64_tokens_on_every_backend(case: Case, backend: str, tmp_path: Path) -> None:
    check_parity(case, load_kernels(backend), tmp_path, num_tokens=64)


COMPACT = [case for case in CASES if case.is_compact]


@pytest.mark.parametrize("case", COMPACT, ids=lambda case: f"{case.model_type}-{case.name}")
def test_a_step_without_logits_still_writes_its_keys(case: Case, tmp_path: Path) -> None:
    reference = save_random_model(tmp_path, case)
    kernels = load_kernels("cpu")
    runner = Runner(load_model(tmp_path, kernels=kernels).model, kernels)
    sequence, prompt = PagedSequence(), random_tokens(12)
    (nothing,) = runner.step(Chunk(sequence, prompt[:11], num_logits=0))
    assert nothing.shape == (0, VOCAB_SIZE)
    (logits,) = runner.step(Chunk(sequence, prompt[11:]))
    expected = reference_logits(reference, prompt)
    assert (logits - expected[-1]).abs().max() <= MAX_DISTANCE * expected.std()


@pytest.mark.parametrize("case", COMPACT, ids=lambda case: f"{case.model_type}-{case.name}")
def test_half_precision_stays_near_float32(case: Case, tmp_path: Path) -> None:
    reference = save_random_model(tmp_path, case)
    kernels = load_kernels("cpu")
    runner = Runner(load_model(tmp_path, kernels=kernels, dtype="bfloat16").model, kernels)
    prompt = random_tokens(40)
    (logits,) = runner.step(Chunk(PagedSequence(), prompt, num_logits=len(prompt)))
    expected = reference_logits(reference, prompt)
    assert logits.dtype == torch.float32
    # Of most rows: where two experts are as good as equal, a row may take the other one.
    distances = (logits - expected).std(dim=1) / expected.std()
    assert distances.median() <= 0.05


@pytest.mark.skipif(load_kernels("cpu").quantized() is None, reason="int8 takes a C compiler")
@pytest.mark.parametrize("case", COMPACT, ids=lambda case: f"{case.model_type}-{case.name}")
def test_int8_stays_near_float32(case: Case, tmp_path: Path) -> None:
    reference = save_random_model(tmp_path, case)
    kernels = load_kernels("cpu")
    quantized = kernels.quantized()
    assert quantized is not None
    model = load_model(tmp_path, kernels=kernels, quantize="int8").model
    prompt = random_tokens(90)
    chunk = Chunk(PagedSequence(), prompt, num_logits=len(prompt))
    (logits,) = Runner(model, quantized).step(chunk)
    expected = reference_logits(reference, prompt)
    divergence = functional.kl_div(
        logits.log_softmax(dim=-1),
        expected.log_softmax(dim=-1),
        reduction="batchmean",
        log_target=True,
    )
    # In nats a token. Measured: 0.007 at most, and 0.03 where a row may take another expert.
    assert 0 < divergence <= (0.05 if "num_experts_per_tok" in case.config else 0.015)
