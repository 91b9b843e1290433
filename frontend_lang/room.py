"""How many programs of a batch go on side by side in a cache that cannot hold all of them.

A program comes back to what it has computed, and where more programs are under way than the cache
holds, each evicts what the next one needs. Fewer at once compute less again, but have fewer rows in
a step, and a step has its price however few its rows are. So the first programs of a batch begin as
the cache holds them, and what they did says which of the two costs more.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sapwood.frontend_lang.backends.interface import Answer, Prompt, TokenIds

NUM_LEARNED = 8  # programs that are looked at, the first of a batch
FIRST_GROWTH = 128  # tokens that a program adds to its first prompt, until one has ended


class TreeSize:
    """How many tokens the tree of some sequences has: each that they share is counted once."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._sequences: list[TokenIds] = []  # sorted

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def num_leaves(self) -> int:
        """Where the tree ends: of sequences, those that no other begins with. O(tokens)."""
        if not self._sequences:
            return 0
        pairs = pairwise(self._sequences)
        return 1 + sum(after[: len(sequence)] != sequence for sequence, after in pairs)

    def num_new(self, sequence: TokenIds) -> int:
        """Tokens that a sequence would add, or that one alone has. O(tokens, log sequences)."""
        index = bisect_left(self._sequences, sequence)
        beside = self._sequences[max(0, index - 1) : index + 1]
        return len(sequence) - max((common_length(sequence, other) for other in beside), default=0)

    def add(self, sequence: TokenIds) -> None:
        self.num_tokens += self.num_new(sequence)
        insort(self._sequences, sequence)

    def remove(self, sequence: TokenIds) -> None:
        """Raises IndexError or KeyError for a sequence that is not there."""
        index = bisect_left(self._sequences, sequence)
        if self._sequences[index] != sequence:
            raise KeyError("the sequence is not in this tree")
        del self._sequences[index]
        self.num_tokens -= self.num_new(sequence)


@dataclass(slots=True, eq=False)
class Visit:
    """A program that works at the backend, and what it has done there.

    Requests that begin when others of the program have ended are its next round.
    """

    prompt: TokenIds  # of its first request
    num_own: int  # of its tokens, those that no program beside it begins with
    tree: TreeSize = field(default_factory=TreeSize)
    steps: list[int] = field(default_factory=list)  # of each round: its longest answer, in tokens
    num_ended_rounds: int = 0

    def begin_request(self) -> int:
        """The round that a request is of."""
        if len(self.steps) == self.num_ended_rounds:
            self.steps.append(0)
        return self.num_ended_rounds

    def end_request(self, round_index: int, prompt: Prompt, answers: Sequence[Answer]) -> None:
        for answer in answers:
            token_ids = answer.token_ids or ()
            self.tree.add((*(prompt.token_ids or ()), *token_ids))
            self.steps[round_index] = max(self.steps[round_index], len(token_ids))
        self.num_ended_rounds = max(self.num_ended_rounds, round_index + 1)


@dataclass(frozen=True, slots=True)
class _Lesson:
    """What a program that has ended did."""

    num_tokens: int  # of its tree, what others share left out
    num_grown: int  # of these, all but its first prompt
    num_returned: int  # that it came back to: its own part of that prompt, in each further round
    num_steps: int  # that its answers took, one round after the other


class Room:
    """The tokens of one cache, and the programs in it. Used on one event loop only.

    `num_tokens` None: nobody knows how large the cache is, and everybody may come in.
    `fixed_rows`: how many rows of a step take as long as what every step costs; None where that
    is not known (yet).
    """

    def __init__(self, num_tokens: int | None = None, *, block_size: int = 1) -> None:
        self.fixed_rows: float | None = None
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._prompts = TreeSize()  # of those that are in it
        self._num_looked_at = 0
        self._lessons: list[_Lesson] = []
        self._num_lessons_told = 0  # that there were when somebody told of steps

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> "Room":
        """Of a backend that tells `info`, by the names of `/get_server_info`."""
        num_tokens = _number(info.get("max_total_num_tokens")) or None
        if num_tokens is None or not info.get("prefix_caching"):
            return cls()
        room = cls(int(num_tokens), block_size=int(_number(info.get("page_size")) or 1))
        room.take(info)
        return room

    def take(self, info: Mapping[str, Any]) -> None:
        """Note what a backend tells of its steps by now."""
        stats = info.get("stats")
        if isinstance(stats, Mapping):
            self.fixed_rows = _number(stats.get("fixed_rows_per_step"))
        self._num_lessons_told = len(self._lessons)

    @property
    def is_curious(self) -> bool:
        """Whether to ask anew what a step costs: it is not known, and would be of use by now."""
        return self.fixed_rows is None and len(self._lessons) > self._num_lessons_told

    def fits(self, prompt: Prompt) -> bool:
        """Whether one more program, with this first prompt, may come in. O(tokens)."""
        if self._num_tokens is None or not len(self._prompts) or not self._is_worth_it():
            return True
        num_first = self._prompts.num_tokens + self._prompts.num_new(prompt.token_ids or ())
        return num_first + self._growth() * (len(self._prompts) + 1) <= self._num_tokens

    def enter(self, prompt: Prompt, next_prompt: Prompt | None = None) -> Visit | None:
        """A program comes in; `next_prompt` is of the one that will be next. The first ones are
        looked at: None for the others, of which nothing need be told."""
        if self._num_tokens is None:
            return None
        token_ids = prompt.token_ids or ()
        num_own = self._prompts.num_new(token_ids)
        if next_prompt is not None:
            shared = common_length(token_ids, next_prompt.token_ids or ())
            num_own = min(num_own, len(token_ids) - shared)
        self._prompts.add(token_ids)
        self._num_looked_at += 1
        return Visit(token_ids, num_own) if self._num_looked_at <= NUM_LEARNED else None

    def leave(self, prompt: Prompt, visit: Visit | None) -> None:
        """A program has ended, or has been ended: nobody comes back to what it holds."""
        if self._num_tokens is None:
            return
        self._prompts.remove(prompt.token_ids or ())
        if visit is not None and visit.num_ended_rounds:
            num_rounds = visit.num_ended_rounds
            num_held = visit.tree.num_tokens + visit.tree.num_leaves * self._block_size
            num_grown = max(0, num_held - len(visit.prompt))
            lesson = _Lesson(
                num_tokens=visit.num_own + num_grown,
                num_grown=num_grown,
                num_returned=visit.num_own * (num_rounds - 1),
                num_steps=sum(visit.steps),
            )
            self._lessons.append(lesson)

    def _growth(self) -> int:
        """Tokens that a program adds to its first prompt."""
        if not self._lessons:
            return FIRST_GROWTH
        return max(lesson.num_grown for lesson in self._lessons)

    def _is_worth_it(self) -> bool:
        """Whether to compute again what was evicted costs more than steps of fewer rows.

        Both in rows: a program loses what it would come back to, or its share of what its steps
        cost with as few beside it as the cache holds. Assumed until something is known.
        """
        if not self._lessons or self.fixed_rows is None:
            return True
        assert self._num_tokens is not None
        num_returned = sum(lesson.num_returned for lesson in self._lessons)
        num_steps = sum(lesson.num_steps for lesson in self._lessons)
        largest = max(lesson.num_tokens for lesson in self._lessons)
        num_beside = max(1, self._num_tokens // max(1, largest))
        return num_returned * num_beside > self.fixed_rows * num_steps


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Leading items that are the same. O(items), by comparing halves."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _number(value: object) -> float | None:
    """What a backend tells, if it is a number that counts something, or nothing: 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if 0 <= value < math.inf else None
