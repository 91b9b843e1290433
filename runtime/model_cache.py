"""How a folder in the user's cache comes to be: whole or not at all."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path


def build_folder(target: Path, fill: Callable[[Path], None]) -> Path:
    """`target`, built by `fill` if it is not there.

    `fill` gets an empty folder next to `target`, which is renamed once it returns. Processes that
    build the same target take turns under a file lock, which the system frees when its holder
    dies: what a killed process left behind is cleared by the next one, and the others find the
    finished folder. Whatever `fill` raises is passed on and leaves no `target`.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.unfinished")
    with open(target.with_name(f"{target.name}.lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            fill(unfinished)
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return target
