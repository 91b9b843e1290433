"""Which programs have begun, and so whose requests are best finished first.

Of requests that would run equally well, those of programs that have begun go before those of
programs that have not: if all advanced together, all would end late. Among those that have begun,
the one with the fewest requests waiting goes first, as its join is the closest. Reads no clock: it
is told the time.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from sapwood.radix import Namespace
from sapwood.runtime.hints import MAX_SECONDS
from sapwood.runtime.request import Sequence

MAX_PROGRAMS = 4096  # that are remembered

Rank: TypeAlias = tuple[int, ...]
_Program: TypeAlias = tuple[Namespace, str]


@dataclass(slots=True)
class _Begun:
    arrival_index: int  # of its first request
    last_seen: float


class Programs:
    """The programs of which a request has run. Those long not heard of are forgotten."""

    def __init__(self) -> None:
        self._begun: OrderedDict[_Program, _Begun] = OrderedDict()  # last seen last

    def __len__(self) -> int:
        return len(self._begun)

    def note_started(self, sequence: Sequence, now: float) -> None:
        """Say that a request runs. O(1)."""
        program = _program_of(sequence)
        if program is None:
            return
        begun = self._begun.setdefault(program, _Begun(sequence.arrival_index, now))
        begun.last_seen = now
        self._begun.move_to_end(program)
        if len(self._begun) > MAX_PROGRAMS:
            self._begun.popitem(last=False)

    def expire(self, now: float) -> None:
        """Forget those whose last request began too long ago."""
        while self._begun:
            program, begun = next(iter(self._begun.items()))
            if begun.last_seen + MAX_SECONDS > now:
                return
            del self._begun[program]

    def ranks(self, waiting: Iterable[Sequence]) -> Callable[[Sequence], Rank]:
        """How to sort requests among which nothing else decides, the smallest rank first.

        `waiting` comes in the order of arrival. A request without a program is one of its own.
        All ranks are the same if there is no program among them. O(waiting).
        """
        num_waiting: Counter[_Program] = Counter()
        first_arrival: dict[_Program, int] = {}
        for sequence in waiting:
            if (program := _program_of(sequence)) is not None:
                num_waiting[program] += 1
                first_arrival.setdefault(program, sequence.arrival_index)
        if not num_waiting:
            return lambda sequence: ()

        def rank(sequence: Sequence) -> Rank:
            program = _program_of(sequence)
            if program is None:
                return 1, 0, sequence.arrival_index
            begun = self._begun.get(program)
            if begun is None:
                return 1, 0, first_arrival[program]
            return 0, num_waiting[program], begun.arrival_index

        return rank


def _program_of(sequence: Sequence) -> _Program | None:
    program_id = sequence.request.hints.program_id
    return None if program_id is None else (sequence.request.namespace, program_id)
