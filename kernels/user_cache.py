"""Where what is fetched, converted and built once is kept, for every part that keeps something."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`SAPWOOD_CACHE`, else `XDG_CACHE_HOME/sapwood`, else `~/.cache/sapwood`. Not created."""
    if chosen := os.environ.get("SAPWOOD_CACHE"):
        return Path(chosen).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "sapwood"
    return Path.home() / ".cache" / "sapwood"
