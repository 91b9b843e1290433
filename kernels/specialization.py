"""One compiled form of a Triton kernel: what stands for its arguments when it is compiled.

A kernel is compiled again for each set of argument types and compile-time constants. Each
`triton_*.py` lists, in `specializations()`, the forms that it launches for the shapes this project
names, so that all of them can be compiled and measured where there is no GPU
(ahead_of_time.py), and compiled before the first request where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

POINTER_ALIGNMENT = 16  # bytes; torch's allocations have more


class JitFunction(Protocol):
    """What is used of a function under `@triton.jit`, compiled or interpreted."""

    @property
    def __name__(self) -> str: ...

    @property
    def arg_names(self) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class ArgumentType:
    """The type of an argument that is passed at launch.

    `name` is Triton's: `*bf16`, `i32`, `fp32`. `alignment` is a power of two that divides the
    value: bytes for a pointer. Triton knows one alignment, 16, and compiles wider loads with it.
    """

    name: str
    alignment: int

    @classmethod
    def parse(cls, text: str) -> ArgumentType:
        """`*bf16`, `i32`, or with an alignment `i32:16`, `*i32:4`.

        Without one a pointer is aligned to 16 bytes, as torch allocates, and a number to 1.
        """
        name, colon, alignment = text.partition(":")
        is_pointer = name.startswith("*")
        if not name or (colon and not alignment.isdecimal()):
            raise ValueError(f"{text!r} is not a type such as *bf16, i32 or i32:16")
        default = POINTER_ALIGNMENT if is_pointer else 1
        return cls(name, int(alignment) if colon else default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialization:
    """One form of `function`. `name` says which, unique among those of its module.

    `signature` has the type of each argument passed at launch (`ArgumentType.parse`), `constants`
    the value of each `tl.constexpr`, and None for a pointer that is not passed. Together they
    name every parameter once.
    """

    name: str
    function: JitFunction
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        names = self.function.arg_names
        given = [*self.signature, *self.constants]
        if sorted(given) != sorted(names):
            raise ValueError(
                f"{self.name}: the kernel's parameters are {', '.join(names)}; "
                f"missing: {', '.join(sorted(set(names) - set(given))) or 'none'}, "
                f"unknown: {', '.join(sorted(set(given) - set(names))) or 'none'}, "
                f"twice: {', '.join(sorted(set(self.signature) & set(self.constants))) or 'none'}"
            )
        for text in self.signature.values():
            ArgumentType.parse(text)
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"{self.name}: {self.num_warps} warps, a kernel has 1, 2, 4, 8 or 16")
        if self.num_stages < 1:
            raise ValueError(f"{self.name}: {self.num_stages} stages, there is at least one")

    @property
    def arguments(self) -> dict[str, ArgumentType]:
        """The types of what is passed at launch, in the order of the kernel's parameters."""
        return {
            name: ArgumentType.parse(self.signature[name])
            for name in self.function.arg_names
            if name in self.signature
        }
