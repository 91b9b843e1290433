"""What stands in one expression reaches the loop together."""

import sys
from collections.abc import Iterator

import pytest

import sapwood as sgl
from tests.frontend_lang.fakes import FakeBackend


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads take turns after a microsecond, so that what may happen between two statements of one
    expression does."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_switches")
def test_a_gen_knows_of_the_pause_that_stands_after_it() -> None:
    """Even where the loop is awake already, and takes the gen before the program goes on."""

    @sgl.function
    def tools(s: sgl.ProgramState) -> None:
        for i in range(200):
            s += f"{i}:" + sgl.gen(f"answer_{i}") + sgl.pause(0.5)
            assert s[f"answer_{i}"] == "ok"  # the loop rests, and begins with the next text

    backend = FakeBackend()
    tools.run(backend=backend)
    idle = [asked.hints.idle_seconds for asked in backend.asked if asked.hints is not None]
    assert idle == [0.5] * 200
