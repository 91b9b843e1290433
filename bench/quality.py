"""What does int8 cost in quality?

One model in float32 and in int8, through the same code, in the same run:

- on GSM8K texts (a question, a line break, its answer) the mean negative log-likelihood per token
  of both and their difference, the mean Kullback-Leibler divergence KL(float32 || int8) of the
  distribution of the next token, and how often both find the same token most likely;
- on multiple-choice questions of MMLU, five worked ones in front, the letter that both choose, and
  the token that greedy decoding gives.

A difference comes with a standard error over texts, since the tokens of a text are not independent.

    python bench/quality.py [--texts 200] [--questions 100]
"""

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, commit, machine, make_parser, read_json_lines, settings, write_json
from torch import Tensor
from workloads import LETTERS, MMLU_FOLDER, MmluQuestion, mmlu_questions

from sapwood.kernels import AttentionPlan, PrivateSegment, load_kernels
from sapwood.runtime.batch import ForwardBatch
from sapwood.runtime.tokenizer import Tokenizer
from sapwood.runtime.weights import find_model, load_model

GSM8K = Path(__file__).parent / "data" / "gsm8k" / "test_200.jsonl"
BLOCK_SIZE = 16
MAX_NLL_DIFFERENCE = 0.01
MIN_SAME_LETTERS = 0.97


class Scorer:
    """A model and the keys and values of the sequence it saw last.

    What a sequence has in common with the one before is not computed again. Memory: the KV cache
    and the logits asked for, float32 [num_logits, vocab_size].
    """

    def __init__(self, model: str, quantize: str, max_tokens: int) -> None:
        self._kernels = load_kernels("cpu")
        loaded = load_model(model, kernels=self._kernels, dtype="float32", quantize=quantize)
        self._model = loaded.model
        num_blocks = -(-max_tokens // BLOCK_SIZE)
        self._kv = self._kernels.make_kv_cache(self._model.kv_spec(num_blocks, BLOCK_SIZE))
        self._token_ids = np.empty(0, np.int64)

    def logits(self, token_ids: Sequence[int], num_logits: int) -> Tensor:
        """Logits of the last `num_logits` rows, float32 [num_logits, vocab_size]."""
        ids = np.array(token_ids, np.int64)
        end = len(ids)
        start = min(_num_common(ids, self._token_ids), end - num_logits)
        self._token_ids = ids
        positions = torch.arange(start, end)
        segment = PrivateSegment(
            block_ids=np.arange(-(-end // BLOCK_SIZE), dtype=np.int32),
            start=0,
            length=end,
            first_row=0,
            num_rows=end - start,
        )
        plan = AttentionPlan(
            num_rows=end - start, block_size=BLOCK_SIZE, shared=(), private=(segment,)
        )
        batch = ForwardBatch(
            input_ids=torch.from_numpy(ids[start:]),
            positions=positions,
            slots=positions,  # block i of the sequence is block i of the cache
            logits_rows=torch.arange(end - start - num_logits, end - start),
            attention=self._kernels.plan_attention(plan, self._kv.spec),
        )
        return self._model.forward(batch, self._kv)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScore:
    """Sums over the predicted tokens of one text, all but its first. In nats."""

    num_tokens: int
    nll: float
    quantized_nll: float
    divergence: float  # KL(float32 || int8)
    num_same_argmax: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What one model makes of a question."""

    letter: str  # the most likely of the four
    token_id: int  # the most likely of all


def main() -> None:
    arguments = _parse()
    started = time.perf_counter()
    tokenizer = Tokenizer.from_folder(find_model(arguments.model))

    def encode(text: str) -> list[int]:
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).tolist()
        return token_ids

    rows = read_json_lines(arguments.data)[: arguments.texts]
    texts = [encode(f"{row['question']}\n{row['answer']}") for row in rows]
    questions = mmlu_questions(encode, arguments.mmlu, count=arguments.questions)
    prompts = [*texts, *(question.prompt_ids for question in questions)]
    max_tokens = max(len(prompt) for prompt in prompts)
    exact, quantized = (
        Scorer(arguments.model, mode, max_tokens)
        for mode in (arguments.baseline, arguments.quantize)
    )
    scores = [_score(exact, quantized, text) for text in texts]
    result = {
        "question": "what does int8 cost in quality",
        "machine": machine(),
        "commit": commit(),
        "dtype": {"baseline": _dtype(arguments.baseline), "quantized": _dtype(arguments.quantize)},
        "settings": settings(arguments),
        "gsm8k": _summary(scores),
        "mmlu": _letters(exact, quantized, questions),
        "seconds": time.perf_counter() - started,
    }
    write_json(arguments.out, result)
    print("\n".join(lines(result)))


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="a known name or a folder")
    for name, mode in (("--baseline", "none"), ("--quantize", "int8")):
        parser.add_argument(name, choices=("none", "int8"), default=mode, help="option quantize")
    parser.add_argument(
        "--data", type=Path, default=GSM8K, help="JSON lines with 'question' and 'answer'"
    )
    parser.add_argument("--texts", type=int, default=200, help="how many of them, from the first")
    parser.add_argument("--mmlu", type=Path, default=MMLU_FOLDER, help="folder of MMLU-Redux")
    parser.add_argument("--questions", type=int, default=100, help="of MMLU")
    parser.add_argument("--out", type=Path, default=RESULTS / "quality.json", help="the result")
    arguments = parser.parse_args()
    if arguments.texts < 2 or arguments.questions < 1:
        parser.error("at least two texts and one question are needed")
    return arguments


def _dtype(quantize: str) -> str:
    return "float32" if quantize == "none" else quantize


def _num_common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


@torch.inference_mode()
def _score(exact: Scorer, quantized: Scorer, text: Sequence[int]) -> TextScore:
    targets = torch.tensor(text[1:]).unsqueeze(1)
    logprobs = exact.logits(text, len(text))[:-1].log_softmax(dim=-1)
    others = quantized.logits(text, len(text))[:-1].log_softmax(dim=-1)
    same = logprobs.argmax(dim=-1) == others.argmax(dim=-1)
    nll = -logprobs.gather(1, targets).sum(dtype=torch.float64)
    quantized_nll = -others.gather(1, targets).sum(dtype=torch.float64)
    probs = logprobs.exp()
    divergence = logprobs.sub_(others).mul_(probs).sum(dim=-1).sum(dtype=torch.float64)
    return TextScore(
        num_tokens=len(targets),
        nll=float(nll),
        quantized_nll=float(quantized_nll),
        divergence=float(divergence),
        num_same_argmax=int(same.sum()),
    )


def _summary(scores: Sequence[TextScore]) -> dict[str, Any]:
    num_tokens = [score.num_tokens for score in scores]
    differences = [score.quantized_nll - score.nll for score in scores]
    total = sum(num_tokens)
    return {
        "num_texts": len(scores),
        "num_tokens": total,
        "nll_per_token": {
            "baseline": sum(score.nll for score in scores) / total,
            "quantized": sum(score.quantized_nll for score in scores) / total,
        },
        "nll_difference": mean_per_token(differences, num_tokens),
        "kl_per_token": mean_per_token([score.divergence for score in scores], num_tokens),
        "same_argmax": sum(score.num_same_argmax for score in scores) / total,
    }


def mean_per_token(sums: Sequence[float], num_tokens: Sequence[int]) -> dict[str, float]:
    """The mean per token of what was summed over each text, and its standard error over texts.

    A ratio of sums, so that the error is that of the residuals `sum - mean * num_tokens`
    (Cochran 1977, chapter 6). Needs two texts.
    """
    count, total = len(sums), sum(num_tokens)
    mean = sum(sums) / total
    squares = sum((s - mean * n) ** 2 for s, n in zip(sums, num_tokens, strict=True))
    return {"mean": mean, "standard_error": math.sqrt(squares * count / (count - 1)) / total}


def _letters(exact: Scorer, quantized: Scorer, questions: Sequence[MmluQuestion]) -> dict[str, Any]:
    """Which of the answers are the same, and which are right."""
    # Prompts of a subject have a prefix in common, which is computed once while they are adjacent.
    in_order = sorted(questions, key=lambda question: question.prompt_ids)
    choices = [(_choice(exact, question), _choice(quantized, question)) for question in in_order]
    count = len(in_order)
    pairs = list(zip(choices, in_order, strict=True))
    return {
        "num_questions": count,
        "num_same_letter": sum(a.letter == b.letter for a, b in choices),
        "num_same_token": sum(a.token_id == b.token_id for a, b in choices),
        "accuracy": {
            "baseline": sum(a.letter == q.answer for (a, _), q in pairs) / count,
            "quantized": sum(b.letter == q.answer for (_, b), q in pairs) / count,
        },
    }


def _choice(scorer: Scorer, question: MmluQuestion) -> Choice:
    logits = scorer.logits(question.prompt_ids, 1)[0]
    best = int(logits[list(question.letter_ids)].argmax())
    return Choice(letter=LETTERS[best], token_id=int(logits.argmax()))


def lines(result: dict[str, Any]) -> list[str]:
    """The result in a few sentences."""
    dtype, gsm8k, mmlu = result["dtype"], result["gsm8k"], result["mmlu"]
    nll, difference = gsm8k["nll_per_token"], gsm8k["nll_difference"]
    divergence = gsm8k["kl_per_token"]
    num_same, count = mmlu["num_same_letter"], mmlu["num_questions"]
    accuracy = mmlu["accuracy"]
    return [
        f"{gsm8k['num_texts']} GSM8K texts, {gsm8k['num_tokens']} tokens: negative log-likelihood "
        f"per token {nll['baseline']:.4f} in {dtype['baseline']}, {nll['quantized']:.4f} in "
        f"{dtype['quantized']}; difference {difference['mean']:+.4f} "
        f"(standard error {difference['standard_error']:.4f}; the bar is {MAX_NLL_DIFFERENCE})",
        f"KL divergence per token {divergence['mean']:.5f} "
        f"(standard error {divergence['standard_error']:.5f}), "
        f"same most likely token {gsm8k['same_argmax']:.2%}",
        f"{count} MMLU questions, 5-shot: same letter {num_same} (the bar is "
        f"{math.ceil(MIN_SAME_LETTERS * count)}), same greedy token {mmlu['num_same_token']}; "
        f"accuracy {accuracy['baseline']:.1%} in {dtype['baseline']}, "
        f"{accuracy['quantized']:.1%} in {dtype['quantized']}",
    ]


if __name__ == "__main__":
    main()
