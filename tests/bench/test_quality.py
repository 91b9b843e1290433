import math

import pytest
from quality import mean_per_token


def test_texts_of_equal_rates_have_no_error() -> None:
    estimate = mean_per_token([2.0, 4.0, 6.0], [1, 2, 3])
    assert estimate["mean"] == pytest.approx(2.0)
    assert estimate["standard_error"] == pytest.approx(0.0)


def test_equal_lengths_give_the_standard_error_of_a_mean() -> None:
    # Per token 1 and 3: mean 2, sample variance 2, over two texts.
    estimate = mean_per_token([10.0, 30.0], [10, 10])
    assert estimate["mean"] == pytest.approx(2.0)
    assert estimate["standard_error"] == pytest.approx(math.sqrt(2 / 2))
