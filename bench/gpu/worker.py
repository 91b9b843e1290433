"""One process of the check: runs sections one after the other and writes a line for all it finds.

    python -m gpu.worker --lines FILE --scale dry --seconds 60 decode prefill

A section that raises loses its own remaining rows only, unless it broke the device: then the
process ends with `BROKEN_DEVICE`, and what is left is for another one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import torch

from gpu.context import Context
from gpu.sections import SECTION_BY_NAME, Row, Scale, Section

NO_DEVICE = 2
BROKEN_DEVICE = 3
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw"
LIBRARIES = ("torch", "triton", "transformers", "numpy")


class Lines:
    """JSON lines in a file that another process reads meanwhile."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, **values}, default=str) + "\n")
        self._file.flush()


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    scale = Scale(options.scale)
    if scale is not Scale.DRY and not torch.cuda.is_available():
        print("torch sees no GPU here; --dry runs the check without one", file=sys.stderr)
        return NO_DEVICE
    device = torch.device("cpu" if scale is Scale.DRY else "cuda")
    end = time.monotonic() + options.seconds
    index, count = map(int, options.shard.split("/"))
    with Path(options.lines).open("a", encoding="utf-8") as file:
        lines = Lines(file)
        lines.write("facts", facts=_facts(device))
        for name in options.sections:
            section = SECTION_BY_NAME[name]
            context = Context(
                device=device,
                scale=scale,
                deadline=min(end, time.monotonic() + section.seconds),
                shard=(index, count),
            )
            _run(section, context, lines)
            del context
            if device.type == "cuda" and not _is_sound():
                return BROKEN_DEVICE
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="+", choices=list(SECTION_BY_NAME))
    parser.add_argument("--lines", required=True, help="file to append to")
    parser.add_argument("--scale", required=True, choices=list(Scale))
    parser.add_argument("--seconds", type=float, required=True, help="for all sections")
    parser.add_argument("--shard", default="0/1", help="of the cases of a sharded section")
    return parser.parse_args(arguments)


def _run(section: Section, context: Context, lines: Lines) -> None:
    started = time.monotonic()
    lines.write("begin", section=section.name, clocks=_clocks(context.device))
    error = None
    try:
        with torch.inference_mode():
            for row in section.load()(context):
                lines.write("row", section=section.name, row=_plain(row))
    except Exception as raised:
        error = "".join(traceback.format_exception(raised))
        print(error, file=sys.stderr)
    lines.write(
        "end",
        section=section.name,
        error=error,
        seconds=time.monotonic() - started,
        clocks=_clocks(context.device),
    )


def _plain(row: Row) -> dict[str, Any]:
    figures = {
        name: float(f"{value:.5g}") if isinstance(value, float) else value
        for name, value in row.figures.items()
    }
    return dataclasses.asdict(dataclasses.replace(row, figures=figures))


def _is_sound() -> bool:
    """Whether the device still works; what a section left is given back to it."""
    try:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        print(f"the device is broken: {error}", file=sys.stderr)
        return False
    return True


def _facts(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            facts[name] = version(name)
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        facts |= {
            "card": card.name,
            "memory GiB": round(card.total_memory / 2**30, 1),
            "multiprocessors": card.multi_processor_count,
            "L2 MiB": round(card.L2_cache_size / 2**20, 1),
            "capability": f"{card.major}.{card.minor}",
            "CUDA": torch.version.cuda,
            "driver": _nvidia_smi("driver_version"),
        }
    else:
        facts["card"] = "none: Triton's interpreter"
    return facts


def _clocks(device: torch.device) -> str | None:
    """Clocks, temperature and power as they are now."""
    return _nvidia_smi(CLOCKS) if device.type == "cuda" else None


def _nvidia_smi(query: str) -> str | None:
    try:
        asked = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
