"""Kernels compiled for a GPU that is not there, and what they take of it.

Triton compiles for any target; registers, shared memory and spills are read from the finished
program with the `cuobjdump` that comes with it. Nothing here needs a GPU or its driver. It does
need compiled kernels: under TRITON_INTERPRET the functions are not compilable.

    python -m sapwood.kernels.ahead_of_time [--target 90] [--match TEXT] [--one-of-each]

prints a line of JSON for every specialization and target.
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

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from sapwood.kernels.specialization import Specialization

TARGETS = (80, 90, 100)  # compute capabilities times ten: Ampere, Hopper, Blackwell
WARP_SIZE = 32
MODULES = (
    "sapwood.kernels.triton_attention",
    "sapwood.kernels.triton_elementwise",
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


def specializations(
    modules: Sequence[str] = MODULES, match: str = "", one_of_each: bool = False
) -> Iterator[Specialization]:
    """Those of `modules` whose name contains `match`; of each kernel only the first if asked."""
    for module in modules:
        listed: Iterable[Specialization] = importlib.import_module(module).specializations()
        seen: set[str] = set()
        for specialization in listed:
            kernel = specialization.function.__name__
            if match not in specialization.name or (one_of_each and kernel in seen):
                continue
            seen.add(kernel)
            yield specialization


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
    options = parser.parse_args(arguments)
    for specialization in specializations(match=options.match, one_of_each=options.one_of_each):
        for target in options.target or TARGETS:
            resources = compile_for(specialization, target)
            print(json.dumps(dataclasses.asdict(resources)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
