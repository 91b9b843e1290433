"""Launches of Triton kernels where there is no GPU: what would be compiled, without running it.

Everything up to the compiler is what runs on a device: Triton's own binding of arguments, of which
the interpreter knows nothing. Results stay what they were allocated as. Needs a process without
TRITON_INTERPRET.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from sapwood.kernels.specialization import Specialization


@dataclass(frozen=True)
class Form:
    """A compiled form of a kernel, as a value to compare. `arguments` and `constants` are pairs
    of a parameter's name and its type (with `:16` where it is aligned) or value."""

    kernel: str
    arguments: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, str], ...]
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, specialization: Specialization) -> Form:
        """The form that a specialization describes."""
        return cls(
            kernel=specialization.function.__name__,
            arguments=tuple(
                (name, f"{argument.name}:16" if argument.alignment % 16 == 0 else argument.name)
                for name, argument in specialization.arguments.items()
            ),
            constants=_plain(specialization.constants),
            num_warps=specialization.num_warps,
            num_stages=specialization.num_stages,
        )


def _plain(constants: Any) -> tuple[tuple[str, str], ...]:
    """Constants by name, in one spelling: 1 and True are the same to Triton."""
    return tuple(
        (name, str(int(value) if isinstance(value, bool) else value))
        for name, value in sorted(constants.items())
    )


class _NoDevice:
    """A driver of a device that is not there, and that nothing is launched on."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def recorded_launches(capability: int = 90) -> Iterator[list[Form]]:
    """The forms of the kernels that are launched inside, in order, repetitions included."""
    forms: list[Form] = []

    def note(*, fn: Any, compile: Any, **_: Any) -> bool:
        names = fn.jit_function.arg_names
        aligned = {names[path[0]] for path, marks in compile["configs"][0].items() if marks}
        forms.append(
            Form(
                kernel=fn.jit_function.__name__,
                arguments=tuple(
                    (name, f"{kind}:16" if name in aligned else kind)
                    for name, kind in compile["signature"].items()
                    if kind != "constexpr"
                ),
                constants=_plain({names[p[0]]: v for p, v in compile["constants"].items()}),
                num_warps=compile["num_warps"],
                num_stages=compile["num_stages"],
            )
        )
        return True  # neither compile nor launch

    hook = knobs.runtime.jit_cache_hook
    driver.set_active(_NoDevice(GPUTarget("cuda", capability, 32)))
    knobs.runtime.jit_cache_hook = note
    try:
        yield forms
    finally:
        knobs.runtime.jit_cache_hook = hook
        driver._active = None
