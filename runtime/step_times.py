"""How long steps take, as a line over their rows: seconds = fixed + rows x each.

The fixed part is what every step costs however few its rows are (the weights are read, kernels are
launched). Its ratio to the other part says what it is worth to have more rows in a step. Reads no
clock: it is told seconds.
"""

DECAY = 0.995  # of what is known, with each step: some two hundred steps count
MIN_STEPS = 16  # that are known before anything is said
MIN_SPREAD = 0.05  # of the rows' variance to their squared mean: a line needs two places


class StepTimes:
    """A least-squares line, with older steps counting less. O(1) for each step."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._weight = self._rows = self._seconds = self._rows_squared = self._products = 0.0

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step of so many rows has taken so long."""
        self._num_steps += 1
        self._weight = self._weight * DECAY + 1
        self._rows = self._rows * DECAY + num_rows
        self._seconds = self._seconds * DECAY + seconds
        self._rows_squared = self._rows_squared * DECAY + num_rows * num_rows
        self._products = self._products * DECAY + num_rows * seconds

    @property
    def fixed_rows(self) -> float | None:
        """How many rows take as long as the fixed part of a step.

        None until steps of different sizes were seen, and where more rows took no longer.
        """
        if self._num_steps < MIN_STEPS:
            return None
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        variance = self._rows_squared / self._weight - rows * rows
        if variance < MIN_SPREAD * rows * rows:
            return None
        each = (self._products / self._weight - rows * seconds) / variance
        if each <= 0:
            return None
        return max(0.0, seconds / each - rows)
