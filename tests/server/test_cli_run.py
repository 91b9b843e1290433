"""`sapwood run`: a program of a file, its arguments, what is printed, and how it fails."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from sapwood.frontend_lang.process import PROCESS
from sapwood.runtime.errors import ConfigError, SapwoodError
from sapwood.server.cli import build_cli

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sapwood as sgl
from tests.frontend_lang.fakes import FakeBackend

sgl.set_default_backend(FakeBackend(lambda prompt, call: str(call.options["temperature"])))


@sgl.function
def answer(s, question, times: int = 1):
    for _ in range(times):
        s += "Q: " + question + " A:" + sgl.gen("answer", max_tokens=4)
    if question == "broken":
        raise ValueError("not\\nthat one")
"""


@pytest.fixture(autouse=True)
def no_default_backend() -> Iterator[None]:
    path = list(sys.path)
    yield
    PROCESS.set_default_backend(None)
    sys.path[:] = path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path, PROGRAM)


def write(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(build_cli(), ["run", *map(str, arguments)])


def refused(*arguments: object) -> SapwoodError:
    result = run(*arguments)
    assert isinstance(result.exception, SapwoodError), result.output
    return result.exception


def test_the_text_of_the_only_program_is_printed(file: Path) -> None:
    result = run(file, "--arg", "question=why?", "--arg", "temperature:=0.5")
    assert result.exit_code == 0
    assert result.stdout == "Q: why? A:0.5\n"


def test_arguments_are_texts_unless_the_program_or_the_caller_says_otherwise(file: Path) -> None:
    common = (file, "--arg", "temperature:=0", "--arg", "question=2")
    assert run(*common, "--arg", "times=2").stdout == "Q: 2 A:0" * 2 + "\n"
    assert run(*common, "--arg", "times:=3").stdout == "Q: 2 A:0" * 3 + "\n"


def test_options_are_read_by_their_types_and_bools_in_either_spelling(tmp_path: Path) -> None:
    program = PROGRAM.replace("times: int = 1", "times: int = 1, twice: bool = False").replace(
        "range(times)", "range(2 * times if twice else times)"
    )
    file = write(tmp_path, program)
    common = (file, "--arg", "temperature=0.5", "--arg", "question=q", "--arg", "stop=1")
    assert run(*common, "--arg", "max_tokens=20").stdout == "Q: q A:0.5\n"
    for spelling in ("True", "true"):
        assert run(*common, "--arg", f"twice={spelling}").stdout == "Q: q A:0.5" * 2 + "\n"
    assert "write true or false" in str(refused(*common, "--arg", "twice=yes"))


def test_missing_arguments_are_told_with_those_that_the_program_takes(file: Path) -> None:
    error = refused(file)
    assert isinstance(error, ConfigError)
    assert "missing a required argument: 'question'" in str(error)
    assert "--arg NAME=TEXT; answer takes question, times=1" in str(error)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:8017", "write http://127.0.0.1:8017"),
        ("http://127.0.0.1:8017/v1", "leave /v1 out"),
    ],
)
def test_a_servers_address_that_is_no_url_of_it_is_told(
    file: Path, address: str, words: str
) -> None:
    assert words in str(refused(file, "--arg", "question=q", "--backend", address))


def test_variables_are_printed_as_json_and_the_tree_beside_them(file: Path) -> None:
    result = run(file, "--arg", "question=q", "--arg", "temperature:=1", "--json", "--trace")
    assert json.loads(result.stdout) == {"answer": "1"}
    assert "1 request:" in result.stderr and "gen answer '1'" in result.stderr


def test_a_batch_prints_a_line_for_each_row_and_tells_what_failed(
    file: Path, tmp_path: Path
) -> None:
    rows = [{"question": "a"}, {"question": "broken"}, {"question": "c"}]
    batch = tmp_path / "rows.jsonl"
    batch.write_text("\n\n".join(map(json.dumps, rows)))
    result = run(file, "--batch", batch, "--arg", "temperature:=2")
    first, failed, last = map(json.loads, result.stdout.splitlines())
    assert first == last == {"answer": "2"}
    assert "that one" in failed["error"]
    assert result.exit_code == 1


def test_one_of_several_programs_is_chosen_by_name(tmp_path: Path) -> None:
    text = PROGRAM + "\n\n@sgl.function\ndef other(s):\n    s += 'other'\n"
    file = write(tmp_path, text)
    assert run(file, "--function", "other").stdout == "other\n"
    assert "2 programs (answer, other); name one with --function" in str(refused(file))
    assert "no program 'x'; there are answer, other" in str(refused(file, "--function", "x"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "has no program"),
        ("import sapwood\n\n1 / 0\n", "program.py:3 in <module>: ZeroDivisionError"),
        ("def f(:\n", "program.py:1 in <module>: SyntaxError"),
    ],
)
def test_a_file_without_a_program_to_run_is_told(tmp_path: Path, text: str, words: str) -> None:
    assert words in str(refused(write(tmp_path, text)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--arg", "question"), "write --arg NAME=TEXT"),
        (("--arg", "times=two"), "times takes no plain text"),
        (("--arg", "question:=two"), "the value is not JSON"),
        (("--batch", "no such file"), "cannot be read"),
    ],
)
def test_wrong_arguments_are_told(file: Path, arguments: Any, words: str) -> None:
    error = refused(file, *arguments)
    assert isinstance(error, ConfigError) and words in str(error)


@pytest.mark.parametrize(
    ("line", "words"),
    [("{", "rows.jsonl:2 is not JSON"), ("[1]", "rows.jsonl:2 is no JSON object")],
)
def test_a_wrong_row_is_told_with_its_line(
    file: Path, tmp_path: Path, line: str, words: str
) -> None:
    batch = tmp_path / "rows.jsonl"
    batch.write_text(f'{{"question": "a"}}\n{line}\n')
    assert words in str(refused(file, "--batch", batch))


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    assert "is no Python file" in str(refused(tmp_path / "nothing.py"))


def test_a_server_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    program = "import sapwood as sgl\n\n@sgl.function\ndef f(s):\n    s += sgl.gen('x')\n"
    file = write(tmp_path, program)
    error = refused(file, "--backend", "http://127.0.0.1:9")
    assert "127.0.0.1:9" in str(error)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--arg", "question=broken"), "program.py:13 in answer: ValueError: not that one"),
        (("--arg", "quesion=q"), "did you mean question"),
        ((), "missing a required argument: 'question'"),
    ],
)
def test_an_error_is_one_line_with_its_place_and_exit_code_one(
    file: Path, arguments: Any, words: str
) -> None:
    command = [sys.executable, "-m", "sapwood", "run", str(file), *arguments]
    command += ["--arg", "temperature:=0"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("sapwood: ") and words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_tiny_model_is_loaded_and_runs_a_program(tmp_path: Path, tiny_model: Path) -> None:
    program = "import sapwood as sgl\n\n@sgl.function\ndef f(s):\n    s += 'a' + sgl.gen('x', 2)\n"
    file = write(tmp_path, program)
    result = run(file, "--backend", tiny_model, "--json", "--trace")
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)) == ["x"]
    assert "generated 2" in result.stderr
