"""The command line. Small and quick to start: what a command needs is imported when it runs.

A command is one function in one file of this folder, and one line in `COMMANDS`.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Any

import typer

import sapwood
from sapwood.runtime.errors import SapwoodError

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "serve": "sapwood.server.cli.serve:serve",
        "chat": "sapwood.server.cli.chat:chat",
        "run": "sapwood.server.cli.run:run",
        "demo": "sapwood.server.cli.demo:demo",
        "pull": "sapwood.server.cli.pull:pull",
        "tune": "sapwood.server.cli.tune:tune",
        "version": "sapwood.server.cli.version:version",
    }
)


def build_cli() -> typer.Typer:
    """All commands in one."""
    cli = typer.Typer(
        name="sapwood",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # its tables cut long option names off
    )
    cli.callback()(_options)
    for name, path in COMMANDS.items():
        module, _, function = path.partition(":")
        command: Callable[..., Any] = getattr(import_module(module), function)
        cli.command(name)(command)
    return cli


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(sapwood.__version__)
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Sapwood: a prefix-sharing inference runtime."""


def main() -> None:
    """Run a command. An error of ours is one line and exit code 1."""
    try:
        build_cli()()
    except SapwoodError as error:
        print(f"sapwood: {error}", file=sys.stderr)
        sys.exit(1)
