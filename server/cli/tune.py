"""`sapwood tune`: measure which kernel shapes are fastest on this machine's GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console

from sapwood.runtime.errors import ConfigError


def tune(
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write the table; default: where engines here look for it."),
    ] = None,
) -> None:
    """Measure the tile shapes of attention on this GPU. Takes about ten minutes.

    Without it a GPU that has no table of its own gets the default one.
    """
    from sapwood.kernels.tuner import gpu_name, tune_here
    from sapwood.kernels.tuning import own_table_path

    console = Console(highlight=False, soft_wrap=True)
    gpu = gpu_name()
    if gpu is None:
        raise ConfigError(
            "sapwood tune measures kernels on an NVIDIA GPU, and torch sees none here; there is "
            "nothing to tune on a CPU"
        )
    path = out or own_table_path(gpu)
    with _new_file(path) as file:
        console.print(f"measuring on {gpu}, nothing else should run on it")
        file.write(tune_here(console.print).dump())
    console.print(f"wrote {path}")


@contextmanager
def _new_file(path: Path) -> Iterator[TextIO]:
    """A file that is at `path` once it is whole. Raises ConfigError, at once, where none can be."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give --out a file")
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = part.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error}); give --out another file") from error
    try:
        with file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
