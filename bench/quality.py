"""What does int8 cost in quality?

One model in float32 and in int8, through the same code, in the same run:

- on GSM8K texts (a question, a line break, its answer) the mean negative log-likelihood per token
  of both and their difference, the mean Kullback-Leibler divergence KL(float32 || int8) of the
  distribution of the next token, and how often both find the same token most likely;
- on multiple-choice questions of MMLU, five worked ones in front, the letter that both choose, and
  the token that greedy decoding gives: in the model's chat format, as an instruct model is asked,
  and in plain text.

A difference comes with a standard error over texts, since the tokens of a text are not independent.
How many letters change hangs on how far the first is ahead of the second (its lead) and on how far
int8 moves the letters' logits against each other (the shift); both are reported.

The bar for letters is on the chat format alone. In plain text SmolLM2, tuned on chats, is below
chance and its letters all but tie, so that a small error of any kind decides which one wins: int8
changes more of them there than the bar would allow.

    python bench/quality.py [--texts 200] [--questions 100]
"""

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, commit, machine, make_parser, read_json_lines, settings, write_json
from torch import Tensor
from workloads import LETTERS, MMLU_FOLDER, MmluQuestion, PromptStyle, mmlu_questions

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

    logits: tuple[float, ...]  # of the four letters
    token_id: int  # the most likely of all

    @property
    def letter(self) -> str:
        """The most likely of the four."""
        return LETTERS[self.logits.index(max(self.logits))]

    @property
    def lead(self) -> float:
        """How far the logit of that letter is above the next one's."""
        *_, second, first = sorted(self.logits)
        return first - second


def main() -> None:
    arguments = _parse()
    started = time.perf_counter()
    tokenizer = Tokenizer.from_folder(find_model(arguments.model))

    texts = [
        tokenizer.encode(f"{row['question']}\n{row['answer']}", add_special_tokens=False).tolist()
        for row in read_json_lines(arguments.data)[: arguments.texts]
    ]
    chats, plain = (
        mmlu_questions(tokenizer, arguments.mmlu, style=style, count=arguments.questions)
        for style in (PromptStyle.CHAT, PromptStyle.TEXT)
    )
    prompts = [*texts, *(question.prompt_ids for question in (*chats, *plain))]
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
        "mmlu": _letters(exact, quantized, chats),
        "mmlu_text": _letters(exact, quantized, plain),
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
    # Prompts of a subject have a prefix in common, which is computed once while they are adjacent.
    in_order = sorted(questions, key=lambda question: question.prompt_ids)
    return compare_choices(
        [question.answer for question in in_order],
        [_choice(exact, question) for question in in_order],
        [_choice(quantized, question) for question in in_order],
    )


def _choice(scorer: Scorer, question: MmluQuestion) -> Choice:
    logits = scorer.logits(question.prompt_ids, 1)[0]
    letters: list[float] = logits[list(question.letter_ids)].tolist()
    return Choice(logits=tuple(letters), token_id=int(logits.argmax()))


def compare_choices(
    answers: Sequence[str], baseline: Sequence[Choice], quantized: Sequence[Choice]
) -> dict[str, Any]:
    """Which choices are the same, which are right, and how firm they are: one of each a question.

    `median_lead` is the baseline's. `shift_deviation` is the standard deviation of what the second
    adds to the logit of a letter beyond what it adds to all four, which changes no choice: from
    the squares about each question's mean, over 3 degrees of freedom a question.
    """
    count = len(answers)
    pairs = list(zip(baseline, quantized, strict=True))
    shifts = np.array([b.logits for b in quantized]) - np.array([a.logits for a in baseline])
    residuals = shifts - shifts.mean(axis=1, keepdims=True)
    return {
        "num_questions": count,
        "num_same_letter": sum(a.letter == b.letter for a, b in pairs),
        "num_same_token": sum(a.token_id == b.token_id for a, b in pairs),
        "accuracy": {
            name: sum(
                choice.letter == answer for choice, answer in zip(choices, answers, strict=True)
            )
            / count
            for name, choices in (("baseline", baseline), ("quantized", quantized))
        },
        "median_lead": statistics.median(choice.lead for choice in baseline),
        "shift_deviation": math.sqrt((residuals**2).sum() / (count * (len(LETTERS) - 1))),
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The result in a few sentences."""
    dtype, gsm8k = result["dtype"], result["gsm8k"]
    nll, difference = gsm8k["nll_per_token"], gsm8k["nll_difference"]
    divergence = gsm8k["kl_per_token"]
    bar = math.ceil(MIN_SAME_LETTERS * result["mmlu"]["num_questions"])
    return [
        f"{gsm8k['num_texts']} GSM8K texts, {gsm8k['num_tokens']} tokens: negative log-likelihood "
        f"per token {nll['baseline']:.4f} in {dtype['baseline']}, {nll['quantized']:.4f} in "
        f"{dtype['quantized']}; difference {difference['mean']:+.4f} "
        f"(standard error {difference['standard_error']:.4f}; the bar is {MAX_NLL_DIFFERENCE})",
        f"KL divergence per token {divergence['mean']:.5f} "
        f"(standard error {divergence['standard_error']:.5f}), "
        f"same most likely token {gsm8k['same_argmax']:.2%}",
        _letters_line(result["mmlu"], dtype, "the model's chat format", f" (the bar is {bar})"),
        _letters_line(result["mmlu_text"], dtype, "plain text", " (no bar)"),
    ]


def _letters_line(mmlu: dict[str, Any], dtype: dict[str, str], form: str, bar: str) -> str:
    accuracy = mmlu["accuracy"]
    return (
        f"{mmlu['num_questions']} MMLU questions in {form}, 5-shot: same letter "
        f"{mmlu['num_same_letter']}{bar}, same greedy token {mmlu['num_same_token']}; "
        f"accuracy {accuracy['baseline']:.1%} in {dtype['baseline']}, "
        f"{accuracy['quantized']:.1%} in {dtype['quantized']}; median lead of the letter "
        f"{mmlu['median_lead']:.2f} logits in {dtype['baseline']}, standard deviation of the "
        f"letters' shift against each other {mmlu['shift_deviation']:.2f}"
    )


if __name__ == "__main__":
    main()
