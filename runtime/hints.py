"""What only a program knows of its future, told with each of its requests.

Hints change when something runs and what is kept, never an answer. Knows no clock: seconds are
counted by who reads them.
"""

from dataclasses import dataclass

from sapwood.runtime.errors import RequestError

MAX_PROGRAM_ID_LEN = 200
MAX_SECONDS = 600.0  # a prefix is kept warm at most that long
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """All fields are optional. On the wire: the object `sapwood.hints`, by the same names.

    `program_id`: requests with the same one belong together, and are best finished together.
    `fork_size`: that many branches go on from this request's prefix; `fork_index`: this is one of
    them, and the program waits for all (`fork_size` of its siblings). `more_follows`: another
    request will continue this prompt and its answer, so both are worth keeping for a while;
    `idle_seconds`: it will take about that long (a tool runs meanwhile). `output_tokens`: a guess
    how long the answer will be.
    """

    program_id: str | None = None
    fork_size: int | None = None
    fork_index: int | None = None
    more_follows: bool = False
    idle_seconds: float | None = None
    output_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raises RequestError, `param` "hints"."""
        if self.program_id is not None and not (
            isinstance(self.program_id, str) and 0 < len(self.program_id) <= MAX_PROGRAM_ID_LEN
        ):
            raise _wrong(f"program_id must be a string of 1 to {MAX_PROGRAM_ID_LEN} characters")
        _check_count("fork_size", self.fork_size, low=1)
        _check_count("fork_index", self.fork_index, low=0)
        _check_count("output_tokens", self.output_tokens, low=0)
        if self.fork_index is not None and self.fork_index >= (self.fork_size or 0):
            raise _wrong("fork_index is counted from 0 and needs a fork_size above it")
        if not isinstance(self.more_follows, bool):
            raise _wrong("more_follows must be true or false")
        self._check_idle_seconds()

    def _check_idle_seconds(self) -> None:
        seconds = self.idle_seconds
        if seconds is None:
            return
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not 0 <= seconds <= MAX_SECONDS:
            raise _wrong(f"idle_seconds must be a number from 0 to {MAX_SECONDS:g}")
        if not self.more_follows:
            raise _wrong("idle_seconds says when more follows; set more_follows too")


def _check_count(name: str, value: object, *, low: int) -> None:
    if value is None:
        return
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not low <= value <= MAX_COUNT:  # type: ignore[operator]
        raise _wrong(f"{name} must be a whole number from {low} to {MAX_COUNT}")


def _wrong(what: str) -> RequestError:
    return RequestError(f"hints: {what}", param="hints")


NO_HINTS = Hints()
