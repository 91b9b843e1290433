"""`sapwood version`."""

import typer

import sapwood


def version() -> None:
    """Print the version."""
    typer.echo(sapwood.__version__)
