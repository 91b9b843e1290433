"""`sapwood tune`: measure which kernel shapes are fastest on this machine's GPU."""

from pathlib import Path
from typing import Annotated

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
    console.print(f"measuring on {gpu}, nothing else should run on it")
    table = tune_here(console.print)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table.dump(), encoding="utf-8")
    console.print(f"wrote {path}")
