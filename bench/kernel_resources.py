"""What do the kernels take of a GPU's multiprocessors?

Every form of every Triton kernel that is launched for the shapes of models this project names, and
for the tuning tables' tiles, is compiled for each target; registers, shared memory and spills are
read from the finished programs. Needs no GPU.

    python bench/kernel_resources.py [--processes 2] [--match attend]

writes results/kernel-resources.json, and the same as a table beside it. Programs resident on a
multiprocessor are reckoned from the registers, shared memory and warps that it has: an upper bound.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, commit, machine, make_parser, settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiprocessor:
    """What programs share. From the CUDA programming guide, table of compute capabilities."""

    registers: int = 65_536
    shared_bytes: int
    warps: int = 64
    programs: int = 32
    shared_bytes_of_program: int = 1024  # that the system takes of each

    def resident(self, form: Mapping[str, Any]) -> int:
        """Programs of a kernel's form that one multiprocessor runs at once, at most."""
        # Registers are given to warps, 256 at a time.
        of_warp = -(-form["registers"] * 32 // 256) * 256
        return min(
            self.registers // (of_warp * form["num_warps"]),
            self.shared_bytes // (form["shared_bytes"] + self.shared_bytes_of_program),
            self.warps // form["num_warps"],
            self.programs,
        )


MULTIPROCESSORS = {
    80: Multiprocessor(shared_bytes=164 * 2**10),
    90: Multiprocessor(shared_bytes=228 * 2**10),
    100: Multiprocessor(shared_bytes=228 * 2**10),
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--match", default="", help="only forms with this text in their name")
    parser.add_argument("--out", type=Path, default=RESULTS / "kernel-resources.json")
    arguments = parser.parse_args()
    found = sorted(
        compiled(arguments.processes, arguments.match), key=lambda f: (f["target"], f["name"])
    )
    forms = [
        {**form, "resident_programs": MULTIPROCESSORS[form["target"]].resident(form)}
        for form in found
    ]
    facts = {
        "machine": machine(),
        "commit": commit(),
        "settings": settings(arguments),
        "multiprocessors": {target: asdict(sm) for target, sm in MULTIPROCESSORS.items()},
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(as_json(facts, forms), encoding="utf-8")
    arguments.out.with_suffix(".md").write_text(markdown(forms), encoding="utf-8")


def compiled(num_processes: int, match: str) -> Iterator[dict[str, Any]]:
    """A line for every form and target, of several processes at once."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TRITON_INTERPRET": "0",
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    command = [sys.executable, "-m", "sapwood.kernels.ahead_of_time", "--match", match]
    processes = [
        subprocess.Popen(
            [*command, "--part", f"{index}/{num_processes}"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(num_processes)
    ]
    for process in processes:
        out, _ = process.communicate()
        if process.returncode:
            raise RuntimeError("a kernel did not compile; the message is above")
        yield from map(json.loads, out.splitlines())


def as_json(facts: Mapping[str, Any], forms: Sequence[Mapping[str, Any]]) -> str:
    """The facts and, as "forms", a line for each form: a form that changed is a line that did."""
    head = json.dumps(facts, indent=1, default=str).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(form)}" for form in forms)
    return f'{head},\n "forms": [\n{lines}\n ]\n}}\n'


def markdown(forms: Sequence[Mapping[str, Any]]) -> str:
    """A table for each target, forms that take the same in one row."""
    lines = [
        "# What the Triton kernels take of a multiprocessor",
        "",
        "Compiled ahead of time by `bench/kernel_resources.py`; nothing here was run. Registers "
        "and spilled bytes are of a thread, shared bytes of a program; programs are those that a "
        "multiprocessor runs at once by these figures.",
    ]
    for target in sorted({form["target"] for form in forms}):
        of_target = [form for form in forms if form["target"] == target]
        spilling = sum(form["spilled_bytes"] > 0 for form in of_target)
        lines += [
            "",
            f"## sm_{target}: {len(of_target)} forms, {spilling} with spills",
            "",
            "| form | warps | stages | registers | shared bytes | spilled | products | programs |",
            "|---|---:|---:|---:|---:|---:|---|---:|",
        ]
        lines += [
            f"| {form['name']} | {form['num_warps']} | {form['num_stages']} | {form['registers']} "
            f"| {form['shared_bytes']:,} | {form['spilled_bytes']} "
            f"| {form['matrix_instruction'] or ''} | {form['resident_programs']} |"
            for form in of_target
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
