"""The number of threads follows what the processor gives, on clocks that the tests turn."""

from dataclasses import dataclass, field

import pytest

from sapwood.runtime.compute_threads import ComputeThreads


@dataclass
class Machine:
    """`num_free` cores; each step takes `seconds`, longer where threads have to share a core."""

    num_free: int
    wall: float = 0.0
    processor: float = 0.0
    asked: list[int] = field(default_factory=list)

    def threads(self, max_threads: int) -> ComputeThreads:
        return ComputeThreads(
            wall_clock=lambda: self.wall,
            processor_clock=lambda: self.processor,
            set_num_threads=self.asked.append,
            max_threads=max_threads,
        )

    def run(self, threads: ComputeThreads, seconds: float) -> None:
        end = self.wall + seconds
        while self.wall < end:
            with threads.watched():
                is_contended = threads.num_threads > self.num_free
                duration = 0.05 if is_contended else 0.01
                self.wall += duration
                self.processor += duration * min(threads.num_threads, self.num_free)


def test_on_free_cores_nothing_changes() -> None:
    machine = Machine(num_free=4)
    threads = machine.threads(4)
    machine.run(threads, seconds=60)
    assert threads.num_threads == 4
    assert machine.asked == []


@pytest.mark.parametrize("num_free", [1, 2, 3])
def test_threads_are_taken_away_until_each_has_a_core(num_free: int) -> None:
    machine = Machine(num_free=num_free)
    threads = machine.threads(4)
    machine.run(threads, seconds=0.5 * (4 - num_free) + 0.4)  # half a second for each
    assert threads.num_threads == num_free


def test_a_core_that_becomes_free_is_used_again_within_the_longest_pause() -> None:
    machine = Machine(num_free=1)
    threads = machine.threads(2)
    machine.run(threads, seconds=300)
    assert threads.num_threads == 1
    machine.num_free = 2
    machine.run(threads, seconds=31)
    assert threads.num_threads == 2


def test_trials_on_a_busy_core_become_rare() -> None:
    machine = Machine(num_free=1)
    threads = machine.threads(2)
    machine.run(threads, seconds=300)
    # 1, 2, 4, 8 and 16 seconds apart, and then 30.
    assert 10 <= machine.asked.count(2) <= 16


def test_a_single_thread_is_left_alone() -> None:
    machine = Machine(num_free=0)
    threads = machine.threads(1)
    with threads.watched():
        machine.wall += 1.0
    assert threads.num_threads == 1
    assert machine.asked == []
