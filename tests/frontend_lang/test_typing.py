"""A user's type checker knows what `state.get` gives."""

import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_package_says_that_it_is_typed() -> None:
    assert (resources.files("sapwood") / "py.typed").is_file()


@pytest.mark.slow
def test_a_users_program_has_the_types_that_it_asked_for() -> None:
    """`typed_program.py` asserts them, and marks its mistakes, which strict mode wants to be
    some."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "tests/frontend_lang/typed_program.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_a_users_program_that_is_typed_runs() -> None:
    import sapwood as sgl
    from tests.frontend_lang import typed_program
    from tests.frontend_lang.fakes import FakeBackend

    answers = ['{"name": "A", "age": 3}', '{"x": 1}', "7", "0.5", "4", "t"]
    state = typed_program.program.run(
        question="q", backend=FakeBackend([*answers, "tip"]), max_tokens=4
    )
    assert state.get(typed_program.person) == typed_program.Person(name="A", age=3)
    assert state.get(typed_program.point) == typed_program.Point(1)
    assert state.get(typed_program.number) == 7
    assert state.get(typed_program.also_number) == 0.5
    assert state.get("by_name") == 4
    assert state.get(typed_program.text) == "t"
    with pytest.raises(sgl.SapwoodError, match="is no value of its type"):
        bad = typed_program.program.run(question="q", backend=FakeBackend("{"))
        bad.get(typed_program.person)
