"""`sapwood run`: one program of a file, with a model here or one behind a server."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from rich.console import Console

from sapwood.frontend_lang.errors import Place, ProgramError
from sapwood.frontend_lang.options import ALIASES, Options
from sapwood.frontend_lang.process import PROCESS
from sapwood.frontend_lang.program import Program
from sapwood.runtime.errors import ConfigError, SapwoodError
from sapwood.server.cli.pull import fetch

if TYPE_CHECKING:
    from types import ModuleType

    from sapwood.frontend_lang.state import ProgramState

DEFAULT_MODEL = "smollm2"
_MODULE_NAME = "__sapwood_program__"
_ADDRESS = re.compile(r"[\w.-]+:\d{2,5}(/.*)?")  # of a server, without http://
_BOOLS = ("True", "False")  # Python's spelling, beside JSON's


def run(
    file: Annotated[Path, typer.Argument(help="A Python file with a @function in it.")],
    arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TEXT",
            help="An argument of the program, or an option such as temperature=0. NAME:=JSON "
            "gives what is no text; a parameter that is annotated int, list... needs no colon.",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="A model to load, or a server's URL. If not given: the file's own default "
            f"backend, or {DEFAULT_MODEL}."
        ),
    ] = None,
    function: Annotated[
        str | None, typer.Option(help="Which program of the file; needed where it has several.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Show the program's tree, with what each node cost.")
    ] = False,
    batch: Annotated[
        Path | None,
        typer.Option(help="Run once for each line of this file, a JSON object of arguments."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the variables, not the text.")
    ] = False,
) -> None:
    """Run a program of a file, and print its text."""
    program = find_program(load(file), file, function)
    given = arguments_of(program, arg or [])
    if batch is None:
        check_arguments(program, given)
    rows = None if batch is None else rows_of(batch)
    with backend_of(backend) as chosen, told_in_one_line(file):
        if rows is None:
            show(program.run(**given, **chosen), as_json=as_json, trace=trace)
        else:
            run_rows(program, [{**given, **row} for row in rows], chosen, trace=trace)


def load(file: Path) -> ModuleType:
    """The module of a file, run once. Raises ConfigError, and ProgramError with the line."""
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{file} is no Python file; give one with a @function in it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE_NAME] = module  # dataclasses and pydantic look their modules up
    sys.path.insert(0, str(file.parent.resolve()))
    with told_in_one_line(file):
        spec.loader.exec_module(module)
    return module


def find_program(module: ModuleType, file: Path, name: str | None) -> Program:
    """The program of that name, or the only one. Raises ConfigError."""
    found = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, Program) and value.function.__module__ == _MODULE_NAME
    }
    listed = ", ".join(found) or "none"
    if name is not None:
        if name not in found:
            raise ConfigError(f"{file} has no program {name!r}; there are {listed}")
        return found[name]
    if len(found) != 1:
        raise ConfigError(
            f"{file} has {len(found)} programs ({listed}); name one with --function"
            if found
            else f"{file} has no program; decorate a function with @sapwood.function"
        )
    return next(iter(found.values()))


def arguments_of(program: Program, given: Sequence[str]) -> dict[str, Any]:
    """`NAME=TEXT` and `NAME:=JSON` as arguments. Raises ConfigError."""
    kinds = _kinds_of(program)
    arguments: dict[str, Any] = {}
    for each in given:
        name, separator, text = each.partition("=")
        if not separator or not name.removesuffix(":"):
            raise ConfigError(f"--arg {each!r} has no name; write --arg NAME=TEXT")
        is_json = name.endswith(":")
        name = name.removesuffix(":")
        kind = kinds.get(name, str)
        if not is_json and _takes_text(kind):
            arguments[name] = text
            continue
        is_bool = bool in (kind, *get_args(kind))
        try:
            arguments[name] = text == "True" if is_bool and text in _BOOLS else json.loads(text)
        except ValueError as error:
            advice = "; write true or false" if is_bool else f"; {name} takes no plain text"
            raise ConfigError(f"--arg {each!r}: the value is not JSON ({error}){advice}") from error
    return arguments


def check_arguments(program: Program, given: Mapping[str, Any]) -> None:
    """Raises ConfigError where arguments are missing, or belong to nobody."""
    try:
        program.invocation((), given)
    except TypeError as error:
        first, *own = inspect.signature(program.function).parameters.values()
        listed = ", ".join(_written(each) for each in own) or f"none beside {first.name}"
        raise ConfigError(
            f"{error}; give arguments as --arg NAME=TEXT; {program.__name__} takes {listed}"
        ) from error


def _written(parameter: inspect.Parameter) -> str:
    return str(parameter.replace(annotation=inspect.Parameter.empty))


def _takes_text(kind: Any) -> bool:
    if kind in (str, Any) or get_origin(kind) is Literal:
        return True
    return get_origin(kind) in (Union, UnionType) and any(map(_takes_text, get_args(kind)))


def _kinds_of(program: Program) -> Mapping[str, Any]:
    """The types of options, and what the program's parameters are annotated with as far as that
    can be told."""
    options = get_type_hints(Options)
    aliases = {alias: options[name] for alias, name in ALIASES.items()}
    own: dict[str, Any] = dict.fromkeys(program.parameters.names, str)
    with suppress(Exception):  # an annotation may be any expression, of names that are nowhere
        own |= get_type_hints(program.function)
    return {**options, **aliases, "timeout": float, **own}


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one a line. Raises ConfigError."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error})") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{file}:{number} is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{file}:{number} is no JSON object of arguments")
        rows.append(row)
    return rows


@contextmanager
def backend_of(name: str | None) -> Iterator[dict[str, Any]]:
    """The keyword that says where to run; empty if the file has set a default backend itself.
    Raises ModelError, and ConfigError for the address of a server that is no URL."""
    if name is None and PROCESS.has_default_backend:
        yield {}
        return
    name = name or DEFAULT_MODEL
    if name.startswith(("http://", "https://")):
        from sapwood.frontend_lang.backends.runtime_endpoint import RuntimeEndpoint

        with closing(RuntimeEndpoint(name)) as endpoint:
            yield {"backend": endpoint}
        return
    if _ADDRESS.fullmatch(name) and not Path(name).exists():
        raise ConfigError(f"{name} is no model; to reach a server there, write http://{name}")
    console = Console(stderr=True, highlight=False)
    fetch(name, console)
    with console.status(f"loading {name}"):
        from sapwood.runtime.engine import Engine  # imports torch, which takes a second

        engine = Engine(name)
    with engine:
        yield {"backend": engine}


@contextmanager
def told_in_one_line(file: Path) -> Iterator[None]:
    """What a program's own code raises becomes a ProgramError with the line in the file."""
    try:
        yield
    except (SapwoodError, typer.Exit):
        raise
    except Exception as error:
        place = _place_in(file, error)
        where = f"{place}: " if place else ""
        message = " ".join(str(error).split())
        raise ProgramError(f"{where}{type(error).__name__}: {message}", place) from error


def _place_in(file: Path, error: Exception) -> Place | None:
    """The innermost line of the file that an error came through."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return Place(error.filename, error.lineno, "<module>")
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if Path(frame.filename).resolve() == file.resolve() and frame.lineno is not None:
            return Place(frame.filename, frame.lineno, frame.name)
    return None


def show(state: ProgramState, *, as_json: bool, trace: bool) -> None:
    """Print what came out; the tree goes to standard error."""
    if as_json:
        typer.echo(json.dumps(variables_of(state), ensure_ascii=False, default=str))
    else:
        typer.echo(state.text())
    if trace:
        typer.echo(str(state.trace()), err=True)


def run_rows(
    program: Program, rows: list[dict[str, Any]], chosen: dict[str, Any], *, trace: bool
) -> None:
    """Print one line of JSON for each row, in their order: the variables, or what went wrong. Exit
    code 1 if anything did."""
    has_failed = False
    states = program.run_batch(rows, generator_style=True, on_error="return", **chosen)
    for state in states:
        error = state.error()
        has_failed = has_failed or error is not None
        line = {"error": str(error)} if error is not None else variables_of(state)
        typer.echo(json.dumps(line, ensure_ascii=False, default=str))
        if trace:
            typer.echo(str(state.trace()), err=True)
    if has_failed:
        raise typer.Exit(1)


def variables_of(state: ProgramState) -> dict[str, Any]:
    """All variables by name."""
    return {name: state[name] for name in state.variables()}
