import math
from typing import Any

import pytest
from quality import Choice, compare_choices, lines, mean_per_token


def test_texts_of_equal_rates_have_no_error() -> None:
    estimate = mean_per_token([2.0, 4.0, 6.0], [1, 2, 3])
    assert estimate["mean"] == pytest.approx(2.0)
    assert estimate["standard_error"] == pytest.approx(0.0)


def test_equal_lengths_give_the_standard_error_of_a_mean() -> None:
    # Per token 1 and 3: mean 2, sample variance 2, over two texts.
    estimate = mean_per_token([10.0, 30.0], [10, 10])
    assert estimate["mean"] == pytest.approx(2.0)
    assert estimate["standard_error"] == pytest.approx(math.sqrt(2 / 2))


def choice(*logits: float, token_id: int = 0) -> Choice:
    return Choice(logits=logits, token_id=token_id)


def test_a_choice_is_the_largest_logit_and_leads_the_next() -> None:
    chosen = choice(-3.0, 2.5, -1.0, 2.0)
    assert chosen.letter == "B"
    assert chosen.lead == pytest.approx(0.5)


def test_letters_tokens_and_right_answers_are_counted_apart() -> None:
    baseline = [choice(3, 0, 0, 0, token_id=7), choice(0, 2, 0, 0), choice(0, 0, 0, 1)]
    quantized = [choice(3, 0, 0, 0, token_id=8), choice(0, 0, 2, 0), choice(0, 0, 0, 4, token_id=9)]
    compared = compare_choices("ACD", baseline, quantized)
    assert compared["num_questions"] == 3
    assert compared["num_same_letter"] == 2
    assert compared["num_same_token"] == 1
    assert compared["accuracy"] == pytest.approx({"baseline": 2 / 3, "quantized": 1.0})
    assert compared["median_lead"] == pytest.approx(2.0)  # of 3, 2 and 1 in the baseline


def test_a_shift_of_all_letters_alike_is_none() -> None:
    baseline = [choice(1, 2, 3, 4), choice(0, 0, 0, 0)]
    quantized = [choice(11, 12, 13, 14), choice(-5, -5, -5, -5)]
    assert compare_choices("AA", baseline, quantized)["shift_deviation"] == pytest.approx(0.0)


def test_the_shift_is_a_standard_deviation_about_each_questions_mean() -> None:
    # Sample variances of the shifts: 4 / 3 in one question, 16 / 3 in the other.
    baseline = [choice(1, 2, 3, 4), choice(4, 3, 2, 1)]
    quantized = [choice(2, 1, 4, 3), choice(106, 101, 104, 99)]
    deviation = compare_choices("AA", baseline, quantized)["shift_deviation"]
    assert deviation == pytest.approx(math.sqrt((4 / 3 + 16 / 3) / 2))


def test_the_bar_for_letters_stands_on_the_chat_format_alone() -> None:
    agreeing = [choice(1, 0, 0, 0)] * 100
    differing = [choice(0, 1, 0, 0)] * 28 + agreeing[28:]
    estimate = {"mean": 0.0, "standard_error": 0.0}
    result: dict[str, Any] = {
        "dtype": {"baseline": "float32", "quantized": "int8"},
        "gsm8k": {
            "num_texts": 2,
            "num_tokens": 10,
            "nll_per_token": {"baseline": 1.0, "quantized": 1.0},
            "nll_difference": estimate,
            "kl_per_token": estimate,
            "same_argmax": 1.0,
        },
        "mmlu": compare_choices("A" * 100, agreeing, agreeing),
        "mmlu_text": compare_choices("A" * 100, agreeing, differing),
    }
    *_, chat, text = lines(result)
    assert "chat format" in chat
    assert "same letter 100 (the bar is 97)" in chat
    assert "plain text" in text
    assert "same letter 72 (no bar)" in text
    assert "accuracy 100.0% in float32, 72.0% in int8; median lead of the letter 1.00" in text
