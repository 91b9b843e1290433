"""Kernels compiled for a GPU that is not there, and what they take of it.

Triton compiles for any target; registers, shared memory and spills are read from the finished
program with the `cuobjdump` that comes with it. Nothing here needs a GPU or its driver. It does
need compiled kernels: under TRITON_INTERPRET the functions are not compilable.

    python -m sapwood.kernels.ahead_of_time [--target 90] [--match TEXT] [--one-of-each]

prints a line of JSON for every specialization and target. `MAX_SHARED_BYTES` is what a program may
have at most: more compiles, and cannot be launched.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from sapwood.kernels.specialization import Specialization

TARGETS = (80, 90, 100)  # compute capabilities times ten: Ampere, Hopper, Blackwell
MAX_SHARED_BYTES = MappingProxyType({80: 163 * 2**10, 90: 227 * 2**10, 100: 227 * 2**10})
WARP_SIZE = 32
MODULES = (
    "sapwood.kernels.triton_attention",
    "sapwood.kernels.triton_elementwise",
    "sapwood.kernels.triton_kv_cache",
    "sapwood.kernels.triton_sampling",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one program of a kernel takes of a multiprocessor, as the compiler reports it.

    `registers` are those of a thread, `shared_bytes` of the program, `spilled_bytes` of a thread:
    its frame in local memory, where registers that do not fit go. `matrix_instruction` is what
    products of tiles run on: `wgmma`, `tcgen05`, `mma`, or none.
    """

    name: str
    target: int
    num_warps: int
    num_stages: int
    registers: int
    shared_bytes: int
    spilled_bytes: int
    matrix_instruction: str | None


def compile_for(specialization: Specialization, target: int) -> Resources:
    """Compile for compute capability `target` / 10. Half a second to some seconds.

    Raises RuntimeError where kernels are interpreted, and what Triton raises of a kernel that does
    not compile.
    """
    function = specialization.function
    if not isinstance(function, JITFunction):
        raise RuntimeError(
            f"{specialization.name} is interpreted and cannot be compiled; unset TRITON_INTERPRET"
        )
    arguments = specialization.arguments
    constants = dict(specialization.constants)
    source = ASTSource(
        fn=function,
        # In the order of the parameters, constants among them.
        signature={
            name: arguments[name].name if name in arguments else "constexpr"
            for name in function.arg_names
        },
        constexprs=constants,
        attrs={
            (function.arg_names.index(name),): [["tt.divisibility", 16]]
            for name, argument in arguments.items()
            if argument.alignment % 16 == 0
        },
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", target, WARP_SIZE),
        options={"num_warps": specialization.num_warps, "num_stages": specialization.num_stages},
    )
    registers, spilled = _usage(compiled.asm["cubin"])
    matrix_instructions = re.findall(r"\b(wgmma|tcgen05|mma)\.(?:mma|sync)", compiled.asm["ptx"])
    return Resources(
        name=specialization.name,
        target=target,
        num_warps=specialization.num_warps,
        num_stages=specialization.num_stages,
        registers=registers,
        shared_bytes=compiled.metadata.shared,
        spilled_bytes=spilled,
        matrix_instruction=matrix_instructions[0] if matrix_instructions else None,
    )


def specializations(modules: Sequence[str] = MODULES) -> Iterator[Specialization]:
    """All that `modules` list."""
    for module in modules:
        listed: Iterable[Specialization] = importlib.import_module(module).specializations()
        yield from listed


def one_of_each(listed: Iterable[Specialization]) -> Iterator[Specialization]:
    """The first of each kernel, and of one that multiplies tiles the first with the most rows."""
    by_kernel: dict[str, list[Specialization]] = {}
    for specialization in listed:
        by_kernel.setdefault(specialization.function.__name__, []).append(specialization)
    for forms in by_kernel.values():
        largest = max(forms, key=_num_rows)
        yield from (forms[0], largest) if _num_rows(largest) > _num_rows(forms[0]) else forms[:1]


def _num_rows(specialization: Specialization) -> int:
    """Of the tile that a program works on, where its kernel has tiles of different sizes."""
    rows = specialization.constants.get("ROWS", 0)
    return rows if isinstance(rows, int) else 0


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its frame in local memory, of the one kernel within."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        report = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump reported no registers: {report}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Compile all kernels without a GPU.")
    parser.add_argument("--target", type=int, action="append", choices=TARGETS)
    parser.add_argument("--match", default="", help="only those with this text in their name")
    parser.add_argument("--one-of-each", action="store_true", help="the first form of each kernel")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th from the i-th on")
    options = parser.parse_args(arguments)
    index, count = map(int, options.part.split("/"))
    listed = [s for s in specializations() if options.match in s.name]
    if options.one_of_each:
        listed = list(one_of_each(listed))
    pairs = [(s, target) for s in listed for target in options.target or TARGETS]
    for specialization, target in pairs[index::count]:
        resources = compile_for(specialization, target)
        print(json.dumps(dataclasses.asdict(resources)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
