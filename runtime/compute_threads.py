"""How many threads compute, by how much of the processor they get.

The threads of a forward pass wait for each other actively, hundreds of times. That is the fastest
where each has a core to itself. Where another program uses one of the cores, a thread that waits
there is in the way of the very one that it waits for, and a step takes several times as long as
with one thread less. Nothing says so in advance, but it shows in how little processor time the
process gets. What is computed does not depend on the number of threads.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_CONTENDED_SHARE = 0.8  # of the processor time that all threads could have had
_FREE_SHARE = 0.85
_NUM_STEPS, _ENOUGH_SECONDS = 8, 0.25  # looked at together: single steps vary by a tenth
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # seconds before one more thread is tried again


class ComputeThreads:
    """Takes a thread away when the threads get in the way of other programs, and tries it again.

    To be used by one thread, the one that computes: the number holds for what it starts.
    """

    def __init__(
        self,
        *,
        wall_clock: Callable[[], float] = time.perf_counter,
        processor_clock: Callable[[], float] = time.process_time,
        set_num_threads: Callable[[int], None] = torch.set_num_threads,
        max_threads: int | None = None,
    ) -> None:
        """`max_threads`: as many as torch takes by itself, if it is not given."""
        self._wall_clock = wall_clock
        self._processor_clock = processor_clock
        self._set_num_threads = set_num_threads
        self._max_threads = max_threads
        self.num_threads = 0  # until the first step
        self._num_steps = 0
        self._wall_seconds = self._processor_seconds = 0.0
        self._is_trial = False
        self._was_contended = False  # when last looked at: once may be chance
        self._pause = _FIRST_PAUSE
        self._next_trial = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around each step. Costs two looks at two clocks."""
        if not self.num_threads:
            self._max_threads = self._max_threads or torch.get_num_threads()
            self.num_threads = self._max_threads
        assert self._max_threads is not None
        if self._max_threads == 1:
            yield
            return
        if self.num_threads < self._max_threads and self._wall_clock() >= self._next_trial:
            self._is_trial = True
            self._use(self.num_threads + 1)
        wall, processor = self._wall_clock(), self._processor_clock()
        yield
        self._wall_seconds += self._wall_clock() - wall
        self._processor_seconds += self._processor_clock() - processor
        self._num_steps += 1
        if self._num_steps == _NUM_STEPS or self._wall_seconds >= _ENOUGH_SECONDS:
            self._decide(self._processor_seconds / (self._wall_seconds * self.num_threads))

    def _decide(self, share: float) -> None:
        """`share` of the processor time that the threads could have had in the last steps."""
        if self._is_trial and share < _FREE_SHARE:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._take_one_away()
        elif self._is_trial:
            self._pause = _FIRST_PAUSE
        elif share < _CONTENDED_SHARE and self.num_threads > 1:
            if self._was_contended:
                self._take_one_away()
            self._was_contended = not self._was_contended
        else:
            self._was_contended = False
        self._is_trial = False
        self._look_anew()

    def _take_one_away(self) -> None:
        self._next_trial = self._wall_clock() + self._pause
        self._use(self.num_threads - 1)

    def _use(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._set_num_threads(num_threads)
        self._look_anew()

    def _look_anew(self) -> None:
        self._num_steps = 0
        self._wall_seconds = self._processor_seconds = 0.0
